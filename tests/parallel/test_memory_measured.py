"""The memory that a launch is refused by, against the peak that ranks really reach."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit.config import RunConfig, presets
from labkit.data.gpt_data import SPLITS, GPTDataset
from labkit.launch import run
from labkit.plan.memory_need import TORCH_BYTES, rank_memories
from labkit.plan.stages import configured_schedule
from labkit.train import pretrain

WIDE = {"steps": 2, "hidden": 512, "layers": 4, "seq_length": 256, "global_batch_size": 8, "record_events": False}
UNFUSED = {"micro_batch_size": 8, "attention_backend": "unfused", "seq_length": 512}
DROPOUT = {"micro_batch_size": 8, "attention_dropout": 0.1, "hidden_dropout": 0.1}
VOCAB = {"vocab_size": 50257, "layers": 1, "micro_batch_size": 8}
LLAMA = {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "bias": False, "kv_heads": 4}
MOE = {"num_experts": 8, "moe.ffn_hidden": 512, "micro_batch_size": 4}
FULL = {"recompute_granularity": "full", "micro_batch_size": 8, "layers": 8}
ZERO = {"hidden": 1024, "distributed_optimizer": True}
QUICK = {"layers": 2, "global_batch_size": 2}
CASES: dict[str, tuple[int, dict[str, Any]]] = {"dp2 zero": (2, {**ZERO, **QUICK})}
LONG: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2 vocab": (2, {**VOCAB, "layers": 2, "parallel.pp": 2, "micro_batch_size": 4}),
    "unfused": (1, UNFUSED),
    "fp32": (1, {}),
    "bf16": (1, {"precision": "bf16", "micro_batch_size": 8}),
    "fp64": (1, {"precision": "fp64", "micro_batch_size": 4}),
    "dropout": (1, DROPOUT),
    "vocab bf16": (1, {**VOCAB, "precision": "bf16"}),
    "llama": (1, {**LLAMA, "micro_batch_size": 8}),
    "recompute": (1, FULL),
    "tp2": (2, {"parallel.tp": 2, "micro_batch_size": 4}),
    "tp2 sp": (2, {"parallel.tp": 2, "sequence_parallel": True, "micro_batch_size": 4}),
    "cp2": (2, {"parallel.cp": 2, "micro_batch_size": 4, "seq_length": 512}),
    "pp4": (4, {"parallel.pp": 4, "layers": 8}),
    "gpipe": (2, {"parallel.pp": 2, "schedule.name": "gpipe"}),
    "zero bubble": (2, {"parallel.pp": 2, "schedule.name": "zero_bubble_h1"}),
    "dp2": (2, {"hidden": 1024}),
    "dp4 zero bf16": (4, {**ZERO, "precision": "bf16"}),
    "experts": (1, MOE),
    "ep2": (2, {**MOE, "parallel.ep": 2}),
}


def kib(name: str, file: str = "status") -> int:
    found = re.search(rf"^{name}:\s+(\d+)", Path(f"/proc/self/{file}").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def peak_bytes(config: RunConfig) -> int:
    """Private memory of this rank at the peak of its training. Pages that all ranks share are left out: those of the
    fork server, and those of libraries, which a rank maps when it first runs their code."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    shared = kib("RssAnon") - kib("Private_Dirty", "smaps_rollup")
    length = config.model.seq_length
    tokens = np.arange(64 * length + 1, dtype=np.int32) % config.model.vocab_size
    datasets = [GPTDataset(tokens, length, name=name) for name in SPLITS]
    pretrain(config, datasets_provider=lambda _: (datasets[0], datasets[1], datasets[2]))
    return (kib("VmHWM") - kib("RssFile") - shared) * 1024


IMPORTS = """
import re, pathlib, torch, numpy, torch.distributed
def private():
    text = pathlib.Path("/proc/self/smaps_rollup").read_text()
    return sum(int(kib) for kib in re.findall(r"^Private_\\w+:\\s+(\\d+)", text, re.MULTILINE)) << 10
before = private()
torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
print(private() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_torch_needs_for_itself_what_is_added() -> None:
    """Mostly modules that its optimizers import: a hundred MB of the sum."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert 0.5 < int(done.stdout) / TORCH_BYTES < 1.0, "the rest is gloo and its threads"


@pytest.mark.skipif(sys.platform != "linux", reason="reads peaks from /proc")
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.sweep) for name in LONG)])
def test_the_sum_is_what_ranks_reach(name: str) -> None:
    """Without what torch needs for itself (`TORCH_BYTES`): the fork server has imported it here, and ranks share it.

    Within 30% on every rank: never above by so much that a run that fits would be turned away, and never below by so
    much that one is let in whose kernel kills it. Allocators round up and fragment, so most are a little below."""
    ranks, changes = {**CASES, **LONG}[name]
    config = presets.tiny().override({**WIDE, **changes}).validate(ranks)
    measured = run(peak_bytes, ranks, config, device="cpu", timeout=120)
    predicted = rank_memories(config, ranks, configured_schedule(config, ranks), "cpu")
    ratios = [need.total / found for need, found in zip(predicted, measured, strict=True)]
    assert all(0.7 < ratio < 1.3 for ratio in ratios), [f"{ratio:.2f}" for ratio in ratios]
    print(name, [f"{ratio:.2f}" for ratio in ratios])
