"""Exercises and bets of chapter 02: the digits of a rank, rank groups, an order string for nodes.

Wrong answers are compared with those of known misunderstandings, and the score names the one that fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from labkit.check.bets import ask
from labkit.check.scoring import MAX_SHOWN, ONLY_FIRST, Diagnosis, Misreadings, Outcome, exercise, holds, plain, shown
from labkit.comm.rank_generator import RankGenerator

_GROUPINGS: tuple[tuple[str, dict[str, int], str], ...] = (
    ("tp-dp", {"tp": 2, "dp": 2}, "tp"),
    ("tp-dp", {"tp": 2, "dp": 2}, "dp"),
    ("tp-dp-pp", {"tp": 4, "dp": 2, "pp": 2}, "dp"),
    ("tp-dp-pp", {"tp": 2, "dp": 2, "pp": 4}, "tp-pp"),
    ("tp-cp-dp-pp", {"tp": 2, "cp": 2, "dp": 2, "pp": 2}, "dp-cp"),
    ("pp-dp-tp", {"tp": 3, "dp": 2, "pp": 2}, "tp"),
    ("tp-ep-dp", {"tp": 1, "ep": 4, "dp": 2}, "ep"),
    ("tp-cp-dp-pp", {"tp": 2, "cp": 3, "dp": 1, "pp": 2}, "tp-cp-dp-pp"),
)


_DIGITS: tuple[tuple[int, str, dict[str, int]], ...] = (
    (6, "tp-dp-pp", {"tp": 2, "dp": 2, "pp": 4}),
    (13, "tp-dp-pp", {"tp": 2, "dp": 2, "pp": 4}),
    (11, "pp-dp-tp", {"tp": 3, "dp": 2, "pp": 2}),
    (23, "tp-cp-dp-pp", {"tp": 2, "cp": 3, "dp": 1, "pp": 4}),
    (0, "tp-dp", {"tp": 4, "dp": 2}),
)
"""(rank, order, sizes)."""


def _reversed(order_string: str) -> str:
    return "-".join(reversed(order_string.split("-")))


def _digits(rank: int, order_string: str, sizes: Mapping[str, int]) -> dict[str, int]:
    found = RankGenerator(**sizes, order=order_string).coordinates(rank)
    return {axis: found[axis] for axis in order_string.split("-")}


@exercise("02.digits", "Write digits(rank, order, sizes) -> {axis: digit} for each axis of the order.")
def digits(answer: Any) -> Iterator[Outcome]:
    """Judge five ranks: slow and fast axes, an axis of size 1, another order, rank 0."""
    diagnosis = Diagnosis()
    for rank, order_string, sizes in _DIGITS:
        strides = RankGenerator(**sizes, order=order_string).strides
        misreadings = {
            "the order string names the fastest axis first, and this reads it from the end": (
                _digits(rank, _reversed(order_string), sizes)
            ),
            "the remainder of the division by the size is missing": {a: rank // strides[a] for a in sizes},
            "the division by the stride is missing": {a: rank % size for a, size in sizes.items()},
            "these are the strides, the same for every rank": {a: strides[a] for a in sizes},
            "a stride is the product of the sizes of all faster axes, not 2 for each of them": {
                axis: rank // 2**place % sizes[axis] for place, axis in enumerate(order_string.split("-"))
            },
        }
        outcome = diagnosis.outcome(
            f"rank {rank}, order {order_string!r} and sizes {sizes}",
            _digits(rank, order_string, sizes),
            lambda r=rank, o=order_string, s=sizes: dict(answer(r, o, dict(s))),
            misreadings,
        )
        yield replace(outcome, reason=ONLY_FIRST)


@exercise("02.groups", "Write groups_of(order, sizes, token) -> the list of groups, each a list of ranks.")
def groups(answer: Any) -> Iterator[Outcome]:
    """Judge the group lists of eight layouts, among them combined tokens and odd sizes.

    `order` and `token` are axes joined by hyphens; `sizes` maps each axis of the order to its size. The digits of the
    order string, fastest first, sort the members of a group, and groups are sorted by their first rank. The order of
    axes in the token does not matter. Of a long list the score shows the first group that differs.
    """
    diagnosis = Diagnosis()
    for order_string, sizes, token in _GROUPINGS:
        expected = RankGenerator(**sizes, order=order_string).get_ranks(token)
        given: list[Any] = []

        def tried(o: str = order_string, s: dict[str, int] = sizes, t: str = token, kept: list[Any] = given) -> Any:
            kept.append(plain(answer(o, dict(s), t)))
            return kept[0]

        words = f"order {order_string!r}, sizes {sizes} and token {token!r}"
        outcome = diagnosis.outcome(words, expected, tried, _misread_groups(order_string, sizes, token))
        yield outcome if outcome.passed or not given else _at_first_difference(outcome, expected, given[0])


def _at_first_difference(outcome: Outcome, expected: list[list[int]], value: Any) -> Outcome:
    """Return the outcome with only the first group that differs, if the lists are too long to show whole."""
    whole = max(len(str(expected)), len(str(value))) <= MAX_SHOWN
    if whole or not isinstance(value, list) or len(value) != len(expected):
        return outcome
    place = next(i for i, pair in enumerate(zip(expected, value)) if pair[0] != pair[1])
    reason = outcome.got[len(shown(value)) :]
    right = f"{len(expected)} groups, of which group {place} is {shown(expected[place])}"
    return replace(outcome, expected=right, got=f"{shown(value[place])}{reason}")


def _misread_groups(order_string: str, sizes: dict[str, int], token: str) -> Misreadings:
    generator = RankGenerator(**sizes, order=order_string)
    right = generator.get_ranks(token)
    size, world = len(right[0]), generator.world_size
    inside = token.split("-")
    others = "-".join(axis for axis in order_string.split("-") if axis not in inside)
    by_token = sorted(
        sorted(group, key=lambda rank: [_digits(rank, order_string, sizes)[axis] for axis in reversed(inside)])
        for group in right
    )
    by_slowest = [
        sorted(group, key=lambda rank: [_digits(rank, order_string, sizes)[axis] for axis in order_string.split("-")])
        for group in right
    ]
    found: dict[str, Any] = {
        "every group is a block of neighbours, as if each axis had stride 1": [
            list(range(first, first + size)) for first in range(0, world, size)
        ],
        "the order string names the fastest axis first, and this reads it from the end": RankGenerator(
            **sizes, order=_reversed(order_string)
        ).get_ranks(token),
        "members are sorted by the token; the digits of the order string sort them": by_token,
        "members are sorted by the slowest digit first; the fastest digit comes first": by_slowest,
    }
    if others:
        found["these are the groups of the other axes: digits of the token vary inside a group, all others stay"] = (
            generator.get_ranks(others)
        )
    return found


@exercise("02.order", "Write order_for(inner, outer) -> an order with `inner` inside nodes and `outer` across them.")
def order(answer: Any) -> Iterator[Outcome]:
    """Judge an order for four nodes of eight GPUs, tp 4, dp 2, pp 4: two axes must fit into a node, one must leave it.

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
    """Return True, or a sentence about the groups of the order string."""
    # This is a dense layout alone, because the experts' generator would reject some orders that are answers here.
    generator = RankGenerator(**sizes, order=order_string)
    crossing = {axis: _crossing(generator.get_ranks(axis)) for axis in (inner, outer)}
    if crossing[inner] == 0.0 and crossing[outer] == 1.0:
        return True
    wrong = [inner] * (crossing[inner] > 0) + [outer] * (crossing[outer] < 1)
    steps = [f"{axis} has stride {generator.strides[axis]} and size {sizes[axis]}" for axis in wrong]
    leaving = f"{crossing[inner]:.0%} of {inner} and {crossing[outer]:.0%} of {outer} groups leave it"
    return f"{order_string!r}, where {leaving}: {' and '.join(steps)}"


def _crossing(group_list: list[list[int]]) -> float:
    return sum(len({rank // 8 for rank in group}) > 1 for group in group_list) / len(group_list)


# ---- bets ----

ask(
    "02.factor",
    "16 GPUs in two nodes of 8, tp 4, dp 2, pp 2, 8.3 billion parameters. How many times as many bytes cross between "
    "the nodes in a step if the order string is pp-dp-tp instead of tp-dp-pp?",
    choices={
        "under 2 times": "All groups send the same bytes in both orders. But bytes inside a node don't count here, and "
        "the two orders send different kinds of them across.",
        "2 to 20 times": "That would do if the kinds of groups sent about as much as each other. tp sends in every "
        "layer and for every microbatch; a pipeline sends once per microbatch and cut.",
        "over 20 times": "With pp first the tp groups span both nodes, and tp sends in every layer, forward and "
        "backward, for every microbatch.",
    },
)
ask(
    "02.hang",
    "Every group and every member is right. Ranks 0 and 3 create their tp group first, ranks 1 and 2 their dp group. "
    "What comes out?",
    choices={
        "two groups": "The groups are the same in the end. But creating one means waiting for its other member, "
        "which waits somewhere else.",
        "an error at once": "No rank can see what the others do, so nobody notices anything wrong.",
        "a deadlock": "Rank 0 waits for rank 1 in tp, rank 1 for rank 3 in dp, rank 3 for rank 2 in tp, and rank 2 for "
        "rank 0 in dp: a cycle.",
    },
)
