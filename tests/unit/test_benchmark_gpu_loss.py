"""The GPU benchmark of the loss, tiny and on a CPU: all alternatives compute the same, and rows come one by one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import gpu_loss

from labkit.parallel.vocab.cross_entropy import CHUNKS, ChunkSizes

CPU = torch.device("cpu")


def test_all_alternatives_have_the_same_gradient() -> None:
    problem = gpu_loss.Problem(600, 12, 50, torch.float32, CPU)
    small = ChunkSizes(1, 1, 1)
    steps = {"ours": problem.ours(small, fused=False), "whole": problem.whole()}
    if (fused := problem.fused_by_torch()) is not None:
        steps["torch"] = fused
    found = {}
    for name, step in steps.items():
        loss = step().mean()
        assert problem.hidden_NH.grad is not None and problem.weight_VH.grad is not None
        found[name] = (loss.detach(), problem.hidden_NH.grad.clone(), problem.weight_VH.grad.clone())
    for name, values in found.items():
        for value, expected in zip(values, found["whole"], strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
    problem.ours(small)()
    torch.testing.assert_close(problem.weight_VH.main_grad, found["whole"][2], rtol=1e-4, atol=1e-7)
    assert problem.weight_VH.grad is None, "as in training"


@pytest.mark.parametrize("repetitions", [15, 2])
def test_rows_come_one_by_one_with_what_cannot_run(monkeypatch: pytest.MonkeyPatch, repetitions: int) -> None:
    def broken(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("")

    usual = CHUNKS["cpu"]
    tiny = {"tokens": 300, "vocab": 40, "exponents": (10, 14), "dtype": torch.float32, "device": "cpu"}
    with monkeypatch.context() as patch:
        patch.setattr(F, "cross_entropy", broken)
        rows = gpu_loss.loss_chunks(hidden_sizes=(8, 16), repetitions=repetitions, **tiny)
        first = next(rows).row()
        assert [row.case for row in rows] == ["output layer and loss, 300 tokens, h16, V40, float32"]
    assert first["case"] == "output layer and loss, 300 tokens, h8, V40, float32"
    assert first["unable"] == {"whole logits, F.cross_entropy": "RuntimeError: no text"}
    assert set(first["noise"]) >= {
        "labkit",
        "labkit, gradient in the weight's type",
        "chunks of 2^10",
        "chunks of 2^14",
    }
    assert CHUNKS["cpu"] == usual, "as it was"
