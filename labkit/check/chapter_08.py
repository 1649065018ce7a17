"""Exercise of chapter 08: the order of 1F1B."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from labkit.check.scoring import Outcome, compare, exercise, holds
from labkit.schedules.builders import one_f_one_b
from labkit.schedules.ir import Schedule
from labkit.schedules.simulator import simulate

_ROWS = ((4, 3, 3), (4, 0, 5), (4, 2, 5), (2, 0, 1), (4, 0, 2), (1, 0, 3))
"""(pp, rank, microbatches), fewer microbatches than warm-up forwards among them."""


@exercise("08.one_f_one_b", "Write row(pp, rank, microbatches) -> the actions of that rank under 1F1B, as texts.")
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
    rows = [list(answer(pp, rank, count)) for rank in range(pp)]
    for rank, row in enumerate(rows):
        missing = [text for m in range(count) if (text := f"{rank}B{m}") not in map(str, row)]
        if missing:
            return f"no backward for {', '.join(text.replace('B', 'F') for text in missing)}"
    timeline = simulate(Schedule("the answer", pp, count, rows))
    peaks = [min(pp - rank, count) for rank in range(pp)]
    if timeline.makespan == 3 * (count + pp - 1) and timeline.peak_in_flight == peaks:
        return True
    return f"one that takes {_units(timeline.makespan)} with {timeline.peak_in_flight} in flight by rank"


def _units(time: float) -> str:
    return f"{time:g} units of time (F = 1, B = 2)"
