"""Pictures of activation memory and of masks: what they say is what they were given."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.viz import (
    Kept,
    TensorArea,
    layer_areas,
    mask_agreement,
    memory_over_time,
    replica_drift,
    saved_waterfall,
    tensor_lifetimes,
)

ROWS = [
    Kept("everything", {"norms": 40.0, "MLP": 160.0}, 200.5),
    Kept("tensor parallel", {"norms": 40.0, "MLP": 80.0}, 120.0),
    Kept("inputs only", {"norms": 20.0}, 20.0),
]


def widths(figure) -> list[float]:
    return [round(bar.get_width(), 6) for bar in figure.fig.axes[0].patches if bar.get_fill()]


def test_a_waterfall_draws_the_parts_and_what_each_step_took() -> None:
    figure = saved_waterfall(ROWS, unit=10.0, unit_name="units", what="a layer")
    assert repr(figure) == (
        "a layer: units: everything 20.0, tensor parallel 12.0, inputs only 2.0; measured within 1% of it."
    )
    assert widths(figure) == [4.0, 16.0, 4.0, 8.0, 2.0]
    taken = [round(bar.get_width(), 6) for bar in figure.fig.axes[0].patches if not bar.get_fill()]
    assert taken == [8.0, 10.0]
    assert figure.png


def test_a_measurement_that_is_off_is_named() -> None:
    wrong = [*ROWS[:2], Kept("inputs only", {"norms": 20.0}, 21.0)]
    assert repr(saved_waterfall(wrong)).endswith("measured differs by more than 1% for inputs only.")
    bare = [Kept(row.label, row.parts) for row in ROWS]
    assert repr(saved_waterfall(bare)) == "bytes: everything 200.0, tensor parallel 120.0, inputs only 20.0."
    with pytest.raises(ValueError, match="at least one row"):
        saved_waterfall([])


def test_areas_are_bytes_and_a_tensor_on_which_the_reader_is_wrong_is_red() -> None:
    tensors = [TensorArea("x", 1, 2), TensorArea("probs", 8, 2, inside=True), TensorArea("mask", 8, 1, inside=True)]
    figure = layer_areas(tensors, ["x", "probs"], ["probs", "mask"])
    assert repr(figure) == "2 of 3 tensors are kept: 18.0 s b h, of which 16.0 inside core attention; wrong: x, mask."
    x, probs, mask = figure.fig.axes[0].patches
    assert [each.get_width() for each in (x, probs, mask)] == [1, 8, 8]
    assert probs.get_height() == 2 * mask.get_height()
    assert x.get_edgecolor() == mask.get_edgecolor() != probs.get_edgecolor()
    texts = [text.get_text() for text in figure.fig.axes[0].texts]
    assert texts == ["2 is not kept", "16", "(8) is missing"]


def test_memory_over_time_says_what_fits_and_what_it_costs() -> None:
    mountain = [(0.0, 0.0), (2.0, 5e9), (6.0, 0.0)]
    figure = memory_over_time({"keep": mountain, "full": [(0.0, 1e9), (8.0, 0.0)]}, 3e9, 2.0, {"keep": mountain})
    assert repr(figure) == (
        "Room for 3.0 GB: keep does not fit, peak 5.0 GB, operations +0.0%; full fits, peak 1.0 GB, operations +33.3%."
    )
    first, second = figure.fig.axes
    assert first.lines[0].get_xdata().tolist() == [0, 1, 3] and len(second.lines) == 1, "only one is predicted"


def test_masks_say_which_positions_share_one() -> None:
    own = np.random.default_rng(0).random((4, 64)) < 0.8
    figure = mask_agreement({"one seed": np.concatenate([own[:2], own[:2]]), "own seeds": own}, 2)
    assert repr(figure) == (
        "one seed: 2 pairs of positions have the same mask, 2 positions apart; "
        "own seeds: no two positions have the same mask."
    )
    first, second, _bar = figure.fig.axes
    shares = [axes.images[0].get_array() for axes in (first, second)]
    assert shares[0][0, 2] == shares[0][3, 1] == 1.0 > shares[0][0, 3] and shares[1][0, 2] < 1.0
    assert (shares[1] == shares[1].T).all() and np.diag(shares[1]).tolist() == [1.0] * 4


def test_replicas_that_drift_apart_are_drawn_in_percent() -> None:
    figure = replica_drift({"one": [2.0, 1.0], "ranks": [2.0, 1.5]}, {"ranks": [0.0, 0.25]}, "gains")
    assert repr(figure) == "After 2 steps the ranks' gains differ: ranks 25.0%; loss one 1, ranks 1.5."
    loss, apart = figure.fig.axes
    assert [len(axes.lines) for axes in (loss, apart)] == [2, 1]
    assert apart.lines[0].get_ydata().tolist() == [0.0, 25.0]
    assert apart.lines[0].get_color() == loss.lines[1].get_color(), "one run, one colour"


def test_lifetimes_are_drawn_as_a_block_per_tensor_and_moment() -> None:
    kept, dropped = [("mm", ("x",)), ("mm", ("x", "dy"))], [("mm", ()), ("mm", ("x",))]
    figure = tensor_lifetimes({"kept": kept, "dropped": dropped}, ["fc1", "fc1"], 1, "tensors")
    assert repr(figure) == ("Kernels, of 2, after which a tensor is in memory: kept: x 2, dy 1; dropped: x 1, dy 0.")
    assert [len(axes.patches) for axes in figure.fig.axes] == [3, 1]
