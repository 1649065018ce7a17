"""One palette by meaning, and matplotlib's settings for every figure of labkit.

Three families of colours share no colour with each other, except for rare activities. So blue is a forward in every
chapter, orange a backward, dark green a weight gradient, and red and pink are communication:

- activities of a rank over time (`ACTIVITIES`), from Okabe and Ito's set;
- axes of groups (`AXES`), Paul Tol's light set;
- things with a number, such as ranks, stages, chunks and microbatches (`SEQUENCE`), from Paul Tol's muted set.

Readers with red-green colour blindness can tell the colours of one family apart. Close colours also differ in their
hatch, and every mark has a label.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import matplotlib.figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

DPI = 100
"""Dots per inch of every PNG."""

ACTIVITIES: dict[str, tuple[str, str, str]] = {
    "forward": ("#0072B2", "", "forward"),
    "backward": ("#E69F00", "", "backward"),
    "input_grad": ("#F0E442", "", "input gradient"),
    "weight_grad": ("#117733", "", "weight gradient"),
    "send": ("#CC79A7", "////", "send"),
    "recv": ("#882255", "\\\\\\\\", "receive"),
    "collective": ("#D55E00", "xx", "collective"),
    "wait": ("#999999", "...", "wait"),
    "idle": ("#F0F0F0", "", "idle"),
    "graph_replay": ("#88CCEE", "||", "replay of a graph"),
    "optimizer": ("#332288", "", "optimizer"),
    "data": ("#DDCC77", "", "data"),
    "timer": ("#44AA99", "--", "timer"),
}
"""Kind of event -> (colour, hatch, label)."""

AXES: dict[str, tuple[str, str, str]] = {
    "tp": ("#EE8866", "", "tensor"),
    "cp": ("#FFAABB", "//", "context"),
    "ep": ("#AAAA00", "\\\\", "expert"),
    "dp": ("#77AADD", "..", "data"),
    "pp": ("#EEDD88", "xx", "pipeline"),
    "etp": ("#44BB99", "++", "expert tensor"),
    "edp": ("#99DDFF", "oo", "expert data"),
    "embd": ("#BBCC33", "--", "embedding"),
}
"""Axis of a layout -> (colour, hatch, label)."""

SEQUENCE = ("#332288", "#CC6677", "#44AA99", "#DDCC77", "#AA4499", "#88CCEE", "#999933", "#661100")
"""Colours of things with a number (rank, stage, chunk, group or curve 0, 1, ...); they repeat after eight."""
HATCHES = ("", "//", "..", "xx", "\\\\", "--", "++", "oo")
"""Hatches of things 0 to 7, 8 to 15, ..., which share their colours."""
LINES = ("-", "--", "-.", ":")
"""Line styles of curve 0, 1, ...; they repeat after four."""
INK = "#333333"
"""Colour of edges and other lines."""
ALERT = "#D40000"
"""Colour of what is wrong, and of a limit."""
PADDING: dict[str, Any] = {"facecolor": "#FFFFFF", "hatch": "////", "edgecolor": "#999999", "linewidth": 0.0}
"""Look of a box of padding."""

RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": False,
    "grid.color": "#DDDDDD",
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "figure.dpi": DPI,
    "savefig.dpi": DPI,
    "svg.hashsalt": "labkit",
}
"""matplotlib's settings; `styled` applies them to a block."""


def meaning(name: str) -> tuple[str, str, str]:
    """Return (colour, hatch, label) of an activity or an axis; combined groups (`dp_cp`) take their first axis.

    Raises ValueError for a name that has no meaning here.
    """
    found = ACTIVITIES.get(name) or AXES.get(name) or AXES.get(name.split("_")[0])
    if found is None:
        raise ValueError(f"{name!r} has no colour; the palette knows {', '.join([*ACTIVITIES, *AXES])}")
    return found


def color(name: str) -> str:
    """Return the colour of an activity or an axis, as #RRGGBB."""
    return meaning(name)[0]


def hatch(name: str) -> str:
    """Return the matplotlib hatch of an activity or an axis; empty where the colour suffices."""
    return meaning(name)[1]


def label(name: str) -> str:
    """Return the name of an activity or an axis in a legend."""
    return meaning(name)[2]


def nth_color(number: int) -> str:
    """Return the colour of thing 0, 1, ...: eight colours, which then come again."""
    return SEQUENCE[number % len(SEQUENCE)]


def nth_style(number: int) -> tuple[str, str]:
    """Return (colour, hatch) of thing 0, 1, ...: eight colours, then the same with the next hatch."""
    turn, place = divmod(number, len(SEQUENCE))
    return SEQUENCE[place], HATCHES[turn % len(HATCHES)]


def mixed(base: str, white: float) -> str:
    """Return `base` (#RRGGBB) mixed with a share of white, from 0 to 1."""
    channels = [int(base[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(channel + (255 - channel) * white):02X}" for channel in channels)


def text_color(background: str) -> str:
    """Return black or white, whichever has the larger contrast ratio (WCAG 2) on `background` (#RRGGBB)."""
    channels = [int(background[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#FFFFFF" if (1.05 / (luminance + 0.05)) > ((luminance + 0.05) / 0.05) else "#000000"


def handle(text: str, fill: str, pattern: str = "") -> Patch:
    """Return an entry of a legend: a patch of this colour and hatch, and its text."""
    return Patch(facecolor=fill, hatch=pattern, edgecolor=INK, linewidth=0.5, label=text)


def legend_patches(names: list[str]) -> list[Patch]:
    """Return the entries of a legend for activities or axes, with colour, hatch and label."""
    return [handle(label(name), color(name), hatch(name)) for name in names]


def counted_mark(size: float = 6.0) -> Line2D:
    """Return the entry of a legend for values that were counted: white diamonds."""
    return Line2D([], [], ls="", marker="D", ms=size, color="#FFFFFF", mec="#000000", label="counted")


def box(
    axes: Any,
    corner: tuple[float, float],
    width: float,
    height: float,
    fill: str,
    text: str = "",
    *,
    size: float = 8.0,
    ink: str = "",
    **look: Any,
) -> None:
    """Draw a rectangle from its corner of the smallest x and y, with a text in its middle.

    size: points of the text. ink: colour of the text, by default black or white, whichever is readable on `fill`.
    look: further properties of the rectangle, such as `hatch` or `zorder`.
    """
    look = {"facecolor": fill, "edgecolor": INK, "linewidth": 0.5} | look
    axes.add_patch(Rectangle(corner, width, height, **look))
    if text:
        middle = corner[0] + width / 2, corner[1] + height / 2
        axes.text(*middle, text, ha="center", va="center", fontsize=size, color=ink or text_color(fill))


def name_rows(axes: Any, names: Sequence[str], *, bars: bool = False) -> None:
    """Name the rows of a picture from the top down, without ticks.

    Row r spans r to r + 1; with `bars` it is a horizontal bar at r.
    """
    axes.set_yticks([row if bars else row + 0.5 for row in range(len(names))], names)
    axes.tick_params(axis="y", length=0)
    if bars:
        axes.invert_yaxis()
    else:
        axes.set_ylim(len(names), 0)


def name_cells(axes: Any, columns: Sequence[str], rows: Sequence[str]) -> None:
    """Name the columns and rows of cells that are 1 wide and 1 high, without ticks and frame."""
    name_rows(axes, rows)
    axes.set_xticks([column + 0.5 for column in range(len(columns))], columns)
    axes.set_xlim(0, len(columns))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


@contextmanager
def styled() -> Iterator[None]:
    """Apply RC while the block builds a figure; nothing outside it changes."""
    with matplotlib.rc_context(RC):
        yield


def new_figure(width: float, height: float) -> matplotlib.figure.Figure:
    """Make an empty figure of `width` x `height` inches with constrained layout, unknown to pyplot.

    pyplot would keep the figure alive, and Jupyter would show the figure a second time. Call inside `styled`.
    """
    return matplotlib.figure.Figure(figsize=(width, height), layout="constrained")
