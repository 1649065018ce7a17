"""When would each action of a schedule run? A prediction as a `Timeline` of Events.

A rank runs its row in order. An action starts when its rank is free and everything that it needs has arrived:

    F(s, m)         needs F(s-1, m)
    B(s, m), I(s, m) need F(s, m) and B or I(s+1, m)
    W(s, m)         needs I(s, m)

A result that crosses ranks arrives alpha + beta x bytes after it was ready; messages overlap with computation.
All ranks advance together, one action each per wave, in numpy: the cost is a few array operations per wave, of which
there are about as many as actions in a row.

Legend: A = actions of the schedule, P = ranks, S = stages, M = microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from labkit.events import Event
from labkit.schedules.ir import EVENT_KINDS, KINDS, Action, Schedule, ScheduleError, grid

_F, _B, _I, _W = range(4)
PerStage = float | Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds (or any unit) of each kind of action, one number or one per stage, and of each message.

    The defaults are units: a full backward computes two gradients and takes twice a forward.
    """

    forward: PerStage = 1.0
    """F."""
    input_grad: PerStage = 1.0
    """I."""
    weight_grad: PerStage = 1.0
    """W."""
    backward: PerStage | None = None
    """B; None means I + W."""
    latency: float = 0.0
    """alpha: what every message between two ranks costs."""
    seconds_per_byte: float = 0.0
    """beta: the reciprocal of the bandwidth."""
    message_bytes: int = 0
    """Size of one activation, and of its gradient."""

    def table(self, num_stages: int) -> np.ndarray:
        """Durations by kind and stage (4, S). Raises ValueError for a wrong number of stages or a negative cost."""
        given = {"forward": self.forward, "input_grad": self.input_grad, "weight_grad": self.weight_grad}
        rows = {name: _per_stage(name, value, num_stages) for name, value in given.items()}
        both = rows["input_grad"] + rows["weight_grad"]
        backward = both if self.backward is None else _per_stage("backward", self.backward, num_stages)
        return np.stack([rows["forward"], backward, rows["input_grad"], rows["weight_grad"]])

    @property
    def message(self) -> float:
        """alpha + beta x bytes."""
        return self.latency + self.seconds_per_byte * self.message_bytes


def _per_stage(name: str, value: PerStage, num_stages: int) -> np.ndarray:
    array = np.asarray(value, dtype=float)
    if array.ndim > 1 or (array.ndim == 1 and len(array) != num_stages):
        raise ValueError(f"{name} has shape {array.shape}: give one number, or one for each of the {num_stages} stages")
    if not np.isfinite(array).all() or (array < 0).any():
        raise ValueError(f"{name} is {value}: durations are finite and not negative")
    return np.broadcast_to(array, (num_stages,))


class Timeline:
    """A schedule with the start and end of every action, as columns in the schedule's order; starts at 0."""

    def __init__(self, schedule: Schedule, start: np.ndarray, end: np.ndarray) -> None:
        self.schedule, self.start, self.end = schedule, start, end

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
            for action in schedule.actions(rank):
                start, end = float(self.start[index]), float(self.end[index])
                kind, chunk = EVENT_KINDS[action.kind], chunks[action.stage]
                events.append(Event(rank, str(action), kind, start, end, action.microbatch, chunk))
                index += 1
        return events

    @property
    def makespan(self) -> float:
        """From 0 to the end of the last action."""
        return float(self.end.max())

    @property
    def busy(self) -> np.ndarray:
        """Time that each rank computes (P,)."""
        return np.bincount(self.schedule.ranks, weights=self.end - self.start, minlength=self.schedule.pp)

    @property
    def bubble_fraction(self) -> float:
        """Idle time over makespan, mean over ranks; 1F1B and GPipe: (p - 1)/(m + p - 1)."""
        return 1 - float(self.busy.sum()) / (self.schedule.pp * self.makespan) if self.makespan else 0.0

    @property
    def bubble_ratio(self) -> float:
        """Idle time over the time that ranks compute; 1F1B and GPipe: (p - 1)/m."""
        busy = float(self.busy.sum())
        return self.schedule.pp * self.makespan / busy - 1 if busy else 0.0

    @property
    def peak_in_flight(self) -> list[int]:
        """Per rank, the most microbatches (of any of its stages) whose activations are alive at once."""
        return [int(counts.max()) for counts in self._in_flight]

    def in_flight(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """(times, counts): from each time on, so many activations are alive on `rank`.

        One is born when its forward starts and dies when its backward, or its weight gradient where split, ends.
        """
        part = slice(self.schedule.offsets[rank], self.schedule.offsets[rank + 1])
        born = self.schedule.kinds[part] == _F
        times = np.where(born, self.start[part], self.end[part])
        return np.concatenate([[0.0], times]), np.concatenate([[0], self._in_flight[rank]])

    @cached_property
    def _in_flight(self) -> list[np.ndarray]:
        step = np.array([1, -1, 0, -1])[self.schedule.kinds]
        if self.schedule.forward_only:
            step = np.zeros_like(step)  # nothing waits for a backward
        return [np.cumsum(part) for part in np.split(step, self.schedule.offsets[1:-1])]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Predict when each action runs, with `costs` (default: units) per action and message.

    Raises ScheduleError, with the grid drawn and the cells marked, where an action is missing, doubled or on a rank
    that does not hold its stage, and where the rows wait for each other in a circle.
    """
    costs = costs or Costs()
    require_complete(schedule)
    by_ring, by_rank = dependencies(schedule)
    duration = costs.table(schedule.num_stages)[schedule.kinds, schedule.stages]
    crosses = (by_ring >= 0) & (schedule.ranks != schedule.ranks[by_ring])
    delay = np.where(crosses, costs.message, 0.0)

    total = len(schedule)
    start, end = np.zeros(total), np.full(total + 1, np.nan)
    end[-1] = 0.0  # what index -1, "nothing needed", reads
    head, last = schedule.offsets[:-1].copy(), schedule.offsets[1:]
    clock, waiting = np.zeros(schedule.pp), np.arange(schedule.pp)
    while len(waiting):
        actions = head[waiting]
        arrived = np.maximum(end[by_ring[actions]] + delay[actions], end[by_rank[actions]])  # NaN: not there yet
        ready = ~np.isnan(arrived)
        if not ready.any():
            raise ScheduleError(_explain_deadlock(schedule, head, np.isnan(end), (by_ring, by_rank)))
        ranks, actions = waiting[ready], actions[ready]
        start[actions] = np.maximum(clock[ranks], arrived[ready])
        clock[ranks] = end[actions] = start[actions] + duration[actions]
        head[ranks] += 1
        waiting = waiting[head[waiting] < last[waiting]]
    return Timeline(schedule, start, end[:-1])


def dependencies(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """Two columns (A,) of indices into the schedule, -1 for none: what an action needs from the neighbouring stage, and
    what it needs from its own stage. The schedule must be complete."""
    stages, microbatches, kinds = schedule.stages, schedule.microbatches, schedule.kinds
    at = np.full((4, schedule.num_stages + 1, schedule.num_microbatches), -1, dtype=np.int64)  # row S stays empty
    at[kinds, stages, microbatches] = np.arange(len(schedule))
    gradient = np.where(at[_B] >= 0, at[_B], at[_I])
    forward, weight = kinds == _F, kinds == _W
    from_neighbour = np.where(forward, at[_F, stages - 1, microbatches], gradient[stages + 1, microbatches])
    from_neighbour = np.where(weight, -1, from_neighbour)
    own = np.where(weight, at[_I, stages, microbatches], at[_F, stages, microbatches])
    return from_neighbour, np.where(forward, -1, own)


def require_complete(schedule: Schedule) -> None:
    """Every stage runs every microbatch once forward and, unless all is forward, once backward (B, or I and W), on one
    rank. Raises ScheduleError with the first ten cells that break this."""
    counts = np.zeros((4, schedule.num_stages, schedule.num_microbatches), dtype=np.int64)
    np.add.at(counts, (schedule.kinds, schedule.stages, schedule.microbatches), 1)
    missing = []
    for stage, microbatch in np.argwhere(counts[_F] == 0)[:10]:
        missing.append(f"{Action(stage, 'F', microbatch)} is missing")
    if not schedule.forward_only:
        none = (counts[_B] + counts[_I] + counts[_W]) == 0
        missing += [f"{Action(s, 'B', m)} is missing" for s, m in np.argwhere(none)[:10]]
        for have, lack in ((_I, _W), (_W, _I)):
            half = (counts[have] > 0) & (counts[lack] == 0)
            missing += [f"{Action(s, KINDS[lack], m)} is missing" for s, m in np.argwhere(half)[:10]]
    marks = _misplaced(schedule, counts)
    if missing or marks:
        lines = [f"{schedule.name} cannot run:", grid(schedule, marks), *missing[:10]]
        raise ScheduleError("\n".join(lines))


def _misplaced(schedule: Schedule, counts: np.ndarray) -> dict[tuple[int, int], str]:
    """Marks for actions that are doubled, both whole and split, or on another rank than their stage (at most ten)."""
    cell = (schedule.kinds, schedule.stages, schedule.microbatches)
    split = (counts[_I] + counts[_W])[cell[1:]] > 0
    away = schedule.ranks != schedule._placement[schedule.stages]
    sentences = (
        (counts[cell] > 1, "appears more than once"),
        ((schedule.kinds == _B) & split, "is a full backward beside a split one"),
        (away, "is on a rank that does not hold its stage"),
    )
    marks: dict[tuple[int, int], str] = {}
    for bad, sentence in sentences:
        for index in np.flatnonzero(bad)[:10].tolist():
            action = Action(int(cell[1][index]), KINDS[cell[0][index]], int(cell[2][index]))
            marks.setdefault(schedule.locate(index), f"{action} {sentence}")
    return marks


def _explain_deadlock(
    schedule: Schedule, head: np.ndarray, undone: np.ndarray, needs: tuple[np.ndarray, np.ndarray]
) -> str:
    """Follow who waits for whom from the first stuck rank until a rank repeats; that circle is the message."""
    stuck = [rank for rank in range(schedule.pp) if head[rank] < schedule.offsets[rank + 1]]
    wanted = {}
    for rank in stuck:
        open_needs = [need[head[rank]] for need in needs if need[head[rank]] >= 0 and undone[need[head[rank]]]]
        wanted[rank] = int(open_needs[0])
    path = [stuck[0]]
    while (following := int(schedule.ranks[wanted[path[-1]]])) not in path:
        path.append(following)
    circle = path[path.index(following) :]
    marks = {}
    for rank in circle:
        other, position = schedule.locate(wanted[rank])
        mine, needed = schedule.locate(int(head[rank]))[1], schedule.actions(other)[position]
        blocker = schedule.actions(other)[schedule.locate(int(head[other]))[1]]
        sentence = f"{schedule.actions(rank)[mine]} waits for {needed}, which rank {other} runs after {blocker}"
        marks[(rank, mine)] = sentence
    ranks = " -> ".join(f"rank {rank}" for rank in [*circle, circle[0]])
    return "\n".join([f"{schedule.name} cannot run, these wait for each other: {ranks}", grid(schedule, marks)])
