"""Activation memory: the bytes that each way of saving memory removes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.viz.figure import Figure
from labkit.viz.style import SEQUENCE, name_rows, new_figure, styled

_HATCHES = ("", "//", "", "xx", "\\\\", "..", "++", "")
"""One hatch per part, so that neighbours can be told apart without colour."""


@dataclass(frozen=True)
class Kept:
    """One bar of a waterfall."""

    label: str
    """Name of the step, such as `sequence parallel`."""
    parts: Mapping[str, float]
    """Part -> predicted bytes."""
    measured: float | None = None
    """Measured bytes, all parts together."""

    @property
    def total(self) -> float:
        """Predicted bytes of all parts."""
        return sum(self.parts.values())


def saved_waterfall(rows: Sequence[Kept], *, unit: float = 1.0, unit_name: str = "bytes", what: str = "") -> Figure:
    """Draw horizontal bars from the top down, each split into parts, with the bytes that a step removed as an outline.

    rows: one row for each way of saving, in the order in which they are added.

    unit, unit_name: the unit of the axis in bytes, and its name, such as s b h bytes.

    what: the first words of the sentence.

    The sentence says whether every measured total is within 1% of the prediction. Raises ValueError without rows.
    """
    if not rows:
        raise ValueError("saved_waterfall needs at least one row")
    parts = list(dict.fromkeys(part for row in rows for part in row.parts))
    with styled():
        fig = new_figure(7.4, 1.3 + 0.44 * len(rows))
        axes = fig.subplots()
        for place, row in enumerate(rows):
            _bar(axes, place, row, parts, unit)
            before = rows[place - 1].total / unit if place else 0.0
            if before > row.total / unit:
                _taken(axes, place, row.total / unit, before)
        _frame(axes, rows, unit, unit_name)
        handles = [_patch(parts, part) for part in parts] + _measured_handle(rows)
        fig.legend(handles=handles, loc="outside lower center", ncols=4)
    return Figure(fig, _sentence(rows, unit, unit_name, what))


def _style(parts: Sequence[str], part: str) -> dict[str, Any]:
    index = parts.index(part) % len(SEQUENCE)
    return {"facecolor": SEQUENCE[index], "hatch": _HATCHES[index], "edgecolor": "#333333", "linewidth": 0.5}


def _patch(parts: Sequence[str], part: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(label=part, **_style(parts, part))


def _measured_handle(rows: Sequence[Kept]) -> list[Any]:
    from matplotlib.lines import Line2D

    marker = Line2D([], [], color="#000000", marker="D", markersize=5, linestyle="", label="measured")
    return [marker] if any(row.measured is not None for row in rows) else []


def _bar(axes: Any, place: int, row: Kept, parts: Sequence[str], unit: float) -> None:
    left = 0.0
    for part in parts:
        width = row.parts.get(part, 0.0) / unit
        if width:
            axes.barh(place, width, left=left, height=0.62, **_style(parts, part))
            left += width
    if row.measured is not None:
        axes.plot(row.measured / unit, place, color="#000000", marker="D", markersize=5, markeredgecolor="#FFFFFF")


def _taken(axes: Any, place: int, now: float, before: float) -> None:
    """Outline the bytes that the row above had in addition."""
    axes.barh(place, before - now, left=now, height=0.62, fill=False, edgecolor="#888888", linestyle=":", linewidth=1)


def _frame(axes: Any, rows: Sequence[Kept], unit: float, unit_name: str) -> None:
    most = max(row.total for row in rows) / unit
    for place, row in enumerate(rows):
        before = max(row.total, rows[place - 1].total if place else 0.0) / unit
        axes.text(before + 0.015 * most, place, f"{row.total / unit:.1f}", va="center", fontsize=8)
    name_rows(axes, [row.label for row in rows], bars=True)
    axes.set(xlabel=unit_name, xlim=(0, 1.09 * most))


def _sentence(rows: Sequence[Kept], unit: float, unit_name: str, what: str) -> str:
    steps = ", ".join(f"{row.label} {row.total / unit:.1f}" for row in rows)
    off = [row.label for row in rows if row.measured is not None and abs(row.measured - row.total) > 0.01 * row.total]
    seen = [row for row in rows if row.measured is not None]
    if not seen:
        verdict = ""
    elif off:
        verdict = f"; measured differs by more than 1% for {', '.join(off)}"
    else:
        verdict = "; measured within 1% of it"
    return f"{what + ': ' if what else ''}{unit_name}: {steps}{verdict}."
