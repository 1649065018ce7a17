"""Figures of a cut vocabulary: rectangles, bars and sentences are those of the numbers given."""

import numpy as np
import pytest
import torch
from matplotlib.patches import Rectangle

from labkit.viz import added_rows, memory_of_losses, split_softmax, vocabulary_shards


def test_each_id_stands_in_the_row_of_its_owner():
    figure = vocabulary_shards(10, 6, 2, [0, 5, 6, 9])
    table, owners = figure.fig.axes
    assert [(p.get_x(), p.get_width()) for p in table.patches if isinstance(p, Rectangle)] == [(0, 6), (6, 6), (10, 2)]
    cells = {(text.get_position(), text.get_text()) for text in owners.texts}
    columns = (("0", "0"), ("5", "0"), ("0", "6"), ("0", "9"))
    assert cells == {((c + 0.5, r + 0.5), word) for c, words in enumerate(columns) for r, word in enumerate(words)}
    assert figure.sentence == (
        "10 words in a table of 12 rows over 2 ranks: 6 rows each, 2 of them padding in all; of 4 ids rank 0 owns "
        "2, rank 1 owns 2."
    )
    assert figure.png.startswith(b"\x89PNG")


def test_the_lower_panel_is_the_gradient_of_torch_and_the_sentence_has_its_loss():
    values = [0.5, -1.0, 2.0, 0.0, 1.5, -0.5, 3.0, 1.0]
    logits = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits[None], torch.tensor([4]))
    loss.backward()
    figure = split_softmax(values, 4, 4)
    above, below = figure.fig.axes
    assert np.allclose([p.get_height() for p in above.patches], values)
    assert np.allclose([p.get_height() for p in below.patches], logits.grad)
    shades = [p.get_facecolor() for p in below.patches]
    assert shades[0] == shades[1] != shades[2] == shades[3] and len(set(shades)) == 4
    assert f"so the loss is {loss.item():.2f} and the label's gradient {logits.grad[4].item():.2f}." in figure.sentence
    assert "label 4 on rank 2 has 1.50" in figure.sentence


def test_a_reader_sees_which_rows_of_the_lookup_are_wrong():
    figure = added_rows([[0, 0], [4, 5]], [0, 5], 4)
    yours, right = figure.fig.axes
    assert [text.get_text() for text in yours.texts] == ["0", "0", "4", "5"]
    assert [text.get_text() for text in right.texts] == ["0", "0", "0", "5"]
    assert [p.get_linewidth() for p in yours.patches] == [1.0, 2.0, 2.0, 1.0]
    assert figure.sentence == "Of 2 ids on 2 ranks 2 cells are wrong."


def test_memory_is_drawn_on_one_axis_with_the_predicted_peak_as_an_outline():
    figure = memory_of_losses({"gathered": [0, 3.1, 1], "parallel": [0.5, 0.4]}, {"gathered": 3, "parallel": 0.5}, "GB")
    first, second = figure.fig.axes
    assert first.get_ylim() == second.get_ylim() and first.get_yscale() == "linear"
    assert [axes.patches[0].get_height() for axes in (first, second)] == [3, 0.5] and not first.patches[0].get_fill()
    assert figure.sentence == "Peaks in GB: gathered 3.10 of 3.00 predicted, parallel 0.50 of 0.50 predicted."


def test_the_end_of_forward_is_marked_and_what_is_small_is_enlarged():
    ways = {"gathered": [1, 3, 1], "chunk by chunk": [0.1, 0.2]}
    figure = memory_of_losses(ways, {"gathered": 3, "chunk by chunk": 0.2}, "GB", {"gathered": 2})
    first, second = figure.fig.axes
    assert [list(line.get_xdata()) for line in first.lines] == [[2, 2]] and not second.lines
    assert not first.child_axes and [axes.get_ylim() for axes in second.child_axes] == [(0, pytest.approx(0.22))]
