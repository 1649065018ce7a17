"""Exercise of chapter 10: a schedule of the reader's own, scored by the verifier and the simulator.

A rank's whole share of the model costs F = I = W = 1 per microbatch (B = 2) and is divided equally among its stages, so
that answers with several stages a rank are held to the same targets. The targets are closed forms: the last rank of a
pipeline with one stage a rank starts after p - 1 forwards and has 3m units of work, so 3m + p - 1 is the least.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from labkit.check.scoring import Outcome, exercise, holds, raised
from labkit.schedules.ir import Action, Schedule, ScheduleError
from labkit.schedules.simulator import Costs, Timeline, simulate
from labkit.schedules.verifier import verify


@exercise("10.schedule", "Write schedule(pp, microbatches) -> one row of actions per rank, as texts such as '0F0'.")
def schedule(answer: Any) -> Iterator[Outcome]:
    """Four targets at p = 4, m = 8, each harder than the one before; then the hardest at other sizes, m >= p."""
    pp, count = 4, 8
    found = _attempt(answer, pp, count)
    yield holds(f"pp {pp}, {count} microbatches", "a schedule that runs", lambda: isinstance(found, Timeline) or found)
    if isinstance(found, str):
        found = "nothing that runs"  # why is said once
    whole, right_after, least = 3 * (count + pp - 1), 3 * count + 2 * (pp - 1), 3 * count + pp - 1
    yield _target(found, pp, count, whole, "1F1B: 3(m + p - 1) and p")
    yield _target(found, pp, count, right_after - 1, "better than each W right after its I: 3m + 2(p - 1)")
    yield _target(found, pp, count, least, "the least with one stage a rank, 3m + p - 1, in 1F1B's memory")
    for pp, count in ((2, 4), (3, 7), (6, 6)):
        other = _attempt(answer, pp, count) if isinstance(found, Timeline) else found
        yield _target(other, pp, count, 3 * count + pp - 1, "3m + p - 1 and p")


def _target(found: Timeline | str, pp: int, count: int, steps: int, why: str) -> Outcome:
    return holds(
        f"pp {pp}, {count} microbatches",
        f"at most {steps} steps with at most {pp} in flight ({why})",
        lambda: _within(found, steps, pp),
    )


def _within(found: Timeline | str, steps: int, most: int) -> bool | str:
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
        rows = [[Action.parse(str(cell)) for cell in row] for row in answer(pp, count)]
        if len(rows) != pp:
            return f"{len(rows)} rows for {pp} ranks"
        stages = 1 + max((action.stage for row in rows for action in row), default=0)
        own = Schedule("the answer", stages, count, rows)
        if own.forward_only:
            return "no backward in any row"
        verify(own)
        return _timed(own)
    except ScheduleError as problem:
        return _without_grid(str(problem))
    except (Exception, SystemExit) as error:
        return raised(error)


def _timed(own: Schedule) -> Timeline:
    held = [len(own.stages_of(rank)) for rank in range(own.pp)]
    if len(set(held)) != 1:
        raise ValueError(f"{held} stages by rank: all ranks must hold equally many, or their times cannot be compared")
    share = 1 / held[0]
    return simulate(own, Costs(forward=share, input_grad=share, weight_grad=share, activation=share))


def _without_grid(message: str) -> str:
    """The sentences of a refusal, without the rows that it draws: a score is one line a case."""
    lines = [line.strip() for line in message.splitlines()]
    return "; ".join(line for line in lines if line and not (line.startswith("rank ") and "|" in line))
