"""Bands of sketches: which agree, and what is framed."""

from matplotlib.patches import Rectangle

from labkit.viz import band_agreement


def test_only_a_band_that_agrees_in_all_its_rows_is_framed():
    figure = band_agreement({"a copy": [[True, True], [True, False], [False, False]], "a quote": [[False], [False]]})
    copy, quote = figure.fig.axes
    frames = [
        [p.get_x() for p in axes.patches if isinstance(p, Rectangle) and not p.get_fill()] for axes in (copy, quote)
    ]
    assert len(frames[0]) == 1 and -0.2 < frames[0][0] < 0 and frames[1] == []
    assert figure.sentence == (
        "Numbers of two sketches that agree. a copy: 3 of 6 numbers, 1 of 3 bands agree; "
        "a quote: 0 of 2 numbers, 0 of 2 bands agree."
    )
