"""Which rank holds which numbers of an MLP's two matrices, as a function that cuts the stored weights has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.viz.figure import Figure
from labkit.viz.style import SEQUENCE, box, handle, new_figure, styled

Cut = Callable[[NDArray[np.int64], NDArray[np.int64], int, int], Any]
"""(fc1, fc2, rank, ranks) -> this rank's parts of both, as torch stores them."""
_CELL = 0.26
"""Inches across a number."""
_NOBODY, _SEVERAL = "#FFFFFF", "#999999"


def weight_parts(parts: Cut, ranks: int, width: int = 2) -> Figure:
    """Draw A [h, 4h] and B [4h, h] twice: as the formula cuts them, and as `parts` cuts what torch stores of them.

    parts: cuts fc1 (A transposed) and fc2 (B transposed). It gets matrices in which every number occurs once.
    ranks: ranks of the cut. width: h, raised to `ranks` if that is more, so that each side can be cut.

    A number has the colour of the rank that holds it; it is white if none does, and grey if several do.
    """
    h = max(width, ranks)
    numbers = np.arange(4 * h * h)
    a, b = numbers.reshape(h, 4 * h), numbers.reshape(4 * h, h)
    held = [parts(a.T.copy(), b.T.copy(), rank, ranks) for rank in range(ranks)]
    found = [_holders([part[number] for part in held], matrix) for number, matrix in enumerate((a, b))]
    right = [np.tile(np.repeat(np.arange(ranks), 4 * h // ranks), (h, 1))]
    right.append(right[0].T)
    cell = min(_CELL, 2.4 / (2.5 * h))
    with styled():
        fig = new_figure(9.2, cell * 4 * h + 0.85)
        panels = fig.subplots(1, 4, width_ratios=[4, 1.6, 4, 1.6])
        titles = ("A, by columns", "B, by rows", "A, from your fc1", "B, from your fc2")
        for axes, title, matrix in zip(panels, titles, (*right, *found), strict=True):
            _draw(axes, matrix, named=h <= 4)
            axes.set_title(title, fontsize=9)
        handles = [handle(f"rank {rank}", SEQUENCE[rank]) for rank in range(ranks)]
        handles += [handle("several ranks", _SEVERAL)] * any((each == -2).any() for each in found)
        handles += [handle("nobody", _NOBODY)] * any((each == -1).any() for each in found)
        fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    names = ", ".join(f"{name} {'as it should be' if (each == like).all() else 'otherwise'}"
                      for name, each, like in zip("AB", found, right))  # fmt: skip
    return Figure(fig, f"{ranks} ranks: {names}.")


def _holders(held: list[Any], matrix: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each number of the matrix its rank; -1 if no rank has it, -2 if several have."""
    has = np.array([np.isin(matrix, np.asarray(part)) for part in held])
    return np.where(has.sum(0) == 1, has.argmax(0), np.where(has.any(0), -2, -1))


def _draw(axes: Any, holders: NDArray[np.int64], *, named: bool) -> None:
    rows, columns = holders.shape
    for row, column in np.ndindex(rows, columns):
        rank = int(holders[row, column])
        fill = SEQUENCE[rank] if rank >= 0 else _SEVERAL if rank == -2 else _NOBODY
        box(axes, (column, row), 1, 1, fill, f"{rank}" if named and rank >= 0 else "", size=7, edgecolor="#FFFFFF"
            if rank != -1 else "#BBBBBB")  # fmt: skip
    axes.set(xlim=(-0.1, columns + 0.1), ylim=(rows + 0.1, -0.1), aspect="equal")
    axes.axis("off")
