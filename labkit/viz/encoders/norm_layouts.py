"""Figure 7 of the Megatron-LM paper (arXiv 1909.08053) redrawn: norms next to the residual stream, or in it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from labkit.viz.figure import Figure
from labkit.viz.style import SEQUENCE, box, new_figure, styled

_PART, _NORM, _LINE = SEQUENCE[0], SEQUENCE[1], "#333333"
_TITLES = {"post": "post: the original BERT (figure 7a)", "pre": "pre: rearranged (figure 7b)"}
_HALF = 3.0
"""Height of one half of a layer."""


def norm_layouts(layers: int) -> Figure:
    """Draw one layer of both layouts from bottom to top, with what is before the first and after the last layer.

    The thick line is the residual stream. layers: layers of the model, for the number of norms that the stream passes.

    Raises ValueError for a model without a layer.
    """
    if layers < 1:
        raise ValueError(f"{layers} layers: a model has one or more")
    with styled():
        fig = new_figure(7.4, 4.6)
        for axes, (placement, title) in zip(fig.subplots(1, 2, sharey=True), _TITLES.items()):
            _draw(axes, placement)
            axes.set_title(title, loc="left")
            axes.set(xlim=(-1.2, 3.4), ylim=(-1.9, 2 * _HALF + 2.0))
            axes.axis("off")
    norms = 2 * layers + 1
    return Figure(
        fig,
        f"Both layouts have {norms} norms in {layers} layers. On the way from the loss to the embeddings the residual "
        f"stream passes {norms} of them in post, and 1 in pre, the final one.",
    )


def _draw(axes: Any, placement: str) -> None:
    top = 2 * _HALF
    axes.plot([0, 0], [-1.0, top + 1.3], color=_LINE, linewidth=3.2, zorder=1, solid_capstyle="butt")
    _box(axes, 0, -1.35, "embeddings", "#D9D9D9")
    if placement == "post":
        _box(axes, 0, -0.45, "norm", _NORM)
    else:
        _box(axes, 0, top + 0.75, "final norm", _NORM)
    _box(axes, 0, top + 1.6, "heads and loss", "#D9D9D9")
    for base, name in ((0.0, "attention"), (_HALF, "MLP")):
        _draw_half(axes, placement, base, name)
    axes.annotate("one layer", (3.25, _HALF), rotation=90, ha="center", va="center", fontsize=8, color="#777777")
    axes.plot([3.0, 3.0], [0.05, top - 0.05], color="#BBBBBB", linewidth=0.8)


def _draw_half(axes: Any, placement: str, base: float, name: str) -> None:
    """Draw the branch, which leaves the stream to the right and returns to a plus; heights count from `base`."""
    first, plus = base + 0.3, base + 2.0 if placement == "post" else base + 2.6
    boxes = [("norm", _NORM, base + 0.8), (name, _PART, base + 1.75)] if placement == "pre" else [
        (name, _PART, base + 1.15)
    ]  # fmt: skip
    corners = [(0.0, first), (1.9, first), (1.9, plus), (0.0, plus)]
    for (x, y), (other_x, other_y) in pairwise(corners):
        axes.plot([x, other_x], [y, other_y], color=_LINE, linewidth=1.2, zorder=1)
    for text, fill, height in boxes:
        _box(axes, 1.9, height, text, fill)
    if placement == "post":
        _box(axes, 0, base + 2.65, "norm", _NORM)
    axes.plot(0, plus, marker="o", markersize=11, color="#FFFFFF", markeredgecolor=_LINE, zorder=3)
    axes.plot(0, plus, marker="+", markersize=7, color=_LINE, zorder=4)


def _box(axes: Any, x: float, y: float, text: str, fill: str) -> None:
    width, height = 1.7, 0.5
    box(axes, (x - width / 2, y - height / 2), width, height, fill, text, linewidth=0.8, zorder=2)
