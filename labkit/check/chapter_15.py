"""Exercises of chapter 15: the smallest world of a folded layout, and what a rank does for the experts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from labkit.check.scoring import Outcome, compare, exercise
from labkit.parallel.rank_generator import rank_generators

Sizes = dict[str, Any]

_WORLDS: tuple[Sizes, ...] = (
    {"tp": 1, "cp": 8, "pp": 1, "etp": 1, "ep": 8},
    {"tp": 4, "cp": 1, "pp": 2, "etp": 1, "ep": 4},
    {"tp": 2, "cp": 2, "pp": 4, "etp": 1, "ep": 64},
    {"tp": 1, "cp": 6, "pp": 2, "etp": 1, "ep": 4},
    {"tp": 2, "cp": 3, "pp": 1, "etp": 2, "ep": 2},
)
"""tp cp = etp ep without and with a pipeline, ep beyond tp cp, and two where neither product divides the other."""

_PLACES: tuple[tuple[int, int, int, Sizes], ...] = (
    (5, 8, 8, {"tp": 1, "cp": 8, "pp": 1, "etp": 1, "ep": 8}),
    (13, 16, 8, {"tp": 4, "cp": 1, "pp": 2, "etp": 1, "ep": 4}),
    (3, 16, 16, {"tp": 4, "cp": 1, "pp": 2, "etp": 1, "ep": 8}),
    (14, 16, 4, {"tp": 2, "cp": 2, "pp": 2, "etp": 2, "ep": 2}),
    (21, 32, 6, {"tp": 2, "cp": 2, "pp": 2, "etp": 2, "ep": 2}),
)
"""(rank, world_size, num_experts, sizes)."""


@exercise("15.world", "Write smallest_world(tp, cp, pp, etp, ep) -> the fewest ranks that hold the folded layout.")
def world(answer: Any) -> Iterator[Outcome]:
    """Five layouts; the right answer is the first number of ranks that the library lays out."""
    for sizes in _WORLDS:
        expected = next(ranks for ranks in count(1) if _fits(ranks, sizes))
        yield compare(_words(sizes), expected, lambda s=sizes: answer(**s))


def _fits(ranks: int, sizes: Sizes) -> bool:
    try:
        rank_generators(world_size=ranks, **sizes)
    except ValueError:
        return False
    return True


@exercise(
    "15.place",
    "Write expert_place(rank, world_size, num_experts, *, tp, cp, pp, etp, ep) -> (experts, ranks, divisor).",
)
def place(answer: Any) -> Iterator[Outcome]:
    """Three questions about each of five layouts in the order tp-cp-ep-dp-pp, each a case of its own."""
    for rank, ranks, experts, sizes in _PLACES:
        given = f"rank {rank} of {ranks}, {experts} experts, {_words(sizes)}"
        tried = lambda r=rank, w=ranks, e=experts, s=sizes: _three(answer(r, w, e, **s))  # noqa: E731
        parts = ("its experts", "the ranks that hold the same", "what their sum is divided by")
        for index, (part, expected) in enumerate(zip(parts, _expected(rank, ranks, experts, sizes))):
            yield compare(f"{given}: {part}", expected, lambda i=index, t=tried: t()[i])


def _expected(rank: int, ranks: int, experts: int, sizes: Sizes) -> tuple[list[int], list[int], int]:
    dense, expert = rank_generators(world_size=ranks, **sizes)
    each = experts // sizes["ep"]
    first = expert.coordinates(rank)["ep"] * each
    copies = expert.group_of("dp", rank).tolist()
    return list(range(first, first + each)), copies, dense.sizes["dp"] * dense.sizes["cp"]


def _three(value: Any) -> tuple[Any, Any, Any]:
    """What was returned, as (experts, ranks, divisor)."""
    if not isinstance(value, (tuple, list)) or len(value) != 3:
        raise ValueError(f"the answer is {value!r}; return (experts, ranks, divisor)")
    experts, ranks, divisor = value
    return list(experts), list(ranks), divisor


def _words(sizes: Sizes) -> str:
    return " ".join(f"{axis} {size}" for axis, size in sizes.items())
