"""Pictures of activation memory and of masks: what they say is what they were given."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.viz import Kept, dropout_masks, memory_and_work, saved_waterfall

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


def test_memory_and_work_name_what_was_counted() -> None:
    figure = memory_and_work({"all": (8.0, 300.0), "full": (2.0, 400.0)}, {"all": (8.1, 300.0), "full": (2.0, 450.0)})
    assert repr(figure) == (
        "Kept bytes against work, counted: all 8.1 s b h and 1.00 of the operations; full 2.0 s b h and 1.50 of the "
        "operations."
    )
    kept, work = figure.fig.axes
    assert [bar.get_width() for bar in kept.patches] == [8.0, 2.0]
    assert work.lines[0].get_xdata().tolist() == [1.0, 1.5]
    with pytest.raises(ValueError, match="must name the same ways"):
        memory_and_work({"all": (1.0, 1.0)}, {})


def test_masks_say_who_draws_the_same() -> None:
    a, b = np.eye(3, dtype=bool), ~np.eye(3, dtype=bool)
    figure = dropout_masks({"after": [a, a], "inside": [a, b]})
    assert repr(figure) == "after: the same mask on all 2 ranks; inside: a mask of its own on each of 2 ranks."
    assert len(figure.fig.axes) == 4 and figure.png
    assert repr(dropout_masks({"x": [a, b, a]})) == "x: some ranks share a mask."
    with pytest.raises(ValueError, match="one mask a rank"):
        dropout_masks({"x": [a], "y": [a, b]})
