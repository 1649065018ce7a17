"""Figures of an evaluated language model: what is drawn, and the sentence, are those of the numbers given."""

import pytest
from matplotlib.patches import Rectangle

from labkit.viz import named_curves, scoring_windows, token_choices, token_prices


def test_each_window_shows_what_it_reads_and_what_it_scores():
    figure = scoring_windows([(0, 1, 5), (2, 5, 7), (4, 7, 9), (6, 9, 10)], 10, 4)
    boxes = [(p.get_x(), p.get_width()) for p in figure.fig.axes[0].patches if isinstance(p, Rectangle)]
    assert boxes == [(0, 4), (1, 4), (2, 4), (5, 2), (4, 4), (7, 2), (6, 4), (9, 1)]
    assert figure.sentence == (
        "4 windows of 4 tokens over 10 tokens: the first scores 4 labels, the last 1, all together 9."
    )
    many = scoring_windows([(s, s + 3, s + 5) for s in range(0, 200, 2)], 203, 4)
    assert "100 windows of 4 tokens over 203 tokens, of which 12 are drawn" in many.sentence
    assert many.png.startswith(b"\x89PNG")


def test_the_same_characters_are_below_each_other_however_they_are_cut():
    figure = token_prices({"one": [("ab ", 2.0), ("c", 0.0)], "two": [("a", 0.2), ("b c", 1.0)]})
    (axes,) = figure.fig.axes
    boxes = [(p.get_x(), p.get_width()) for p in axes.patches if isinstance(p, Rectangle)]
    assert boxes == [(0, 3), (3, 1), (0, 1), (1, 3)]
    dark = [sum(p.get_facecolor()[:3]) for p in axes.patches]
    assert dark[0] < dark[3] < dark[2] < dark[1] == 3, "the darker, the more it costs"
    assert [text.get_text() for text in axes.texts if "." in text.get_text()] == ["2.0", "1.0"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one\n2.0 bits", "two\n1.2 bits"]
    assert figure.sentence == "bits for 4 characters: one 2.0 in 2 tokens, two 1.2 in 2 tokens."
    for rows in ({}, {"one": []}, {"one": [("a", 1.0)], "two": [("b", 1.0)]}):
        with pytest.raises(ValueError, match="the same text in all rows"):
            token_prices(rows)


def test_panels_of_choices_share_an_axis_and_say_what_is_out():
    figure = token_choices(["a", "\n"], {"plain": [0.75, 0.25], "top-k 1": [1.0, 0.0]})
    left, right = figure.fig.axes
    assert [p.get_width() for p in left.patches] == [0.75, 0.25]
    assert [text.get_text() for text in right.texts] == [" out"]
    assert [label.get_text() for label in left.get_yticklabels()] == ["a", "\\n"]
    assert left.get_xlim() == right.get_xlim()
    assert figure.sentence == "plain: 2 of 2 left, the first has 0.75; top-k 1: 1 of 2 left, the first has 1.00."


def test_curves_have_their_points_and_the_sentence_both_ends():
    figure = named_curves({"a": [(1, 100.0), (2, 10.0)], "b": [(4, 0.5)]}, x="step", y="work", log=True)
    (axes,) = figure.fig.axes
    assert [list(map(tuple, line.get_xydata())) for line in axes.lines] == [[(1, 100), (2, 10)], [(4, 0.5)]]
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_yscale()) == ("step", "work", "log")
    assert figure.sentence == "work by step: a 100 at 1, 10 at 2; b 0.5 at 4."


def test_a_level_is_a_line_without_points():
    figure = named_curves({"a": [(1, 3.0), (10, 1.0)]}, x="step", y="loss", levels={"a guess": 2.5})
    curve, level = figure.fig.axes[0].lines
    assert list(level.get_ydata()) == [2.5, 2.5] and level.get_marker() == "None" != curve.get_marker()
    assert figure.sentence == "loss by step: a 3 at 1, 1 at 10; a guess 2.5."
