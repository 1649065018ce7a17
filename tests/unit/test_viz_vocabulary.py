"""Figures of a cut vocabulary: rectangles, bars and sentences are those of the numbers given."""

import numpy as np
import torch
from matplotlib.patches import Rectangle

from labkit.viz import loss_costs, split_softmax, vocabulary_shards


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


def test_costs_share_an_axis_and_the_sentence_says_how_far_they_are_from_the_prediction():
    ways = {"gather": {"sent": (1000, 1000), "kept": (5e6, 5.1e6)}, "fused": {"sent": (12, 12), "kept": (4e5, 4e5)}}
    figure = loss_costs(ways)
    panels = figure.fig.axes
    assert [axes.get_title(loc="left") for axes in panels] == ["sent", "kept"]
    assert [[p.get_width() for p in axes.patches] for axes in panels] == [[1000, 12], [5e6, 4e5]]
    assert panels[0].get_xlim() == panels[1].get_xlim() and panels[0].get_xscale() == "log"
    assert figure.sentence == (
        "Bytes of a rank, sent: gather 1,000, fused 12; kept: gather 5,100,000, fused 400,000; within 2.0% of the "
        "prediction."
    )
    assert loss_costs({"a": {"b": (1, 1)}}).sentence == "Bytes of a rank, b: a 1; as predicted."
