"""Ranks on nodes of unequal size, in any arrangement: which tensor-parallel groups stay whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labkit.viz.figure import Figure
from labkit.viz.style import box, new_figure, nth_style, styled, text_color

_GAP = 0.5
"""Space between two nodes, in widths of a cell."""


def placed_ranks(placements: Mapping[str, Sequence[Mapping[str, int]]], nodes: Sequence[int]) -> Figure:
    """Draw each placement as a row of cells, a cell for each GPU, in one block per node.

    placements: title -> the digits tp, dp and pp of each GPU, node after node. nodes: GPUs of each node. Ranks of one
        tp group have one colour, so a group that is cut has its colour in two blocks.
    """
    node_of = [node for node, gpus in enumerate(nodes) for _ in range(gpus)]
    left = [gpu + _GAP * node for gpu, node in enumerate(node_of)]
    said: list[str] = []
    with styled():
        fig = new_figure(8.6, 0.35 + 0.95 * len(placements))
        axes = fig.subplots()
        for row, (title, placement) in enumerate(placements.items()):
            top = 2.1 * row
            axes.text(0, top - 0.15, title, ha="left", va="bottom", fontsize=9)
            homes: dict[tuple[int, int], set[int]] = {}
            for x, node, digits in zip(left, node_of, placement, strict=True):
                group = digits["pp"], digits["dp"]
                homes.setdefault(group, set()).add(node)
                fill, _ = nth_style(group[1] + 2 * group[0])
                box(axes, (x, top), 1, 1, fill)
                text = f"t{digits['tp']}\nd{digits['dp']}p{digits['pp']}"
                axes.text(x + 0.5, top + 0.5, text, ha="center", va="center", fontsize=7, color=text_color(fill))
            cut = sum(len(each) > 1 for each in homes.values())
            said.append(f"{title}, {cut} of {len(homes)} tp groups on more than one node")
        bottom = 2.1 * (len(placements) - 1) + 1.1
        for node, gpus in enumerate(nodes):
            middle = left[node_of.index(node)] + gpus / 2
            axes.text(middle, bottom, f"node {node}, {gpus} GPUs", ha="center", va="top", fontsize=8)
        axes.set(xlim=(-0.1, left[-1] + 1.1), ylim=(bottom + 0.5, -0.7), aspect="equal")
        axes.axis("off")
    return Figure(fig, f"{len(left)} ranks on nodes of {', '.join(map(str, nodes))}. {'; '.join(said)}.")
