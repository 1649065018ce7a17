"""The pipeline benchmark in tiny form: nine schedules of three systems agree in losses and gradients first."""

from __future__ import annotations

import pytest
import torch

from labkit.config import ModelConfig
from labkit.launch import run

pytestmark = pytest.mark.oracle

MODEL = ModelConfig(layers=4, hidden=32, heads=4, vocab_size=256, seq_length=16, activation="gelu")


def tiny(count: int) -> tuple[list[str], dict[str, float]]:
    import pipeline

    found = pipeline.measure(count, MODEL, repetitions=1, max_load=float("inf"))
    return list(found.seconds), found.facts


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
