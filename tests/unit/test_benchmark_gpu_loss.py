"""The GPU benchmark of the loss, tiny and on a CPU: all alternatives compute the same, and rows come one by one."""

from __future__ import annotations

import gpu_loss
import harness
import pytest
import torch
import torch.nn.functional as F

from labkit.parallel.vocab.cross_entropy import CHUNKS, ChunkSizes

CPU = torch.device("cpu")


def test_all_alternatives_have_the_same_gradient() -> None:
    """With a vocabulary that needs no padding: the peers have the columns of padding in their loss."""
    problem = gpu_loss.Problem(600, 12, 128, torch.float32, CPU)
    small = ChunkSizes(1, 1, 1)
    sides = {"ours": problem.ours(small, fused=False), "whole": problem.whole()}
    if hasattr(F, "linear_cross_entropy"):
        sides["torch"] = problem.fused_by_torch()
    found = {}
    for name, side in sides.items():
        side.step()
        assert problem.weight_VH.grad is not None
        found[name] = (*(x.clone() for x in side.results().values()), problem.weight_VH.grad.clone())
    for name, values in found.items():
        for value, expected in zip(values, found["whole"], strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
    problem.ours(small).step()
    torch.testing.assert_close(problem.weight_VH.main_grad, found["whole"][2], rtol=1e-4, atol=1e-7)
    assert problem.weight_VH.grad is None, "as in training"


def test_a_side_begins_without_the_gradients_of_the_one_before() -> None:
    """Their memory would be counted as there already, and would be missing in the peak."""
    problem = gpu_loss.Problem(64, 8, 128, torch.float32, CPU)
    side = problem.ours(fused=False)
    side.step()
    assert side.passes is not None and problem.weight_VH.grad is not None
    side.passes[0]()
    assert problem.weight_VH.grad is None and problem.hidden_NH.grad is None


@pytest.mark.parametrize("repetitions", [15, 2])
def test_rows_come_one_by_one_with_what_cannot_run(monkeypatch: pytest.MonkeyPatch, repetitions: int) -> None:
    def broken(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("")

    usual = CHUNKS["cpu"]
    tiny = {"tokens": 300, "vocab": 128, "exponents": (10, 14), "dtype": torch.float32, "device": CPU}
    with monkeypatch.context() as patch:
        patch.setattr(F, "cross_entropy", broken)
        patch.setattr(F, "linear_cross_entropy", broken, raising=False)
        rows = gpu_loss.loss_chunks(hidden_sizes=(8, 16), repetitions=repetitions, **tiny)
        first, second, found = next(rows), next(rows), next(rows)
        assert sum(isinstance(row, harness.Comparison) for row in rows) == 1
    assert isinstance(found, harness.Comparison)
    assert found.case == "output layer and loss, 300 tokens, h8, V128, float32"
    assert first == {"case": f"{found.case}: whole logits, F.cross_entropy", "could_not_run": "RuntimeError"}
    assert second["case"].endswith("F.linear_cross_entropy, chunked") and "could_not_run" in second
    assert list(found.seconds) == [
        "labkit", "labkit, gradient in the weight's type", "chunks of 2^10", "chunks of 2^14",
    ]  # fmt: skip
    assert CHUNKS["cpu"] == usual, "as it was"
