"""Figures of an evaluated language model: what is drawn, and the sentence, are those of the numbers given."""

from matplotlib.patches import Rectangle

from labkit.viz import named_curves, scoring_windows, token_choices


def test_each_window_shows_what_it_reads_and_what_it_scores():
    figure = scoring_windows(range(0, 7, 2), 10, 4, 2)
    boxes = [(p.get_x(), p.get_width()) for p in figure.fig.axes[0].patches if isinstance(p, Rectangle)]
    assert boxes == [(0, 4), (1, 4), (2, 4), (5, 2), (4, 4), (7, 2), (6, 4), (9, 1)]
    assert figure.sentence == (
        "4 windows of 4 tokens over 10 tokens: the first scores 4 labels, the last 1, all together 9."
    )
    many = scoring_windows(range(0, 200, 2), 203, 4, 2)
    assert "100 windows of 4 tokens over 203 tokens, of which 12 are drawn" in many.sentence
    assert many.png.startswith(b"\x89PNG")


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
