"""Figures of a machine's laws: lengths and heights are the numbers given, and sentences carry them."""

import pytest

from labkit.viz import Rate, published_rates, roofline, step_parts

STEPS = {"one GPU": {"gemm": 1.5, "tp": 0.0, "host": 0.5}, "eight": {"gemm": 0.25, "tp": 0.75, "bubble": -1e-9}}


def test_parts_are_stacked_and_what_was_measured_is_at_its_time():
    figure = step_parts(STEPS, measured={"eight": 1.25}, unit=1e-3, unit_name="ms")
    (axes,) = figure.fig.axes
    ends = {}
    for bar in axes.patches:
        ends[round(bar.get_y() + 0.35)] = bar.get_x() + bar.get_width()
    assert ends == pytest.approx({0: 2000, 1: 1000})
    (mark,) = axes.lines
    assert (*mark.get_xdata(), *mark.get_ydata()) == (1250, 1)
    assert [text.get_text() for text in figure.fig.legends[0].get_texts()] == [
        "GEMM", "communication of tp", "host",
    ]  # fmt: skip
    assert figure.sentence == "2 predictions: one GPU 2e+03 ms, eight 1e+03 ms."


def test_no_run_has_no_parts():
    with pytest.raises(ValueError, match="at least one run"):
        step_parts({})


def test_published_rates_are_filled_and_predicted_ones_outlined_with_their_interval():
    panels = {"a": [Rate("1", 39.0, 37.0, 33.0, 42.0)], "b": [Rate("64", 30.0, 31.0, 28.0, 35.0)]}
    figure = published_rates(panels, unit="TFLOP/s", below="GPUs", sentence="Of 39, 37 are predicted.")
    for axes, (title, (rate,)) in zip(figure.fig.axes, panels.items(), strict=True):
        filled, outlined = axes.patches
        assert axes.get_title() == title and filled.get_fill() and not outlined.get_fill()
        assert (filled.get_height(), outlined.get_height()) == (rate.published, rate.predicted)
        (interval,) = axes.collections
        assert interval.get_segments()[0][:, 1] == pytest.approx([rate.low, rate.high])


def test_a_roofline_names_both_ends_and_its_worst_point():
    figure = roofline({1: 14e9, 8: 40e9, 512: 180e9}, {1: 15e9, 8: 120e9, 11.3: 164e9, 512: 164e9}, label="rows",
                      peak=164e9)  # fmt: skip
    assert figure.sentence == (
        "With 1 row the GEMM reaches 14 GFLOP/s, with 512 rows 180; the line predicts 15 and 164. "
        "It is furthest off at 8 rows, by a factor of 3."
    )
