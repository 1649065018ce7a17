"""Rows of a timeline: Events ready to draw, and the memory curve of each row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from labkit.events import Event
from labkit.schedules.ir import ACTION
from labkit.schedules.simulator import Timeline

COMPUTE = ("forward", "backward", "input_grad", "weight_grad")
STRIP = ("wait", "collective", "optimizer", "data")
"""Kinds in the strip under the computations of a rank."""
MOST_DRAWN = 100_000
"""Most actions in a picture: more would take minutes to draw, and pixels could not show them."""


@dataclass(frozen=True)
class Rows:
    """Events ready to draw: times from 0, ranks renumbered to rows."""

    events: list[Event]
    ranks: list[int]
    timeline: Timeline | None = None
    """The Timeline of predicted Events; its costs weigh the activations."""
    weights: list[list[float]] | None = None
    """Weight of a measured activation, by row and chunk; None gives each activation the weight 1."""

    @cached_property
    def end(self) -> float:
        """End of the last Event."""
        return max((event.end for event in self.events), default=1.0)

    @cached_property
    def chunks(self) -> int:
        """Number of model chunks on a rank."""
        return 1 + max((event.chunk or 0 for event in self.events if event.kind in COMPUTE), default=0)

    def names(self, row: int) -> list[str]:
        """Return the names of the computations of a row, in order."""
        mine = [event for event in self.events if event.rank == self.ranks[row] and event.kind in COMPUTE]
        return [event.name for event in sorted(mine, key=lambda event: event.start)]

    def memory(self) -> list[tuple[list[float], list[float]]]:
        """Return (times, amounts) for each row: the weight of its activations from each time on."""
        if self.timeline is None:
            weights = self.weights or [[]] * len(self.ranks)
            return [_in_flight(self.events, rank, own) for rank, own in zip(self.ranks, weights, strict=True)]
        return [_weighed(self.timeline, rank) for rank in self.ranks]

    @property
    def peak(self) -> float:
        """The largest amount of any row."""
        return max(max(amounts) for _, amounts in self.memory())


def rows_of(timeline: Timeline | Iterable[Event]) -> Rows:
    """Move times so that the first computation starts at 0, and drop the Events that ended before it.

    Raises ValueError if there is nothing to draw, or far more than a picture can show.
    """
    predicted = isinstance(timeline, Timeline)
    if predicted and len(timeline.schedule) > MOST_DRAWN:
        raise ValueError(f"{len(timeline.schedule):,} actions are more than a picture can show ({MOST_DRAWN:,})")
    given = timeline.events if predicted else list(timeline)
    events = [event for event in _without_details(given) if event.kind in (*COMPUTE, *STRIP)]
    if not events:
        raise ValueError("there is nothing to draw: no event is a computation, a wait or a collective")
    origin = min((event.start for event in events if event.kind in COMPUTE), default=min(e.start for e in events))
    moved = [replace(e, start=max(e.start - origin, 0.0), end=e.end - origin) for e in events if e.end > origin]
    return Rows(moved, sorted({event.rank for event in moved}), timeline if predicted else None)


def measured_bubble(events: Iterable[Event]) -> float:
    """Return the share of the time from first to last computation that ranks do not compute, as a mean over ranks."""
    compute = [event for event in _without_details(list(events)) if event.kind in COMPUTE]
    if not compute:
        return 0.0
    span = max(event.end for event in compute) - min(event.start for event in compute)
    ranks = len({event.rank for event in compute})
    return 1 - sum(event.duration for event in compute) / (ranks * span)


def _without_details(events: list[Event]) -> list[Event]:
    """Drop the gradients of single layers if a schedule's actions contain the same gradients."""
    if not any(_is_action(event) for event in events):
        return events
    return [event for event in events if event.kind not in COMPUTE or _is_action(event)]


def _is_action(event: Event) -> bool:
    return event.kind in COMPUTE and ACTION.fullmatch(event.name) is not None


def chunk_weights(timeline: Timeline) -> list[list[float]]:
    """Return the weight of one microbatch's activations by rank and chunk, from the costs of a prediction."""
    kept = timeline.costs.kept(timeline.schedule.num_stages)[0]
    return [[float(kept[stage]) for stage in timeline.schedule.stages_of(rank)] for rank in range(timeline.schedule.pp)]


def _in_flight(events: list[Event], rank: int, weights: list[float]) -> tuple[list[float], list[float]]:
    """Count the activations alive on a rank: a forward's start adds one, the end of its backward frees one.

    `weights` gives the activations of each chunk a weight of their own.
    """

    def weigh(event: Event) -> float:
        return weights[event.chunk or 0] if weights else 1.0

    mine = [event for event in events if event.rank == rank]
    split = {(e.chunk, e.microbatch) for e in mine if e.kind == "weight_grad"}
    has_backward = any(event.kind in ("backward", "weight_grad") for event in mine)
    changes = [(e.start, weigh(e)) for e in mine if e.kind == "forward" and has_backward]
    changes += [(e.end, -weigh(e)) for e in mine if e.kind == "weight_grad"]
    changes += [(e.end, -weigh(e)) for e in mine if e.kind == "backward" and (e.chunk, e.microbatch) not in split]
    times, counts = [0.0], [0.0]
    for time, together in groupby(sorted(changes), key=lambda change: change[0]):
        times.append(time)
        counts.append(counts[-1] + sum(step for _, step in together))
    return times, counts


def _weighed(timeline: Timeline, rank: int) -> tuple[list[float], list[float]]:
    """Return `Timeline.memory` with one amount per time, because two amounts at one time would draw a spike."""
    times, amounts = timeline.memory(rank)
    last = np.append(times[1:] != times[:-1], True)
    return times[last].tolist(), amounts[last].tolist()
