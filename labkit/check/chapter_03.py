"""Exercises and bets of chapter 03: cut weights, an MLP with f and g over ranks, the cheapest ways to cut.

Wrong answers are compared with those of known misunderstandings, and the score names the one that fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.check.bets import ask
from labkit.check.scoring import Diagnosis, Misreadings, Outcome, asked, exercise, holds, raised, shown

if TYPE_CHECKING:
    from labkit.viz.figure import Figure

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


def draw_parts(answer: Any) -> Figure | None:
    """Draw the answer's cut over two ranks next to the right one; an answer of another form has no drawing."""
    from labkit.viz.held_weights import weight_parts  # matplotlib, which a score does without

    held = answer(*_stored(2), 0, 2)
    return weight_parts(answer, 2) if isinstance(held, (tuple, list)) and len(held) == 2 else None


@exercise(
    "03.parts",
    "Write parts(fc1, fc2, rank, t) -> this rank's parts of two weights as torch stores them.",
    draw=draw_parts,
)
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
            found["gradients of different parts are averaged, as if the ranks were replicas; each part has its own"] = [
                each / tp for each in total
            ]
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
    "03.f_and_g", "Write mlp(x, dy, fc1, fc2, bias, all_reduce) -> lists y, dx, dA, dB, dbias, with one array per rank."
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
    "only y and dx are sums over the ranks; the gradients of weights and bias stay where they are": 5,
}


# ---- the cheapest way to cut an MLP ----

_WAYS = (("column", "row"), ("row", "row"), ("column", "column"), ("row", "column"))
_BEST = dict(zip(_WAYS, (4, 11, 11, 18), strict=True))
_SLOTS = ("before A", "before the GeLU", "before B", "at the end")
_WIDTHS = (1, 4, 4, 1)
OPERATORS = {
    "f": ("whole", "shared", 0, 2), "g": ("partial", "whole", 2, 0), "split": ("whole", "cut", 0, 1),
    "gather": ("cut", "whole", 1, 0), "g_split": ("partial", "cut", 1, 1), "gather_f": ("cut", "shared", 1, 1),
}  # fmt: skip
"""Operator -> what it takes and makes, and units per h of width that a rank sends forward and backward. `shared` is
whole, and its gradients on the ranks are terms of a sum."""
_WASTE = "right, but an all-reduce whose result is then cut has sent twice what a reduce-scatter would"


def plan_units(way: tuple[str, str], slots: Any) -> int:
    """Return the units that a plan sends forward and backward.

    Raises ValueError, with the misunderstanding, for a plan whose result or gradient is wrong.
    """
    if not isinstance(slots, list | tuple) or len(slots) != 4 or any(isinstance(slot, str) for slot in slots):
        raise ValueError(f"a plan is four lists of operators; this is {shown(slots)}")
    state, units = "whole", 0
    for place, (slot, width) in enumerate(zip(slots, _WIDTHS, strict=True)):
        for operator in slot:
            if operator not in OPERATORS:
                raise ValueError(f"{operator!r} is no operator; choose from {', '.join(OPERATORS)}")
            takes, makes, forward, backward = OPERATORS[operator]
            if state != takes:
                raise ValueError(f"{_SLOTS[place]}, {operator} meets a {state} tensor. {_why(operator, state)}")
            state, units = makes, units + width * (forward + backward)
        if place == 1 and state == "partial":
            raise ValueError("the GeLU meets a partial sum, and the GeLU of a sum is not the sum of the GeLUs")
        if place in (0, 2):
            state = _product(way[place // 2], state, "A" if place == 0 else "B")
    if state != "whole":
        raise ValueError(f"Y is {state} at the end; every rank needs it whole")
    return units


def _product(kind: str, state: str, matrix: str) -> str:
    """Return what a product makes of its input."""
    if kind == "column" and state == "whole":
        raise ValueError(f"{matrix} is cut by columns, and nobody adds up the gradients of its input: f is missing")
    if kind == "column" and state != "shared":
        raise ValueError(f"{matrix} is cut by columns and needs its input whole; it is {state}")
    if kind == "row" and state != "cut":
        raise ValueError(f"{matrix} is cut by rows: the columns of its input have to be cut alike; it is {state}")
    return "cut" if kind == "column" else "partial"


def _why(operator: str, state: str) -> str:
    if state == "shared":
        return "Its gradient is added up once by f; added up again it is t times too large."
    if operator in ("g", "g_split"):
        return "It adds up terms of a sum; whole copies would become t times too large."
    return f"It takes a {OPERATORS[operator][0]} one."


@exercise("03.plan", "Write plan(first, second) -> four lists of operators, that send no more than 44 units together.")
def plan(answer: Any) -> Iterator[Outcome]:
    """Judge each of the four ways to cut: right forward and backward, and as cheap as it can be."""
    for way in _WAYS:
        yield holds(f"{way[0]}, then {way[1]}", f"{_BEST[way]} units", lambda way=way: _judged(answer, way))


def _judged(answer: Any, way: tuple[str, str]) -> tuple[str, str]:
    try:
        units = plan_units(way, answer(*way))
    except ValueError as error:
        said = str(error)
        return re.split(r"[.;:,] ", said, maxsplit=1)[-1], said  # the reason comes after the place
    return (_WASTE, f"{units} units: {_WASTE}") if units > _BEST[way] else ("", "")


# ---- bets ----

ask(
    "03.deleted",
    "In layer 0's MLP, f is between the norm and fc1, and in forward it returns its input. We delete it. The loss of "
    "the first step does not change. Which gradients are wrong?",
    choices={
        "those of fc1 and fc2": "Each rank's part of fc1 and fc2 gets its gradient before backward arrives at f, so "
        "they are right.",
        "those before f": "Backward arrives at f after fc1. What it passes on from there, to the norm, attention and "
        "the input, is one term of a sum.",
        "none": "In forward f does nothing. But its backward is an all-reduce.",
    },
)
ask(
    "03.ways",
    "There are four ways to cut A and B by rows or columns. Each is done as well as it can be. How many times as many "
    "bytes does the worst way send as the best?",
    misread=lambda: {
        "That counts messages. Their sizes differ by up to four.": 2,
        "That is the width alone. The worst way also splits and gathers at its ends.": 4,
        "That is row then row, or column then column. There is a worse one.": 2.75,
    },
    unit="times",
    because="Column then row sends two all-reduces of width h, 4 units. Row then column needs the sum before the GeLU "
    "whole, and the same again backward, both of width 4h: 16 units, and 2 at the ends.",
)
ask(
    "03.hidden",
    "Between the start and the end of an all-reduce a rank can compute something that does not need its result. In "
    "which of f and g can it?",
    choices={
        "f only": "Backward has two products per matrix. dX goes into f, and dA, which needs nobody, can be computed "
        "meanwhile. What comes after g is the residual and the next norm, which need its result.",
        "g only": "What comes after g is the residual and the next norm, which need its result.",
        "both": "g is followed by the residual and the next norm, which need its result.",
        "neither": "Backward has two products per matrix, and the second one does not need f's result.",
    },
)
ask(
    "03.link",
    "tp 8, 32 layers of width 4,096, one sample of 8,192 tokens in bf16, four all-reduces per layer on a ring, "
    "450 GB/s out of each GPU. How many ms of all-reduces are that?",
    misread=lambda: {
        "That is forward alone; f sends as much backward.": 16.7,
        "That is one layer.": 1.04,
        "That is InfiniBand, with 50 GB/s.": 300.6,
        "That counts N bytes per all-reduce; a ring sends 2 N (t - 1)/t.": 19.1,
    },
    unit="ms",
    because="8,192 x 4,096 x 2 bytes are 67 MB, of which a rank sends 2 x 7/8, 117 MB, in 0.26 ms. There are 4 x 32.",
)
