"""Two matrices cut over the ranks of a tensor-parallel group, drawn to scale with the shapes of their parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.viz.figure import Figure
from labkit.viz.style import SEQUENCE, box, color, new_figure, styled, text_color

PARTS = {
    ("mlp", False): ("A", 4, "GeLU", "B", 4), ("attention", False): ("q, k, v", 3, "heads", "P", 1),
    ("mlp", True): ("Bᵀ", 4, "GeLU′", "Aᵀ", 4),
}  # fmt: skip
"""Part of a layer, and whether backward -> (first matrix, its columns in units of h, what follows, second matrix, its
rows in units of h)."""

_GAP = 0.62
_TOKENS = 0.7  # height of [tokens, ..] in units of h: the same in all pictures, for any number of tokens


def cut_matrices(part: str, tokens: int, hidden: int, ranks: int, *, backward: bool = False, heads: int = 0) -> Figure:
    """Draw X, a matrix cut by columns, the product, a matrix cut by rows, and the sum; each rank has a colour.

    part: `mlp` (hidden to 4 hidden and back) or `attention` (q, k and v, then the projection P).
    tokens: rows of X. The picture draws equal sides with equal length, but tokens and hidden not to one scale.
    backward: draw the way from dY to dX, for `mlp` alone: the transposed matrices, with g first and f at the end.
    heads: of attention; thin lines between their columns of q, k, v and of what they make. None are drawn for 0.

    Raises ValueError for another part, or if the ranks do not divide hidden.
    """
    if (part, backward) not in PARTS:
        known = " or ".join(name for name, back in PARTS if back == backward)
        raise ValueError(f"no part {part!r} of a layer; choose {known}")
    if hidden % ranks:
        raise ValueError(f"{ranks} ranks do not divide {hidden} columns")
    first, wide, between, second, deep = PARTS[part, backward]
    start, end = ("dY", "dX") if backward else ("X", "Y")
    sizes = {start: (tokens, hidden), first: (hidden, wide * hidden), between: (tokens, deep * hidden),
             second: (deep * hidden, hidden), end: (tokens, hidden)}  # fmt: skip
    with styled():
        top, x = max(deep, 1.2), 0.0
        right = 3 + wide + deep + 4 * _GAP
        fig = new_figure(9.0, 9.0 * (top + 1.2) / (right + 0.6))
        axes = fig.subplots()
        for index, (name, cut) in enumerate(zip(sizes, (_whole, _columns, _columns, _rows, _sum))):
            width = {start: 1.0, first: wide, between: deep, second: 1.0, end: 1.0}[name]
            height = {start: _TOKENS, first: 1.0, between: _TOKENS, second: deep, end: _TOKENS}[name]
            cut(axes, x, (top - height) / 2, width, height, ranks)
            for border in range(1, heads if cut is _columns else 0):
                at = x + border * width / heads
                axes.plot((at, at), ((top - height) / 2, (top + height) / 2), color="#FFFFFF", linewidth=0.5)
            _label(
                axes,
                x + width / 2,
                (top - height) / 2,
                height,
                name,
                _shapes(sizes[name], cut, ranks),
                last=name == end,
            )
            if name != end:
                axes.text(x + width + _GAP / 2, top / 2, "→" if name in (first, second) else "·", ha="center",
                          va="center", fontsize=11 if name in (first, second) else 18)  # fmt: skip
            for operator, at in (("g" if backward else "f", 0), ("f" if backward else "g", 3)):
                if index == at:
                    _operator(axes, x + width + _GAP / 2, top / 2 + 0.25, operator)
            x += width + _GAP
        axes.set(xlim=(-0.3, right + 0.3), ylim=(-0.7, top + 0.5), aspect="equal")
        axes.axis("off")
    return Figure(fig, _sentence(f"{part}, backward," if backward else part, sizes, first, second, ranks, start))


def _whole(axes: Any, x: float, y: float, width: float, height: float, ranks: int) -> None:
    _draw(axes, x, y, width, height, "#DDDDDD", "all")


def _columns(axes: Any, x: float, y: float, width: float, height: float, ranks: int) -> None:
    for rank in range(ranks):
        _draw(axes, x + rank * width / ranks, y, width / ranks, height, SEQUENCE[rank], f"{rank}")


def _rows(axes: Any, x: float, y: float, width: float, height: float, ranks: int) -> None:
    for rank in range(ranks):
        _draw(axes, x, y + height - (rank + 1) * height / ranks, width, height / ranks, SEQUENCE[rank], f"{rank}")


def _sum(axes: Any, x: float, y: float, width: float, height: float, ranks: int) -> None:
    """Draw one sheet for each rank's partial sum, and the whole sum in front."""
    for rank in reversed(range(ranks)):
        shift = 0.24 * (rank + 1) / ranks
        _draw(axes, x + shift, y + shift, width, height, SEQUENCE[rank], "")
    _draw(axes, x, y, width, height, "#DDDDDD", "sum")


Cut = Callable[[Any, float, float, float, float, int], None]


def _shapes(size: tuple[int, int], cut: Cut, ranks: int) -> str:
    """Return the shape of the whole, and below it the shape of one rank's part."""
    rows, columns = size
    part = (rows, columns // ranks) if cut is _columns else (rows // ranks, columns) if cut is _rows else None
    whole = f"[{rows}, {columns}]"
    return f"{whole}\nper rank: [{part[0]}, {part[1]}]" if part else whole


def _draw(axes: Any, x: float, y: float, width: float, height: float, face: str, text: str) -> None:
    fits = min(width, height) > 0.16
    box(axes, (x, y), width, height, face, text if fits else "", size=7)


def _label(axes: Any, x: float, y: float, height: float, name: str, shapes: str, *, last: bool) -> None:
    axes.text(x, y + height + 0.08, "" if last else name, ha="center", va="bottom", fontsize=9)
    axes.text(x, y - 0.08, (f"{name} " if last else "") + shapes, ha="center", va="top", fontsize=7, linespacing=1.2)


def _operator(axes: Any, x: float, y: float, operator: str) -> None:
    face = color("collective")
    box = {"boxstyle": "round,pad=0.25", "facecolor": face, "edgecolor": "#333333", "linewidth": 0.5}
    axes.text(x, y, operator, ha="center", va="bottom", fontsize=9, style="italic", color=text_color(face), bbox=box)


def _sentence(part: str, sizes: dict[str, tuple[int, int]], first: str, second: str, ranks: int,
              start: str) -> str:  # fmt: skip
    (h, wide), (deep, _), (tokens, _) = sizes[first], sizes[second], sizes[start]
    return (
        f"{part} over {ranks} ranks: a rank has {wide // ranks:,} of {wide:,} columns of {first} and {deep // ranks:,} "
        f"of {deep:,} rows of {second}; after {second} the sum has [{tokens}, {h}] numbers."
    )
