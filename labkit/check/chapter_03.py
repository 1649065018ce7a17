"""Exercises of chapter 03: cut weights, an MLP with f and g over ranks, and the hunt for a missing sum.

Wrong answers are compared with those of known misunderstandings, and the score names the one that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.check.scoring import Diagnosis, Misreadings, Outcome, asked, exercise, raised, shown

Array = NDArray[np.int64]
Parts = list[Array]


def _same(got: Any, expected: Any) -> bool:
    """Compare two lists of arrays, or two numbers, exactly, because all numbers are small integers."""
    if not isinstance(got, (list, tuple)) or not isinstance(expected, (list, tuple)):
        return got is None if expected is None else bool(np.array_equal(got, expected))
    return all(np.array_equal(np.asarray(g), e) for g, e in zip(got, expected, strict=True))


# ---- the parts of two stored matrices ----

_CUTS = ((2, 0), (2, 1), (4, 2), (1, 0))
"""(ranks, rank)."""
Pair = tuple[Array, Array]


def _stored(h: int) -> Pair:
    """Return fc1 [4, h] and fc2 [h, 4] as torch stores A [h, 4] and B [4, h]; each number shows its place."""
    return np.arange(4 * h).reshape(4, h), 20 + np.arange(4 * h).reshape(h, 4)


def _part(ranks: int, rank: int, *, dims: tuple[int | None, int | None] = (0, 1), stride: bool = False) -> Pair:
    """Return a rank's part of fc1 and of fc2; a dim that is None is not cut. `stride`: every t-th row or column."""

    def cut(weight: Array, dim: int | None) -> Array:
        places = np.arange(1 if dim is None else weight.shape[dim])
        own = places[rank::ranks] if stride else np.split(places, ranks)[rank] if dim is not None else places
        return weight if dim is None else np.take(weight, own, dim)

    fc1, fc2 = (cut(weight, dim) for weight, dim in zip(_stored(max(2, ranks)), dims))
    return fc1, fc2


@exercise("03.parts", "Write parts(fc1, fc2, rank, t) -> this rank's parts of two weights as torch stores them.")
def parts(answer: Any) -> Iterator[Outcome]:
    """Judge two ranks, a middle one of four, and one rank alone."""
    return asked(
        _CUTS,
        given="rank {1} of {0}".format,
        right=_part,
        tried=lambda ranks, rank: tuple(answer(*_stored(max(2, ranks)), rank, ranks)),
        misread=_misread_parts,
    )


def _misread_parts(ranks: int, rank: int) -> Misreadings:
    return {words: _part(ranks, 0 if "rank 0" in words else rank, **cut) for words, cut in _MISREAD_PARTS.items()}


_MISREAD_PARTS: dict[str, dict[str, Any]] = {
    "torch stores the transpose of A and of B, so this cuts A by rows and B by columns": {"dims": (1, 0)},
    "this cuts B by columns; its rows are the columns of fc2 as torch stores it": {"dims": (0, 0)},
    "this cuts A by rows, so partial sums meet the GeLU; its columns are the rows of fc1": {"dims": (1, 1)},
    "fc2 is whole; a rank needs only the part that meets its columns of A": {"dims": (0, None)},
    "fc1 is whole, so every rank computes all columns of A": {"dims": (None, 1)},
    "both are whole; nothing is cut": {"dims": (None, None)},
    "every rank gets the part of rank 0": {},
    "the result would be right, but a rank of Megatron holds neighbouring columns, and its checkpoints, too": {
        "stride": True
    },
}


# ---- f and g ----

_RESULTS = ("y", "dx", "dA", "dB", "dbias")
_SUMMED_DY = "every rank holds dy whole; this sums it over the ranks, so the gradient is t times too large"
_MASK = "the gradient of relu is missing: it is 0 where relu gave 0"


@dataclass(frozen=True)
class _MLP:
    """y = relu(x A^T) B^T + bias, with x, dy [2, 2], A [F, 2], B [2, F], bias [2], in small integers for exact sums."""

    x: Array
    dy: Array
    a: Array
    b: Array
    bias: Array
    tp: int

    @staticmethod
    def make(tp: int) -> _MLP:
        numbers = np.random.default_rng(tp)
        shapes = ((2, 2), (2, 2), (2 * tp, 2), (2, 2 * tp), (2,))
        x, dy, a, b, bias = (numbers.integers(-3, 4, shape) for shape in shapes)
        return _MLP(x, dy, a, b, bias + 5, tp)  # a bias far from zero, so that adding it twice shows

    def cut(self) -> tuple[Parts, Parts]:
        return np.split(self.a, self.tp), np.split(self.b, self.tp, axis=1)

    def on_rank(self, rank: int) -> dict[str, Array]:
        """Return the results of rank `rank` alone: partial sums of y and dx, and the gradients of its weights."""
        a, b = (part[rank] for part in self.cut())
        inner = np.maximum(self.x @ a.T, 0)
        d_inner = (self.dy @ b) * (inner > 0)
        unmasked = self.dy @ b
        return {"y": inner @ b.T, "dx": d_inner @ a, "dA": d_inner.T @ self.x, "dB": self.dy.T @ inner,
                "dbias": self.dy.sum(0), "unmasked dx": unmasked @ a, "unmasked dA": unmasked.T @ self.x}  # fmt: skip

    def by_rank(self, name: str) -> Parts:
        return [self.on_rank(rank)[name] for rank in range(self.tp)]

    def right(self, name: str) -> Parts:
        found = self.by_rank(name)
        total = np.sum(found, axis=0)
        if name == "y":
            return [total + self.bias] * self.tp
        return [total] * self.tp if name == "dx" else found

    def misread(self, name: str) -> Misreadings:
        """Return the answers of known misunderstandings for one result."""
        alone: list[Any] = self.by_rank(name)
        tp = self.tp
        total: list[Any] = [sum(alone)] * tp
        if name == "y":
            return {
                "each rank keeps its partial sum; g adds them up": [part + self.bias for part in alone],
                "the bias is added on each rank before g, so the sum holds it t times": [
                    each + tp * self.bias for each in total
                ],
                "the bias is missing": total,
                "g is a sum over ranks, not a mean": [each / tp + self.bias for each in total],
                "only rank 0 has the sum; every rank needs it for the next layer": [
                    sum(alone) + self.bias, *(part + self.bias for part in alone[1:])
                ],
            }  # fmt: skip
        found: dict[str, list[Any]] = {_SUMMED_DY: [tp * each for each in self.right(name)]}
        if name == "dx":
            found["f is missing: each rank keeps its own share of dx"] = alone
            found["f is a sum over ranks, not a mean"] = [each / tp for each in total]
            found["x is summed over the ranks twice, or f's sum is taken twice"] = [tp * tp * each for each in total]
        if name in ("dx", "dA"):
            unmasked = self.by_rank(f"unmasked {name}")
            found[_MASK] = unmasked if name == "dA" else [sum(unmasked)] * tp
        if name in ("dA", "dB"):
            found["gradients of different parts are added; each rank's part has its own gradient"] = total
        if name == "dbias":
            found["the gradient is not summed over the tokens"] = [self.dy] * tp
            found["each rank holds the whole bias, so its gradient is not divided by t"] = [part / tp for part in alone]
        return found


def _counted_all_reduce(tp: int) -> tuple[Callable[[list[Any]], list[Any]], list[int]]:
    """Return an all-reduce over a list with one array per rank, and the list to which each call adds its length."""
    calls: list[int] = []

    def all_reduce(parts: list[Any]) -> list[Any]:
        parts = list(parts)
        if len(parts) != tp:
            raise ValueError("all_reduce takes a list with one array for each rank")
        calls.append(len(parts))
        total = sum(np.asarray(part) for part in parts)
        return [np.array(total) for _ in parts]

    return all_reduce, calls


def _given_back(answer: Any, case: _MLP) -> tuple[dict[str, Any], int, Exception | None]:
    """Call the answer once; return its five lists by name, the number of all-reduces, and its exception."""
    all_reduce, calls = _counted_all_reduce(case.tp)
    a, b = case.cut()
    try:
        found = answer(case.x.copy(), case.dy.copy(), a, b, case.bias.copy(), all_reduce)
        if not isinstance(found, (tuple, list)) or len(found) != len(_RESULTS):
            raise ValueError(f"mlp returned {shown(found)}; it returns five lists: {', '.join(_RESULTS)}")
        return dict(zip(_RESULTS, found)), len(calls), None
    except (Exception, SystemExit) as error:
        return {}, len(calls), ValueError(raised(error)) if isinstance(error, SystemExit) else error


@exercise(
    "03.f_and_g", "Write mlp(x, dy, A, B, bias, all_reduce) -> lists y, dx, dA, dB, dbias, with one array per rank."
)
def f_and_g(answer: Any) -> Iterator[Outcome]:
    """Judge the results of every rank at tp 1, 2 and 4, and the number of all-reduces.

    At tp 1 an all-reduce is the identity, so all-reduces are not counted there.
    """
    diagnosis = Diagnosis(_same)
    for tp in (2, 4, 1):
        case = _MLP.make(tp)
        found, calls, problem = _given_back(answer, case)

        def tried(name: str, found: Any = found, problem: Exception | None = problem, tp: int = tp) -> Any:
            if problem is not None:
                raise problem
            value = found[name]
            if value is None:
                return None
            if not hasattr(value, "__len__") or len(value) != tp:
                raise ValueError(f"{name} is {shown(value)}, not a list with one array for each rank")
            return list(value)

        for name in _RESULTS:
            misread = {**(case.misread(name) if tp > 1 else {}), "there is no result yet": None}
            yield diagnosis.outcome(
                f"tp {tp}, {name} on every rank", case.right(name), lambda n=name, t=tried: t(n), misread
            )
        if tp > 1:
            yield diagnosis.outcome(
                f"tp {tp}, the number of all-reduces", 2, lambda t=tried, c=calls: (t("y"), c)[1], _CALLS
            )


_CALLS: Misreadings = {
    "no rank hears of another": 0,
    "y and dx are both sums over the ranks": 1,
    "only y and dx are sums over the ranks": 3,
    "only y and dx are sums over the ranks; the weights' gradients stay where their parts are": 4,
}


# ---- the fault hunt ----

_DIFFERENCES = (
    ("layers.0.mlp.norm.bias gradient", "layers.0.mlp", "f"),
    ("layers.1.attention output", "layers.1.attention", "g"),
    ("layers.1.attention.norm.bias gradient", "layers.1.attention", "f"),
    ("layers.0.mlp output", "layers.0.mlp", "g"),
    ("layers.10.attention.norm.bias gradient", "layers.10.attention", "f"),
)
"""The first difference that the microscope names, and the all-reduce that is missing: its sub-layer and operator."""


def _before(part: str) -> str:
    """Return the sub-layer before this one."""
    _, layer, name = part.split(".")
    return f"layers.{layer}.attention" if name == "mlp" else f"layers.{int(layer) - 1}.mlp"


def _after(part: str) -> str:
    _, layer, name = part.split(".")
    return f"layers.{layer}.mlp" if name == "attention" else f"layers.{int(layer) + 1}.attention"


@exercise("03.suspect", 'Write suspect(name) -> (sub-layer, "f" or "g"): the all-reduce that was left out.')
def suspect(answer: Any) -> Iterator[Outcome]:
    """Judge findings about outputs and about gradients of norms, in several layers."""
    diagnosis = Diagnosis()
    for name, part, operator in _DIFFERENCES:
        other = "g" if operator == "f" else "f"
        said = (
            "outputs differ, so forward is wrong; f does nothing forward"
            if operator == "g"
            else "outputs and loss agree, so forward is right; g does nothing backward"
        )
        misread = {
            said: (part, other),
            "the norm is before f, and f belongs to the sub-layer of this norm": (f"{part}.norm", operator),
            "this has the name of a parameter; name the sub-layer": (f"{part}.norm.bias", operator),
            "this is a layer; name the sub-layer, attention or mlp": (part.rpartition(".")[0], operator),
            "backward reaches this norm right after the f of its own sub-layer": (
                _before(part), operator
            ),
            "this sub-layer comes later; its results differ because of the first difference": (_after(part), operator),
        }  # fmt: skip
        yield diagnosis.outcome(f"{name!r}", (part, operator), lambda name=name: tuple(answer(name)), misread)
