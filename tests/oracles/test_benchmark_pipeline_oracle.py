"""The pipeline benchmark in tiny form: nine schedules of three systems agree in losses and gradients first."""

from __future__ import annotations

import pytest
import torch
from harness import Comparison

from labkit.config import ModelConfig
from labkit.launch import run

pytestmark = pytest.mark.oracle

MODEL = ModelConfig(layers=4, hidden=32, heads=4, vocab_size=256, seq_length=16, activation="gelu")


def tiny(count: int) -> tuple[list[str], dict[str, float]]:
    import pipeline

    found = pipeline.measure(count, MODEL, repetitions=1)
    return list(found.seconds), found.facts


@pytest.mark.sweep
def test_ours_megatron_core_and_torch_compute_the_same_step() -> None:
    for names, facts in run(tiny, 2, 4, timeout=120):
        assert names == [
            "labkit 1F1B",
            "labkit interleaved",
            "labkit zero_bubble_h1",
            "labkit zbv",
            "megatron-core 1F1B",
            "megatron-core interleaved",
            "torch 1F1B",
            "torch interleaved",
            "torch zbv",
        ]
        assert facts["loss"] == pytest.approx(5.55, abs=0.1), "ln 256 and a little"
        assert facts["lower_bound_ms"] > 0


def disagreeing() -> str:
    import pipeline

    ones, twos = [torch.ones(3)], [torch.full((3,), 2.0)]
    sides = {
        "a": pipeline.Side(lambda: [1.0], lambda: ones),
        "b": pipeline.Side(lambda: [1.0], lambda: twos),
    }
    with pytest.raises(AssertionError) as refusal:
        pipeline.check_agreement(sides)
    return str(refusal.value)


def test_a_side_with_other_gradients_is_not_timed() -> None:
    assert all("b: the gradient's norm is" in message for message in run(disagreeing, 2))


def compared(others: float = 0.0, **seconds: float) -> Comparison:
    """Made-up times, the same in each of 15 repetitions; `labkit_zbv` stands for "labkit zbv"."""
    return Comparison("made up", {name.replace("_", " "): [value] * 15 for name, value in seconds.items()}, others)


def test_the_best_of_either_side_are_chosen_in_the_round_and_held_against_each_other_in_turn() -> None:
    import pipeline

    found = compared(labkit_1F1B=2.0, labkit_zbv=1.0, torch_zbv=1.1, torch_1F1B=3.0)
    assert pipeline.best_of_each(found) == ("labkit zbv", "torch zbv")
    facts = pipeline.judged(found, compared(labkit_zbv=1.2, torch_zbv=0.8), 0.4, 5.5).facts
    assert facts["best_over_best_peer"] == 1.5
    assert facts["best_ms"] == {"labkit zbv": 1200, "torch zbv": 800}
    assert facts["over_lower_bound"] == {"labkit zbv": 3.0, "torch zbv": 2.0}
    assert facts["same_schedule"] == {"torch zbv": 0.9091, "torch 1F1B": 0.6667}


def test_a_row_whose_best_could_not_be_held_against_each_other_is_not_quoted() -> None:
    import pipeline

    found = pipeline.judged(
        compared(labkit_zbv=1.0, torch_zbv=1.1), compared(9.0, labkit_zbv=1.0, torch_zbv=1.1), 0.4, 5.5
    )
    assert found.rejected and "best against best" in found.rejected
    assert "best_over_best_peer" not in found.facts
