"""Ranks that form a group: sizes and an order string in, lists of ranks out.

Write a rank in mixed radix. The order string names the digits, the fastest first; the sizes are their bases. The stride
of an axis is the product of the sizes to its left (`prefix_product`):

    rank = rank_offset + sum over axes of coordinate[axis] * stride[axis]

A token such as `dp-cp` marks the digits that vary inside a group (the mask). Every combination of the other digits is
one group. The order string alone decides the order of groups and of members, so `dp-cp` and `cp-dp` are one token.

Dense layers and experts see the same ranks through two generators (`rank_generators`). Dense layers have tp, cp, dp, pp
and no ep. Experts have pp, ep, and tp and dp of their own (etp, edp), and no cp: MoE parallel folding (arXiv
2504.14960). The names are those of Megatron-LM's `megatron/core/parallel_state.py`. The module needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from labkit.comm.mixed_radix import Members, as_size, check_listable, decompose, prefix_product

AXES = ("tp", "cp", "ep", "dp", "pp")
"""Every axis an order string may name: tensor, context, expert, data and pipeline parallelism."""
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
"""The axis that communicates most varies fastest, so that its groups stay inside a node."""


def masked_orthogonal_array(parallel_size: Sequence[int], mask: Sequence[bool]) -> np.ndarray:
    """Return the groups as an int64 array (num_groups, group_size); sizes and mask are in order, fastest axis first.

    The ranks 0, 1, 2, ... fill a box with one dimension for each axis. The masked dimensions become the last ones. Then
    the other dimensions are flattened to rows, the groups, and the masked ones to columns, the members.
    """
    check_listable(prod(parallel_size), f"the sizes {list(parallel_size)}")
    slowest_first = range(len(parallel_size) - 1, -1, -1)
    box = np.arange(prod(parallel_size), dtype=np.int64).reshape([parallel_size[i] for i in slowest_first])
    dims = [(len(parallel_size) - 1 - i, mask[i]) for i in slowest_first]
    outside, inside = [dim for dim, masked in dims if not masked], [dim for dim, masked in dims if masked]
    group_size = prod(size for size, masked in zip(parallel_size, mask) if masked)
    return box.transpose(outside + inside).reshape(-1, group_size)


def generate_masked_orthogonal_rank_groups(
    world_size: int, parallel_size: Sequence[int], mask: Sequence[bool]
) -> list[list[int]]:
    """Return the groups of a world with axes of these sizes, fastest first; `mask` marks the axes inside a group.

    Arguments and result are those of Megatron-LM's function of this name. `(8, [2, 2, 2], [False, False, True])` gives
    `[[0, 4], [1, 5], [2, 6], [3, 7]]`. Raises ValueError if mask and sizes differ in length, or if the product of the
    sizes is not the world size.
    """
    world_size = as_size("world_size", world_size)
    sizes = [as_size(f"parallel_size[{i}]", size) for i, size in enumerate(parallel_size)]
    if len(mask) != len(sizes):
        raise ValueError(f"parallel_size has {len(sizes)} axes and mask has {len(mask)}; give one flag per axis")
    if prod(sizes) != world_size:
        raise ValueError(f"the sizes {sizes} make {prod(sizes)} ranks, but world_size is {world_size}")
    return masked_orthogonal_array(sizes, mask).tolist()


generate_masked_orthogonal_groups = generate_masked_orthogonal_rank_groups


def parse_order(order: str) -> list[str]:
    """Return the axes of an order string. Raises ValueError for another type, an unknown axis and one named twice."""
    if not isinstance(order, str):
        raise ValueError(f"order is {order!r}; give a string such as {DEFAULT_ORDER!r}")
    axes = order.lower().split("-")
    for axis in axes:
        if axis not in AXES:
            raise ValueError(f"order {order!r} names {axis!r}, which is not an axis; the axes are {', '.join(AXES)}")
        if axes.count(axis) > 1:
            raise ValueError(f"order {order!r} names {axis!r} {axes.count(axis)} times; name each axis once")
    return axes


class RankGenerator:
    """Groups of ranks for any token.

    `order` lists the axes from fastest to slowest varying; axes left out must have size 1. `rank_offset` is the first
    rank.

    Raises ValueError for sizes below 1 or not whole. It also rejects an order that repeats an axis, names an unknown
    axis or misses an axis larger than 1. cp and ep above 1 belong to two generators, so it rejects both together.
    """

    def __init__(self, tp: int = 1, ep: int = 1, dp: int = 1, pp: int = 1, cp: int = 1,
                 order: str = DEFAULT_ORDER, rank_offset: int = 0) -> None:  # fmt: skip
        given = {"tp": tp, "ep": ep, "dp": dp, "pp": pp, "cp": cp}
        self.sizes = {axis: as_size(axis, size) for axis, size in given.items()}
        self.rank_offset = as_size("rank_offset", rank_offset, least=0)
        if self.sizes["ep"] > 1 and self.sizes["cp"] > 1:
            raise ValueError(
                f"ep is {self.sizes['ep']} and cp is {self.sizes['cp']} in one generator; context parallelism "
                "belongs to the dense generator and expert parallelism to the expert one: use rank_generators"
            )
        self.axes = parse_order(order)
        for axis, size in self.sizes.items():
            if axis not in self.axes:
                if size > 1:
                    raise ValueError(
                        f"order {order!r} leaves out {axis}, whose size is {size}; only size 1 may be missing"
                    )
                self.axes.append(axis)
        self.order = "-".join(self.axes)
        self.ordered_size = [self.sizes[axis] for axis in self.axes]
        self.world_size = prod(self.ordered_size)
        self.strides = dict(zip(self.axes, prefix_product(self.ordered_size)))

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={self.sizes[axis]}" for axis in self.axes if self.sizes[axis] > 1)
        return f"RankGenerator({sizes}{', ' if sizes else ''}order={self.order!r}, rank_offset={self.rank_offset})"

    def get_mask(self, token: str) -> list[bool]:
        """Return a flag for each axis in order, true for the axes that `token` (`tp`, `dp-cp`, `dp_cp`) names."""
        wanted = str(token).lower().replace("_", "-").split("-")
        for axis in wanted:
            if axis not in AXES:
                raise ValueError(
                    f"token {token!r} names {axis!r}, which is not an axis; the axes are {', '.join(AXES)}"
                )
            if wanted.count(axis) > 1:
                raise ValueError(f"token {token!r} names {axis!r} {wanted.count(axis)} times; name each axis once")
        return [axis in wanted for axis in self.axes]

    def rank_array(self, token: str) -> np.ndarray:
        """Return the groups of `token` as an int64 array (num_groups, group_size); ValueError past MAX_LISTED_RANKS."""
        return masked_orthogonal_array(self.ordered_size, self.get_mask(token)) + self.rank_offset

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return the groups of `token` as lists, one per combination of the other axes."""
        return self.rank_array(token).tolist()

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the digits of `rank` (its position along each axis), fastest first; ValueError for a rank outside."""
        rank = as_size("rank", rank, least=0)
        first, last = self.rank_offset, self.rank_offset + self.world_size - 1
        if not first <= rank <= last:
            raise ValueError(f"rank {rank} is not in this layout, whose ranks are {first} to {last}")
        return dict(zip(self.axes, decompose(rank - first, self.ordered_size)))

    def members_of(self, token: str, rank: int) -> Members:
        """Return the group of `token` that holds `rank`, by formula: the cost does not depend on the group's size."""
        mask, here = self.get_mask(token), self.coordinates(rank)
        inside = [axis for axis, masked in zip(self.axes, mask) if masked]
        first = rank - sum(here[axis] * self.strides[axis] for axis in inside)
        return Members.of(first, [(self.sizes[axis], self.strides[axis]) for axis in inside])

    def group_of(self, token: str, rank: int) -> np.ndarray:
        """Return the members of `members_of` as an int64 array; ValueError past MAX_LISTED_RANKS."""
        return self.members_of(token, rank).array()


def rank_generators(
    *,
    world_size: int,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    order: str = DEFAULT_ORDER,
    rank_offset: int = 0,
) -> tuple[RankGenerator, RankGenerator]:
    """Return the dense and the expert generator of one world; dp and edp follow from the world size and the other axes.

    `etp` None means tp. Raises ValueError if the sizes do not divide the world, or if the two generators would put a
    rank into different pipelines. With an order that ends in `pp` they never do.
    """
    world_size = as_size("world_size", world_size)
    sizes = {name: as_size(name, size) for name, size in (("tp", tp), ("pp", pp), ("cp", cp), ("ep", ep))}
    etp = sizes["tp"] if etp is None else as_size("etp", etp)
    tp, pp, cp, ep = sizes["tp"], sizes["pp"], sizes["cp"], sizes["ep"]
    dp = _what_is_left(world_size, {"tp": tp, "cp": cp, "pp": pp})
    edp = _what_is_left(world_size, {"etp": etp, "ep": ep, "pp": pp})
    dense = RankGenerator(tp=tp, dp=dp, pp=pp, cp=cp, order=order, rank_offset=rank_offset)
    expert = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, order=order, rank_offset=rank_offset)
    _check_same_pipelines(dense, expert)
    return dense, expert


def _what_is_left(world_size: int, sizes: dict[str, int]) -> int:
    used = prod(sizes.values())
    if world_size % used:
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"world size {world_size} is not a multiple of {product} = {used}; "
            f"use a multiple of {used} ranks, or sizes whose product divides {world_size}"
        )
    return world_size // used


def _check_same_pipelines(dense: RankGenerator, expert: RankGenerator) -> None:
    """Check that both generators have the same PP groups.

    They have if pp is 1, or if the pp axis has the same stride s in both. Then group g is
    `g % s + (g // s) * s * pp + range(pp) * s` in either. With different strides the first groups, `range(pp) * s`,
    differ. So the check compares strides, not lists, in a world of any size.
    """
    pp, mine, theirs = dense.sizes["pp"], dense.strides["pp"], expert.strides["pp"]
    if pp > 1 and mine != theirs:
        raise ValueError(
            f"the two generators disagree on the pipelines: with order {dense.order!r} the first pp group of "
            f"the dense layers is {_first_group(dense)}, that of the experts {_first_group(expert)}, so a rank would "
            f"hold layers of two different stages (stride of pp: {mine} against {theirs}); "
            "let the order end in 'pp', or choose etp, ep so that the strides agree"
        )


def _first_group(generator: RankGenerator) -> str:
    first, stride, pp = generator.rank_offset, generator.strides["pp"], generator.sizes["pp"]
    ranks = [str(first + i * stride) for i in range(min(pp, 4))] + (["..."] if pp > 4 else [])
    return f"[{', '.join(ranks)}]"
