"""Which positions each position of a result depends on, as one map for each kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from labkit.viz.figure import Figure
from labkit.viz.style import new_figure, nth_color, styled

_UNREAD = "#E6E6E6"


def read_positions(maps: Mapping[str, Any], rows: str, columns: str) -> Figure:
    """Draw a map for each name: a coloured cell where the row's position reads the column's, a grey one elsewhere.

    maps: name -> booleans [positions that read, positions that are read]. rows, columns: labels of the axes.

    Raises ValueError without a map.
    """
    reads = {name: np.asarray(values, dtype=bool) for name, values in maps.items()}
    if not reads:
        raise ValueError("read_positions needs at least one map")
    with styled():
        fig = new_figure(7.4, 2.9)
        for number, (axes, (name, each)) in enumerate(
            zip(fig.subplots(1, len(reads), squeeze=False)[0], reads.items())
        ):
            height, width = each.shape
            for row, column in np.ndindex(height, width):
                fill = nth_color(number) if each[row, column] else _UNREAD
                axes.fill_between([column - 0.5, column + 0.5], row - 0.5, row + 0.5, color=fill, ec="white", lw=0.8)
            axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5), aspect="equal", anchor="N")
            axes.set(xlabel=columns, ylabel=rows)
            axes.set_title(name, loc="left")
            axes.set_xticks(range(0, width, 1 + width // 10))
            axes.set_yticks(range(0, height, 1 + height // 10))
            axes.spines[:].set_visible(False)
            axes.tick_params(length=0)
    said = "; ".join(f"{name}: {each.sum()} of {each.size} pairs" for name, each in reads.items())
    return Figure(fig, f"Positions that are read. {said}.")
