"""Exercise of chapter 16: a function with a branch, a number and a counter, written so that a graph can hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit.check.scoring import Outcome, exercise, holds
from labkit.graphs.capture import make_graphed_callables
from labkit.graphs.refusal import Refusal
from labkit.parallel.capturing import GraphCaptureError

SHAPE = (4, 3)
"""[T, H] of the exercise."""
_NO_TENSOR = "no tensor but a "


@dataclass(frozen=True)
class _Call:
    """One call: what it is made with, what comes back, and whether it counts."""

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
    # Captured on numbers that take the first branch of any `if`: a decision then cannot look right by chance.
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
    """True, or what came back instead."""
    limit.fill_(call.limit)
    got = function(call.x.clone(), limit, count) if pass_all else function(call.x.clone())
    if not isinstance(got, Tensor):
        return f"{_NO_TENSOR}{type(got).__name__}"
    if got.shape != call.expected.shape:
        return f"a tensor of shape {list(got.shape)}"
    if torch.allclose(got, call.expected, rtol=1e-5, atol=1e-7):
        return True
    return "NaN among the entries" if got.isnan().any() else f"a tensor of norm {float(got.norm()):.4g}"
