"""Exercise of chapter 06: ring attention over simulated ranks, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.check.scoring import Outcome, compare, exercise
from labkit.parallel.context_plan import Layout, chunks_of_rank

Array = NDArray[np.float64]
Part = tuple[Array, Array, Array, NDArray[np.int64]]

_CASES: tuple[tuple[int, Layout, float], ...] = (
    (1, "zigzag", 1.0),
    (2, "contiguous", 1.0),
    (2, "zigzag", 1.0),
    (4, "zigzag", 1.0),
    (4, "zigzag", 800.0),
)
"""(cp, how the sequence is cut, factor of the queries: scores of several hundred overflow exp)."""


def _problem(cp: int, scale: float) -> tuple[Array, Array, Array]:
    """q, k and v of 4 cp positions, [S, 3] each."""
    numbers = np.random.default_rng(cp)
    q, k, v = (numbers.normal(size=(4 * cp, 3)) for _ in range(3))
    return scale * q, k, v


def _whole(q: Array, k: Array, v: Array) -> Array:
    """softmax(q k^T / sqrt(3)) v over positions up to one's own."""
    scores = np.where(np.tril(np.ones((len(q), len(q)), dtype=bool)), q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ v


def _positions(cp: int, rank: int, layout: Layout) -> NDArray[np.int64]:
    """Those that a rank holds, of 4 cp in chunks of 2."""
    return np.concatenate([np.arange(2 * chunk, 2 * chunk + 2) for chunk in chunks_of_rank(cp, rank, layout)])


@exercise("06.ring", "Write ring(parts, pass_on) -> the outputs of causal attention, one array per rank.")
def ring(answer: Any) -> Iterator[Outcome]:
    """One, two and four ranks, both ways to cut, large scores; and how often keys were handed over."""
    for cp, layout, scale in _CASES:
        q, k, v = _problem(cp, scale)
        at = [_positions(cp, rank, layout) for rank in range(cp)]
        expected = [_whole(q, k, v)[rows] for rows in at]
        calls: list[int] = []

        def tried(case: Any = (q, k, v, at), cp: int = cp, calls: list[int] = calls) -> list[Array]:
            def pass_on(held: Any) -> list[Any]:
                assert len(held) == cp, f"pass_on takes a list with one entry for each of {cp} ranks, not {len(held)}"
                calls.append(cp)
                return [held[(rank - 1) % cp] for rank in range(cp)]

            q, k, v, at = case
            calls.clear()
            parts: list[Part] = [(q[rows], k[rows], v[rows], rows.copy()) for rows in at]
            outputs = list(answer(parts, pass_on))
            assert len(outputs) == cp, f"{len(outputs)} outputs for {cp} ranks"
            return [np.asarray(output, dtype=float).round(6) for output in outputs]

        words = (
            f"cp {cp}, {'zigzag' if layout == 'zigzag' else 'plain cut'}{', scores of hundreds' if scale > 1 else ''}"
        )
        yield compare(f"{words}, the outputs", [part.round(6) for part in expected], tried, equal=_close)
        if cp > 1 and scale == 1.0:
            yield compare(
                f"{words}, the number of times keys are passed on", cp - 1, lambda t=tried, c=calls: (t(), len(c))[1]
            )


def _close(got: Any, expected: Any) -> bool:
    """Whether all arrays agree to rounding."""
    return all(g.shape == e.shape and np.allclose(g, e, rtol=0, atol=2e-6) for g, e in zip(got, expected, strict=True))
