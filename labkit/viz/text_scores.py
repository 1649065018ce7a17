"""Figures of an evaluated language model: windows over a text, choices of the next token, curves with named axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from labkit.viz.figure import Figure
from labkit.viz.style import SEQUENCE, name_rows, new_figure, styled

_READ, _SCORED = "#D9D9D9", SEQUENCE[0]
MAX_WINDOWS = 12
"""Windows that are drawn; if there are more, the first ones."""

# ---- windows ----


def scoring_windows(starts: Sequence[int], tokens: int, length: int, stride: int) -> Figure:
    """Draw a row for each window of a text: grey for the tokens that it reads, coloured for the labels that it scores.

    starts: first token of each window. tokens: number of tokens in the text. length: tokens that a window reads.
    stride: tokens by which a window moves; the first window scores all its labels, each later one its last `stride`.

    Raises ValueError without a window.
    """
    if not starts:
        raise ValueError("scoring_windows needs at least one window")
    firsts = [1 if start == 0 else start + length - stride + 1 for start in starts]
    ends = [min(start + length + 1, tokens) for start in starts]
    drawn = list(zip(starts, firsts, ends))[:MAX_WINDOWS]
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
    more = "" if len(drawn) == len(starts) else f", of which {len(drawn)} are drawn"
    scored = [end - first for first, end in zip(firsts, ends)]
    return Figure(
        fig,
        f"{len(starts)} windows of {length} tokens over {tokens:,} tokens{more}: the first scores {scored[0]} labels, "
        f"the last {scored[-1]}, all together {sum(scored):,}.",
    )


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


def named_curves(curves: Mapping[str, Points], *, x: str, y: str, log: bool = False) -> Figure:
    """Draw a line with marks for each curve, over an axis named `x`; the sentence has both ends of each.

    curves: name -> (x, y) points, in order. log: make the axis of y logarithmic.

    Raises ValueError without a curve, and for a curve without a point.
    """
    if not curves or not all(len(points) for points in curves.values()):
        raise ValueError("named_curves needs at least one curve with at least one point")
    with styled():
        fig = new_figure(7.2, 3.0)
        axes = fig.subplots()
        for number, (name, points) in enumerate(curves.items()):
            style: dict[str, Any] = {"color": SEQUENCE[number % len(SEQUENCE)], "marker": "os^Dv"[number % 5]}
            axes.plot(*zip(*points), lw=1.8, ms=4, label=name, ls=("-", "--", "-.", ":")[number % 4], **style)
        axes.set(xlabel=x, ylabel=y, yscale="log" if log else "linear")
        axes.grid(axis="y")
        if all(float(at).is_integer() for points in curves.values() for at, _ in points):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(curves) > 3:
            fig.legend(loc="outside lower center", ncols=4)  # next to the curves there may be no room for so many
        elif len(curves) > 1:
            axes.legend(loc="best")
    ends = [
        f"{name} {points[0][1]:.3g} at {points[0][0]:g}"
        + (f", {points[-1][1]:.3g} at {points[-1][0]:g}" if len(points) > 1 else "")
        for name, points in curves.items()
    ]
    return Figure(fig, f"{y} by {x}: {'; '.join(ends)}.")
