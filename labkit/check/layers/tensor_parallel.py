"""Exercise on tensor parallelism: an MLP with f and g over simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.check.scoring import Outcome, compare, exercise

Array = NDArray[np.int64]


def _same(got: Any, expected: Any) -> bool:
    """Compare two lists of arrays exactly: all numbers are small integers."""
    return all(np.array_equal(np.asarray(g), e) for g, e in zip(got, expected, strict=True))


# ---- Chapter 03: f and g ----


def _mlp_problem(tp: int) -> tuple[Array, Array, Array, Array, Array]:
    """x [2, 2], dy [2, 2], A [F, 2], B [2, F], bias [2] of small integers, so that sums are exact in any order."""
    numbers = np.random.default_rng(tp)
    ffn = 2 * tp
    shapes = ((2, 2), (2, 2), (ffn, 2), (2, ffn), (2,))
    x, dy, a, b, bias = (numbers.integers(-3, 4, shape) for shape in shapes)
    return x, dy, a, b, bias + 5  # a bias far from zero: adding it twice shows


def _whole_mlp(x: Array, dy: Array, a: Array, b: Array, bias: Array) -> tuple[Array, Array]:
    """Output and input gradient of relu(x A^T) B^T + bias."""
    hidden = np.maximum(x @ a.T, 0)
    return hidden @ b.T + bias, ((dy @ b) * (hidden > 0)) @ a


def _counted_all_reduce() -> tuple[Callable[[list[Any]], list[Any]], list[int]]:
    """An all-reduce over a list with one array per rank, and the list to which each call adds its length."""
    calls: list[int] = []

    def all_reduce(parts: list[Any]) -> list[Any]:
        calls.append(len(parts))
        total = sum(np.asarray(part) for part in parts)
        return [np.array(total) for _ in parts]

    return all_reduce, calls


@exercise("03.f_and_g", "Write mlp(x, dy, A, B, bias, all_reduce) -> (outputs, input gradients), one of each per rank.")
def f_and_g(answer: Any) -> Iterator[Outcome]:
    """Judge the results of every rank at tp 1, 2 and 4, and the number of all-reduces.

    At tp 1 an all-reduce is the identity, and the exercise does not count all-reduces.
    """
    for tp in (1, 2, 4):
        x, dy, a, b, bias = _mlp_problem(tp)
        y, dx = _whole_mlp(x, dy, a, b, bias)
        shards = (np.split(a, tp), np.split(b, tp, axis=1))
        all_reduce, calls = _counted_all_reduce()

        def tried(what: int, tp: int = tp, case: Any = (x, dy, *shards, bias), reduce: Any = all_reduce) -> Any:
            found = answer(*(part.copy() if isinstance(part, np.ndarray) else list(part) for part in case), reduce)
            assert len(found[what]) == tp, f"{len(found[what])} entries for {tp} ranks"
            return found[what]

        yield compare(f"tp {tp}, the output on every rank", [y] * tp, lambda t=tried: t(0), equal=_same)
        yield compare(f"tp {tp}, the input gradient on every rank", [dx] * tp, lambda t=tried: t(1), equal=_same)
        if tp == 1:
            continue
        calls.clear()
        count = lambda t=tried, c=calls: (t(0), len(c))[1]  # noqa: E731
        yield compare(f"tp {tp}, the number of all-reduces for one forward and one backward", 2, count)
