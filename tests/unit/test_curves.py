"""Loss curves: what the sentence says is computed from the numbers, and what cannot be compared is refused."""

import pytest

from labkit.viz import loss_curves

LOSSES = [4.0, 3.0, 2.0]


def test_sentence_and_panels():
    figure = loss_curves({"alone": LOSSES, "tp2": LOSSES}, levels={"unigram entropy": 2.5}, tolerance=1e-5)
    assert figure.sentence == (
        "Training loss over 3 steps: alone 4.00 to 2.00; tp2 4.00 to 2.00; no step differs by more than 1e-05 of the "
        "loss; the last is below the unigram entropy, 2.50."
    )
    upper, lower = figure.fig.axes
    drawn = [*upper.get_lines()[:2], lower.get_lines()[0]]
    assert [list(line.get_xdata()) for line in drawn] == [[1, 2, 3]] * 3, "steps count from 1"
    assert [line.get_label() for line in upper.get_lines()[:2]] == ["alone", "tp2"]
    assert lower.get_yscale() == "log"


def test_a_difference_beyond_the_tolerance_is_said_and_shown():
    figure = loss_curves({"alone": LOSSES, "tp2": [4.0, 3.003, 2.0]}, tolerance=1e-5)
    assert "tp2 differs from alone by up to 1.0e-03 of the loss" in figure.sentence
    lower = figure.fig.axes[1]
    assert max(lower.get_lines()[0].get_ydata()) == pytest.approx(1e-3)


@pytest.mark.parametrize(("level", "where"), [(1.0, "not below"), (2.5, "below"), (2.0, "not below")])
def test_levels(level, where):
    figure = loss_curves({"alone": LOSSES}, levels={"entropy": level})
    assert f"the last is {where} the entropy, {level:.2f}" in figure.sentence
    assert len(figure.fig.axes) == 1


def test_levels_are_compared_with_a_mean_of_the_last_losses():
    """One batch is noisy: here the last loss is below the level and the mean of the last two, 2.5, is not."""
    assert "the last is below" in loss_curves({"alone": LOSSES}, levels={"entropy": 2.4}).sentence
    assert "the last 2 are on average not below" in loss_curves({"a": LOSSES}, levels={"entropy": 2.4}, last=2).sentence
    assert "the last 2 are on average below" in loss_curves({"a": LOSSES}, levels={"entropy": 2.6}, last=2).sentence
    with pytest.raises(ValueError, match="last is 0"):
        loss_curves({"alone": LOSSES}, last=0)


def test_one_step_is_drawn():
    assert "over 1 steps" in loss_curves({"alone": [1.0]}).sentence


@pytest.mark.parametrize(
    ("curves", "message"),
    [
        ({}, "at least one curve"),
        ({"alone": []}, "at least one loss"),
        ({"alone": LOSSES, "tp2": LOSSES[:2]}, "cannot be compared"),
    ],
)
def test_refusals(curves, message):
    with pytest.raises(ValueError, match=message):
        loss_curves(curves, tolerance=1e-5)


def test_steps_are_whole_and_exact_agreement_is_named():
    figure = loss_curves({"one": [3.0, 2.0, 1.0], "two": [3.0, 2.0 * (1 + 1e-15), 1.0]}, tolerance=1e-12)
    lower = figure.fig.axes[1]
    ticks = [tick for tick in lower.get_xticks() if 0.9 <= tick <= 3.1]
    assert ticks == [1, 2, 3]
    assert "exactly\nequal" in [text.get_text() for text in lower.texts]
    low, _ = lower.get_ylim()
    assert low < min(lower.lines[0].get_ydata()), "steps that agree exactly have their dot too"
    three = loss_curves({key: [3.0, 2.0] for key in ("one", "two", "three", "four")}, tolerance=1e-12).fig.axes[1]
    sizes = [line.get_markersize() for line in three.lines if line.get_linestyle() == "None"]
    assert sizes == sorted(set(sizes), reverse=True) and len(sizes) == 3, "one that lies on another leaves its rim"
    apart = loss_curves({"one": [3.0, 2.0], "two": [3.1, 2.1]}, tolerance=1e-12)
    assert "exactly equal" not in [text.get_text() for text in apart.fig.axes[1].texts]
