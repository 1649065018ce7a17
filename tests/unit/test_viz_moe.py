"""Figures of the MoE layer: sentences and places computed by hand, controls that redraw, refusals."""

import itertools
import time

import numpy as np
import pytest
import torch

from labkit.models.synthetic_load import SleepingExperts, zipf_logits
from labkit.viz import capacity_curve, dispatch_steps, explore_skew, load_over_training, send_matrix_figure, skew_curve


def map_of(experts, *choices):
    """[T, E] from each token's experts."""
    chosen = np.zeros((len(choices), experts), dtype=bool)
    for token, each in enumerate(choices):
        chosen[token, list(each)] = True
    return chosen


# ---- send matrix ----


def test_the_send_matrix_says_what_travels_and_who_is_fullest():
    figure = send_matrix_figure([[5, 3], [1, 7]])
    assert figure.sentence == (
        "16 rows over ep 2: 12 stay on their rank, 4 travel; rank 1 computes the most, 10, 1.25 times the mean, "
        "rank 0 the least, 6."
    )
    above, below = figure.fig.axes
    assert [bar.get_height() for bar in above.patches] == [6, 10]
    assert [text.get_text() for text in below.texts] == ["5", "3", "1", "7"]
    assert [patch.get_hatch() for patch in below.patches] == ["....", "", "", "...."]
    assert "each computes 4." in send_matrix_figure([[1, 3], [3, 1]]).sentence


def test_a_large_send_matrix_carries_no_numbers():
    assert not send_matrix_figure(np.ones((32, 32), dtype=int)).fig.axes[1].texts
    assert send_matrix_figure([[0]]).sentence == "0 rows over ep 1: 0 stay on their rank, 0 travel; each computes 0."


# ---- where rows lie ----


def test_rows_lie_as_the_dispatcher_puts_them():
    """2 ranks, 4 experts, 2 a rank. Rank 0: token 0 to 3 and 0, 1 to 1. Rank 1: token 2 to 0, 3 to 1 and 2.

    Permuted: 0 1 0 | 2 3 3. Received: rank 0 gets 0 1 from rank 0 and 2 3 from rank 1; rank 1 gets 0 and 3. Sorted by
    local expert: expert 0 has 0 2, expert 1 has 1 3, then expert 2 has 3 and expert 3 has 0.
    """
    figure = dispatch_steps([map_of(4, (0, 3), (1,)), map_of(4, (0,), (1, 2))])
    assert figure.sentence == (
        "4 tokens of 2 ranks make 6 rows for 4 experts: 3 go to another rank, rank 0 gets the most, 4."
    )
    numbers = "".join(text.get_text() for text in figure.fig.axes[0].texts if text.get_text().isdigit())
    tokens, permuted, received, by_expert = numbers[:4], numbers[4:10], numbers[10:16], numbers[16:22]
    assert (tokens, permuted, received, by_expert) == ("0123", "010233", "012303", "021330")


def test_boxes_do_not_overlap_where_ranks_have_few_rows():
    """Tokens without a row, and a rank without a token."""
    figure = dispatch_steps([map_of(3, (), (0, 1), (), ()), map_of(3), map_of(3, (2,))])
    places = [(round(box.get_x(), 3), round(box.get_y(), 3)) for box in figure.fig.axes[0].patches]
    columns = [sorted(y for x, y in places if x == column) for column in {x for x, _ in places}]
    assert len(columns) == 4
    assert all(b - a >= 0.9 for column in columns for a, b in itertools.pairwise(column))


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
        "A step over 2 ranks takes, against an even load, 1.00 at skew 0, 2.00 at skew 2; measured, the steps come in "
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


def test_a_capacity_drops_what_is_over_and_leaves_empty_what_is_under():
    """8 tokens, top-1, 4 experts, factor 1: 2 rows an expert. Even: 8 of 8 kept, 0 of 8 empty; one expert: 2 of 8 kept.

    Factor 2 means 4 rows, so 16 places: 8 empty and 12 empty.
    """
    loads = {"even": [[2, 2, 2, 2]], "one": [[8, 0, 0, 0]]}
    figure = capacity_curve(loads, tokens=8, top_k=1, factors=(1, 2, 8))
    assert figure.sentence == (
        "Experts with a limit: at capacity factor 1 even drops 0.0% and leaves 0.0% empty, one drops 75.0% and leaves "
        "75.0% empty; at capacity factor 2 even drops 0.0% and leaves 50.0% empty, one drops 50.0% and leaves 75.0% "
        "empty."
    )
    dropped, empty = figure.fig.axes
    assert list(dropped.lines[1].get_ydata()) == [0.75, 0.5, 0.0], "no more than all 8 tokens"
    assert list(empty.lines[1].get_ydata()) == [0.75, 0.75, 0.75]
    for wrong in ({}, {"a": [1, 2]}, {"a": [[0, 0]]}):
        with pytest.raises(ValueError, match="at least one"):
            capacity_curve(wrong, tokens=1, top_k=1)


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
