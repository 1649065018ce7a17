"""Chunks on ranks, matrices between them, times of links: drawn as given, and sentences with their numbers."""

import numpy as np
from matplotlib.colors import to_hex

from labkit.viz import bandwidth_by_size, before_and_after, rank_matrices, ring_and_tree, term_bars
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


def test_a_matrix_and_its_transpose_are_told():
    gather = np.vstack([np.eye(2)] * 2)
    figure = rank_matrices({"gather": gather, "scatter": gather.T, "swap": np.eye(4)[[0, 2, 1, 3]]}, 2)
    assert figure.sentence == (
        "3 matrices of 2 ranks; transposes: gather of scatter, scatter of gather; their own: swap."
    )
    first = figure.fig.axes[0]
    assert [t.get_text() for t in first.texts] == [*"10011001", "from 0", "from 1", "to 0", "to 1"]


def test_terms_are_outlined_one_after_another_and_the_measured_time_is_filled():
    figure = term_bars([16, 64], {"latency": [1e-3, 1e-3], "bytes": [1e-3, 4e-3]}, [3e-3, 6e-3], of="a ring")
    bars = [(p.get_x(), p.get_width()) for p in figure.fig.axes[0].patches]
    np.testing.assert_allclose(bars, [(0, 1), (1, 1), (0, 3), (0, 1), (1, 4), (0, 6)], atol=1e-9)
    assert figure.sentence == "Time of a ring of 16 to 64 bytes: latency and bytes predicted, and measured."


def test_a_tree_of_eight_nodes_has_three_levels():
    figure = ring_and_tree(8)
    assert figure.sentence.startswith("An all-reduce over 8 nodes: a ring takes 14 steps, a tree 6.")
    ring, tree = figure.fig.axes
    assert [len([t for t in axes.texts if not t.get_text()]) for axes in (ring, tree)] == [8, 2 * 7]
    levels = [text.get_position()[1] for text in tree.texts if text.get_text()]
    assert levels == [3, 0, 1, 0, 2, 0, 1, 0]


def test_half_of_the_largest_bandwidth_is_told():
    figure = bandwidth_by_size({"a": ([1e3, 2e6, 3e9], [1e9, 5e9, 10e9])}, {"a": ([1e3], [2e9])}, links={"b": 4e9})
    assert figure.sentence == "Bus bandwidth by size: a half at 2 MB."
    assert [float(line.get_ydata()[-1]) for line in figure.fig.axes[0].lines] == [10, 5, 2, 4]
    told = [text.get_text() for text in figure.fig.legends[0].get_texts()]
    assert told == ["a", "a, measured", "b", "half of its largest"]
