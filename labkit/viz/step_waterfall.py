"""A step as a waterfall: from model FLOPs at the peak to what a run achieved, predicted outlined over measured."""

from __future__ import annotations

from typing import Any

from labkit.plan.waterfall import ROWS, Waterfall
from labkit.viz.figure import Figure
from labkit.viz.style import INK, color, handle, hatch, name_rows, new_figure, styled

_LOOKS = {
    "ideal": (color("forward"), ""),
    "gemm": (color("forward"), "//"),
    "attention": (color("graph_replay"), ""),
    "memory": (color("weight_grad"), ""),
    "launch": (color("timer"), "--"),
    "recompute": (color("input_grad"), ""),
    **{axis: (color(axis), hatch(axis)) for axis in ("tp", "cp", "ep", "dp", "pp")},
    "fill": (color("idle"), ""),
    "stages": (color("idle"), "//"),
    "actions": (color("idle"), ".."),
    "stragglers": (color("backward"), ""),
    "optimizer": (color("optimizer"), ""),
    "host": (color("wait"), "..."),
    "unexplained": ("#FFFFFF", "xx"),
}
"""Row -> colour and hatch."""
_SHOWN = 0.002
"""Share of both steps below which a row is left out; its seconds stay in the sums."""


def step_waterfall(found: Waterfall, name: str) -> Figure:
    """Draw each row of a step where the measured rows before it end: measured filled, predicted as an outline.

    name: the run, for the title.
    """
    shown = [
        row
        for row in found.rows
        if max(abs(row.predicted) / found.predicted, abs(row.measured) / found.measured) > _SHOWN
    ]
    with styled():
        fig = new_figure(8.5, 1.3 + 0.32 * (len(shown) + 1))
        axes = fig.subplots()
        start = 0.0
        for row in found.rows:
            if row in shown:
                _bar(axes, shown.index(row), start, row.measured, row.predicted, _LOOKS[row.key])
            start += row.measured
        _bar(axes, len(shown), 0.0, found.measured, found.predicted, (color("timer"), ""))
        name_rows(axes, [*(ROWS[row.key] for row in shown), "step"], bars=True)
        axes.set_xlabel("seconds")
        axes.set_title(f"where the step of {name} goes")
        axes.legend(handles=[handle("measured", color("timer")), handle("predicted", "none")], loc="upper right")
    largest = found.largest
    times = f"took {found.measured:.4g} s, and {found.predicted:.4g} s were predicted"
    loss = f"{ROWS[largest.key]}, {largest.measured / found.measured:.0%} of the step"
    return Figure(fig, f"The step of {name} {times}; the largest loss is {loss}.")


def _bar(axes: Any, place: int, start: float, measured: float, predicted: float, look: tuple[str, str]) -> None:
    fill, pattern = look
    axes.barh(place, measured, left=start, height=0.55, color=fill, hatch=pattern, edgecolor=INK, lw=0.4)
    axes.barh(place, predicted, left=start, height=0.8, color="none", edgecolor=INK, lw=1.2)
