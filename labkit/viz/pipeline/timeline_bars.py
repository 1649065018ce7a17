"""Bars of a timeline with readable labels, memory curves on the same axis, and legends that hide nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from labkit.events import Event
from labkit.viz.pipeline.timeline_rows import COMPUTE, STRIP, Rows
from labkit.viz.style import SEQUENCE, color, handle, hatch, legend_patches, mixed, text_color

WIDTH = 9.0
"""Width of the figure, in inches."""
_AXIS, _POINT = WIDTH - 1.0, 1 / 72
_LETTER = {"forward": "F", "backward": "B", "input_grad": "I", "weight_grad": "W"}
_EMS = {"F": 0.58, "B": 0.69, "I": 0.30, "W": 0.99}
_DIGIT, _MARGIN = 0.64, 0.35
"""Widths of a digit and of a label's two margins together, in font sizes."""
_SMALLEST, _LARGEST = 7.0, 8.5
"""Font sizes of labels in points. A bar too narrow for the smallest shows only the microbatch, or no label."""
_FEW = 8
"""Up to this many ranks, each curve has a colour and a name of its own."""


def row_height(ranks: int) -> float:
    """Return the inches for one rank."""
    return 0.42 if ranks <= _FEW else min(0.3, max(0.08, 6.0 / ranks))


@dataclass(frozen=True)
class Style:
    """Look of the bars of one set of rows; row r spans r to r + 1, downwards."""

    scale: float
    """Units of the axis per unit of the Events' times."""
    width: float
    """End of the axis, which decides which labels fit."""
    inches: float
    """Height of a row."""
    strips: bool = False
    top: float = 0.07
    height: float = 0.86
    """Part of the row's height that the bars take, from `top` on."""
    outline: bool = False
    """True for outlines, which predictions have next to measurements."""

    def points(self, duration: float) -> float:
        """Return the width of a bar in points."""
        return duration * self.scale * _AXIS / self.width / _POINT


def draw_rows(axes: Axes, rows: Rows, style: Style) -> None:
    """Draw the bars of every rank, labelled by direction and microbatch where there is room."""
    has_strip = style.strips and any(event.kind in STRIP for event in rows.events)
    body = style.height * (0.74 if has_strip else 1.0)
    row_of = {rank: row for row, rank in enumerate(rows.ranks)}
    compute = [event for event in rows.events if event.kind in COMPUTE]
    typical = median(style.points(event.duration) for event in compute) if compute else 0.0
    for kind in dict.fromkeys(event.kind for event in rows.events):
        if kind in STRIP and not style.strips:
            continue
        offset, tall = (body + 0.02, style.height - body - 0.02) if kind in STRIP else (0.0, body)
        mine = [event for event in rows.events if event.kind == kind]
        tops = np.array([row_of[event.rank] + style.top + offset for event in mine])
        lefts, rights = (np.array([[e.start, e.end] for e in mine]) * style.scale).T
        corners = [(lefts, tops), (rights, tops), (rights, tops + tall), (lefts, tops + tall)]
        edge = 0.6 if kind in STRIP or typical >= 4.0 else 0.0  # edges would hide bars that are hardly wider
        shades = [_shade(kind, event.chunk, rows.chunks) for event in mine]
        look: dict[str, Any] = {"facecolor": shades, "edgecolor": "#FFFFFF" if kind in COMPUTE else "#555555"}
        if style.outline:
            look, edge = {"facecolor": "#FFFFFF", "edgecolor": shades}, 1.6 if typical >= 6.0 else 0.8
        axes.add_collection(
            PolyCollection(  # an array of corners: a patch each would take longer than all the drawing
                list(np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)),
                hatch="" if style.outline else hatch(kind),
                linewidth=edge,
                **look,
            )
        )
    middles = {rank: row + style.top + body / 2 for rank, row in row_of.items()}
    _label(axes, compute, middles, body, rows.chunks, style)


def _label(axes: Axes, compute: list[Event], middles: dict[int, float], tall: float, chunks: int, style: Style) -> None:
    """Label bars of equal width in the same form, which the widest label decides."""
    digits = max((len(str(event.microbatch)) for event in compute if event.microbatch is not None), default=0)
    letter = max((_EMS[_LETTER[event.kind]] for event in compute), default=0.0)
    number = digits * _DIGIT + _MARGIN
    highest = min(_LARGEST, tall * style.inches / _POINT * 0.6)
    for event in compute:
        room, text = style.points(event.duration), "" if event.microbatch is None else str(event.microbatch)
        size = min(highest, room / (letter + number))
        if size >= _SMALLEST:
            text = _LETTER[event.kind] + text
        else:
            size = min(highest, room / number)
        if size >= _SMALLEST:
            shade = "#FFFFFF" if style.outline else _shade(event.kind, event.chunk, chunks)
            middle = (event.start + event.end) / 2 * style.scale
            axes.text(middle, middles[event.rank], text, ha="center", va="center_baseline", fontsize=size,
                      color=text_color(shade), clip_on=True)  # fmt: skip


def draw_frames(axes: Axes, rows: Rows, style: Style, names: Collection[str]) -> None:
    """Draw a thick frame around the computations of these names."""
    row_of = {rank: row for row, rank in enumerate(rows.ranks)}
    for event in (event for event in rows.events if event.kind in COMPUTE and event.name in names):
        corner = event.start * style.scale, row_of[event.rank] + style.top
        axes.add_patch(
            Rectangle(corner, event.duration * style.scale, style.height, fill=False, linewidth=1.8, zorder=3)
        )


def _shade(kind: str, chunk: int | None, chunks: int) -> str:
    """Return the colour of a kind, mixed with white for later chunks of a rank."""
    return mixed(color(kind), _white_of(chunk or 0, chunks))


def _white_of(chunk: int, chunks: int) -> float:
    return chunk * min(0.35, 0.66 / max(1, chunks - 1))


def draw_needs(axes: Axes, rows: Rows, needs: Callable[[str], Iterable[str]]) -> None:
    """Draw an arrow to each computation from the end of each one that it needs and that is on another rank."""
    row_of = {rank: row for row, rank in enumerate(rows.ranks)}
    known = {event.name: event for event in rows.events if event.kind in COMPUTE}
    for event in known.values():
        for source in (known[name] for name in needs(event.name) if known[name].rank != event.rank):
            ends = (source.end, row_of[source.rank] + 0.5), (event.start, row_of[event.rank] + 0.5)
            look = {"arrowstyle": "-|>", "color": "#000000", "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", ends[1], ends[0], arrowprops=look, zorder=4)


def finish(axes: Axes, labels: list[str], end: float, inches: float) -> None:
    """Set limits, the names of the rows (as many as have room), and lines between the rows."""
    axes.set_xlim(0, end)
    axes.set_ylim(len(labels), 0)
    step = math.ceil(0.15 / inches)
    axes.set_yticks([row + 0.5 for row in range(0, len(labels), step)], labels[::step])
    axes.tick_params(axis="y", length=0)
    axes.set_facecolor(color("idle"))
    axes.spines["left"].set_visible(False)
    for row in range(1, len(labels)):
        axes.axhline(row, color="#FFFFFF", linewidth=1.5 if inches > 0.2 else 0.5)


def draw_memory(axes: Axes, rows: Rows, scale: float, labels: list[str], limit: float | None = None) -> None:
    """Draw a step line per rank. A few ranks have a name each; many ranks have shades, and only some have names."""
    count, curves = len(labels), rows.memory()
    if count <= _FEW:
        colours: Iterable[Any] = SEQUENCE
        named = range(count)
    else:
        colours = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.9, count))
        named = sorted({0, count // 3, 2 * count // 3, count - 1})
    for row, ((times, amounts), colour) in enumerate(zip(curves, colours, strict=False)):
        axes.step(np.array([*times, rows.end]) * scale, [*amounts, amounts[-1]], where="post", color=colour,
                  linewidth=1.4 if count <= _FEW else 0.9, label=labels[row] if row in named else "")  # fmt: skip
    axes.set_ylabel("in flight")
    axes.set_ylim(0, rows.peak + 0.5 if limit is None else limit)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=rows.peak >= 3))
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=_FEW, borderaxespad=0.0, columnspacing=1.2)


def legend(fig: Any, rows: Rows, strips: bool) -> None:
    """List the kinds in the picture and, where a rank has several chunks, how pale each chunk is, in grey."""
    kinds = [kind for kind in (*COMPUTE, *(STRIP if strips else ())) if any(e.kind == kind for e in rows.events)]
    handles = legend_patches([*kinds, "idle"])
    if rows.chunks > 1:
        shown = range(rows.chunks) if rows.chunks <= 4 else (0, rows.chunks - 1)
        handles += [handle(f"chunk {chunk}", mixed("#555555", _white_of(chunk, rows.chunks))) for chunk in shown]
    fig.legend(handles=handles, loc="outside upper right", ncols=min(len(handles), 8))
