"""What a machine makes of a model: a roofline, where the time of runs goes, and rates next to published ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.ticker import LogLocator, NullLocator

from labkit.config.errors import counted
from labkit.plan.terms import KINDS
from labkit.viz.figure import Figure
from labkit.viz.style import INK, SEQUENCE, color, handle, hatch, new_figure, styled

LOOKS = {
    "gemm": (color("forward"), ""),
    "attention": (color("graph_replay"), ""),
    "memory": (color("weight_grad"), ""),
    "launch": (color("timer"), "--"),
    "tp": (color("tp"), hatch("tp")),
    "cp": (color("cp"), hatch("cp")),
    "ep": (color("ep"), hatch("ep")),
    "dp": (color("dp"), hatch("dp")),
    "pp": (color("pp"), hatch("pp")),
    "bubble": (color("idle"), ""),
    "recompute": (color("input_grad"), ""),
    "optimizer": (color("optimizer"), ""),
    "host": (color("wait"), "..."),
}
"""Kind of a part of the step -> colour and hatch."""
_SMALL = 0.005
"""Share of the longest bar below which a part is too small for the legend."""


def parts_bar(axes: Any, place: float, parts: Mapping[str, float]) -> float:
    """Draw a horizontal bar of the seconds by kind (`labkit.plan.terms.KINDS`), and return its length."""
    left = 0.0
    for kind in KINDS:
        seconds = max(0.0, parts.get(kind, 0.0))
        fill, pattern = LOOKS[kind]
        axes.barh(place, seconds, left=left, color=fill, hatch=pattern, edgecolor=INK, linewidth=0.4, height=0.7)
        left += seconds
    return left


def parts_legend(bars: Sequence[Mapping[str, float]]) -> list[Any]:
    """Return the entries of a legend for the kinds that are large enough to be seen in one of the bars."""
    longest = max(sum(parts.values()) for parts in bars)
    seen = [kind for kind in KINDS if any(parts.get(kind, 0.0) > _SMALL * longest for parts in bars)]
    return [handle(KINDS[kind], *LOOKS[kind]) for kind in seen]


def step_parts(
    bars: Mapping[str, Mapping[str, float]], *, measured: Mapping[str, float] | None = None, unit: float = 1.0,
    unit_name: str = "s", what: str = "prediction", line: float | None = None,
) -> Figure:  # fmt: skip
    """Draw where the time of each run goes as a stacked bar, predicted or not, and what was measured as a diamond.

    bars: name -> seconds by kind (`labkit.plan.terms.KINDS`). measured: name -> measured seconds. unit, unit_name: what
    the axis counts in, such as 1e-3 and `ms`. what: what a bar is. line: draw a vertical line here, in this unit.

    Raises ValueError without bars.
    """
    if not bars:
        raise ValueError("step_parts needs at least one run with its parts")
    scaled = {name: {kind: seconds / unit for kind, seconds in parts.items()} for name, parts in bars.items()}
    with styled():
        fig = new_figure(7.2, 1.3 + 0.36 * len(bars))
        axes = fig.subplots()
        lengths = [parts_bar(axes, place, parts) for place, parts in enumerate(scaled.values())]
        for place, (name, length) in enumerate(zip(bars, lengths, strict=True)):
            found = measured[name] / unit if measured and name in measured else None
            told = f"{length:.3g}" if found is None else f"{found - length:+.2g}"
            end = max(length, found or 0.0), place
            axes.annotate(told, end, xytext=(8, 0), textcoords="offset points", va="center", fontsize=8)
            if found is not None:
                axes.plot(found, place, ls="", marker="D", ms=7, color="#000000",
                          zorder=5)  # fmt: skip
        if line is not None:
            axes.axvline(line, color=INK, lw=1.0, ls="--")
        axes.set_yticks(range(len(bars)), list(bars))
        axes.set_xlim(0, 1.1 * max([*lengths, *(seconds / unit for seconds in (measured or {}).values())]))
        axes.invert_yaxis()
        axes.set_xlabel(f"{unit_name}{'; diamonds: measured, and how much more that is' if measured else ''}")
        fig.legend(handles=parts_legend(list(scaled.values())), loc="outside upper center", ncols=4)
    told = ", ".join(f"{name} {length:.3g} {unit_name}" for name, length in zip(bars, lengths, strict=True))
    return Figure(fig, f"{counted(len(bars), what)}: {told}.")


def roofline(
    measured: Mapping[int, float], predicted: Mapping[int, float], *, label: str, peak: float
) -> Figure:  # fmt: skip
    """Draw the measured rate of a GEMM by its number of rows as dots below the predicted rates as a line.

    measured: rows -> FLOP/s. predicted: the same for these rows and perhaps for more, which make the line smooth.
    label: what has these rows. peak: FLOP/s of the flat part. The gap between dots and line is shaded.
    """
    line = sorted(predicted)
    with styled():
        fig = new_figure(7.2, 3.0)
        axes = fig.subplots()
        axes.plot(line, [predicted[rows] / 1e9 for rows in line], color=SEQUENCE[1], lw=1.6,
                  label="predicted from two constants")  # fmt: skip
        dots = np.interp(np.log(line), np.log(list(measured)), np.log(list(measured.values())))
        axes.fill_between(line, np.exp(dots) / 1e9, [predicted[rows] / 1e9 for rows in line], color=SEQUENCE[1],
                          alpha=0.15, linewidth=0)  # fmt: skip
        axes.plot(list(measured), [rate / 1e9 for rate in measured.values()], ls="", marker="o", color=SEQUENCE[0],
                  label="measured")  # fmt: skip
        axes.axhline(peak / 1e9, color=INK, lw=0.8, ls=":")
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(measured), [str(rows) for rows in measured])
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _place: f"{value:g}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(label)
        axes.set_ylabel("GFLOP/s")
        axes.legend(loc="lower right")
    first, last = min(measured), max(measured)
    worst = max(measured, key=lambda rows: abs(math.log(predicted[rows] / measured[rows])))
    return Figure(fig, f"With {first} row the GEMM reaches {measured[first] / 1e9:.3g} GFLOP/s, with {last} rows "
                  f"{measured[last] / 1e9:.3g}; the line predicts {predicted[first] / 1e9:.3g} and "
                  f"{predicted[last] / 1e9:.3g}. It is furthest off at {worst} rows, by a factor of "
                  f"{predicted[worst] / measured[worst]:.2g}.")  # fmt: skip


class Rate(NamedTuple):
    """A published rate next to a predicted one, in the unit of the axis."""

    name: str
    published: float
    predicted: float
    low: float
    """Lower end of the interval of the prediction."""
    high: float


def published_rates(panels: Mapping[str, Sequence[Rate]], *, unit: str, below: str, sentence: str) -> Figure:
    """Draw published rates as filled bars and predicted ones as outlines with their intervals.

    panels: title -> rates from left to right. unit: label of the axis. below: label of all names.
    """
    with styled():
        fig = new_figure(7.2, 3.4)
        drawn = fig.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (title, rates) in zip(drawn, panels.items(), strict=True):
            _rate_bars(axes, rates)
            axes.set_title(title)
            axes.set_xlabel(below)
        drawn[0].set_ylabel(unit)
        fig.legend(*drawn[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return Figure(fig, sentence)


def _rate_bars(axes: Any, rates: Sequence[Rate]) -> None:
    width = 0.38
    for place, rate in enumerate(rates):
        first = place == 0
        axes.bar(place - width / 2, rate.published, width, color=SEQUENCE[0], label="paper" if first else None)
        axes.bar(place + width / 2, rate.predicted, width, fill=False, edgecolor=SEQUENCE[1], linewidth=1.6,
                 label="predicted" if first else None)  # fmt: skip
        ends = [[rate.predicted - rate.low], [rate.high - rate.predicted]]
        axes.errorbar(place + width / 2, rate.predicted, yerr=ends, color=INK, capsize=3, linewidth=1,
                      label="80 % interval" if first else None)  # fmt: skip
    axes.set_xticks(range(len(rates)), [rate.name for rate in rates])
