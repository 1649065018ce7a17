"""Rank groups from sizes and an order string (first form)."""

from __future__ import annotations

import itertools


class RankGenerator:
    """Groups of ranks for any token such as `tp` or `dp-cp`."""

    def __init__(self, tp: int = 1, ep: int = 1, dp: int = 1, pp: int = 1, cp: int = 1,
                 order: str = "tp-cp-ep-dp-pp", rank_offset: int = 0) -> None:  # fmt: skip
        self.sizes = {"tp": tp, "ep": ep, "dp": dp, "pp": pp, "cp": cp}
        self.axes = order.split("-")
        self.rank_offset = rank_offset

    def get_ranks(self, token: str) -> list[list[int]]:
        """The groups of `token`, one per combination of the other axes."""
        wanted = [a for a in self.axes if a in token.split("-")]
        others = [a for a in self.axes if a not in wanted]
        stride, step = 1, {}
        for axis in self.axes:
            step[axis] = stride
            stride *= self.sizes[axis]

        def offsets(axes: list[str]) -> list[int]:
            ranges = [range(self.sizes[a]) for a in reversed(axes)]
            return [sum(i * step[a] for i, a in zip(c, reversed(axes))) for c in itertools.product(*ranges)]

        return [[o + w + self.rank_offset for w in offsets(wanted)] for o in offsets(others)]
