"""docs/concepts/memory.md: every row of its tables is what `labkit.plan` computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from labkit.config import presets
from labkit.plan import model_parameters, rank_memory
from labkit.plan.stages import configured_schedule
from labkit.plan.zero_stages import STAGES, formula

PAGE = (Path(__file__).parents[2] / "docs" / "concepts" / "memory.md").read_text()
ZERO, RECOMPUTE, BATCH = "optim.distributed_optimizer", "model.recompute_granularity", {"train.global_batch_size": 512}
SEQUENCE = {"parallel.tp": 8, "parallel.sequence_parallel": True, RECOMPUTE: "none"}
ROWS: dict[str, dict[str, tuple[dict[str, Any], int, int]]] = {
    "gpt2_124m": {
        "one GPU": ({}, 1, 0),
        "8 GPUs, dp 8, distributed optimizer": ({ZERO: True}, 8, 0),
        "and `micro_batch_size` 1": ({ZERO: True, "train.micro_batch_size": 1}, 8, 0),
        "and `recompute_granularity` full, 8 samples": ({ZERO: True, RECOMPUTE: "full"}, 8, 0),
        "8 GPUs, tp 4 with sequence parallelism, dp 2, distributed optimizer": (
            {ZERO: True, "parallel.tp": 4, "parallel.sequence_parallel": True}, 8, 0,
        ),
    },
    "table1_1_2b": {
        "one GPU": ({}, 1, 0),
        "nothing recomputed": ({RECOMPUTE: "none"}, 1, 0),
        "dp 8, distributed optimizer": ({ZERO: True, **BATCH}, 8, 0),
        "dp 64, distributed optimizer": ({ZERO: True, **BATCH}, 64, 0),
        "tp 8": ({"parallel.tp": 8}, 8, 0),
        "tp 8, nothing recomputed": ({"parallel.tp": 8, RECOMPUTE: "none"}, 8, 0),
        "tp 8 with sequence parallelism, nothing recomputed": (SEQUENCE, 8, 0),
        "pp 4, first stage": ({"parallel.pp": 4, **BATCH}, 4, 0),
        "pp 4, second stage": ({"parallel.pp": 4, **BATCH}, 4, 1),
        "pp 4, last stage": ({"parallel.pp": 4, **BATCH}, 4, 3),
    },
}  # fmt: skip


@pytest.mark.parametrize("preset", ROWS)
def test_the_page_has_the_parameters_and_the_bytes_of_each_row(preset: str) -> None:
    base = presets.get(preset)
    table = PAGE[PAGE.index(f"{model_parameters(base.model):,}") :]
    for label, (changes, world_size, place) in ROWS[preset].items():
        config = base.override(changes).validate(world_size)
        need = rank_memory(config, world_size, configured_schedule(config, world_size), place, device="cuda")
        parts = (need.weights, need.gradients, need.optimizer, need.activations, need.workspaces, need.total)
        assert f"| {label} | {' | '.join(f'{size / 2**30:.2f}' for size in parts)} |" in table


@pytest.mark.parametrize("words, types", [("bf16 or fp16, fp32", "bf16 fp32"), ("fp32, fp32", "fp32 fp32"),
                                          ("bf16, bf16 (`optim.grad_reduce_in_bf16`)", "bf16 bf16")])  # fmt: skip
def test_the_page_has_the_bytes_per_parameter_of_each_zero_stage(words: str, types: str) -> None:
    param, grad = types.split()
    cells = [formula(param_dtype=param, grad_dtype=grad, stage=stage) for stage in STAGES]
    assert f"| {words} | {' | '.join(cells)} |" in PAGE
