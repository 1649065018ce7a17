"""Recomputation on a GPU: its random states replayed, the bytes of the closed form, memory really given back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from labkit.config import ModelConfig
from labkit.models import GPTModel, SavedTensors, Share
from labkit.parallel import single_process_groups
from labkit.plan.activations import layers_activation_bytes, recomputed_at_once_bytes

pytestmark = pytest.mark.gpu

BATCH = 4
MODEL = ModelConfig(
    layers=4, hidden=256, heads=8, vocab_size=512, seq_length=256, attention_dropout=0.1, hidden_dropout=0.1
)
CHOICES: dict[str, dict[str, Any]] = {
    "kept": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm")},
    "all parts": {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp", "layernorm")},
    "full": {"recompute_granularity": "full"},
}


def layers_of(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> GPTModel:
    """The layers alone, with an input; the same weights, input and random states every time."""
    model = GPTModel(
        config, single_process_groups(), layers=range(config.layers), pre_process=False, post_process=False, seed=3,
        dtype=dtype, device="cuda",
    )  # fmt: skip
    torch.manual_seed(5)
    shape = config.seq_length, BATCH, config.hidden
    model.set_input_tensor(torch.randn(shape, dtype=dtype, device="cuda", requires_grad=True))
    return model


def gradients(config: ModelConfig) -> list[Tensor]:
    model = layers_of(config)
    model(None).float().square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("backend", ["fused", "unfused"])
@pytest.mark.parametrize("choice", [name for name in CHOICES if name != "kept"])
def test_dropout_is_replayed_to_the_bit(choice: str, backend: str) -> None:
    # 128 keys: a fused kernel adds the parts of a query's gradient up in any order, and has at most two of them here
    config = replace(MODEL, attention_backend=backend, seq_length=128)
    kept, again = gradients(config), gradients(replace(config, **CHOICES[choice]))
    assert len(kept) == len(again) > 0
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("backend", ["fused", "math", "unfused"])
@pytest.mark.parametrize("choice", CHOICES)
def test_saved_bytes_to_one_percent(choice: str, backend: str, dtype: torch.dtype) -> None:
    if backend == "fused" and dtype == torch.float32:
        pytest.skip("float32 has no flash kernel on a GPU: which one torch takes, and what it keeps, is its choice")
    config = replace(MODEL, attention_backend=backend, **CHOICES[choice])
    model, on = layers_of(config, dtype), Share(samples=BATCH, element_bytes=dtype.itemsize, device="cuda")
    with SavedTensors(model) as saved:
        _alive = model(None)
        assert saved.bytes == pytest.approx(layers_activation_bytes(config, on), rel=0.01)


def test_memory_between_forward_and_backward_falls_by_what_is_not_kept() -> None:
    def allocated(config: ModelConfig) -> int:
        model, held = layers_of(config), 0
        for _ in range(2):  # the first time cuBLAS takes its workspace
            before = torch.cuda.memory_allocated()
            y = model(None)
            held = torch.cuda.memory_allocated() - before
            y.sum().backward()
            del y
        return held

    config, on = replace(MODEL, attention_backend="unfused"), Share(samples=BATCH, element_bytes=2, device="cuda")
    full = replace(config, recompute_granularity="full")
    expected = layers_activation_bytes(config, on) - layers_activation_bytes(full, on)
    assert allocated(config) - allocated(full) == pytest.approx(expected, rel=0.05)
    assert recomputed_at_once_bytes(full, on) < layers_activation_bytes(config, on) / 2
