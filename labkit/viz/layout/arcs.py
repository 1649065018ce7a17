"""Who meets whom, as arcs: the GPUs in a row, attention's groups above them and the experts' groups below.

A GPU is a box. Its upper part names what it does in attention, the lower part which experts it holds. Two GPUs with the
same colour in a part do the same thing there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from matplotlib.patches import Arc

from labkit.viz.figure import Figure
from labkit.viz.layout.folding import Reading, letters_of, readings
from labkit.viz.style import INK, LINES, box, color, new_figure, nth_style, styled

MAX_GPUS = 16
"""Most GPUs in a row; with more, arcs are too many to follow."""
_WIDTH, _MIDDLE, _PART = 0.8, 0.22, 0.42
"""Width of a box, and heights of its number and of each of its parts, where GPUs are 1 apart."""
_INCH = 0.62
"""Inches from one GPU to the next."""


def fold_arcs(layouts: Mapping[str, Mapping[str, Any]], *, above: str = "cp", below: str = "ep") -> Figure:
    """Draw a panel for each layout: its GPUs, arcs of the groups `above` (attention's) and `below` (the experts').

    layouts: title -> `world_size`, the sizes that `readings` takes, and `folded` (True).

    Raises ValueError without a layout, for more than MAX_GPUS GPUs, and as `readings` does.
    """
    panels: dict[str, tuple[Reading, Reading]] = {}
    for title, layout in layouts.items():
        sizes = dict(layout)
        world_size, folded = sizes.pop("world_size"), sizes.pop("folded", True)
        panels[title] = readings(sizes, world_size, folded=folded)
    return arcs_of(panels, above=above, below=below)


def arcs_of(panels: Mapping[str, tuple[Reading, Reading]], *, above: str = "cp", below: str = "ep") -> Figure:
    """Draw a panel for each pair of attention's and the experts' reading, as `fold_arcs` does."""
    ranks = [len(next(iter(attention.digits.values()))) for attention, _ in panels.values()]
    if not ranks or max(ranks) > MAX_GPUS:
        raise ValueError(f"give 1 layout or more, each of at most {MAX_GPUS} GPUs; got {ranks} GPUs")
    tops = [max(_tallest(attention.groups(above)), 0.35) for attention, _ in panels.values()]
    bottoms = [max(_tallest(experts.groups(below)), 0.35) for _, experts in panels.values()]
    body = _MIDDLE + 2 * _PART
    heights = [top + body + bottom + 0.6 for top, bottom in zip(tops, bottoms)]
    with styled():
        fig = new_figure(_INCH * (max(ranks) + 2.7), _INCH * sum(heights) + 0.3 * len(panels))
        all_axes = fig.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
        for axes, (title, both), top, bottom in zip(all_axes, panels.items(), tops, bottoms):
            _panel(axes, both, above, below)
            axes.set(xlim=(-2.2, max(ranks) - 0.4), ylim=(-bottom - body / 2 - 0.15, top + body / 2 + 0.15))
            axes.set(aspect="equal", anchor="W")
            axes.set_title(title, loc="left")
            axes.set_axis_off()
    said = [
        f"{title}: {above} {_listed(attention.groups(above))}, {below} {_listed(experts.groups(below))}"
        for title, (attention, experts) in panels.items()
    ]
    return Figure(fig, f"{'; '.join(said)}.")


def _panel(axes: Any, both: tuple[Reading, Reading], above: str, below: str) -> None:
    edge = _MIDDLE / 2
    for side, reading, axis in ((1, both[0], above), (-1, both[1], below)):
        jobs = reading.number(reading.job_axes).tolist()
        for rank, job in enumerate(jobs):
            fill, pattern = nth_style(job)
            corner = rank - _WIDTH / 2, edge if side > 0 else -edge - _PART
            text = letters_of(reading, rank, without=("pp",))
            box(axes, corner, _WIDTH, _PART, fill, text, size=7, hatch=pattern)
        for number, group in enumerate(reading.groups(axis)):
            for one, other in combinations(group, 2):
                _arc(axes, one, other, side, color(axis), LINES[number % len(LINES)])
        name = "attention" if side > 0 else "experts"
        axes.text(-0.6, side * (edge + _PART / 2), name, ha="right", va="center", fontsize=8, color=INK)
        axes.text(-0.6, side * (edge + _PART + 0.22), f"arcs: {axis}", ha="right", va="center", fontsize=8, color=INK)
    for rank in range(len(jobs)):
        box(axes, (rank - _WIDTH / 2, -edge), _WIDTH, _MIDDLE, "#FFFFFF", str(rank), size=7)


def _arc(axes: Any, one: int, other: int, side: int, ink: str, line: str) -> None:
    """Draw half an ellipse from one GPU to another, above (side 1) or below (side -1) the boxes."""
    start = side * (_MIDDLE / 2 + _PART)
    half = (0, 180) if side > 0 else (180, 360)
    middle, width = (one + other) / 2, other - one
    axes.add_patch(Arc((middle, start), width, 2 * _height(width), theta1=half[0], theta2=half[1], color=ink,
                       linestyle=line, linewidth=1.1))  # fmt: skip


def _height(distance: float) -> float:
    return 0.2 + 0.17 * distance


def _tallest(groups: Sequence[Sequence[int]]) -> float:
    return max((_height(max(group) - min(group)) for group in groups if len(group) > 1), default=0.0)


def _listed(groups: Sequence[Sequence[int]]) -> str:
    """Return `[0, 1] [2, 3]`, and for more than four groups the number of the others."""
    more = f" and {len(groups) - 4} more" if len(groups) > 4 else ""
    return " ".join(map(str, groups[:4])) + more
