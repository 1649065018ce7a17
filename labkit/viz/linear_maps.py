"""Linear maps between what ranks hold before and after a collective, as matrices of zeros and ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.patches import Rectangle

from labkit.viz.figure import Figure
from labkit.viz.style import INK, box, new_figure, nth_color, styled

_CELL = 0.33
"""Inches across a cell."""


def rank_matrices(matrices: Mapping[str, Any], ranks: int) -> Figure:
    """Draw each matrix [numbers after, numbers before]; a filled cell is a one, in the colour of the sending rank.

    Rows are what the ranks hold afterwards and columns what they held before, rank 0 first; thin gaps separate ranks.

    Raises ValueError without a matrix, and if the ranks do not share its rows and columns equally.
    """
    found = {name: np.asarray(matrix) for name, matrix in matrices.items()}
    if not found or any(side % ranks for matrix in found.values() for side in matrix.shape):
        raise ValueError(f"give matrices whose rows and columns {ranks} ranks share equally")
    wide = [matrix.shape[1] for matrix in found.values()]
    high = max(matrix.shape[0] for matrix in found.values())
    with styled():
        fig = new_figure(1.15 * _CELL * sum(each + 1.7 for each in wide), _CELL * (high + 2.6))
        panels = fig.subplots(1, len(found), squeeze=False, width_ratios=[each + 1.7 for each in wide])[0]
        for axes, (name, matrix) in zip(panels, found.items()):
            _draw(axes, matrix, ranks, high)
            axes.set_title(name, fontsize=9)
    pairs = [
        f"{name} of {other}"
        for name, matrix in found.items()
        for other, another in found.items()
        if name != other and np.array_equal(matrix.T, another)
    ]
    own = [name for name, matrix in found.items() if np.array_equal(matrix, matrix.T)]
    told = [f"transposes: {', '.join(pairs)}"] * bool(pairs) + [f"their own: {', '.join(own)}"] * bool(own)
    return Figure(fig, f"{len(found)} matrices of {ranks} ranks; {'; '.join(told) or 'none is a transpose'}.")


def _draw(axes: Any, matrix: np.ndarray, ranks: int, high: int) -> None:
    rows, columns = matrix.shape
    for row in range(rows):
        for column in range(columns):
            sender = column * ranks // columns
            fill = nth_color(sender) if matrix[row, column] else "#FFFFFF"
            box(axes, (column, row), 1, 1, fill, f"{int(matrix[row, column])}", edgecolor="#BBBBBB")
    for side, count in ((0, columns), (1, rows)):
        for rank in range(ranks):
            start, length = rank * count / ranks, count / ranks
            corner, size = ((start, 0), (length, rows)) if side == 0 else ((0, start), (columns, length))
            axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor=INK, linewidth=1.6))
            middle = start + length / 2
            if side == 0:
                axes.text(middle, rows + 0.15, f"from {rank}", ha="center", va="top", fontsize=7.5)
            else:
                axes.text(-0.15, middle, f"to {rank}", ha="right", va="center", fontsize=7.5)
    axes.set(xlim=(-1.6, columns + 0.1), ylim=(high + 0.8, -0.2), aspect="equal")
    axes.axis("off")
