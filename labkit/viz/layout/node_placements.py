"""Ranks on nodes, also of unequal size, in any arrangement: which tensor-parallel groups stay whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.viz.figure import Figure
from labkit.viz.style import INK, box, new_figure, nth_style, styled, text_color

_GAP = 0.5
"""Space between two nodes, in widths of a cell."""


def placed_ranks(
    placements: Mapping[str, Sequence[Mapping[str, int]]], nodes: Sequence[int], *, ring: tuple[int, int] | None = None
) -> Figure:
    """Draw each placement as a row of cells, a cell for each GPU with its number, in one block per node.

    placements: title -> the digits tp, dp and pp of each GPU, node after node. nodes: GPUs of each node. Ranks of one
        tp group have one colour, so a group that is cut has its colour in two blocks.
    ring: (dp, pp) of a tp group whose ring is drawn too: a thick arrow is a link that leaves a node.
    """
    node_of = [node for node, gpus in enumerate(nodes) for _ in range(gpus)]
    left = [gpu + _GAP * node for gpu, node in enumerate(node_of)]
    said: list[str] = []
    pitch, title_at = (2.1, 0.15) if ring is None else (3.1, 0.6)
    with styled():
        fig = new_figure(8.6, 0.35 + 0.45 * pitch * len(placements))
        axes = fig.subplots()
        for row, (title, placement) in enumerate(placements.items()):
            top = pitch * row
            axes.text(0, top - title_at, title, ha="left", va="bottom", fontsize=9)
            homes: dict[tuple[int, int], set[int]] = {}
            for gpu, (x, node, digits) in enumerate(zip(left, node_of, placement, strict=True)):
                group = digits["pp"], digits["dp"]
                homes.setdefault(group, set()).add(node)
                fill, _ = nth_style(group[1] + 2 * group[0])
                box(axes, (x, top), 1, 1, fill)
                text = f"t{digits['tp']}\nd{digits['dp']}p{digits['pp']}"
                axes.text(x + 0.5, top + 0.62, text, ha="center", va="center", fontsize=7, color=text_color(fill))
                axes.text(x + 0.5, top + 0.2, f"{gpu}", ha="center", va="center", fontsize=8, color=text_color(fill))
            cut = sum(len(each) > 1 for each in homes.values())
            said.append(f"{title}, {cut} of {len(homes)} tp groups on more than one node")
            if ring is not None:
                members = [gpu for gpu, digits in enumerate(placement) if (digits["dp"], digits["pp"]) == ring]
                members.sort(key=lambda gpu: placement[gpu]["tp"])
                leaving = _ring(axes, [(left[gpu] + 0.5, node_of[gpu]) for gpu in members], top)
                said[-1] += f", the ring of dp {ring[0]} pp {ring[1]} leaves a node {leaving} times"
        bottom = pitch * (len(placements) - 1) + (1.1 if ring is None else 1.5)
        for node, gpus in enumerate(nodes):
            middle = left[node_of.index(node)] + gpus / 2
            axes.text(middle, bottom, f"node {node}, {gpus} GPUs", ha="center", va="top", fontsize=8)
        axes.set(xlim=(-0.1, left[-1] + 1.1), ylim=(bottom + 0.5, -title_at - 0.55), aspect="equal")
        axes.axis("off")
    return Figure(fig, f"{len(left)} ranks on nodes of {', '.join(map(str, nodes))}. {'; '.join(said)}.")


def _ring(axes: Any, members: Sequence[tuple[float, int]], top: float) -> int:
    """Draw arrows from each member (its x and node) to the next, right above and left below; count those that leave."""
    leaving = 0
    for (start, node), (end, other) in zip(members, [*members[1:], members[0]], strict=True):
        leaving += node != other
        forward = end > start
        edge, height = (top, -0.35) if forward else (top + 1, 0.35)
        inset = 0.12 if forward else -0.12
        shape = [(start + inset, edge), (start + inset, edge + height), (end - inset, edge + height)]
        style: dict[str, Any] = {"color": INK if node != other else "#999999", "linewidth": 2 if node != other else 0.8}
        axes.plot(*zip(*shape, strict=True), solid_joinstyle="miter", **style)
        arrow = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 9, **style}
        axes.annotate("", (end - inset, edge), shape[-1], arrowprops=arrow)
    return leaving
