"""The load of experts in pictures: over training, and against the time of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import ArrayLike, NDArray

from labkit.viz.figure import Figure
from labkit.viz.live import LiveFigure, is_live, wide
from labkit.viz.style import INK, LINES, SEQUENCE, color, new_figure, nth_color, styled, text_color

_RUNS = ("#000000", "#AA4499", "#44AA99", "#999933")
"""Colours of runs, none of which is the colour of an expert."""
_LAST = 5
"""Steps at the end over which a sentence averages, because one batch is noisy."""


# ---- over training ----


def load_over_training(runs: Mapping[str, ArrayLike]) -> Figure:
    """Draw each expert's share of a layer's rows by step, one panel per run; below, the fullest expert over the mean.

    runs: name -> rows of each expert by step, [steps, E]. The axis counts steps from 1.

    Raises:
        ValueError: there is no run, or one that is no table of counts.
    """
    loads = {name: np.asarray(table, dtype=float) for name, table in runs.items()}
    for name, table in loads.items():
        if table.ndim != 2 or not table.size or not (table.sum(axis=1) > 0).all():
            raise ValueError(f"{name!r} is not a table [steps, experts] of rows: its shape is {table.shape}")
    if not loads:
        raise ValueError("load_over_training needs at least one run")
    with styled():
        fig = new_figure(7.4, 4.6)
        grid = fig.add_gridspec(2, len(loads), height_ratios=(1.25, 1))
        for column, (name, table) in enumerate(loads.items()):
            axes = fig.add_subplot(grid[0, column])
            _draw_shares(axes, table)
            axes.set_title(name, loc="left")
            if column:
                axes.tick_params(labelleft=False)
            else:
                axes.set_ylabel("share of rows")
        _draw_fullest(fig.add_subplot(grid[1, :]), loads)
    return Figure(fig, _training_sentence(loads))


def _draw_shares(axes: Any, table: NDArray[Any]) -> None:
    """Draw the experts one above another, in the order of their numbers; even shares are the dotted lines."""
    shares = table / table.sum(axis=1, keepdims=True)
    steps, experts = shares.shape
    shades = [nth_color(expert) for expert in range(experts)]
    axes.stackplot(range(1, steps + 1), shares.T, colors=shades, linewidth=0)
    for border in range(1, experts):
        axes.axhline(border / experts, color="black", lw=0.7, ls=":")
    if experts <= len(SEQUENCE):
        middle = shares[-1].cumsum() - shares[-1] / 2
        for expert in range(experts):
            if shares[-1, expert] > 0.05:
                halo = [withStroke(linewidth=2, foreground=shades[expert])]  # lines may cross the number
                axes.text(1 + 0.98 * (steps - 1), middle[expert], expert, fontsize=7, ha="right", va="center",
                          color=text_color(shades[expert]), path_effects=halo)  # fmt: skip
    axes.set(xlim=(1, max(2, steps)), ylim=(0, 1), xlabel="step")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))


def _draw_fullest(axes: Any, loads: Mapping[str, NDArray[Any]]) -> None:
    for number, (name, table) in enumerate(loads.items()):
        ratio, style = _fullest(table), {"ls": LINES[number % len(LINES)], "color": _RUNS[number % len(_RUNS)]}
        axes.plot(range(1, len(ratio) + 1), ratio, label=name, **style)
    axes.axhline(1, color="#666666", lw=0.8, ls=":")
    axes.set(xlabel="step", ylabel="fullest expert / mean", ylim=(0.9, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)
    axes.grid(axis="y")
    axes.legend(loc="upper right", ncols=len(loads), bbox_to_anchor=(1.0, 1.12))


def _fullest(table: NDArray[Any]) -> NDArray[Any]:
    return table.max(axis=1) / table.mean(axis=1)


def _training_sentence(loads: Mapping[str, NDArray[Any]]) -> str:
    first = next(iter(loads.values()))
    words = []
    for name, table in loads.items():
        ratio = _fullest(table)
        words.append(f"{name} {ratio[0]:.1f}, at most {ratio.max():.1f}, at the end {ratio[-_LAST:].mean():.1f}")
    return (
        f"Load of {first.shape[1]} experts over {len(first)} steps, the fullest against the mean: {'; '.join(words)}."
    )


# ---- skew and the time of a step ----


def skew_curve(
    rows: Mapping[float, Sequence[int]],
    chosen: float,
    *,
    measured: Mapping[float, float] | None = None,
    seconds_per_row: float = 1.0,
) -> Figure:
    """Draw the time of a step over the skew of its routing, and the rows of the ranks at one skew.

    All ranks wait for the fullest rank, so it decides the time.

    rows: skew -> rows that each rank computes. chosen: the skew whose ranks are shown. measured: skew -> seconds of a
        step whose experts take `seconds_per_row`; points in the picture, relative to the time of an even load.

    Raises:
        ValueError: no rows at the chosen skew, or skews without a row.
    """
    if chosen not in rows:
        raise ValueError(f"there are no rows for skew {chosen}; there are {', '.join(f'{skew:g}' for skew in rows)}")
    if any(sum(each) <= 0 for each in rows.values()):
        raise ValueError("every skew needs at least one row")
    with styled():
        fig = new_figure(7.4, 2.9)
        left, right = fig.subplots(1, 2, width_ratios=(1.15, 1))
        skews = sorted(rows)
        left.plot(skews, [_slowest(rows[skew]) for skew in skews], color=SEQUENCE[0], label="fullest rank's rows")
        for skew, relative in _relative(rows, measured or {}, seconds_per_row).items():
            label = "measured" if skew == min(measured or {}) else None
            left.plot(skew, relative, "o", ms=5, color=SEQUENCE[1], mec=INK, mew=0.5, label=label)
        left.axvline(chosen, color="#666666", lw=0.9, ls=":")
        left.axhline(1, color="#666666", lw=0.9, ls=":")
        left.set(xlabel="skew (exponent of Zipf's law)", ylabel="step time / that of an even load", ylim=(0, None))
        left.legend(loc="lower right")  # no step is shorter than with an even load
        _draw_ranks(right, rows[chosen], chosen)
    return Figure(fig, _skew_sentence(rows, chosen, measured, seconds_per_row))


def _draw_ranks(axes: Any, by_rank: Sequence[int], skew: float) -> None:
    """Draw the rows of each rank as bars, and dots for the time in which a rank waits for the fullest."""
    longest, mean = max(by_rank), sum(by_rank) / len(by_rank)
    names = [f"rank {rank}" for rank in range(len(by_rank))]
    axes.barh(names, by_rank, 0.7, color=SEQUENCE[0], edgecolor=INK, linewidth=0.4, label="computes")
    rest = [longest - count for count in by_rank]
    axes.barh(names, rest, 0.7, left=by_rank, color=color("idle"), hatch="...", edgecolor=INK, linewidth=0.4,
              label="waits")  # fmt: skip
    for place, count in enumerate(by_rank):
        inside = count > 0.15 * longest
        box = None if inside else {"facecolor": "white", "edgecolor": "none", "pad": 1}  # beside it there are dots
        axes.text(0.02 * longest if inside else count + 0.02 * longest, place, f"{count:,}", va="center", fontsize=8,
                  color=text_color(SEQUENCE[0]) if inside else INK, bbox=box)  # fmt: skip
    axes.axvline(mean, color=INK, lw=0.9, ls=(0, (6, 2)))
    axes.set(xlim=(0, 1.02 * longest), xlabel=f"rows at skew {skew:g} (dashed: mean; dotted: waits)")
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)


def _slowest(by_rank: Sequence[int]) -> float:
    """Return the rows of the fullest rank over the mean."""
    return max(by_rank) * len(by_rank) / sum(by_rank)


def _relative(
    rows: Mapping[float, Sequence[int]], measured: Mapping[float, float], seconds_per_row: float
) -> dict[float, float]:
    """Return the measured seconds, by skew, over those of an even load."""
    return {skew: measured[skew] / (sum(rows[skew]) / len(rows[skew]) * seconds_per_row) for skew in sorted(measured)}


def _skew_sentence(
    rows: Mapping[float, Sequence[int]], chosen: float, measured: Mapping[float, float] | None, seconds_per_row: float
) -> str:
    shown = sorted(measured or {min(rows), chosen, max(rows)})
    words = ", ".join(f"{_slowest(rows[skew]):.2f} at skew {skew:g}" for skew in shown)
    ranks = len(rows[chosen])
    text = f"A step over {ranks} rank{'s' * (ranks != 1)} takes, against an even load, {words}"
    if measured:
        counted = [_slowest(rows[skew]) for skew in sorted(measured, key=lambda skew: measured[skew])]
        agrees = counted == sorted(counted)  # equal loads may come in any order
        found = ", ".join(f"{relative:.2f}" for relative in _relative(rows, measured, seconds_per_row).values())
        text += f"; measured {found}, in {'the same' if agrees else 'another'} order"
    busy = 1 / _slowest(rows[chosen])
    return f"{text}; at skew {chosen:g} the ranks compute for {busy:.0%} of it."


def explore_skew(
    rows_at: Callable[[float], Sequence[int]],
    *,
    chosen: float = 1.0,
    largest: float = 3.0,
    measured: Mapping[float, float] | None = None,
    seconds_per_row: float = 1.0,
) -> Any:
    """Return `skew_curve` from skew 0 to `largest`; in a live notebook add a slider for the chosen skew.

    rows_at: rows that each rank computes at a skew.

    Returns a Figure, or in a live notebook an ipywidgets box with the slider above the same figure.
    """
    line = {float(skew): rows_at(float(skew)) for skew in np.linspace(0, largest, 25)}
    line |= {skew: rows_at(skew) for skew in measured or {}}

    def drawn(skew: float) -> Figure:
        rows = line | {skew: rows_at(skew)}
        return skew_curve(rows, skew, measured=measured, seconds_per_row=seconds_per_row)

    figure = drawn(chosen)
    return _slider(figure, drawn, chosen, largest) if is_live() else figure


def _slider(figure: Figure, drawn: Callable[[float], Figure], chosen: float, largest: float) -> Any:
    import ipywidgets as widgets

    control = widgets.FloatSlider(value=chosen, min=0, max=largest, step=0.05, description="skew", layout=wide("460px"))
    return LiveFigure(figure).panel({"skew": control}, lambda given: drawn(round(given["skew"], 2)))
