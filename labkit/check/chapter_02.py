"""Exercises of chapter 02: rank groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from labkit.check.scoring import Outcome, compare, exercise, holds
from labkit.parallel.rank_generator import RankGenerator

_LAYOUTS: tuple[tuple[str, dict[str, int], str], ...] = (
    ("tp-dp", {"tp": 2, "dp": 2}, "tp"),
    ("tp-dp", {"tp": 2, "dp": 2}, "dp"),
    ("tp-dp-pp", {"tp": 4, "dp": 2, "pp": 2}, "dp"),
    ("tp-dp-pp", {"tp": 2, "dp": 2, "pp": 4}, "tp-pp"),
    ("tp-cp-dp-pp", {"tp": 2, "cp": 2, "dp": 2, "pp": 2}, "dp-cp"),
    ("pp-dp-tp", {"tp": 3, "dp": 2, "pp": 2}, "tp"),
    ("tp-ep-dp", {"tp": 1, "ep": 4, "dp": 2}, "ep"),
    ("tp-cp-dp-pp", {"tp": 2, "cp": 3, "dp": 1, "pp": 2}, "tp-cp-dp-pp"),
)


@exercise("02.groups", "Write groups_of(order, sizes, token) -> the list of groups, each a list of ranks.")
def groups(answer: Any) -> Iterator[Outcome]:
    """Group lists of eight layouts, combined tokens and odd sizes among them.

    `order` and `token` are axes joined by hyphens, `sizes` maps each axis of the order to its size. Members, and groups
    by their first rank's digits, count in the order string's digits, fastest first, whatever the order in the token.
    """
    for order, sizes, token in _LAYOUTS:
        expected = RankGenerator(**sizes, order=order).get_ranks(token)
        given = f"order {order!r}, sizes {sizes} and token {token!r}"
        yield compare(given, expected, lambda o=order, s=sizes, t=token: answer(o, dict(s), t))


@exercise("02.order", "Write order_for(inner, outer) -> an order with `inner` inside nodes and `outer` across them.")
def order(answer: Any) -> Iterator[Outcome]:
    """Four nodes of eight GPUs, tp 4, dp 2, pp 4: two axes must fit into a node, the third must leave it.

    Any order string that contains tp, dp and pp will do; the layers are dense.
    """
    sizes = {"tp": 4, "dp": 2, "pp": 4}
    for inner, outer in (("tp", "pp"), ("dp", "pp"), ("pp", "tp"), ("tp", "dp")):
        yield holds(
            f"tp 4, dp 2, pp 4 on nodes of 8, inner {inner}, outer {outer}",
            f"an order whose {inner} groups stay inside a node and whose {outer} groups all leave it",
            lambda i=inner, o=outer: _places(answer(i, o), sizes, i, o),
        )


def _places(order_string: Any, sizes: dict[str, int], inner: str, outer: str) -> bool | str:
    """True, or the sentence that says what the order string does instead."""
    # A dense layout alone: the experts' generator would refuse some orders that are answers here.
    generator = RankGenerator(**sizes, order=order_string)
    crossing = {axis: _crossing(generator.get_ranks(axis)) for axis in (inner, outer)}
    if crossing[inner] == 0.0 and crossing[outer] == 1.0:
        return True
    return (
        f"{order_string!r}, where {crossing[inner]:.0%} of {inner} and {crossing[outer]:.0%} of {outer} groups leave it"
    )


def _crossing(group_list: list[list[int]]) -> float:
    return sum(len({rank // 8 for rank in group}) > 1 for group in group_list) / len(group_list)
