"""Rank grids: the ranks of each group, drawn over nodes and GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

import numpy as np
from matplotlib.patches import Patch, Rectangle

from labkit.comm.group_plan import GROUP_KINDS, all_groups, groups_of_rank
from labkit.comm.rank_generator import DEFAULT_ORDER
from labkit.config import ParallelConfig
from labkit.viz.figure import Figure
from labkit.viz.live import LiveFigure, is_live, whole_number, words
from labkit.viz.style import color, hatch, legend_patches, new_figure, nth_style, styled, text_color

MAX_ROWS = 8
"""Up to this many nodes a node is a row; with more it is a column, so that many nodes make a wide picture."""
MAX_LABELLED = 64
"""Up to this many ranks each cell shows its numbers."""
MAX_LARGE_COLUMNS = 16
"""Up to this many columns cells are large enough for text."""
MAX_WIDTH = 8.6
"""Inches across which panels are side by side; a notebook shows a wider picture smaller than it was drawn."""

Sizes = ParallelConfig | Mapping[str, Any]


class Grid:
    """Places of the ranks' cells: it maps node and GPU to x and y."""

    def __init__(self, world_size: int, gpus_per_node: int, first: int = 0) -> None:
        if gpus_per_node < 1:
            raise ValueError(f"gpus_per_node is {gpus_per_node}; it must be at least 1")
        self.world_size, self.gpus, self.first = world_size, min(gpus_per_node, world_size), first
        self.nodes = ceil(world_size / self.gpus)
        self.tall = self.nodes <= MAX_ROWS
        self.columns, self.rows = (self.gpus, self.nodes) if self.tall else (self.nodes, self.gpus)

    def cell(self, rank: int) -> tuple[int, int]:
        """Return (x, y) of the upper left corner of the cell of `rank`."""
        node, gpu = divmod(rank - self.first, self.gpus)
        return (gpu, node) if self.tall else (node, gpu)

    def prepare(self, axes: Any, title: str) -> None:
        """Set limits, ticks and title of a panel for this grid."""
        axes.set(xlim=(-0.05, self.columns + 0.05), ylim=(self.rows + 0.05, -0.05), aspect="equal")
        axes.set_title(title, loc="left")
        steps = 1 if self.columns <= MAX_LARGE_COLUMNS else max(1, self.columns // 8)
        axes.set_xticks(np.arange(0, self.columns, steps) + 0.5, [str(i) for i in range(0, self.columns, steps)])
        axes.set_yticks(np.arange(self.rows) + 0.5, [str(i) for i in range(self.rows)])
        axes.set_xlabel("GPU of the node" if self.tall else "node")
        axes.set_ylabel("node" if self.tall else "GPU of the node")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)

    def draw(self, axes: Any, rank: int, fill: str, pattern: str, text: str, size: float = 8) -> None:
        """Draw the cell of `rank` in this colour and hatch, with its text if there is room for it."""
        x, y = self.cell(rank)
        edge = "#FFFFFF" if self.world_size > MAX_LABELLED else "#BBBBBB"
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=fill, edgecolor=edge, linewidth=0.4, hatch=pattern))
        if self.world_size <= MAX_LABELLED and self.columns <= MAX_LARGE_COLUMNS:
            box = {"facecolor": fill, "edgecolor": "none", "pad": 0.8} if pattern else None
            axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", color=text_color(fill), fontsize=size, bbox=box)

    def outline(self, axes: Any, groups: Sequence[Sequence[int]], width: float = 1.1) -> None:
        """Draw a dark line wherever two neighbouring cells belong to different groups."""
        owner = {rank: number for number, group in enumerate(groups) for rank in group}
        at = {self.cell(rank): number for rank, number in owner.items()}
        for (x, y), number in at.items():
            for dx, dy, line in ((1, 0, ((1, 1), (0, 1))), (0, 1, ((0, 1), (1, 1)))):
                if at.get((x + dx, y + dy), -1) != number:
                    axes.plot(
                        [x + line[0][0], x + line[0][1]], [y + line[1][0], y + line[1][1]], color="#222222", lw=width
                    )
            for dx, dy, line in ((-1, 0, ((0, 0), (0, 1))), (0, -1, ((0, 1), (0, 0)))):
                if (x + dx, y + dy) not in at:
                    axes.plot(
                        [x + line[0][0], x + line[0][1]], [y + line[1][0], y + line[1][1]], color="#222222", lw=width
                    )

    def span(self, group: Sequence[int]) -> int:
        """Return the number of nodes that have members of `group`."""
        return len({(rank - self.first) // self.gpus for rank in group})


def rank_grid(
    sizes: Sizes, kinds: str | Sequence[str] = ("tp", "dp", "pp"), *, world_size: int, gpus_per_node: int = 8
) -> Figure:
    """Draw one panel per kind of group: every group has its colour and number over the grid of nodes and GPUs.

    `sizes` and `kinds` are the arguments of `all_groups`. Raises ValueError for an unknown kind and for an impossible
    layout.
    """
    kinds = _known([kinds] if isinstance(kinds, str) else list(kinds))
    plan = all_groups(sizes, world_size)
    grid = Grid(world_size, gpus_per_node, int(plan["tp"].min()))
    scale = 0.42 if grid.columns <= MAX_LARGE_COLUMNS else 0.15
    width, height = max(2.0, grid.columns * scale + 0.9), grid.rows * scale + 0.9  # 2 inches: room for the title
    across = min(len(kinds), max(1, int(MAX_WIDTH // width)))
    down = ceil(len(kinds) / across)
    with styled():
        fig = new_figure(across * width, down * height)
        panels = fig.subplots(down, across, squeeze=False).ravel()
        for axes in panels[len(kinds) :]:
            axes.set_axis_off()
        for axes, kind in zip(panels, kinds):
            groups = plan[kind]
            grid.prepare(axes, f"{kind}: {_count(groups)}")
            for number, group in enumerate(groups.tolist()):
                fill, pattern = nth_style(number)
                pattern = pattern if world_size <= MAX_LABELLED else ""
                for rank in group:
                    grid.draw(axes, rank, fill, pattern, f"{rank}\ng{number}")
            grid.outline(axes, groups.tolist())
    parts = "; ".join(f"{kind} {_count(plan[kind])}, {_spans(grid, plan[kind])}" for kind in kinds)
    return Figure(fig, f"{_place(grid)}: {parts}.")


def rank_neighbours(
    rank: int,
    sizes: Sizes,
    kinds: Sequence[str] = ("tp", "cp", "dp", "pp"),
    *,
    world_size: int,
    gpus_per_node: int = 8,
) -> Figure:
    """Draw the groups of one rank: each kind in the colour of its axis, over the grid of nodes and GPUs.

    A rank that is in several of the groups takes the colour of the first. Only the groups of this rank are computed.
    """
    mine = groups_of_rank(rank, sizes, world_size)
    kinds = [kind for kind in _known(list(kinds)) if len(mine[kind]) > 1]
    offset = sizes.rank_offset if isinstance(sizes, ParallelConfig) else int(sizes.get("rank_offset", 0))
    grid = Grid(world_size, gpus_per_node, offset)
    role = {member: kind for kind in reversed(kinds) for member in mine[kind].tolist()} | {rank: "self"}
    with styled():
        scale = 0.42 if grid.columns <= MAX_LARGE_COLUMNS else 0.15
        fig = new_figure(grid.columns * scale + 1.9, grid.rows * scale + 1.0)
        axes = fig.subplots()
        grid.prepare(axes, f"the groups of rank {rank}")
        for other in range(offset, offset + world_size):
            kind = role.get(other)
            fill = {"self": "#000000", None: "#EEEEEE"}.get(kind) or color(str(kind))
            pattern = hatch(kind) if kind in kinds else ""
            grid.draw(axes, other, fill, pattern, str(other))
        handles = legend_patches(kinds)
        for handle, kind in zip(handles, kinds):
            handle.set_label(f"{kind}, {len(mine[kind])}")
        handles.append(Patch(facecolor="#000000", label=f"rank {rank}"))
        axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5))
    members = {kind: mine[kind].tolist() for kind in kinds}
    parts = "; ".join(
        f"{kind} {_short(group)} on {nodes_in_words(grid.span(group))}" for kind, group in members.items()
    )
    return Figure(fig, f"{_place(grid)}, rank {rank}: {parts or 'no group larger than 1'}.")


def _known(kinds: list[str]) -> list[str]:
    for kind in kinds:
        if kind not in GROUP_KINDS:
            raise ValueError(f"{kind!r} is not a kind of group; choose among {', '.join(GROUP_KINDS)}")
    return kinds


def nodes_in_words(count: int) -> str:
    """Return `1 node` or `2 nodes`."""
    return f"{count} node{'s' if count > 1 else ''}"


def _place(grid: Grid) -> str:
    return f"{grid.world_size} ranks on {nodes_in_words(grid.nodes)} of {grid.gpus}"


def _count(groups: np.ndarray) -> str:
    return f"{groups.shape[0]} group{'s' if groups.shape[0] > 1 else ''} of {groups.shape[1]}"


def _spans(grid: Grid, groups: np.ndarray) -> str:
    crossing = sum(grid.span(group) > 1 for group in groups.tolist())
    if not crossing:
        return "all inside a node"
    return "all across nodes" if crossing == len(groups) else f"{crossing} of them across nodes"


def _short(ranks: list[int]) -> str:
    shown = [str(rank) for rank in ranks] if len(ranks) <= 8 else [*map(str, ranks[:3]), "...", str(ranks[-1])]
    return f"[{', '.join(shown)}]"


# ---- controls ----


def explore_layout(
    *,
    world_size: int = 16,
    gpus_per_node: int = 8,
    tp: int = 4,
    cp: int = 1,
    pp: int = 2,
    ep: int = 1,
    etp: int = 1,
    order: str = DEFAULT_ORDER,
    kinds: tuple[str, ...] = ("tp", "dp", "pp"),
) -> Any:
    """Return the rank grid of the given layout; in a live notebook add controls for sizes, order and kinds.

    Returns a Figure, or in a live notebook an ipywidgets box that shows the same figure first. An impossible
    layout hides the picture and shows the reason.
    """
    sizes = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp, "order": order}
    figure = rank_grid(sizes, kinds, world_size=world_size, gpus_per_node=gpus_per_node)
    start = {"world_size": world_size, "gpus_per_node": gpus_per_node, **sizes}
    return _controls(figure, start, kinds) if is_live() else figure


def _controls(figure: Figure, start: dict[str, Any], kinds: tuple[str, ...]) -> Any:
    numbers = [name for name in start if name != "order"]
    inputs: dict[str, Any] = {name: whole_number(name, start[name], most=2**20) for name in numbers}
    inputs |= {"order": words("order", start["order"]), "kinds": words("kinds", " ".join(kinds))}

    def draw(given: dict[str, Any]) -> Figure:
        drawn_kinds, world, per_node = given.pop("kinds").split(), given.pop("world_size"), given.pop("gpus_per_node")
        return rank_grid(given, drawn_kinds, world_size=world, gpus_per_node=per_node)

    rows = [*(numbers[i : i + 4] for i in range(0, len(numbers), 4)), ("order", "kinds")]
    return LiveFigure(figure).panel(inputs, draw, rows)
