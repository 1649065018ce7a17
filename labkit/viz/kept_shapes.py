"""Shapes of tensors that a rank keeps: a reader's next to the right ones, each as a part of the whole tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.viz.figure import Figure
from labkit.viz.style import ALERT, SEQUENCE, box, new_figure, styled

Shape = Sequence[int]
_SIDE = 0.8


def compare_shapes(
    yours: Mapping[str, Shape], right: Mapping[str, Shape], whole: Mapping[str, Shape], what: str
) -> Figure:
    """Draw each tensor [positions, samples, width] twice: what the reader says a rank keeps, and what it keeps.

    An outline is the whole tensor of `whole`, with positions downwards and width to the right. Wrong shapes have a red
    outline. what: the first words of the sentence.
    """
    wrong = [name for name in right if list(yours[name]) != list(right[name])]
    with styled():
        fig = new_figure(8.6, 3.2)
        axes = fig.subplots()
        for place, name in enumerate(right):
            axes.text(place + _SIDE / 2, 2.3, name, ha="center", fontsize=9)
            _draw_part(axes, place, 1.25, yours[name], whole[name], ALERT if name in wrong else "")
            _draw_part(axes, place, 0.0, right[name], whole[name], "")
        for height, words in ((1.65, "yours"), (0.4, "right")):
            axes.text(-0.1, height, words, ha="right", va="center", fontsize=9)
        axes.set(xlim=(-0.6, len(right)), ylim=(-0.25, 2.5))
        axes.axis("off")
    said = f"{', '.join(wrong)} {'differs' if len(wrong) == 1 else 'differ'}" if wrong else "all shapes are right"
    return Figure(fig, f"{what}: {said}.")


def _draw_part(axes: Any, x: float, y: float, shape: Shape, whole: Shape, mark: str) -> None:
    """Draw a whole tensor as an outline and the part of it that has this shape, from its first entries on."""
    outline = {"edgecolor": mark, "linewidth": 2.5, "zorder": 3} if mark else {}
    high, wide = (_SIDE * min(1.0, part / of) for part, of in ((shape[0], whole[0]), (shape[-1], whole[-1])))
    box(axes, (x, y), _SIDE, _SIDE, "#FFFFFF", **outline)
    box(axes, (x, y + _SIDE - high), wide, high, SEQUENCE[0], zorder=4)
    axes.text(x + _SIDE / 2, y - 0.05, str(list(shape)), ha="center", va="top", fontsize=8, color=mark or "#000000")
