"""Predict when each action of a schedule runs: a `Timeline` of Events.

A rank runs its row in order. An action starts when its rank is free and everything that the action needs
(`dependencies.py`) has arrived. A result that crosses ranks arrives alpha + beta x bytes after the end of its action.
Messages overlap with computation.

A merged pair is one piece of work, which starts when both its actions can, and takes as long as both. If the costs give
the parts of layers, it takes less: all-to-alls have a lane of their own beside the computation (`merging.py`).

All ranks advance together in waves of numpy operations; in a wave each rank runs at most one action. A wave costs nine
array operations on P numbers. There are about as many waves as actions in a row. 4 million actions on 64 ranks take
half a second.

Legend: A = actions of the schedule, P = ranks, S = stages, M = microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from labkit.events import Event
from labkit.schedules.dependencies import awaited, explain_deadlock, require_complete
from labkit.schedules.ir import EVENT_KINDS, Action, Schedule, ScheduleError
from labkit.schedules.merging import Lane, LayerTimes, pair_lanes, pair_seconds

_F, _B, _I, _W = range(4)
PerStage = float | Sequence[float]
PerLink = float | Sequence[Sequence[float]]
_WAVES = 32
"""Waves between two checks that a rank still moves."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds (or any unit) of each kind of action and of each message, and the memory that activations take.

    Times of actions are one number, or one for each stage. The defaults are units. A full backward computes two
    gradients and takes twice as long as a forward. Messages are free. A microbatch leaves one activation on each stage.
    """

    forward: PerStage = 1.0
    """F."""
    input_grad: PerStage = 1.0
    """I."""
    weight_grad: PerStage = 1.0
    """W."""
    backward: PerStage | None = None
    """B; None means I + W."""
    latency: PerLink = 0.0
    """alpha: time of an empty message between two ranks; one number, or a row of P numbers for each sending rank."""
    seconds_per_byte: PerLink = 0.0
    """beta: the reciprocal of the bandwidth; one number, or P x P as `latency`."""
    message_bytes: float = 0
    """Size of one activation on its way to the next stage."""
    gradient_bytes: float | None = None
    """Size of its gradient on the way back; None means the size of the activation."""
    activation: PerStage = 1.0
    """Activations of one microbatch on a stage from forward to backward, in units of the reader's choice."""
    freed_by_input_grad: PerStage = 0.0
    """Share of `activation` (0 to 1) that I of a split backward frees; W frees the rest."""
    layers: Sequence[Sequence[LayerTimes]] = ()
    """By stage, the parts of each layer. Their time is added to that of F, I and B, and alone nothing hides their
    all-to-alls. In a merged pair the other side's computation does."""
    delay_wgrad: bool = False
    """Merged pairs compute weight gradients apart."""
    slowdown: float = 0.0
    """Seconds by which a second that a pair hides slows the computation beside it."""

    def table(self, num_stages: int) -> np.ndarray:
        """Return durations by kind and stage (4, S). Raises ValueError for a wrong number of stages or a negative
        cost."""
        given = {"forward": self.forward, "input_grad": self.input_grad, "weight_grad": self.weight_grad}
        rows = {name: _per_stage(name, value, num_stages) for name, value in given.items()}
        both = rows["input_grad"] + rows["weight_grad"]
        backward = both if self.backward is None else _per_stage("backward", self.backward, num_stages)
        table = np.stack([rows["forward"], backward, rows["input_grad"], rows["weight_grad"]])
        return table + self._layers_alone(num_stages) if self.layers else table

    def _layers_alone(self, num_stages: int) -> np.ndarray:
        """Return what the layers of each stage add to its actions outside pairs (4, S)."""
        if len(self.layers) != num_stages:
            raise ValueError(f"layers has {len(self.layers)} stages: give the layers of each of the {num_stages}")
        forward = np.array([pair_seconds(layers, ()) for layers in self.layers])
        backward = np.array([pair_seconds((), layers) for layers in self.layers])
        weight = np.array([sum(sum(layer.weight.values()) for layer in layers) for layers in self.layers])
        return np.stack([forward, backward, backward - weight, weight])

    def lanes(self, forward: Action | None, backward: Action | None) -> list[Lane]:
        """Return what the layers do in a merged pair, or in one action alone. I leaves weight gradients out."""
        ahead = () if forward is None else self.layers[forward.stage]
        back = () if backward is None else self.layers[backward.stage]
        if backward is not None and backward.kind == "I":
            return pair_lanes(ahead, [replace(layer, weight={}) for layer in back])
        return pair_lanes(ahead, back, delay_wgrad=self.delay_wgrad)

    def hidden(self, forward: int, backward: int) -> float:
        """Return the seconds by which a pair of these stages is shorter than its two actions alone."""
        if not self.layers:
            return 0.0
        ahead, back = self.layers[forward], self.layers[backward]
        paired = pair_seconds(ahead, back, delay_wgrad=self.delay_wgrad)
        return (pair_seconds(ahead, ()) + pair_seconds((), back) - paired) * (1 - self.slowdown)

    def messages(self, pp: int) -> np.ndarray:
        """alpha + beta x bytes of an activation and of a gradient, by sending and receiving rank (2, P, P); 0 within a
        rank. Raises ValueError for a wrong number of ranks or a negative cost."""
        latency, beta = _per_link("latency", self.latency, pp), _per_link("seconds_per_byte", self.seconds_per_byte, pp)
        back = self.message_bytes if self.gradient_bytes is None else self.gradient_bytes
        for name, size in (("message_bytes", self.message_bytes), ("gradient_bytes", back)):
            if not 0 <= size < np.inf:
                raise ValueError(f"{name} is {size}: sizes are finite and not negative")
        if not (np.any(self.latency) or np.any(self.seconds_per_byte)):
            return np.broadcast_to(0.0, (2, pp, pp))  # thousands of ranks need no table of zeros
        return np.stack([latency + beta * self.message_bytes, latency + beta * back]) * (1 - np.eye(pp))

    def kept(self, num_stages: int) -> np.ndarray:
        """Change of a rank's memory by kind of action and stage (4, S). F's counts from its start, the others from
        their end. Raises ValueError for a wrong number of stages and a share outside 0 to 1."""
        whole = _per_stage("activation", self.activation, num_stages)
        early = _per_stage("freed_by_input_grad", self.freed_by_input_grad, num_stages)
        if (early > 1).any():
            raise ValueError(f"freed_by_input_grad is {self.freed_by_input_grad}: it is a share, 0 to 1")
        return np.stack([whole, -whole, -whole * early, whole * early - whole])


def _per_stage(name: str, value: PerStage, num_stages: int) -> np.ndarray:
    array = np.asarray(value, dtype=float)
    if array.ndim > 1 or (array.ndim == 1 and len(array) != num_stages):
        raise ValueError(f"{name} has shape {array.shape}: give one number, or one for each of the {num_stages} stages")
    return np.broadcast_to(_require_cost(name, value, array), (num_stages,))


def _per_link(name: str, value: PerLink, pp: int) -> np.ndarray:
    array = np.asarray(value, dtype=float)
    if array.shape not in ((), (pp, pp)):
        raise ValueError(
            f"{name} has shape {array.shape}: give one number, or {pp} x {pp} by sending and receiving rank"
        )
    return np.broadcast_to(_require_cost(name, value, array), (pp, pp))


def _require_cost(name: str, value: object, array: np.ndarray) -> np.ndarray:
    if not np.isfinite(array).all() or (array < 0).any():
        raise ValueError(f"{name} is {value}: costs are finite and not negative")
    return array


class Timeline:
    """A schedule with the start and end of every action, as columns in the schedule's order. Time starts at 0.

    `costs`: the costs of the simulation. They also give the memory of an activation.
    """

    def __init__(self, schedule: Schedule, start: np.ndarray, end: np.ndarray, costs: Costs | None = None) -> None:
        self.schedule, self.start, self.end, self.costs = schedule, start, end, costs or Costs()

    def __repr__(self) -> str:
        peak = max(self.peak_in_flight)
        bubble = f"{self.bubble_fraction:.1%}"
        return f"Timeline({self.schedule.name}: makespan {self.makespan:g}, bubble {bubble}, peak {peak} in flight)"

    @cached_property
    def events(self) -> list[Event]:
        """One Event per action, rank after rank, each rank in the order it runs."""
        schedule, events, index = self.schedule, [], 0
        for rank in range(schedule.pp):
            chunks = {stage: chunk for chunk, stage in enumerate(schedule.stages_of(rank))}
            for cell in schedule.cells(rank):
                start, end = float(self.start[index]), float(self.end[index])
                if self.costs.layers and cell[0].kind != "W":
                    events += self._part_events(rank, cell, chunks, end)
                elif len(cell) == 2:
                    events += self._halves(rank, cell, chunks, start, end)
                else:
                    events.append(_event(rank, cell[0], "", EVENT_KINDS[cell[0].kind], start, end, chunks))
                index += len(cell)
        return events

    def _halves(
        self, rank: int, pair: tuple[Action, ...], chunks: dict[int, int], start: float, end: float
    ) -> list[Event]:
        """Return a merged pair as its forward and then its backward, in proportion to their costs."""
        forward, backward = pair
        table = self.costs.table(self.schedule.num_stages)
        ahead, back = float(table[_F, forward.stage]), float(table[_B, backward.stage])
        middle = start + (end - start) * (ahead / (ahead + back) if ahead + back else 0.5)
        return [
            _event(rank, forward, "", EVENT_KINDS["F"], start, middle, chunks),
            _event(rank, backward, "", EVENT_KINDS["B"], middle, end, chunks),
        ]

    def _part_events(self, rank: int, cell: tuple[Action, ...], chunks: dict[int, int], end: float) -> list[Event]:
        """Return the parts and all-to-alls of an action or a merged pair, such as `2F5 0 experts`; what the costs put
        outside the layers runs before them."""
        sides = {"F" if action.kind == "F" else "B": action for action in cell}
        lanes = self.costs.lanes(sides.get("F"), sides.get("B"))
        first = end - max((lane.end for lane in lanes), default=0.0)
        events = []
        for lane in lanes:
            side = lane.name[0]
            action = sides["F" if side == "F" else "B"]
            kind = EVENT_KINDS["W" if side == "W" else action.kind] if lane.lane == "compute" else "collective"
            events.append(_event(rank, action, lane.name[1:], kind, first + lane.start, first + lane.end, chunks))
        return events

    @property
    def makespan(self) -> float:
        """From 0 to the end of the last action."""
        return float(self.end.max())

    @cached_property
    def busy(self) -> np.ndarray:
        """Time that each rank computes (P,)."""
        took = np.where(self.schedule.merged, 0.0, self.end - self.start)  # a merged pair counts once
        return np.add.reduceat(took, self.schedule.offsets[:-1])

    @property
    def bubble_fraction(self) -> float:
        """Idle time over makespan, mean over ranks; 1F1B and GPipe: (p - 1)/(m + p - 1)."""
        return 1 - float(self.busy.sum()) / (self.schedule.pp * self.makespan) if self.makespan else 0.0

    @property
    def bubble_ratio(self) -> float:
        """Idle time over the time that ranks compute; 1F1B and GPipe: (p - 1)/m."""
        busy = float(self.busy.sum())
        return self.schedule.pp * self.makespan / busy - 1 if busy else 0.0

    @cached_property
    def peak_in_flight(self) -> list[int]:
        """By rank, the most microbatches (of any of its stages) whose activations are alive at once."""
        return [max(0, int(self.in_flight(rank)[1].max())) for rank in range(self.schedule.pp)]

    def in_flight(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (times, counts): number of activations that are alive on `rank` from each time on.

        An activation lives from the start of its forward to the end of its backward, or of W if the backward is split.
        """
        return self._curve(rank, np.repeat([[1], [-1], [0], [-1]], self.schedule.num_stages, axis=1))

    @cached_property
    def peak_memory(self) -> list[float]:
        """By rank, the maximum of `memory`, in the units of `Costs.activation`."""
        return [float(self.memory(rank)[1].max()) for rank in range(self.schedule.pp)]

    def memory(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (times, amounts): memory of the activations on `rank` from each time on, in units of
        `Costs.activation`.

        Unlike `in_flight`, I of a split backward may free a share.
        """
        return self._curve(rank, self.costs.kept(self.schedule.num_stages))

    def _curve(self, rank: int, changes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the running sum of `changes`, by kind and stage, over the row of `rank`."""
        row = self.schedule.span(rank)
        kinds = self.schedule.kinds[row]
        times = np.where(kinds == _F, self.start[row], self.end[row])
        steps = changes[kinds, self.schedule.stages[row]]
        if self.schedule.forward_only:
            steps = np.zeros_like(steps)  # nothing waits for a backward
        return np.concatenate([[0.0], times]), np.concatenate([[0], np.cumsum(steps)])


def _event(rank: int, action: Action, rest: str, kind: str, start: float, end: float, chunks: dict[int, int]) -> Event:
    return Event(rank, f"{action}{rest}", kind, start, end, action.microbatch, chunks[action.stage])


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Predict when each action runs, with `costs` (default: units) for actions and messages.

    Raises ScheduleError, with the grid drawn and the cells marked, for an action that is missing, doubled or not on the
    rank of its stage. Rows that wait for each other in a circle raise it too.
    """
    costs = costs or Costs()
    durations = costs.table(schedule.num_stages)[schedule.kinds, schedule.stages]
    if costs.layers:
        hidden = lru_cache(None)(costs.hidden)
        for second in np.flatnonzero(schedule.merged).tolist():
            durations[second] -= hidden(*schedule.stages[second - 1 : second + 1].tolist())
    start, end = earliest(schedule, durations, costs.messages(schedule.pp))
    return Timeline(schedule, start, end, costs)


def earliest(
    schedule: Schedule, durations: np.ndarray, messages: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the earliest start and end of every action (A,), given the duration of each (A,).

    messages: time of an activation and of a gradient by sending and receiving rank (2, P, P); None means no time.
    Raises ScheduleError as `simulate` does.
    """
    waits = awaited(schedule, require_complete(schedule))
    second = np.flatnonzero(schedule.merged)
    if len(second):  # a merged pair is one piece of work, at the place of its backward
        durations = durations.copy()
        durations[second] += durations[second - 1]
        durations[second - 1] = 0.0
    delays = _delays(schedule, waits, messages) if messages is not None and messages.any() else None
    # Each row gets a place after its end, where its rank stops. One more place at the very end means "nothing needed".
    stops = schedule.offsets[1:] + np.arange(schedule.pp)
    places = [*schedule.offsets[1:].tolist(), len(schedule)]
    nothing = len(schedule) + schedule.pp
    moved = np.where(waits < 0, nothing, waits + schedule.ranks[waits])
    waits = np.insert(moved.astype(np.int32), places, [*stops.tolist(), nothing])  # a stopped rank waits for itself
    durations = np.insert(durations, places, 0.0)
    delays = None if delays is None else np.insert(delays, places, 0.0)

    end, heads = _advance(waits, durations, delays, np.concatenate([[0], stops[:-1] + 1]))
    if (heads < stops).any():
        done = np.isfinite(np.delete(end, [*stops, nothing]))
        raise ScheduleError(explain_deadlock(schedule, heads - np.arange(schedule.pp), done))
    end[stops] = end[nothing] = 0.0
    arrived = end[waits] if delays is None else end[waits] + delays
    np.maximum(arrived[1:], end[:-1], out=arrived[1:])
    start, end = (np.delete(times, [*stops, nothing]) for times in (arrived, end))
    start[second - 1], end[second - 1] = start[second], end[second]
    return start, end


def _delays(schedule: Schedule, waits: np.ndarray, messages: np.ndarray) -> np.ndarray:
    """Return the time for which the message that each action reads is under way (A,)."""
    delays = np.zeros(len(schedule))
    received = np.flatnonzero(waits >= 0)
    backwards = (schedule.kinds[received] != _F).astype(np.int8)
    delays[received] = messages[backwards, schedule.ranks[waits[received]], schedule.ranks[received]]
    return delays


def _advance(
    waits: np.ndarray, durations: np.ndarray, delays: np.ndarray | None, heads: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Run all ranks from their `heads` until none moves. Return the end of every place and the head of each rank.

    An action that cannot run yet gets the end inf, and its rank stays at this action. Nothing can start after inf, so a
    wave needs no case distinction.
    """
    end = np.full(len(waits), np.inf)
    end[-1] = -np.inf
    clock, ended, spent = np.zeros((3, len(heads)))
    need, ready = np.empty(len(heads), waits.dtype), np.ones(len(heads), bool)
    while ready.any():
        for _ in range(_WAVES):  # operations fill arrays in place: allocating would cost more than computing
            waits.take(heads, None, need, "clip")  # "clip", because "raise" copies
            end.take(need, None, ended, "clip")
            if delays is not None:
                delays.take(heads, None, spent, "clip")
                np.add(ended, spent, ended)
            np.maximum(ended, clock, out=ended)
            durations.take(heads, None, spent, "clip")
            np.add(ended, spent, ended)
            end[heads] = ended
            np.less(ended, np.inf, ready)
            np.copyto(clock, ended, where=ready)
            np.add(heads, ready, heads)
    return end, heads


def kept_whole(schedule: Schedule, rank: int, count: int) -> frozenset[tuple[int, int]]:
    """(stage, microbatch) of the activations that `rank` keeps whole: as many as possible, at any time at most `count`.

    Under full recomputation a stage keeps little of each microbatch in flight. If memory is left, some microbatches can
    keep everything, and their backward needs no second forward. This is microbatch-level recomputation (arXiv
    2205.05198, appendix C; Megatron's option `num_microbatches_with_partial_activation_checkpoints`). Late stages have
    fewer microbatches in flight, so there `count` covers a larger share, up to all.

    A forward takes a place if one is free. B gives the place back, or W if the backward is split. Under 1F1B with w
    warm-up forwards this is Megatron's rule: the first `count` of every w + 1 microbatches. Megatron counts the same
    way for interleaving, although backwards then do not follow the order of the forwards. This one follows the row.

    Raises ValueError for a negative count.
    """
    if count < 0:
        raise ValueError(f"{count} microbatches cannot be kept whole; give 0 or more")
    alive: set[tuple[int, int]] = set()
    kept: set[tuple[int, int]] = set()
    for action in schedule.actions(rank):
        key = (action.stage, action.microbatch)
        if action.kind == "F" and len(alive) < count:
            alive.add(key)
            kept.add(key)
        elif action.kind in "BW":
            alive.discard(key)
    return frozenset(kept)
