"""Chunks on ranks: stripes and frames are those of the numbers given, sentences count them."""

import numpy as np
from matplotlib.colors import to_hex

from labkit.viz import before_and_after
from labkit.viz.style import SEQUENCE

WHOLE = list(np.eye(9).reshape(3, 3, 3, 3))
"""Chunk c of rank r has its one at [r, c]."""
SUMS = sum(WHOLE)


def stripes(axes, column, row):
    """Colours of the parts of a cell, from top to bottom; an empty cell has none."""
    filled = [p for p in axes.patches if p.get_fill() and int(p.get_x() + 0.01) == column and p.get_linewidth() == 0]
    return [to_hex(p.get_facecolor()).upper() for p in filled if row <= p.get_y() + 1e-9 < row + 1 - 1e-9]


def frames(axes):
    return {to_hex(p.get_edgecolor()).upper() for p in axes.patches if not p.get_fill()}


def test_a_cell_has_the_colours_of_the_ranks_in_it_and_a_lone_chunk_stands_in_its_column():
    scattered = [SUMS[rank : rank + 1] for rank in range(3)]
    figure = before_and_after({"all-reduce": (WHOLE, [SUMS] * 3), "reduce-scatter": (WHOLE, scattered)})
    above, other, all_sums, own_sums = figure.fig.axes
    assert all(stripes(above, c, r) == [SEQUENCE[r]] for r in range(3) for c in range(3))
    assert all(stripes(all_sums, c, r) == list(SEQUENCE[:3]) for r in range(3) for c in range(3))
    assert [bool(stripes(own_sums, c, r)) for r in range(3) for c in range(3)] == [
        r == c for r in range(3) for c in range(3)
    ]
    assert frames(other) == {"#FFFFFF"} and frames(own_sums) == {"#000000"}
    assert figure.sentence == (
        "Chunks of a rank, of 3 ranks: all-reduce 3 before and 3 sums after; reduce-scatter 3 before and 1 sum after."
    )
    assert figure.png.startswith(b"\x89PNG")
