"""Exercises on tensor parallelism: an MLP with f and g, and a block whose sequence is split, over simulated ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.check.scoring import Outcome, compare, exercise, holds, plain, shown

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


# ---- Chapter 06: sequence parallelism ----

Parts = list[Array]
Case = tuple[Parts, Parts, Array, Parts, Parts]


def _block_problem(tp: int) -> Case:
    """x and dy: [2, 3] a rank; gain [3]; A [2, 3] and B [3, 2] a rank. Small integers, so that sums are exact."""
    numbers = np.random.default_rng(40 + tp)
    shapes = ((2, 3), (2, 3), (2, 3), (3, 2))
    x, dy, a, b = ([numbers.integers(-3, 4, shape) for _ in range(tp)] for shape in shapes)
    return x, dy, numbers.integers(1, 4, (3,)), a, b


def _whole_block(case: Case) -> tuple[Array, Array, Array]:
    """y, dx and dgain of y = relu((x gain) A^T) B^T on whole arrays."""
    x, dy, gain, a, b = (np.concatenate(part, axis) if isinstance(part, list) else part
                         for part, axis in zip(case, (0, 0, 0, 0, 1), strict=True))  # fmt: skip
    scaled = x * gain
    hidden = np.maximum(scaled @ a.T, 0)
    d_scaled = ((dy @ b) * (hidden > 0)) @ a
    return hidden @ b.T, d_scaled * gain, (d_scaled * x).sum(0)


def _collectives(tp: int) -> tuple[list[Callable[[Parts], Parts]], Counter[str]]:
    """Make all_gather, reduce_scatter and all_reduce over lists with one array a rank, and count their calls."""
    calls: Counter[str] = Counter()

    def counted(name: str, function: Callable[[Parts], Parts]) -> Callable[[Parts], Parts]:
        def call(parts: Parts) -> Parts:
            assert len(parts) == tp, f"{name} was given {len(parts)} arrays for {tp} ranks"
            calls[name] += 1
            return function([np.asarray(part) for part in parts])

        return call

    def total(parts: Parts) -> Array:
        return np.sum(parts, axis=0)

    return [
        counted("all_gather", lambda parts: [np.concatenate(parts) for _ in parts]),
        counted("reduce_scatter", lambda parts: np.split(total(parts), len(parts))),
        counted("all_reduce", lambda parts: [total(parts) for _ in parts]),
    ], calls


@exercise(
    "06.sequence",
    "Write block(x, dy, gain, A, B, all_gather, reduce_scatter, all_reduce) -> (outputs, gradients of x, gradients of "
    "the gain), one of each per rank.",
)
def sequence_parallel(answer: Any) -> Iterator[Outcome]:
    """Judge the form of the result, then the results of every rank at tp 1, 2 and 4, and the number of calls.

    At tp 1 each call is the identity, and the exercise counts none. An answer in another form gets one sentence and no
    further case.
    """
    form = "lists (y, dx, dgain) with one array per rank"
    outcome = holds("tp 1, what is returned", form, lambda: _formed(answer(*_block_problem(1), *_collectives(1)[0])))
    yield outcome
    if not outcome.passed:
        return
    for tp in (1, 2, 4):
        case = _block_problem(tp)
        y, dx, dgain = _whole_block(case)
        collectives, calls = _collectives(tp)

        def tried(what: int, tp: int = tp, case: Case = case, collectives: Any = collectives) -> Any:
            copies = (list(map(np.copy, part)) if isinstance(part, list) else part.copy() for part in case)
            found = answer(*copies, *collectives)[what]
            assert len(found) == tp, f"{len(found)} entries for {tp} ranks"
            return found

        expected = (("its positions' output", np.split(y, tp)), ("its positions' gradient of x", np.split(dx, tp)))
        for what, (name, parts) in enumerate((*expected, ("the gradient of the gain", [dgain] * tp))):
            given = f"tp {tp}, on every rank {name}"
            yield compare(given, parts, lambda t=tried, w=what: t(w), equal=_same)
        if tp == 1:
            continue
        calls.clear()
        for name, allowed in (("all_gather", (2, 3)), ("reduce_scatter", (2,)), ("all_reduce", (1,))):
            given = f"tp {tp}, the number of {name.replace('_', '-')}s of one forward and one backward"
            wanted = " or ".join(map(str, allowed)) if len(allowed) > 1 else allowed[0]
            yield compare(given, wanted, lambda n=name, t=tried, c=calls: _calls(n, t, c), equal=_among(allowed))


def _formed(found: Any) -> bool | str:
    """Return True, or words for the result of one rank that is not three lists with its [2, 3], [2, 3] and [3]."""
    if not hasattr(found, "__len__") or len(found) != 3:
        return f"{shown(found)}, which is not three lists"
    for name, parts, shape in zip(("y", "dx", "dgain"), found, ((2, 3), (2, 3), (3,)), strict=True):
        if not hasattr(parts, "__len__") or len(parts) != 1:
            return f"{shown(parts)} as {name}, which is not a list with one array for the one rank"
        if np.shape(plain(parts[0])) != shape:
            return f"an array {list(np.shape(plain(parts[0])))} as {name} of a rank, which has {list(shape)}"
    return True


def _calls(name: str, tried: Callable[[int], Any], calls: Counter[str]) -> int:
    calls.clear()
    tried(0)
    return calls[name]


def _among(allowed: tuple[int, ...]) -> Callable[[Any, Any], bool]:
    return lambda got, _: got in allowed
