"""The ways of partial sums: round a ring of nodes, or up a tree."""

from __future__ import annotations

from math import cos, pi, sin
from typing import Any

from labkit.viz.figure import Figure
from labkit.viz.style import INK, SEQUENCE, color, new_figure, styled


def ring_and_tree(nodes: int = 8) -> Figure:
    """Draw an all-reduce's way from node to node, as a ring and as a tree.

    nodes: 4, 8 or 16. In the tree node 0 is above the root of a balanced tree of the others, as in NCCL. Solid arrows
    carry partial sums, dashed ones the complete sum. On a ring both go the same way.

    Raises ValueError for another number of nodes.
    """
    if nodes not in (4, 8, 16):
        raise ValueError(f"{nodes} nodes: 4, 8 or 16 make a tree that can be read")
    depth = nodes.bit_length() - 1
    with styled():
        fig = new_figure(7.2, 2.9)
        ring, tree = fig.subplots(1, 2, width_ratios=[1, 1.7])
        turns = [pi / 2 - 2 * pi * n / nodes for n in range(nodes)]
        round_places = [(cos(turn), sin(turn)) for turn in turns]
        _arrows(ring, [(round_places[n], round_places[(n + 1) % nodes]) for n in range(nodes)])
        _nodes(ring, round_places)
        ring.set_title(f"ring: {2 * (nodes - 1)} steps of 1/{nodes} of the tensor", loc="left")
        tree_places = [(float(n), float(depth if n == 0 else _height(n))) for n in range(nodes)]
        edges = [(n, _parent(n, nodes)) for n in range(1, nodes)]
        _arrows(tree, [(tree_places[child], tree_places[parent]) for child, parent in edges], back=True)
        _nodes(tree, tree_places)
        tree.set_title(f"tree: {depth} levels up, {depth} down", loc="left")
        for axes in (ring, tree):
            axes.set_axis_off()
        ring.set_aspect("equal")
    sentence = f"An all-reduce over {nodes} nodes: a ring takes {2 * (nodes - 1)} steps, a tree {2 * depth}."
    return Figure(fig, sentence + " In the tree solid arrows carry partial sums, dashed ones the complete sum.")


def _height(node: int) -> int:
    """Return how often 2 divides a node's number: its level in the tree."""
    return (node & -node).bit_length() - 1


def _parent(node: int, nodes: int) -> int:
    """Return the node to which this one sends its partial sum."""
    bit = node & -node
    up = (node ^ bit) | (bit << 1)
    return up if up < nodes else node ^ bit


def _nodes(axes: Any, places: list[tuple[float, float]]) -> None:
    look = {"boxstyle": "circle,pad=0.35", "facecolor": "#FFFFFF", "edgecolor": INK}
    for node, (x, y) in enumerate(places):
        axes.text(x, y, f"{node}", ha="center", va="center", bbox=look, zorder=3)
    wide, tall = (max(each) - min(each) for each in zip(*places))
    axes.set_xlim(min(x for x, _ in places) - 0.12 * wide, max(x for x, _ in places) + 0.12 * wide)
    axes.set_ylim(min(y for _, y in places) - 0.15 * tall, max(y for _, y in places) + 0.15 * tall)


def _arrows(axes: Any, pairs: list[tuple[tuple[float, float], tuple[float, float]]], *, back: bool = False) -> None:
    """Draw an arrow for each pair; with `back` a dashed one in the other direction, too."""
    ways = [("-", color("collective"), pair, 0.12 if back else 0.0) for pair in pairs]
    if back:
        ways += [("--", SEQUENCE[0], (there, here), 0.12) for here, there in pairs]
    for line, ink, (start, end), bend in ways:
        look = {"arrowstyle": "-|>", "color": ink, "ls": line, "lw": 1.4, "shrinkA": 9, "shrinkB": 9,
                "connectionstyle": f"arc3,rad={bend}"}  # fmt: skip
        axes.annotate("", end, start, arrowprops=look)
