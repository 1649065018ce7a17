"""Our GPT beside megatron-core's, with the same weights in the same ranks: loss and every gradient."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from labkit.config import ModelConfig, OptimConfig, ParallelConfig, RunConfig, TrainConfig
from labkit.launch import run
from labkit.models import build_model_chunks
from labkit.parallel import NaiveDataParallel, finalize_model_grads, initialize_model_parallel

pytestmark = pytest.mark.oracle

MODEL = ModelConfig(layers=2, hidden=32, heads=4, vocab_size=512, seq_length=16, activation="gelu")


def both(layout: dict[str, Any], kv_heads: int | None) -> dict[str, Any]:
    """Largest differences of loss and gradients on this rank after one forward and backward of both models."""
    import megatron_peer

    config = RunConfig(
        model=replace(MODEL, kv_heads=kv_heads),
        parallel=ParallelConfig(**layout),
        optim=OptimConfig(lr=0.0, weight_decay=0.0, clip_grad=1e9),
        train=TrainConfig(micro_batch_size=3, global_batch_size=3),
    )
    groups = initialize_model_parallel(config.parallel)
    [ours] = build_model_chunks(config, groups)
    ids = torch.randint(0, 256, (3, 17), generator=torch.Generator().manual_seed(1))
    batch = {"tokens_BS": ids[:, :-1].contiguous(), "labels_BS": ids[:, 1:].contiguous()}
    step, theirs = megatron_peer.make_step(config, groups, itertools.repeat(batch), ours)
    their_loss = step()
    wrapped = NaiveDataParallel(ours, groups.dp_cp)
    loss = wrapped(batch["tokens_BS"], labels_BS=batch["labels_BS"]).mean()
    loss.backward()
    finalize_model_grads([wrapped], groups)
    gradients = {
        p.full_name: megatron_peer.their_part(p.main_grad, p, groups.tp)  # type: ignore[attr-defined]
        for p in ours.parameters()
    }
    worst = {}
    for name, parameter in theirs.module.named_parameters():
        own = gradients.pop(megatron_peer.our_name(name, 0))
        assert own is not None
        worst[name] = ((own - parameter.main_grad).norm() / parameter.main_grad.norm()).item()
    return {"loss": loss.item(), "theirs": their_loss, "worst": worst, "left": list(gradients)}


@pytest.mark.parametrize(
    ("layout", "kv_heads"),
    [
        ({}, None),
        pytest.param({"tp": 2}, None, marks=pytest.mark.sweep),
        pytest.param({"tp": 2, "sequence_parallel": True}, None, marks=pytest.mark.sweep),
        ({"tp": 4, "sequence_parallel": True}, None),
        pytest.param({"tp": 2}, 1, marks=pytest.mark.sweep),
        ({"tp": 4, "sequence_parallel": True}, 2),
    ],
    ids=["one rank", "tp2", "tp2 sp", "tp4 sp", "tp2, one kv head", "tp4 sp, two kv heads"],
)
def test_loss_and_gradients_equal_megatron_core(layout: dict[str, Any], kv_heads: int | None) -> None:
    for found in run(both, layout.get("tp", 1), layout, kv_heads, timeout=120):
        assert found["loss"] == pytest.approx(found["theirs"], rel=1e-6)
        assert found["left"] == []
        # A key bias has no gradient but rounding; it is a third of qkv.bias, whose norm is the value's.
        assert max(found["worst"].values()) < 1e-5, found["worst"]
