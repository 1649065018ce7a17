"""Exercise of chapter 10: the order of 1F1B."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from labkit.check.scoring import Outcome, compare, exercise, holds, listed, shown, without_grid
from labkit.schedules.builders import one_f_one_b
from labkit.schedules.ir import Action, Schedule, ScheduleError
from labkit.schedules.simulator import simulate

_ROWS = ((4, 3, 3), (4, 0, 5), (4, 2, 5), (2, 0, 1), (4, 0, 2), (1, 0, 3))
"""(pp, rank, microbatches), fewer microbatches than warm-up forwards among them."""


@exercise("10.one_f_one_b", "Write row(pp, rank, microbatches) -> the actions of that rank under 1F1B, as texts.")
def one_f_one_b_row(answer: Any) -> Iterator[Outcome]:
    """Six rows, then two whole pipelines that must run, in the time and the memory of 1F1B."""
    for pp, rank, count in _ROWS:
        expected = [str(action) for action in one_f_one_b(pp, count).actions(rank)]
        yield compare(f"pp {pp}, rank {rank}, {count} microbatches", expected, lambda a=(pp, rank, count): answer(*a))
    for pp, count in ((4, 8), (5, 3)):
        yield holds(
            f"all {pp} rows for {count} microbatches",
            f"a schedule that takes {_units(3 * (count + pp - 1))} with at most {min(pp, count)} in flight",
            lambda p=pp, m=count: _whole(answer, p, m),
        )


def _whole(answer: Any, pp: int, count: int) -> bool | str:
    """True, or what the answer's rows do together."""
    rows: list[list[Action]] = []
    for rank in range(pp):
        row = _parsed(answer(pp, rank, count), rank)
        if isinstance(row, str):
            return row
        rows.append(row)
    try:
        timeline = simulate(Schedule("the answer", pp, count, rows))
    except ScheduleError as problem:
        return without_grid(str(problem))
    peaks = [min(pp - rank, count) for rank in range(pp)]
    if timeline.makespan == 3 * (count + pp - 1) and timeline.peak_in_flight == peaks:
        return True
    return f"one that takes {_units(timeline.makespan)} with {timeline.peak_in_flight} in flight by rank"


def _parsed(row: Any, rank: int) -> list[Action] | str:
    """The actions of an answer's row, or what is wrong with them, as words of a sentence."""
    form = f"a row is a list of texts such as '{rank}F0'"
    if isinstance(row, str) or not isinstance(row, Iterable):
        return f"{shown(row)} for rank {rank}: {form}"
    actions: list[Action] = []
    for cell in row:
        try:
            actions.append(Action.parse(str(cell)))
        except ScheduleError:
            return f"{shown(cell)} in the row of rank {rank}: {form}"
    foreign = [action for action in actions if action.stage != rank]
    if foreign:
        return f"a row in which rank {rank} runs stage {foreign[0].stage} ({foreign[0]}): rank r runs stage r"
    ran = {(action.kind, action.microbatch) for action in actions}
    missing = [str(a) for a in actions if a.kind == "F" and ("B", a.microbatch) not in ran]
    return f"no backward for {listed(missing)}" if missing else actions


def _units(time: float) -> str:
    return f"{time:g} units of time (F = 1, B = 2)"
