"""Figures of BERT and T5: boxes, lines and sentences are those of what is given."""

from itertools import pairwise

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from labkit.viz import (
    distance_buckets,
    masked_words,
    norm_layouts,
    path_widths,
    read_positions,
    split_stages,
    stage_work,
)


def words_of(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_under_each_chosen_token_stands_what_the_model_sees():
    text = ["[CLS]", "key", "##board", "and", "bug", "read"]
    figure = masked_words(text, ["[CLS]", "[MASK]", "[MASK]", "and", "bug", "the"], [[1, 2], [4], [5]], "[MASK]")
    (axes,) = figure.fig.axes
    assert sorted(words_of(axes)) == sorted([*text, "[MASK]", "[MASK]", "bug", "the"])
    boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    shades = [patch.get_facecolor() for patch in boxes]
    assert shades[1] == shades[2] and len({shades[1], shades[3], shades[4], shades[5]}) == 4
    assert all(a.get_x() + a.get_width() <= b.get_x() for a, b in pairwise(boxes)), "no box on another"
    assert len(axes.collections) == 3
    assert figure.sentence == (
        "6 tokens, of which 4 (67%) in 3 n-grams are to be predicted: 2 shown as [MASK], 1 as a random token, 1 as it "
        "is."
    )
    assert figure.png.startswith(b"\x89PNG")


def test_post_has_its_norms_on_the_stream():
    figure = norm_layouts(24)
    post, pre = figure.fig.axes
    places = [{text.get_position()[0] for text in axes.texts if text.get_text() == "norm"} for axes in (post, pre)]
    assert places == [{0}, {1.9}] and "final norm" in words_of(pre)
    assert "49 norms in 24 layers" in figure.sentence and "passes 49 of them in post, and 1 in pre" in figure.sentence


def test_a_line_joins_the_copies_of_a_table():
    figure = split_stages([2], [1, 1, 1], {"words": [0, 1, 3], "positions": [0, 1]})
    (axes,) = figure.fig.axes
    assert sum(text == "words" for text in words_of(axes)) == 3
    assert "decoder: 1 layer" in words_of(axes) and "encoder: 2 layers" in words_of(axes)
    ends = [tuple(line.get_segments()[0][:, 0]) for line in axes.collections]
    assert ends == [(0.5, 3.5), (0.5, 1.5)]
    assert figure.sentence == (
        "4 stages, the decoder from stage 1 on: words on stages 0, 1 and 3; positions on stages 0 and 1."
    )


def test_biases_of_both_halves_share_a_row():
    figure = split_stages([1], [1, 1], {"words": [0, 1, 2], "encoder's biases": [0], "decoder's biases": [1, 2]})
    (axes,) = figure.fig.axes
    assert [line.get_segments()[0][0, 1] for line in axes.collections] == [1.5, 2.5, 2.5]
    assert figure.sentence.endswith("encoder's biases on stage 0; decoder's biases on stages 1 and 2.")


def test_a_line_is_at_the_slowest_stage_of_each_cut():
    cuts = {"1 and 1": [("encoder", 4.0, 0.0), ("decoder", 1.0, 2.0)], "2 and 1": [("encoder", 2.0, 0.0)] * 2}
    figure = stage_work(cuts, unit="GFLOP")
    both, one = figure.fig.axes
    assert [patch.get_y() + patch.get_height() for patch in both.patches] == [4, 4, 1, 3]
    assert [line.get_ydata()[0] for axes in (both, one) for line in axes.lines] == [4, 2]
    assert figure.sentence == "Slowest stage in GFLOP: 1 and 1, 4.0 on stage 0; 2 and 1, 2.0 on stage 0."


def test_a_key_that_is_never_seen_has_no_number():
    figure = distance_buckets({"both": [[0, 3], [1, 0]], "back": [[0, -1], [1, 0]]})
    both, back = figure.fig.axes
    assert words_of(both) == ["0", "3", "1", "0"] and words_of(back) == ["0", "1", "0"]
    assert figure.sentence == "Buckets of 2 x 2 pairs of positions. both: 3 buckets in use; back: 2 buckets in use."
    wide = distance_buckets({"a": np.zeros((40, 40), dtype=int)})
    assert words_of(wide.fig.axes[0]) == []


def test_a_position_that_is_read_is_coloured():
    figure = read_positions({"causal": np.tril(np.ones((2, 2))), "all": np.ones((2, 3))}, "reads", "is read")
    causal, every = figure.fig.axes
    shades = [tuple(patch.get_facecolor()[0]) for patch in causal.collections]
    assert shades[0] == shades[2] == shades[3] != shades[1]
    assert len(every.collections) == 6 and (every.get_xlabel(), every.get_ylabel()) == ("is read", "reads")
    assert figure.sentence == "Positions that are read. causal: 3 of 4 pairs; all: 6 of 6 pairs."


def test_bars_of_both_factors_stand_before_the_aim():
    figure = path_widths({3: 0.9, 6: 0.6}, {3: 0.7, 6: 0.35}, (0.8, 0.96))
    (axes,) = figure.fig.axes
    band, *bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert (band.get_y(), band.get_height()) == pytest.approx((80, 16))
    assert [round(bar.get_height()) for bar in bars] == [70, 35, 90, 60]
    assert figure.sentence == ("80% to 96% of the input arrive at 1 of 2 depths; with factor 1 0.35 to 0.7 of it.")
    with pytest.raises(ValueError, match=r"depths \[3\] and \[6\] differ"):
        path_widths({3: 0.2}, {6: 0.4}, (0.15, 0.3))
