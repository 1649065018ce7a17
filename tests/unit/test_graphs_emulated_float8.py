"""fp8 and graphs: a weight is cast once a step, ahead of the replays of its first microbatch, and nowhere inside."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch import Tensor

from labkit.config import RunConfig, presets
from labkit.fp8.gemms import Float8Gemms
from labkit.train import pretrain

STEPS, MICROBATCHES, LINEARS = 6, 4, 4


def training(**more: Any) -> RunConfig:
    small = {"model.layers": 1, "hidden": 32, "heads": 2, "seq_length": 16, "train.global_batch_size": MICROBATCHES}
    return presets.tiny().override(small | {"train.steps": STEPS, "optim.fp8": "hybrid"} | more)


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """How often weights were cast, by whether the cast counts for training (the scale's history moves on)."""
    found: Counter[bool] = Counter()
    cast = Float8Gemms._cast

    def counted(self: Float8Gemms, x: Tensor, kind: str, *args: Any, trains: bool) -> Any:
        found[trains] += kind == "weight"
        return cast(self, x, kind, *args, trains=trains)

    monkeypatch.setattr(Float8Gemms, "_cast", counted)
    return found


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_weights_are_cast_once_a_step_with_graphs_and_without(casts: Counter[bool], recipe: str) -> None:
    eager = pretrain(training(**{"optim.fp8_recipe": recipe})).losses
    assert casts == {True: LINEARS * STEPS}
    casts.clear()
    graphs = {"graph.cuda_graph_impl": "emulated", "graph.cuda_graph_warmup_steps": 1}
    assert pretrain(training(**{"optim.fp8_recipe": recipe} | graphs)).losses == eager
    # once more for each linear: the place where graphs find it is made, and the runs ahead of the capture look at it
    assert casts == {True: LINEARS * (STEPS + 1), False: LINEARS}
