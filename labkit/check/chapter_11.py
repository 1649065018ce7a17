"""Exercise of chapter 11: the signed order of interleaved 1F1B."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from labkit.check.scoring import Outcome, compare, exercise, holds, listed, shown, without_grid
from labkit.schedules.ir import Schedule, ScheduleError
from labkit.schedules.simulator import simulate
from labkit.schedules.tables import convert_schedule_table_to_order, get_pp_rank_microbatches, get_schedule_table

_ROWS = ((4, 2, 8, 4, 0), (4, 2, 8, 4, 3), (2, 2, 5, 3, 0), (2, 3, 4, 2, 1), (4, 2, 16, 8, 1), (4, 2, 4, 4, 0))
"""(pp, vpp, microbatches, group size, rank): a short last group and a warm-up of all forwards are among them."""


@exercise(
    "11.order",
    "Write order(pp, vpp, microbatches, group_size, rank) -> the signed numbers of that rank's row.",
)
def interleaved_order(answer: Any) -> Iterator[Outcome]:
    """Six rows, then two whole pipelines that must run, in the time and the memory of interleaved 1F1B."""
    for pp, vpp, count, size, rank in _ROWS:
        _, _, warmup, _ = get_pp_rank_microbatches(count, vpp, size, pp_size=pp, pp_rank=rank)
        expected = convert_schedule_table_to_order(warmup, vpp, get_schedule_table(count, vpp, size))
        given = f"pp {pp}, vpp {vpp}, {count} microbatches, group size {size}, rank {rank}"
        yield compare(given, expected, lambda a=(pp, vpp, count, size, rank): answer(*a))
    for pp, vpp, count in ((4, 2, 8), (3, 4, 6)):
        yield holds(
            f"all {pp} orders for vpp {vpp}, {count} microbatches, group size {pp}",
            f"a schedule that takes {_units(3 * (count * vpp + pp - 1))} with {_peak(pp, vpp)} in flight on rank 0",
            lambda p=pp, v=vpp, m=count: _whole(answer, p, v, m),
        )


def _whole(answer: Any, pp: int, vpp: int, count: int) -> bool | str:
    """True, or what the answer's orders do together."""
    rows: list[list[str]] = []
    for rank in range(pp):
        order = _read(answer(pp, vpp, count, pp, rank), rank)
        if isinstance(order, str):
            return order
        rows.append(_row(order, rank, pp))
    try:
        timeline = simulate(Schedule("the answer", pp * vpp, count, rows))
    except ScheduleError as problem:
        return without_grid(str(problem))
    if timeline.makespan == 3 * (count * vpp + pp - 1) and timeline.peak_in_flight[0] == _peak(pp, vpp):
        return True
    return f"one that takes {_units(timeline.makespan)} with {timeline.peak_in_flight[0]} in flight on rank 0"


def _read(order: Any, rank: int) -> list[int] | str:
    """The numbers of an answer's order, or what is wrong with them, as words of a sentence."""
    form = "an order is a list of whole numbers, 1 for a forward of the first chunk, -1 for its backward"
    if isinstance(order, str) or not isinstance(order, Iterable):
        return f"{shown(order)} for rank {rank}: {form}"
    numbers = list(order)
    for number in numbers:
        if not isinstance(number, int | np.integer) or isinstance(number, bool) or number == 0:
            return f"{shown(number)} in the order of rank {rank}: {form}"
    counts = Counter(map(int, numbers))
    without = [f"chunk {chunk}" for chunk in sorted(counts) if chunk > 0 and not counts[-chunk]]
    return f"no backward for {listed(without)} on rank {rank}" if without else [int(number) for number in numbers]


def _row(order: Iterable[int], rank: int, pp: int) -> list[str]:
    """Actions of a signed order: each chunk sees the microbatches in ascending order."""
    seen: Counter[int] = Counter()
    row = []
    for signed in order:
        row.append(f"{(abs(signed) - 1) * pp + rank}{'F' if signed > 0 else 'B'}{seen[signed]}")
        seen[signed] += 1
    return row


def _peak(pp: int, vpp: int) -> int:
    return 2 * (pp - 1) + (vpp - 1) * pp + 1


def _units(time: float) -> str:
    return f"{time:g} units of time (a chunk's F = 1, B = 2)"
