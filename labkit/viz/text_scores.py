"""Figures of an evaluated language model: windows over a text, prices of tokens, choices of the next one, curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from labkit.viz.figure import Figure
from labkit.viz.style import SEQUENCE, mixed, name_rows, new_figure, nth_color, styled, text_color

_READ, _SCORED = "#D9D9D9", SEQUENCE[0]
_LEVEL = "#777777"
MAX_WINDOWS = 12
"""Windows that are drawn; if there are more, the first ones."""
_SHOWN_PRICE = 0.3
"""Least price of a token that is written above it."""
_PRICE_WIDTH = 2.4
"""Characters that a written price takes."""

# ---- windows ----


Window = tuple[int, int, int]
"""(first token that a window reads, first label that it scores, label after the last that it scores)."""


def scoring_windows(windows: Sequence[Window], tokens: int, length: int) -> Figure:
    """Draw a row for each window of a text: grey for the tokens that it reads, coloured for the labels that it scores.

    windows: in the order of the text. tokens: number of tokens in the text. length: tokens that a window reads.

    Raises ValueError without a window.
    """
    if not windows:
        raise ValueError("scoring_windows needs at least one window")
    drawn = windows[:MAX_WINDOWS]
    with styled():
        fig = new_figure(7.4, 1.1 + 0.24 * len(drawn))
        axes = fig.subplots()
        for row, (start, first, end) in enumerate(drawn):
            axes.add_patch(Rectangle((start, row + 0.12), min(length, tokens - start), 0.76, facecolor=_READ))
            axes.add_patch(Rectangle((first, row + 0.12), end - first, 0.76, facecolor=_SCORED))
        axes.set(xlim=(0, max(end for *_, end in drawn)), ylim=(len(drawn), 0))
        axes.set(xlabel="position in the text", ylabel="window", yticks=[])
        axes.spines[["left"]].set_visible(False)
        handles = [Patch(facecolor=_READ, label="read"), Patch(facecolor=_SCORED, label="label scored")]
        fig.legend(handles=handles, loc="outside upper right", ncols=2)
    more = "" if len(drawn) == len(windows) else f", of which {len(drawn)} are drawn"
    scored = [end - first for _, first, end in windows]
    return Figure(
        fig,
        f"{len(windows)} windows of {length} tokens over {tokens:,} tokens{more}: the first scores {scored[0]} labels, "
        f"the last {scored[-1]}, all together {sum(scored):,}.",
    )


# ---- prices of tokens ----


def token_prices(rows: Mapping[str, Sequence[tuple[str, float]]], *, unit: str = "bits") -> Figure:
    """Draw one text per row, cut into tokens: a box spans its token's characters, and is the darker the more it costs.

    rows: name of a model -> (token as text, what it costs) in order. All rows must be the same text, so that the same
    characters are below each other, however they are cut. A token that costs at least 0.3 has its price above it,
    unless a price before it leaves no room.

    Raises ValueError without a row, for an empty text, and for rows that are not the same text.
    """
    texts = {"".join(token for token, _ in row) for row in rows.values()}
    if len(texts) != 1 or "" in texts:
        raise ValueError("token_prices needs at least one row, and the same text in all rows")
    (text,) = texts
    most = max(1.0, max(price for row in rows.values() for _, price in row))
    with styled():
        fig = new_figure(7.6, 0.7 + 0.52 * len(rows))
        axes = fig.subplots()
        for number, row in enumerate(rows.values()):
            start, free = 0, -1.0
            for token, price in row:
                shade = mixed(SEQUENCE[0], 1 - max(0.0, min(1.0, price / most)))
                axes.add_patch(Rectangle((start, number + 0.36), len(token), 0.56, fc=shade, ec="#999999", lw=0.5))
                for place, character in enumerate(token.replace("\n", "\u21b5").replace(" ", "\u00b7"), start):
                    axes.text(place + 0.5, number + 0.64, character, ha="center", va="center", fontsize=6.5,
                              family="monospace", color=text_color(shade))  # fmt: skip
                middle = start + len(token) / 2
                if price >= _SHOWN_PRICE and middle > free:
                    free = middle + _PRICE_WIDTH
                    axes.text(middle, number + 0.2, f"{price:.1f}", ha="center", va="center",
                              fontsize=6.5)  # fmt: skip
                start += len(token)
        totals = {name: sum(price for _, price in row) for name, row in rows.items()}
        name_rows(axes, [f"{name}\n{total:.1f} {unit}" for name, total in totals.items()])
        axes.set(xlim=(0, len(text)), xticks=[])
        axes.spines[:].set_visible(False)
    parts = [f"{name} {total:.1f} in {len(rows[name])} tokens" for name, total in totals.items()]
    return Figure(fig, f"{unit} for {len(text)} characters: {', '.join(parts)}.")


# ---- choices of a token ----


def token_choices(words: Sequence[str], panels: Mapping[str, Sequence[float]]) -> Figure:
    """Draw a panel of bars for each way of choosing: the probability of each token, in one order and on one axis.

    words: the tokens as text, most likely first.
    panels: name of a way -> probability of each of these tokens; 0 for a token that the way leaves out.

    Raises ValueError without a panel, and if there are not as many numbers as words.
    """
    if not panels or any(len(values) != len(words) for values in panels.values()):
        raise ValueError(f"token_choices needs at least one panel, and {len(words)} probabilities in each")
    with styled():
        fig = new_figure(7.4, 1.0 + 0.19 * len(words))
        every = fig.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
        for axes, (name, values) in zip(every, panels.items()):
            axes.barh(range(len(words)), values, height=0.7, color=SEQUENCE[0])
            for place, value in enumerate(values):
                if value == 0:
                    axes.text(0, place, " out", va="center", fontsize=7, color="#777777")
            axes.set_title(name, loc="left")
            axes.set_xlabel("probability")
            axes.tick_params(axis="y", length=0)
        name_rows(every[0], [repr(word)[1:-1] for word in words], bars=True)
    parts = [
        f"{name}: {sum(value > 0 for value in values)} of {len(words)} left, the first has {values[0]:.2f}"
        for name, values in panels.items()
    ]
    return Figure(fig, "; ".join(parts) + ".")


# ---- curves ----

Points = Sequence[tuple[float, float]]


def named_curves(
    curves: Mapping[str, Points], *, x: str, y: str, log: bool = False, levels: Mapping[str, float] | None = None
) -> Figure:
    """Draw a line with marks for each curve, over an axis named `x`; the sentence has both ends of each.

    curves: name -> (x, y) points, in order. log: make the axis of y logarithmic. levels: name -> y of a grey line.

    Raises ValueError without a curve, and for a curve without a point.
    """
    if not curves or not all(len(points) for points in curves.values()):
        raise ValueError("named_curves needs at least one curve with at least one point")
    with styled():
        fig = new_figure(7.2, 3.0)
        axes = fig.subplots()
        for number, (name, points) in enumerate(curves.items()):
            style: dict[str, Any] = {"color": nth_color(number), "marker": "os^Dv"[number % 5]}
            axes.plot(*zip(*points), lw=1.8, ms=4, label=name, ls=("-", "--", "-.", ":")[number % 4], **style)
        for name, level in (levels or {}).items():
            axes.axhline(level, color=_LEVEL, lw=1.4, ls="--", label=name, zorder=1)
        axes.set(xlabel=x, ylabel=y, yscale="log" if log else "linear")
        axes.grid(axis="y")
        if all(float(at).is_integer() for points in curves.values() for at, _ in points):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        if len(curves) > 3:
            fig.legend(loc="outside lower center", ncols=4)  # next to the curves there may be no room for so many
        elif len(curves) > 1:
            axes.legend(loc="best")
    ends = [
        f"{name} {points[0][1]:.3g} at {points[0][0]:g}"
        + (f", {points[-1][1]:.3g} at {points[-1][0]:g}" if len(points) > 1 else "")
        for name, points in curves.items()
    ]
    ends += [f"{name} {level:.3g}" for name, level in (levels or {}).items()]
    return Figure(fig, f"{y} by {x}: {'; '.join(ends)}.")
