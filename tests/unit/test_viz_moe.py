"""Figures of the MoE layer: sentences and places computed by hand, controls that redraw, refusals."""

import time

import pytest
import torch

from labkit.models.synthetic_load import SleepingExperts, zipf_logits
from labkit.viz import (
    explore_skew,
    load_and_scores,
    load_over_training,
    loss_beside_load,
    mass_tables,
    price_of_balance,
    skew_curve,
)

# ---- load ----


def test_load_over_training_names_start_peak_and_end():
    """Fullest over mean: 20/10, 40/10, 10/10; the end is the mean of the last five steps."""
    table = [[20, 10, 5, 5], [40, 0, 0, 0], *[[10, 10, 10, 10]] * 5]
    figure = load_over_training({"bias": table, "nothing": [[12, 8, 10, 10]] * 7})
    assert figure.sentence == (
        "Load of 4 experts over 7 steps, the fullest against the mean: bias 2.0, at most 4.0, at the end 1.0; "
        "nothing 1.2, at most 1.2, at the end 1.2."
    )
    assert len(figure.fig.axes) == 3
    fullest = figure.fig.axes[2].lines[0]
    assert fullest.get_ydata().tolist() == [2, 4, 1, 1, 1, 1, 1]
    assert list(fullest.get_xdata()) == [1, 2, 3, 4, 5, 6, 7], "steps count from 1"
    for wrong in ({}, {"a": [1, 2]}, {"a": [[0, 0]]}):
        with pytest.raises(ValueError):
            load_over_training(wrong)


ROWS = {0.0: [10, 10], 1.0: [15, 5], 2.0: [20, 0]}


def test_a_step_takes_as_long_as_the_fullest_rank():
    figure = skew_curve(ROWS, 1.0, measured={0.0: 0.11, 2.0: 0.25}, seconds_per_row=0.01)
    assert figure.sentence == (
        "A step over 2 ranks takes, against an even load, 1.00 at skew 0, 2.00 at skew 2; measured 1.10, 2.50, in "
        "the same order; at skew 1 the ranks compute for 67% of it."
    )
    curve, first, second = figure.fig.axes[0].lines[:3]
    assert list(curve.get_ydata()) == [1.0, 1.5, 2.0]
    assert [float(point.get_ydata()[0]) for point in (first, second)] == pytest.approx([1.1, 2.5])
    computes, waits = figure.fig.axes[1].patches[:2], figure.fig.axes[1].patches[2:]
    assert [bar.get_width() for bar in computes] == [15, 5]
    assert [bar.get_width() for bar in waits] == [0, 10]
    assert "in another order" in skew_curve(ROWS, 1.0, measured={0.0: 0.3, 2.0: 0.2}).sentence
    even = {skew: [10, 10] for skew in ROWS}  # equal loads have no order that a measurement could miss
    assert "in the same order" in skew_curve(even, 1.0, measured={0.0: 0.3, 2.0: 0.2}).sentence
    with pytest.raises(ValueError, match="no rows for skew 3"):
        skew_curve(ROWS, 3.0)
    with pytest.raises(ValueError, match="at least one row"):
        skew_curve({0.0: [0, 0]}, 0.0)


def rows_at(skew):
    return [10 + round(5 * skew), 10 - round(5 * skew)]


def test_the_skew_slider_redraws_only_where_somebody_sits(monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    figure = explore_skew(rows_at, chosen=1.0, largest=2.0)
    assert "1.50 at skew 1, 2.00 at skew 2; at skew 1 the ranks compute for 67%" in figure.sentence
    monkeypatch.setenv("JPY_SESSION_NAME", "chapter.ipynb")
    slider, picture, words = explore_skew(rows_at, chosen=1.0, largest=2.0).children
    before = picture.value
    assert figure.sentence in words.value
    slider.value = 2.0
    assert "at skew 2 the ranks compute for 50% of it" in words.value
    assert picture.value != before


# ---- balance ----


def test_the_loss_stands_beside_the_load():
    """Fullest over mean: 20/10, 10/10; the run without a loss is on the right alone."""
    figure = loss_beside_load({"loss": [2.0, 1.0]}, {"nobody": [[20, 0], [20, 0]], "loss": [[20, 0], [10, 10]]})
    assert figure.sentence == (
        "At the end the balancing loss is loss 1.50; the fullest expert has nobody 2.0, loss 1.5."
    )
    left, right = figure.fig.axes
    assert [len(axes.lines) for axes in (left, right)] == [2, 3], "and a dotted line each"
    assert left.lines[0].get_color() == right.lines[1].get_color()


def test_scores_that_avoid_the_load_have_a_small_loss():
    """2 tokens, 4 experts: both experts with a token have 1/3 of its own score only: 4/4 (1/3 + 1/3) = 0.667."""
    third = 1 / 3
    figure = load_and_scores([1, 1, 0, 0], [[third, 0, third, third], [0, third, third, third]])
    assert figure.sentence == "The fullest of 4 experts has 2.00 times the mean; the balancing loss is 0.667."
    assert [[round(bar.get_height(), 3) for bar in axes.patches] for axes in figure.fig.axes] == [
        [1, 1, 0, 0], [0.333, 0.333, 0.667, 0.667]
    ]  # fmt: skip


def test_tables_show_their_sums():
    figure = mass_tables({"start": [[0.9, 0.1], [0.6, 0.4]], "end": [[0.5, 0.5], [0.5, 0.5]]})
    assert figure.sentence == "Largest sum of a column over the mean: start 1.50, end 1.00."
    assert [text.get_text() for text in figure.fig.axes[0].texts] == [
        "0.90", "0.10", "0.60", "0.40", "1.00", "1.00", "1.50", "0.50"
    ]  # fmt: skip


def test_a_rule_has_a_mark_for_each_seed_and_a_large_one_for_their_mean():
    figure = price_of_balance({"a": ([1.0, 2.0], [2.0, 2.5]), "b": ([1.0, 1.0], [2.2, 2.5])})
    assert figure.sentence == (
        "Loss on unseen text, seed by seed, and fullest expert over mean: a +0.00% at 1.5; b +5.00% at 1.0."
    )
    assert [line.get_ydata() for line in figure.fig.axes[0].lines[3:]] == [pytest.approx([10, 0]), pytest.approx([5])]
    assert [text.get_text() for text in figure.fig.legends[0].get_texts()] == ["b", "a"]


# ---- sleeping experts ----


def test_sleeping_experts_sleep_for_their_rows_and_weigh_them():
    experts = SleepingExperts(0.002)
    rows, weights = torch.ones(6, 3), torch.arange(6.0)
    start = time.perf_counter()
    out = experts(rows, torch.tensor([4, 2]), weights)
    assert time.perf_counter() - start >= 6 * 0.002
    assert experts.rows == 6
    assert torch.equal(out, weights[:, None].expand(6, 3))


def test_skew_draws_experts_with_chances_that_fall_as_a_power():
    """Top-1 of Gumbel noise plus log p draws from p: at skew 1 shares are 1/(e + 1) over their sum."""
    for skew in (0.0, 1.0, 2.0):
        drawn = zipf_logits(40_000, 4, skew).argmax(1).bincount(minlength=4) / 40_000
        chances = torch.arange(1, 5, dtype=torch.float64) ** -skew
        torch.testing.assert_close(drawn.double(), chances / chances.sum(), atol=0.01, rtol=0)
    assert torch.equal(zipf_logits(8, 4, 1.0), zipf_logits(8, 4, 1.0))
    assert not torch.equal(zipf_logits(8, 4, 1.0), zipf_logits(8, 4, 1.0, seed=1))
