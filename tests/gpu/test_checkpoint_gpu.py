"""Checkpoints on a GPU: pinned copies, random states of the device, replayed graphs, and the way to a CPU and back."""

import json

import pytest

from labkit.config import presets
from labkit.launch import run
from labkit.train import pretrain

pytestmark = pytest.mark.gpu

SMALL = presets.tiny().override(
    {"layers": 2, "hidden": 64, "heads": 4, "seq_length": 32, "global_batch_size": 4, "decay_steps": 8}
    | dict.fromkeys(("hidden_dropout", "attention_dropout", "embedding_dropout"), 0.1)
)
CASES = {
    "bf16, asynchronous": {"precision": "bf16", "checkpoint.asynchronous": True},
    "fp16": {"precision": "fp16"},
    "local graphs": {"cuda_graph_impl": "local", "cuda_graph_warmup_steps": 1},
    "fp8": {"precision": "bf16", "optim.fp8": "hybrid"},
}


@pytest.mark.parametrize("name", CASES)
def test_a_cut_run_ends_as_one_that_was_never_cut(name, tmp_path):
    config = SMALL.override({**CASES[name], "steps": 8, "checkpoint.dir": str(tmp_path / "cut")})
    whole = run(pretrain, 1, config.override({"checkpoint.dir": str(tmp_path / "whole")}), device="cuda")[0]
    before = run(pretrain, 1, config.override({"steps": 5}), device="cuda")[0]
    after = run(pretrain, 1, config, device="cuda")[0]
    assert (after.resumed_after, before.losses + after.losses) == (5, whole.losses)
    tensors = [
        json.loads((tmp_path / folder / "step_00000008" / "manifest.json").read_text())["tensors"]
        for folder in ("whole", "cut")
    ]
    assert tensors[0] == tensors[1]  # names, shapes, places and checksums


def test_a_checkpoint_of_the_gpu_loads_on_the_cpu_and_goes_back(tmp_path):
    still = SMALL.override({"lr": 0.0, "weight_decay": 0.0, "precision": "fp32"})
    run(pretrain, 1, still.override({"steps": 1, "checkpoint.dir": str(tmp_path)}), device="cuda")
    run(pretrain, 1, still.override({"steps": 2, "checkpoint.dir": str(tmp_path)}), device="cpu")
    run(pretrain, 1, still.override({"steps": 3, "checkpoint.dir": str(tmp_path), "keep": 3}), device="cuda")
    stored = [json.loads((tmp_path / f"step_0000000{n}" / "manifest.json").read_text())["tensors"] for n in (2, 3)]
    weights = [name for name in stored[0] if not name.startswith(("exp_avg", "rng."))]
    assert weights and [stored[0][name] for name in weights] == [stored[1][name] for name in weights]
