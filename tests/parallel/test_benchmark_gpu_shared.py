"""The parts of the GPU benchmark that start ranks, tiny and on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace

import gpu_shared

TINY = replace(gpu_shared.SHARED, hidden=32, heads=4, vocab_size=128, seq_length=16)


def test_every_way_to_share_a_gpu_gives_the_loss_of_one_rank() -> None:
    found = [
        *gpu_shared.tensor_parallel(TINY, (2,), device="cpu"),
        *gpu_shared.pipeline_parallel(TINY, 4, device="cpu"),
        *gpu_shared.overlapped_reduction(replace(TINY, vocab_size=1024), precision="fp32", device="cpu"),
    ]
    assert len({one.case for one in found}) == len(found) == 2 + len(gpu_shared.pipeline.OURS)
    json.dumps([one.row() for one in found], allow_nan=False)
    for one in found:
        assert one.facts["loss_difference"] < 1e-4, one.case
        assert [len(seconds) for seconds in one.seconds.values()] == [15, 15], "of every alternative, side by side"
    assert all(0 < share <= 1 for one in found for share in one.facts.get("busy_share_by_rank", []))
