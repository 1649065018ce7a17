"""Exercise on the buffers of a pipeline's graphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from labkit.check.scoring import Outcome, compare, exercise, holds, shown
from labkit.graphs.buffers import PlanError, check_plan, plan_buffers
from labkit.graphs.order_table import read_order
from labkit.schedules.builders import gpipe, interleaved, one_f_one_b

_ORDERS: dict[str, list[float]] = {
    "the order 1 1 -1 1 -1 -1": [1, 1, -1, 1, -1, -1],
    "the order 1 -1 1 -1 1 -1": [1, -1, 1, -1, 1, -1],
    "GPipe's order 1 1 1 -1 -1 -1": gpipe(2, 3).order(0),
    "the order 1 2 1 -2 -1 2 -2 -1 of two chunks": [1, 2, 1, -2, -1, 2, -2, -1],
    "1F1B, 4 stages, 8 microbatches, rank 1": one_f_one_b(4, 8).order(1),
}
_LONG_ORDERS: dict[str, list[float]] = {
    "interleaved 1F1B, 4 ranks, 2 chunks, 16 microbatches, rank 0": interleaved(4, 2, 16).order(0),
    "interleaved 1F1B, 4 ranks, 3 chunks, 8 microbatches, rank 2": interleaved(4, 3, 8).order(2),
}


@exercise(
    "17.buffers",
    "Write buffers(order) -> the buffer of each forward, in the order of the forwards: the one that has been free "
    "longest, or a new one, numbered 0, 1, ... as they are first taken.",
)
def buffers(answer: Any) -> Iterator[Outcome]:
    """Five orders entry by entry, then two long ones: no buffer held twice, none too many."""
    for given, order in _ORDERS.items():
        yield compare(given, _taken(order), lambda order=order: _as_list(answer(list(order))))
    for given, order in _LONG_ORDERS.items():
        fewest = plan_buffers(order, 1).num_buffers
        yield holds(
            given, f"{fewest} buffers, none held twice", lambda o=order, n=fewest: _sound(answer(list(o)), o, n)
        )


def _as_list(given: Any) -> Any:
    """Turn a generator into a list: a generator is an answer like any other."""
    return list(given) if isinstance(given, Iterator) else given


def _taken(order: Sequence[float]) -> list[int]:
    """Buffers of the forwards, one layer a chunk."""
    assignment = plan_buffers(order, 1).assignment
    return [assignment[one.chunk, 0, one.microbatch] for one in read_order(order) if one.kind == "F"]  # type: ignore[index]


def _sound(given: Any, order: Sequence[float], fewest: int) -> bool | str:
    """Return True, or the fault of the answer's buffers in words."""
    forwards = [one for one in read_order(order) if one.kind == "F"]
    given = _as_list(given)
    if isinstance(given, str) or not isinstance(given, Iterable):
        return f"{shown(given)}: an answer is a list of whole numbers, one for each forward"
    numbers = list(given)
    if len(numbers) != len(forwards):
        return f"{len(numbers)} buffers for {len(forwards)} forwards"
    for number in numbers:
        if not isinstance(number, int | np.integer) or isinstance(number, bool):
            return f"{shown(number)} among the buffers: each is a whole number"
    plan = plan_buffers(order, 1)
    assignment = {
        use: int(numbers[place]) for place, one in enumerate(forwards) for use in plan.assignment
        if (use.chunk, use.microbatch) == (one.chunk, one.microbatch)
    }  # fmt: skip
    try:
        check_plan(replace(plan, assignment=assignment), order)
    except PlanError as problem:
        return str(problem).splitlines()[0]
    count = len(set(assignment.values()))
    return True if count == fewest else f"{count} buffers, none held twice"
