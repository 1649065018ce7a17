"""Exercises on CUDA graphs: a function for a graph, buffers of a pipeline's graphs, the end of a partial graph."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.check.scoring import Outcome, compare, exercise, holds, plain, shown
from labkit.graphs.buffers import PlanError, check_plan, plan_buffers
from labkit.graphs.capture import make_graphed_callables
from labkit.graphs.order_table import read_order
from labkit.graphs.study.refusal import Refusal
from labkit.parallel.communication.capturing import GraphCaptureError
from labkit.schedules.builders import gpipe, interleaved, one_f_one_b

# ---- Chapter 16: a function that a graph can hold ----

SHAPE = (4, 3)
"""[T, H] of the exercise."""
_NO_TENSOR = "no tensor but a "


@dataclass(frozen=True)
class _Call:
    """One call: its arguments, its expected result, and True where `count` grows."""

    words: str
    x: Tensor
    limit: float
    expected: Tensor
    counts: bool


def _calls() -> list[_Call]:
    """Within the limit, above it, the limit changed, not finite, zeros, and exactly on the limit."""
    unit = torch.randn(SHAPE, generator=torch.Generator().manual_seed(14))
    unit /= unit.norm()
    bad = [unit.clone(), unit.clone()]
    bad[0][1, 2], bad[1][0, 0] = float("inf"), float("nan")
    zeros, exact = torch.zeros(SHAPE), torch.zeros(SHAPE)
    exact[0, 0], exact[3, 2] = 3.0, 4.0  # 25 and its root are exact, in whatever way the norm is computed
    return [
        _Call("norm 1, limit 2", unit, 2.0, unit, False),
        _Call("norm 8, limit 2", 8 * unit, 2.0, 2 * unit, True),
        _Call("norm 8, limit changed to 16", 8 * unit, 16.0, 8 * unit, False),
        _Call("an entry that is inf", bad[0], 16.0, zeros, True),
        _Call("an entry that is NaN", bad[1], 16.0, zeros, True),
        _Call("all entries 0", zeros, 2.0, zeros, False),
        _Call("norm 5, limit 5", exact, 5.0, exact, False),
        _Call("norm 100, limit 2", 100 * unit, 2.0, 2 * unit, True),
    ]


@exercise("16.clipped", "Write clipped(x, limit, count), a clip by norm that a CUDA graph can hold.")
def clipped(answer: Any) -> Iterator[Outcome]:
    """Eager first; then one capture, and the same calls replayed."""
    calls = _calls()
    limit, count = torch.tensor(calls[0].limit), torch.tensor(0)
    for call in (calls[1], calls[3]):
        eager = holds(f"{call.words}, without a graph", _claim(call), partial(_agrees, answer, call, limit, count))
        yield eager
        if eager.got.startswith(_NO_TENSOR):
            return  # one sentence, not ten
    # The capture takes the first branch of any `if`, so that a frozen decision cannot look right by chance.
    sample = calls[0].x.clone()
    limit.fill_(calls[0].limit)
    graphed: list[Callable[..., Tensor]] = []

    def captured() -> bool | str:
        def body(x: Tensor) -> Any:
            return answer(x, limit, count)

        try:
            graphed.append(make_graphed_callables(body, (sample,), impl="emulated", num_warmup=2))
        except GraphCaptureError as error:
            seen = Refusal.of(error)
            return f"a refusal of `{seen.line}`: {seen.reason}" if seen.line else f"a refusal: {seen.reason}"
        return True

    yield holds("a capture", "a graph", captured)
    if not graphed:
        return
    count.zero_()  # the warm-up counted as well
    for call in calls:
        yield holds(f"{call.words}, replayed", _claim(call), partial(_agrees, graphed[0], call, limit, count, False))
    counted = sum(call.counts for call in calls)
    yield holds(
        f"those {len(calls)} replays, `count` set to 0 before",
        f"count {counted}",
        lambda: True if int(count) == counted else f"count {int(count)}",
    )


def _claim(call: _Call) -> str:
    norm = float(call.expected.norm())
    if call.expected.equal(call.x):
        return "x unchanged"
    return f"x scaled to the norm {norm:g}" if norm else "zeros"


def _agrees(
    function: Callable[..., Any], call: _Call, limit: Tensor, count: Tensor, pass_all: bool = True
) -> bool | str:
    """Return True, or a sentence about the returned value."""
    limit.fill_(call.limit)
    got = function(call.x.clone(), limit, count) if pass_all else function(call.x.clone())
    if not isinstance(got, Tensor):
        return f"{_NO_TENSOR}{type(got).__name__}"
    if got.shape != call.expected.shape:
        return f"a tensor of shape {list(got.shape)}"
    if torch.allclose(got, call.expected, rtol=1e-5, atol=1e-7):
        return True
    return "NaN among the entries" if got.isnan().any() else f"a tensor of norm {float(got.norm()):.4g}"


# ---- Chapter 17: buffers of a pipeline's graphs ----

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


# ---- Chapter 18: the end of a partial graph ----

Step = tuple[str, tuple[str, ...], tuple[str, ...]]
"""Name, values that the step reads, values that it writes; a second write gives a name a new value."""

LAYER: list[Step] = [
    ("attention", ("x",), ("x",)),
    ("norm", ("x",), ("hidden",)),
    ("shared experts", ("hidden",), ("shared",)),
    ("route", ("hidden",), ("probs", "map")),
    ("preprocess", ("hidden", "probs", "map"), ("hidden", "probs", "counts", "origin")),
    ("dispatch", ("hidden", "probs", "counts"), ("hidden", "probs")),
    ("experts", ("hidden", "probs", "counts"), ("hidden",)),
    ("combine", ("hidden", "origin", "counts"), ("hidden",)),
    ("add shared", ("hidden", "shared"), ("hidden",)),
    ("residual", ("x", "hidden"), ("x",)),
]
_TWO_STEPS: list[Step] = [("double", ("x",), ("y",)), ("add", ("x", "y"), ("z",))]
_AGAIN: list[Step] = [("a", ("x",), ("t",)), ("b", ("t",), ("y",)), ("c", ("x",), ("t",)), ("d", ("t", "y"), ("z",))]
_BOUNDARIES: dict[str, tuple[list[Step], int]] = {
    "y = double(x), z = add(x, y), the first step captured": (_TWO_STEPS, 1),
    "the same, both captured": (_TWO_STEPS, 2),
    "a layer with experts, captured up to attention": (LAYER, 1),
    "the layer, captured up to route": (LAYER, 4),
    "the layer, captured up to preprocess": (LAYER, 5),
    "the layer without its attention, captured up to route": (LAYER[1:], 3),
    "t = a(x), y = b(t), t = c(x), z = d(t, y), the first two captured": (_AGAIN, 2),
}


@exercise(
    "18.boundary",
    "Write boundary(steps, captured) -> (inputs, outputs): what a graph of the first steps takes in and must give out.",
)
def boundary(answer: Any) -> Iterator[Outcome]:
    """Small forwards, a layer cut in three places, and forwards drawn at random."""
    for given, (steps, captured) in _BOUNDARIES.items():
        right = list(_boundary(steps, captured))
        yield compare(given, right, lambda steps=steps, captured=captured: answer(list(steps), captured))
    yield holds("200 forwards drawn at random", "the same as a walk from the end", lambda: _at_random(answer))


def _boundary(steps: Sequence[Step], captured: int) -> tuple[list[str], list[str]]:
    """Live values, found from the end backwards."""
    live = set(steps[-1][2])
    for _, reads, writes in reversed(steps[captured:]):
        live = live - set(writes) | set(reads)
    inputs: list[str] = []
    written: list[str] = []  # in the order of the last time
    for _, reads, writes in steps[:captured]:
        inputs += [name for name in reads if name not in written and name not in inputs]
        written = [name for name in written if name not in writes] + list(writes)
    return inputs, [name for name in written if name in live]


def _at_random(answer: Any) -> bool | str:
    draw = random.Random(16)
    for _ in range(200):
        names = [f"v{i}" for i in range(draw.randint(2, 6))]
        steps: list[Step] = []
        for number in range(draw.randint(1, 8)):
            reads = tuple(draw.sample(names, draw.randint(1, 2)))
            steps.append((f"step {number}", reads, tuple(draw.sample(names, draw.randint(1, 2)))))
        captured = draw.randint(1, len(steps))
        right, got = list(_boundary(steps, captured)), plain(answer(list(steps), captured))
        if got != right:
            return f"{shown(got)} instead of {shown(right)} for the first {captured} of {shown(steps)}"
    return True
