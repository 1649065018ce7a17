"""Exercise of chapter 07: ring attention over simulated ranks, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.check.scoring import Outcome, compare, exercise, holds, plain, shown
from labkit.parallel.context.plan import Layout, chunks_of_rank

Array = NDArray[np.float64]
Part = tuple[Array, Array, Array, NDArray[np.int64]]

_CASES: tuple[tuple[int, Layout, float], ...] = (
    (1, "zigzag", 1.0),
    (2, "contiguous", 1.0),
    (2, "zigzag", 1.0),
    (4, "zigzag", 1.0),
    (4, "zigzag", 800.0),
)
"""(cp, way to cut the sequence, factor of the queries: scores of several hundred overflow exp)."""


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
    """Positions that a rank holds, of 4 cp in chunks of 2."""
    return np.concatenate([np.arange(2 * chunk, 2 * chunk + 2) for chunk in chunks_of_rank(cp, rank, layout)])


@exercise("07.ring", "Write ring(parts, pass_on) -> the outputs of causal attention, one array per rank.")
def ring(answer: Any) -> Iterator[Outcome]:
    """Judge the form of the result; one, two and four ranks, both ways to cut, large scores; the number of passes.

    An answer in another form gets one sentence and no further case.
    """
    outcome = holds("cp 1, what is returned", "a list with one array per rank", lambda: _formed(answer))
    yield outcome
    if not outcome.passed:
        return
    for cp, layout, scale in _CASES:
        q, k, v = _problem(cp, scale)
        at = [_positions(cp, rank, layout) for rank in range(cp)]
        calls: list[int] = []

        def tried(case: Any = (q, k, v, at), cp: int = cp, calls: list[int] = calls) -> list[Any]:
            def pass_on(held: Any) -> list[Any]:
                assert len(held) == cp, f"pass_on takes a list with one entry for each of {cp} ranks, not {len(held)}"
                calls.append(cp)
                return [held[(rank - 1) % cp] for rank in range(cp)]

            q, k, v, at = case
            calls.clear()
            parts: list[Part] = [(q[rows], k[rows], v[rows], rows.copy()) for rows in at]
            return list(answer(parts, pass_on))

        cut = "zigzag" if layout == "zigzag" else "plain cut"
        words = f"cp {cp}, {cut}{', scores of hundreds' if scale > 1 else ''}"
        whole = _whole(q, k, v)
        yield holds(
            f"{words}, the outputs",
            "attention over the whole sequence in every row",
            lambda t=tried, e=whole, at=at: _first_wrong(t(), e, at),
        )
        if cp > 1 and scale == 1.0:
            count = lambda t=tried, c=calls: (t(), len(c))[1]  # noqa: E731
            yield compare(f"{words}, the number of times keys are passed on", cp - 1, count)


def _formed(answer: Any) -> bool | str:
    """Return True, or words for the result of one rank that is no list with one array [4, 3]."""
    q, k, v = _problem(1, 1.0)
    found = answer([(q, k, v, _positions(1, 0, "zigzag"))], lambda held: held)
    if not hasattr(found, "__len__") or len(found) != 1:
        return f"{shown(found)}, which is not a list with one array for the one rank"
    if np.shape(plain(found[0])) != v.shape:
        return f"an array {list(np.shape(plain(found[0])))} for a rank that holds {len(q)} rows of {v.shape[1]}"
    return True


def _first_wrong(outputs: list[Any], whole: Array, at: list[NDArray[np.int64]]) -> bool | str:
    """Return True, or words for the first row that is not attention."""
    if len(outputs) != len(at):
        return f"{len(outputs)} outputs for {len(at)} ranks"
    for rank, (output, rows) in enumerate(zip(outputs, at, strict=True)):
        got = np.asarray(output, dtype=float)
        if got.shape != whole[rows].shape:
            return f"an array {list(got.shape)} on rank {rank}, which holds {len(rows)} rows of {whole.shape[1]}"
        for place, position in enumerate(rows):
            if not np.allclose(got[place], whole[position], rtol=0, atol=1e-6):
                found, expected = (shown(row.round(3)) for row in (got[place], whole[position]))
                return f"{found} instead of {expected} at position {position} (rank {rank}, row {place})"
    return True
