"""Exercises and bets of chapter 02: the digits of a rank, rank groups, ranks on nodes of unequal size.

Wrong answers are compared with those of known misunderstandings, and the score names the one that fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import permutations, product
from typing import TYPE_CHECKING, Any

from labkit.check.bets import ask
from labkit.check.scoring import (
    MAX_SHOWN,
    ONLY_FIRST,
    Diagnosis,
    Finding,
    Misreadings,
    Outcome,
    exercise,
    holds,
    plain,
    shown,
)
from labkit.comm.rank_generator import RankGenerator
from labkit.plan.node_traffic import TransformerTraffic, placement_traffic

if TYPE_CHECKING:
    from labkit.viz.figure import Figure

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


# ---- ranks on nodes of unequal size ----

NODES = (6, 6, 4)
"""GPUs of the nodes on which `place` puts the ranks of tp 4, dp 2, pp 2."""
_AXES = {"tp": 4, "dp": 2, "pp": 2}
_EVERY = [dict(zip(_AXES, digits)) for digits in product(*map(range, _AXES.values()))]
_STAGES = [(d, p) for d in range(2) for p in range(2)]
Placement = list[dict[str, int]]


def gigabytes(placement: Placement, samples: int) -> dict[str, float]:
    """Return kind -> GB between nodes in a step of so many samples, for the digits of each GPU, node after node."""
    sent = placement_traffic(TransformerTraffic(global_batch_size=samples), placement, NODES)
    return {axis: sent[axis] / 1e9 for axis in _AXES}


def by_order(order_string: str) -> Placement:
    """Return the placement of an order string: rank i is on GPU i."""
    return [_digits(rank, order_string, _AXES) for rank in range(16)]


def in_blocks(places: Iterable[tuple[int, int]]) -> Placement:
    """Return a placement of whole tp groups, one after another; a group is (dp, pp)."""
    return [{"tp": t, "dp": d, "pp": p} for d, p in places for t in range(4)]


def fewest(samples: int) -> tuple[float, float]:
    """Return the fewest GB of an order string, and of all sequences of whole tp groups.

    With 512 samples no other placement sends less: the tests try all 1,681,680.
    """
    strings = (by_order("-".join(axes)) for axes in permutations(_AXES))
    blocks = map(in_blocks, permutations(_STAGES))
    best, least = (min(sum(gigabytes(each, samples).values()) for each in tried) for tried in (strings, blocks))
    return best, least


def draw_place(answer: Any) -> Figure | None:
    """Draw the answer's placements under that of the usual order."""
    from labkit.viz.layout.node_placements import placed_ranks  # matplotlib, which a score does without

    rows = {"the order tp-dp-pp": by_order("tp-dp-pp")} | {f"yours, {n} samples": answer(n) for n in (512, 8)}
    if any(_missing(placement) for placement in rows.values()):
        return None
    totals = {n: f"{sum(gigabytes(rows[f'yours, {n} samples'], n).values()):,.1f} GB" for n in (512, 8)}
    titles = {f"yours, {n} samples": f"yours for {n} samples: {total}" for n, total in totals.items()}
    return placed_ranks({titles.get(name, name): placement for name, placement in rows.items()}, NODES)


@exercise(
    "02.place",
    "Write place(samples) -> for each of the 16 GPUs, node after node, the digits tp, dp and pp of its rank.",
    draw=draw_place,
    ladder=True,
)
def place(answer: Any) -> Iterator[Outcome]:
    """Judge placements on nodes of 6, 6 and 4 GPUs, for 512 and for 8 samples in a step; each target is harder."""
    yield holds(
        "512 and 8 samples per step",
        "every rank on one GPU",
        lambda: next(((wrong, wrong) for wrong in (_missing(answer(n)) for n in (512, 8)) if wrong), True),
    )
    (string, least), (small, _) = fewest(512), fewest(8)
    best = "as the best order string"
    for samples, most, words in ((512, string, best), (8, small, best), (512, least, "the fewest that there is")):
        yield holds(
            f"{samples} samples per step",
            f"at most {most:,.1f} GB between nodes, {words}",
            lambda n=samples, m=most: _enough(answer(n), n, m),
        )


def _missing(placement: Any) -> str:
    """Return which rank is on no GPU; an empty text if all are on one."""
    found = [{axis: int(digits[axis]) for axis in _AXES} for digits in placement]
    gone = next((digits for digits in _EVERY if digits not in found), None)
    if gone:
        return f"{len(found)} GPUs and none with {gone}"
    return "" if len(found) == 16 else f"{len(found)} GPUs in place of 16"


def _enough(placement: Placement, samples: int, most: float) -> Finding:
    """Return True, or what the placement sends and the largest part that it could do without."""
    if wrong := _missing(placement):
        return wrong, wrong
    sent = gigabytes(placement, samples)
    total = sum(sent.values())
    if total <= most * (1 + 1e-9):
        return True
    why = _few_samples(placement, sent) if samples == 8 else _many_samples(placement)
    parts = ", ".join(f"{axis} {sent[axis]:,.1f}" for axis in sent)
    return why, f"{total:,.1f} GB ({parts}): {why}"


def _few_samples(placement: Placement, sent: Mapping[str, float]) -> str:
    if sent["dp"]:
        return (
            "with 4 microbatches per copy a link of a dp ring carries nearly as much as one of tp, and all dp groups "
            "can stay inside nodes"
        )
    rings = _leaving(placement)
    return f"the dp groups are inside; the rings of tp leave a node {sum(rings)} times, and 8 is possible"


def _many_samples(placement: Placement) -> str:
    rings = _leaving(placement)
    if (cut := sum(links > 0 for links in rings)) > 1:
        return f"{cut} of the 4 tp groups are cut, and three whole ones fit into these nodes"
    if max(rings) > 2:
        return (
            f"the ring of the cut tp group leaves a node {max(rings)} times; cut once, between two digits that follow "
            "each other, it leaves twice, there and back"
        )
    if gigabytes(placement, 512)["dp"] > gigabytes(by_order("tp-dp-pp"), 512)["dp"]:
        return "the cut tp group has GPUs on two nodes, and its copy, the other dp of its stage, can be on one of them"
    return "tp and dp are as cheap as they can be; the other stage of the cut group could be on one of its nodes, too"


def _leaving(placement: Placement) -> list[int]:
    """Return for each tp group how many links of its ring leave a node."""
    node_of = [node for node, gpus in enumerate(NODES) for _ in range(gpus)]
    homes = {tuple(digits[axis] for axis in _AXES): node for digits, node in zip(placement, node_of, strict=True)}
    rings = [[homes[t, d, p] for t in range(4)] for d, p in _STAGES]
    return [sum(ring[t] != ring[t - 1] for t in range(4)) for ring in rings]


# ---- bets ----

ask(
    "02.neighbours",
    "Neighbours average their gradients, over [0, 1] and [2, 3], and descend for 200 steps. What comes out?",
    choices={
        "an error": "All gradients have one shape, since the shards are equally large. Nothing can notice that they "
        "belong to different columns.",
        "a loss that doesn't fall": "The mean of two shards' gradients is no gradient of either, but it points "
        "downhill for the two together.",
        "a loss that stays too high": "Both shards take the same steps, so they stay equal, and the best that they can "
        "both become is the mean of what each should be.",
        "the right loss": "Each shard would need its own gradient for that, and gets the mean of two.",
    },
)
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
ask(
    "02.step",
    "16 H100s in two nodes of 8, 8.3 billion parameters, tp 4, dp 2, pp 2. By how many percent does the planner expect "
    "a step to be longer with tp as the slowest axis than with the usual order?",
    unit="%",
    misread=lambda bytes_factor: {
        "That is the factor of the bytes between nodes. But computing takes the same time in any order.": 100
        * (bytes_factor - 1),
    },
    because="Computing takes the same time in both. Only tp's messages get longer, in the step and in recompute, and "
    "the bubble that waits for them; and they use all eight network adapters of a node at once.",
)
