"""Exercise of chapter 12: a schedule of the reader's own, scored by the verifier and the simulator.

A rank's whole share of the model costs F = I = W = 1 per microbatch (B = 2) and is divided equally among its stages, so
that answers with several stages a rank are held to the same targets. The targets are closed forms: the last rank of a
pipeline with one stage a rank starts after p - 1 forwards and has 3m units of work, so 3m + p - 1 is the least. With
two, p ranks share 2p stages, so one of them has none before stage p - 1; it starts after p - 1 forwards of half a unit,
and 3m + (p - 1)/2 is the least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from labkit.check.scoring import Outcome, exercise, holds, raised, shown, without_grid
from labkit.schedules.ir import Action, Schedule, ScheduleError
from labkit.schedules.simulator import Costs, Timeline, simulate
from labkit.schedules.verifier import verify

_ROWS = "a list of rows (lists of texts such as 0F0)"


@exercise("12.schedule", "Write schedule(pp, microbatches) -> one row of actions per rank, as texts such as '0F0'.")
def schedule(answer: Any) -> Iterator[Outcome]:
    """Five targets at p = 4, m = 8, each harder than the one before; then the last two at other sizes, m >= p.

    What an answer fails for is said once: later cases that fail for the same reason get no sentence.
    """
    said: set[str] = set()
    for outcome in _cases(answer):
        words = outcome.got
        yield replace(outcome, told=outcome.passed or words not in said)
        if not words.endswith("in flight"):  # times and memory are held against another target in each case
            said.add(words)


def _cases(answer: Any) -> Iterator[Outcome]:
    pp, count = 4, 8
    found = _attempt(answer, pp, count)
    given = f"pp {pp}, {count} microbatches"
    yield holds(given, f"{_ROWS} that runs", lambda: isinstance(found, Timeline) or found)
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
    """Steps that no schedule with so many stages a rank can be below."""
    return 3 * count + (pp - 1) / stages


def _other(answer: Any, found: Timeline | str, pp: int, count: int) -> Timeline | str:
    """The answer at other sizes; one that does not even run at the first is not asked again."""
    return _attempt(answer, pp, count) if isinstance(found, Timeline) else found


def _target(found: Timeline | str, pp: int, count: int, steps: float, why: str) -> Outcome:
    return holds(
        f"pp {pp}, {count} microbatches",
        f"at most {steps:g} steps with at most {pp} in flight ({why})",
        lambda: _within(found, steps, pp),
    )


def _within(found: Timeline | str, steps: float, most: int) -> bool | str:
    """True, or the steps and the memory that the answer needs, or why it does not run."""
    if isinstance(found, str):
        return found
    peak = max(found.peak_memory)
    if found.makespan <= steps + 1e-9 and peak <= most + 1e-9:
        return True
    return f"{found.makespan:g} steps with {peak:g} in flight"


def _attempt(answer: Any, pp: int, count: int) -> Timeline | str:
    """The answer verified and timed, or why it cannot be, as words of a sentence."""
    try:
        rows = _parsed(answer(pp, count) if callable(answer) else answer)
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


def _parsed(rows: Any) -> list[list[Action]] | str:
    """The actions of an answer, or what it is instead of rows, as words of a sentence."""
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
