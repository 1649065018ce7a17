"""Exercises on pipeline schedules: the idle share of a step, a schedule of the reader's own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from labkit.check.scoring import Diagnosis, Outcome, exercise, holds, raised, shown, without_grid
from labkit.schedules.builders import one_f_one_b
from labkit.schedules.ir import Action, Schedule, ScheduleError
from labkit.schedules.simulator import Costs, Timeline, simulate
from labkit.schedules.verifier import verify

# ---- Chapter 00: the idle share ----

_STEPS: tuple[tuple[int, int, tuple[float, ...]], ...] = (
    (2, 4, (1.0, 1.0)),
    (3, 2, (1.0, 1.0, 1.0)),
    (2, 4, (1.0, 3.0)),
    (4, 8, (2.0, 1.0, 1.0, 1.0)),
    (1, 3, (1.0,)),
)
"""(stages, microbatches, seconds of a forward of each stage; a backward takes twice as long)."""
_DELAY = 5.0
"""Seconds at which the steps of the exercise begin."""

Spans = list[list[tuple[float, float]]]
"""By stage: (start, end) of its actions."""


def _spans(stages: int, count: int, forward: tuple[float, ...]) -> Spans:
    timeline = simulate(one_f_one_b(stages, count), Costs(forward=forward, backward=[2 * each for each in forward]))
    rows: Spans = [[] for _ in range(stages)]
    for event in timeline.events:
        rows[event.rank].append((event.start + _DELAY, event.end + _DELAY))
    return rows


@exercise("00.idle", "Write idle_share(rows) -> the share of the step in which stages are idle, from 0 to 1.")
def idle(answer: Any) -> Iterator[Outcome]:
    """Five steps of 1F1B: equal stages, unequal ones, one stage; no step begins at 0."""
    diagnosis = Diagnosis(lambda value, other: math.isclose(value, other, rel_tol=1e-6, abs_tol=1e-9))
    failed = False
    for stages, count, forward in _STEPS:
        rows = _spans(stages, count, forward)
        busy = sum(end - start for row in rows for start, end in row)
        first, last = min(row[0][0] for row in rows), max(row[-1][1] for row in rows)
        step = last - first
        own = sum(row[-1][1] - row[0][0] for row in rows)
        misreadings = {
            "this is the share in which stages work; the idle share is the rest": busy / (stages * step),
            "all stages can work all the time: divide by their number, too": 1 - busy / step,
            "a stage is idle also before its first action and after its last": 1 - busy / own,
            "divide by the number of stages, and by a step that begins with its first action": 1 - busy / last,
            "the step begins with its first action, not at time 0": 1 - busy / (stages * last),
            "this formula holds for equal stages; take the times of the rows": (stages - 1) / (count + stages - 1),
            "these are seconds; divide by stages times the length of the step": stages * step - busy,
        }
        outcome = diagnosis.outcome(
            f"{stages} stages, {count} microbatches, and forwards of {list(forward)} s",
            round((stages * step - busy) / (stages * step), 6),
            lambda r=rows: round(float(answer([list(row) for row in r])), 6),
            {words: round(value, 6) for words, value in misreadings.items()},
        )
        yield replace(outcome, told=outcome.told and not failed)
        failed |= not outcome.passed


# ---- Chapter 12: a schedule of the reader's own ----

_FORM = "a list of rows (lists of texts such as 0F0)"


@exercise("12.schedule", "Write schedule(pp, microbatches) -> one row of actions per rank, as texts such as '0F0'.")
def schedule(answer: Any) -> Iterator[Outcome]:
    """Five targets at p = 4, m = 8, each harder than the target before; then the last two at other sizes, m >= p.

    A rank's whole share of the model costs F = I = W = 1 per microbatch (B = 2). Stages of one rank divide the share
    equally, so an answer with several stages a rank meets the same targets. Each target is a closed form:

    One stage a rank: the last rank starts after p - 1 forwards and has 3m units of work. The least is 3m + p - 1.

    Two stages a rank: p ranks share 2p stages, so some rank holds no stage before stage p - 1. This rank starts after
    p - 1 forwards of half a unit. The least is 3m + (p - 1)/2.

    The score gives each reason for failure once: later cases with the same reason get no sentence.
    """
    said: set[str] = set()
    for outcome in _targets(answer):
        words = outcome.got
        yield replace(outcome, told=outcome.passed or words not in said)
        if not words.endswith("in flight"):  # each case has another target for times and memory
            said.add(words)


def _targets(answer: Any) -> Iterator[Outcome]:
    pp, count = 4, 8
    found = _attempt(answer, pp, count)
    given = f"pp {pp}, {count} microbatches"
    yield holds(given, f"{_FORM} that runs", lambda: isinstance(found, Timeline) or found)
    whole, right_after = 3 * (count + pp - 1), 3 * count + 2 * (pp - 1)
    yield _target(found, pp, count, whole, "1F1B: 3(m + p - 1) and p")
    yield _target(found, pp, count, right_after - 1, "better than each W right after its I: 3m + 2(p - 1)")
    yield _target(
        found, pp, count, _least(pp, count, 1), "the least with one stage a rank, 3m + p - 1, in 1F1B's memory"
    )
    yield _target(
        found, pp, count, _least(pp, count, 2), "the least with two stages a rank, 3m + (p - 1)/2, in the same"
    )
    for pp, count in ((2, 4), (6, 6)):
        yield _target(_other(answer, found, pp, count), pp, count, _least(pp, count, 1), "3m + p - 1 and p")
    for pp, count in ((3, 7), (5, 12)):
        yield _target(_other(answer, found, pp, count), pp, count, _least(pp, count, 2), "3m + (p - 1)/2 and p")


def _least(pp: int, count: int, stages: int) -> float:
    """Least number of steps of any schedule with so many stages a rank."""
    return 3 * count + (pp - 1) / stages


def _other(answer: Any, found: Timeline | str, pp: int, count: int) -> Timeline | str:
    """Try the answer at other sizes, unless the answer fails at the first size."""
    return _attempt(answer, pp, count) if isinstance(found, Timeline) else found


def _target(found: Timeline | str, pp: int, count: int, steps: float, why: str) -> Outcome:
    return holds(
        f"pp {pp}, {count} microbatches",
        f"at most {steps:g} steps with at most {pp} in flight ({why})",
        lambda: _within(found, steps, pp),
    )


def _within(found: Timeline | str, steps: float, most: int) -> bool | str:
    """Return True, or the steps and the memory of the answer, or its refusal."""
    if isinstance(found, str):
        return found
    peak = max(found.peak_memory)
    if found.makespan <= steps + 1e-9 and peak <= most + 1e-9:
        return True
    return f"{found.makespan:g} steps with {peak:g} in flight"


def _attempt(answer: Any, pp: int, count: int) -> Timeline | str:
    """Verify and time the answer; return its Timeline, or the refusal as words of a sentence."""
    try:
        rows = _parsed_rows(answer(pp, count) if callable(answer) else answer)
        if isinstance(rows, str):
            return rows
        if len(rows) != pp:
            return f"{len(rows)} rows for {pp} ranks"
        stages = 1 + max((action.stage for row in rows for action in row), default=0)
        own = Schedule("the answer", stages, count, rows)
        if own.forward_only:
            return "no backward in any row"
        verify(own)
        return _timed(own)
    except ScheduleError as problem:
        return without_grid(str(problem))
    except (Exception, SystemExit) as error:
        return raised(error)


def _parsed_rows(rows: Any) -> list[list[Action]] | str:
    """Parse an answer; return its rows of actions, or words for a value that is no list of rows."""
    if isinstance(rows, Schedule):
        return "a Schedule: give its rows, [[str(action) for action in s.actions(rank)] for rank in range(s.pp)]"
    if not isinstance(rows, (list, tuple)):
        return f"{type(rows).__name__} {shown(rows)}, which is no list of rows" if rows is not None else "None"
    for rank, row in enumerate(rows):
        if not isinstance(row, (list, tuple)):
            return f"{shown(row)} as the row of rank {rank}, which is no list of texts"
    return [[Action.parse(str(cell)) for cell in row] for row in rows]


def _timed(own: Schedule) -> Timeline:
    held = [len(own.stages_of(rank)) for rank in range(own.pp)]
    if len(set(held)) != 1:
        raise ValueError(f"{held} stages by rank: all ranks must hold equally many, or their times cannot be compared")
    share = 1 / held[0]
    return simulate(own, Costs(forward=share, input_grad=share, weight_grad=share, activation=share))
