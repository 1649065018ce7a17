"""The parts of the GPU benchmark that start ranks, tiny and on the CPU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import gpu_shared

TINY = replace(gpu_shared.SHARED, hidden=32, heads=4, vocab_size=128, seq_length=16)


def test_every_way_to_share_a_gpu_gives_the_loss_of_one_rank() -> None:
    rows = [
        *gpu_shared.tensor_parallel(TINY, (2,), device="cpu"),
        *gpu_shared.pipeline_parallel(TINY, 4, device="cpu"),
        *gpu_shared.overlapped_reduction(replace(TINY, vocab_size=1024), 2, precision="fp32", device="cpu"),
    ]
    assert len(rows) == len({row["case"] for row in rows}) == 2 + len(gpu_shared.pipeline.OURS)
    json.dumps(rows, allow_nan=False)
    for row in rows:
        assert row["loss_difference"] < 1e-4 and row["ms"] > 0, row
