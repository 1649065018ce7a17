"""The idle time of a pipeline, predicted or measured, split by its cause.

A rank idles whenever it does not compute, from 0 to the end of the step. Its idle time is the sum of four parts:

    communication   time that free messages would save: the makespan, less the makespan of the same rows and durations
                    if every action started as soon as its rank is free and its inputs are computed. In a measured step
                    this part also holds everything else that delays an action, such as the launch of kernels. It is
                    the same on every rank, since all ranks wait for the end of the step.
    warm_up         of the remaining idle time, the part before the rank's first backward
    cool_down       the part after its last forward (and its first backward), up to the end of the step
    steady          the part in between. Its causes are unequal stages, unequal durations of single actions, and waits
                    that belong to the order itself.

Under 1F1B with equal stages, rank r has these parts:

    warm_up     r F + (p - r - 1) B
    cool_down   (p - r - 1) F + r B
    steady      0

Interleaved 1F1B with equal stages also idles (p - 1)(F + B) on every rank. Its first ranks may do part of this in the
steady phase. For example (p 4, v 2, m 8, B = 2F), rank 0 waits F before 4F4, because rank 3 ends 3F4 late.

Every rank's time is its computation plus these parts. So two makespans differ by the sum of the differences of one
rank's parts, and `explain_gap` names the largest difference.

Legend: A = actions of the schedule, P = ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from labkit.config.errors import counted
from labkit.events import Event
from labkit.schedules.dependencies import awaited, positions
from labkit.schedules.ir import ACTION, EVENT_KINDS, KINDS, Schedule
from labkit.schedules.simulator import Timeline, earliest

PARTS = {
    "warm_up": "warm-up",
    "steady": "steady-phase wait",
    "communication": "communication wait",
    "cool_down": "cool-down",
}
"""Part of the idle time -> its name in sentences."""


@dataclass(frozen=True, eq=False)
class BubbleSplit:
    """Idle time of each rank (P,) by cause, in the unit of the timeline (measured: seconds)."""

    warm_up: np.ndarray
    steady: np.ndarray
    communication: np.ndarray
    cool_down: np.ndarray

    @property
    def idle(self) -> np.ndarray:
        """Their sum (P,): the makespan less the time that a rank computes."""
        return self.warm_up + self.steady + self.communication + self.cool_down

    @property
    def total(self) -> dict[str, float]:
        """Each part summed over ranks."""
        return {part: float(getattr(self, part).sum()) for part in PARTS}

    def __str__(self) -> str:
        idle = float(self.idle.sum())
        rounded = {part: 0.0 if time < 1e-9 * idle else time for part, time in self.total.items()}
        parts = ", ".join(f"{PARTS[part]} {time:,g}" for part, time in rounded.items())
        return f"idle {idle:,g} over {counted(len(self.idle), 'rank')}: {parts}"


def split_timeline(timeline: Timeline) -> BubbleSplit:
    """Return the split of a simulated Timeline."""
    return _split(timeline.schedule, timeline.start, timeline.end)


def bubble_split(events: Iterable[Event], schedule: Schedule) -> BubbleSplit:
    """Return the split of a measured step, in seconds; time 0 is the start of the first action.

    events: every action of `schedule` once, by its name, as `labkit.train.pipeline_events` gives them. Other events
        are ignored. Raises ValueError if one is missing or doubled, or if a rank ran another order.
    """
    return _split(schedule, *measured_columns(events, schedule))


def measured_columns(events: Iterable[Event], schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """Return measured start and end of every action of `schedule` (A,), the first start at 0. Errors as in
    `bubble_split`."""
    if schedule.has_pairs:
        raise ValueError(f"{schedule.name} has merged pairs: their actions run at once and have no times of their own")
    at = positions(schedule)
    start, end = np.full((2, len(schedule)), np.nan)
    for event in events:
        found = ACTION.fullmatch(event.name)
        if found is None or event.kind != EVENT_KINDS[found[2]]:
            continue
        stage, microbatch = int(found[1]), int(found[3])
        inside = stage < schedule.num_stages and microbatch < schedule.num_microbatches
        index = at[KINDS.index(found[2]), stage, microbatch] if inside else -1
        if index < 0:
            raise ValueError(f"{event.name} was measured but is not in {schedule.name}: give the schedule that ran")
        if not np.isnan(start[index]):
            raise ValueError(f"{event.name} was measured twice: give one step of one rank for each pipeline rank")
        start[index], end[index] = event.start, event.end
    _require_rows(schedule, start)
    return start - start.min(), end - start.min()


def _require_rows(schedule: Schedule, start: np.ndarray) -> None:
    absent = np.flatnonzero(np.isnan(start))
    if len(absent):
        rank, position = schedule.locate(int(absent[0]))
        raise ValueError(f"{schedule.actions(rank)[position]} was not measured: give the Events of every rank")
    early = np.flatnonzero((np.diff(start) < 0) & (np.diff(schedule.ranks) == 0))
    if len(early):
        rank, position = schedule.locate(int(early[0]))
        first, second = schedule.actions(rank)[position : position + 2]
        raise ValueError(f"rank {rank} ran {second} before {first}, which is not the order of {schedule.name}")


def _split(schedule: Schedule, start: np.ndarray, end: np.ndarray) -> BubbleSplit:
    free_start, free_end = earliest(schedule, np.where(schedule.merged, 0.0, end - start))  # a merged pair counts once
    finish = free_end.max()
    if np.allclose(free_end, end, rtol=1e-12, atol=0.0):  # messages are free already: no rounding where 0 is meant
        free_start, free_end, finish = start, end, end.max()
    parts = np.zeros((3, schedule.pp))
    for rank in range(schedule.pp):
        row = schedule.span(rank)
        gaps = np.append(free_start[row], finish) - np.concatenate([[0.0], free_end[row]])
        gaps[:-1][schedule.merged[row]] = 0.0  # inside a merged pair
        warm, cool = _phases(schedule.kinds[row])
        parts[:, rank] = gaps[:warm].sum(), gaps[warm:cool].sum(), gaps[cool:].sum()
    communication = np.full(schedule.pp, end.max() - finish)
    return BubbleSplit(parts[0], parts[1], communication, parts[2])


def _phases(kinds: np.ndarray) -> tuple[int, int]:
    """Return the number of gaps in the warm-up, and the first gap of the cool-down.

    A row has a gap before each action and one after the last."""
    forward = kinds == KINDS.index("F")
    first_backward = 0 if forward.all() else int(np.argmin(forward))
    last_forward = int(np.flatnonzero(forward)[-1])
    return first_backward + 1, max(first_backward, last_forward) + 1


# ---- prediction against measurement ----


@dataclass(frozen=True)
class Gap:
    """The part of one rank's time in which measurement and prediction differ most; `str` gives a sentence."""

    predicted: float
    """Makespan of the prediction, in seconds."""
    measured: float
    """Makespan that was measured, in seconds."""
    part: str
    """`computation`, or one of PARTS."""
    rank: int
    """Pipeline rank. All ranks share the communication wait; there it is the rank with most of the difference."""
    difference: float
    """Measured less predicted seconds of the part."""
    stage: int | None = None
    """For computation, the stage that differs most."""
    kind: str | None = None
    """For computation, the kind of action that differs most on that stage."""
    detail: float = 0.0
    """Measured less predicted seconds of this kind on this stage."""

    def __str__(self) -> str:
        ratio = f"{self.measured / self.predicted:.2f} of the predicted time"
        return f"the step took {ratio} ({_ms(self.measured)} for {_ms(self.predicted)}); {self.where()}"

    def where(self, row: str = "rank") -> str:
        """The half of the sentence that names the place; `row` is the word for a pipeline rank."""
        place = f"on {row} {self.rank}: {_ms(self.difference, '+')}"
        if self.part != "computation":
            return f"what differs most is the {PARTS[self.part]} {place}"
        kind = EVENT_KINDS[self.kind or "F"].replace("_", " ").replace("grad", "gradient")
        of_stage = f"of it {_ms(self.detail, '+')} in the {kind} of stage {self.stage}"
        return f"what differs most is computation {place}, {of_stage}"


def _ms(seconds: float, sign: str = "") -> str:
    return f"{seconds * 1e3:{sign}.1f} ms"


_CONSEQUENCE = 0.1
"""A slower rank makes others idle just as long, and measurements scatter. If the differences of idle time and of its
cause are within this share, `explain_gap` names the cause."""


def explain_gap(predicted: Timeline, measured: Iterable[Event]) -> Gap:
    """Find the largest difference between prediction (costs in seconds) and measurement.

    Each rank's makespan is its computation plus the four parts of its idle time. The function names the rank and part
    that differ most. Computation, and then messages, come before the idle time that they cause elsewhere. Errors as in
    `bubble_split`.
    """
    schedule = predicted.schedule
    start, end = measured_columns(measured, schedule)
    expected, found = split_timeline(predicted), _split(schedule, start, end)
    longer = (end - start) - (predicted.end - predicted.start)
    waits = _message_waits(schedule, start, end) - _message_waits(schedule, predicted.start, predicted.end)
    computation = np.add.reduceat(longer, schedule.offsets[:-1])
    differences = {"computation": computation, "communication": found.communication - expected.communication}
    differences |= {part: getattr(found, part) - getattr(expected, part) for part in PARTS if part not in differences}
    largest = {part: np.abs(values).max() for part, values in differences.items()}
    part = next(part for part, value in largest.items() if value >= (1 - _CONSEQUENCE) * max(largest.values()))
    rank = int(np.argmax(np.abs(waits if part == "communication" else differences[part])))
    makespans, difference = (predicted.makespan, float(end.max())), float(differences[part][rank])
    if part != "computation":
        return Gap(*makespans, part, rank, difference)
    row = schedule.span(rank)
    by_stage = np.zeros((len(KINDS), schedule.num_stages))
    np.add.at(by_stage, (schedule.kinds[row], schedule.stages[row]), longer[row])
    kind, stage = np.unravel_index(np.argmax(by_stage * np.sign(difference)), by_stage.shape)
    return Gap(*makespans, part, rank, difference, int(stage), KINDS[kind], float(by_stage[kind, stage]))


def _message_waits(schedule: Schedule, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return, by rank (P,), the idle time in which the inputs of the next action were already computed.

    Its message was then under way, or nothing but the rank itself delayed the action."""
    needed = awaited(schedule)
    computed = np.where(needed >= 0, end[needed], 0.0)
    before = np.concatenate([[0.0], end[:-1]])
    before[schedule.offsets[:-1]] = 0.0
    return np.add.reduceat(np.maximum(start - np.maximum(before, computed), 0.0), schedule.offsets[:-1])
