"""Parts of the GPU benchmark: fp8 beside bf16 (row G3), types of a whole step, recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from gpu_steps import (
    DEVICE,
    GPT2,
    forget_peak_memory,
    gemm_rate,
    layer_flops,
    layer_step,
    our_step,
    peak_memory_gib,
    peak_rate,
    rates,
    stack_step,
    synchronize,
    timed,
)  # fmt: skip
from harness import Comparison

from labkit.config import ModelConfig
from labkit.fp8 import Float8Recipe
from labkit.launch.machine import why_no_transformer_engine

SIZES = ((4096, 8), (1024, 8))
"""Hidden size and samples: fp8 should win at the first (aim 1.25) and may lose at the second."""
LAYER = ModelConfig(layers=1, use_cpu_initialization=False)
RECOMPUTED = replace(LAYER, layers=8, hidden=2048, heads=16, seq_length=2048)
TYPES: dict[str, dict[str, Any]] = {
    "labkit, bf16": {"precision": "bf16"},
    "labkit, fp16": {"precision": "fp16"},
    "labkit, fp8 delayed": {"precision": "bf16", "fp8": "hybrid"},
    "labkit, fp32": {"precision": "fp32"},
}
RECOMPUTATIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective, layernorm": {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
    "selective, mlp": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    "full": {"recompute_granularity": "full"},
}


def fp8_layer(
    sizes: tuple[tuple[int, int], ...] = SIZES,
    seq_length: int = 2048,
    head: int = 128,
    *,
    device: torch.device = DEVICE,
) -> Iterator[Comparison]:
    """G3: one layer in fp8 and in bf16, by our layers (`torch._scaled_mm`) and, where it is, by Transformer Engine."""
    for hidden, batch in sizes:
        config = ModelConfig(
            layers=1, hidden=hidden, heads=hidden // head, seq_length=seq_length, use_cpu_initialization=False
        )
        steps = {
            "labkit, fp8 delayed": layer_step(config, batch, Float8Recipe("delayed"), device),
            "labkit, fp8 current": layer_step(config, batch, Float8Recipe("current"), device),
            "labkit, bf16": layer_step(config, batch, device=device),
        }
        if (missing := why_no_transformer_engine()) is None:
            engine = replace(config, transformer_impl="transformer_engine")
            steps |= {
                "Transformer Engine, bf16": layer_step(engine, batch, device=device),
                "Transformer Engine, fp8 delayed": layer_step(engine, batch, Float8Recipe("delayed"), device),
                "Transformer Engine, fp8 current": layer_step(engine, batch, Float8Recipe("current"), device),
            }
        case = f"G3: layer h{hidden} s{seq_length} b{batch} in fp8, forward and backward"
        facts = {} if missing is None else {"transformer_engine": missing}
        found = replace(timed(case, steps, device=device), facts=facts)
        yield rates(found, layer_flops(config, batch), gemm_rate(device), peak_rate(device))


def precisions(
    model: ModelConfig = GPT2,
    micro_batch: int = 16,
    types: tuple[str, ...] = tuple(TYPES),
    *,
    device: torch.device = DEVICE,
) -> Iterator[Comparison]:
    """A whole training step in each type, and the loss after the timed steps."""
    steps = {name: our_step(model, micro_batch, device, **TYPES[name]) for name in types}
    found = timed(f"GPT-2 124M, s{model.seq_length} b{micro_batch}, whole step by type", steps, device=device)
    last = {name: step() for name, step in steps.items()}
    facts: dict[str, Any] = {"loss": {name: round(result.loss, 3) for name, result in last.items()}}
    if "labkit, fp16" in last:
        facts["fp16_loss_scale"] = last["labkit, fp16"].loss_scale
    yield replace(found, facts=facts)


def recomputation(
    model: ModelConfig = RECOMPUTED, batch: int = 4, *, device: torch.device = DEVICE
) -> Iterator[Comparison]:
    """Peak memory of activations and time by `recompute_granularity`."""
    for name, choice in RECOMPUTATIONS.items():
        step = stack_step(replace(model, **choice), batch, device)
        step()
        synchronize(device)
        held = torch.cuda.memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
        forget_peak_memory(device)
        case = f"{model.layers} layers h{model.hidden} s{model.seq_length} b{batch}, recomputation {name}"
        found = timed(case, {"labkit": step}, device=device)
        peak = peak_memory_gib(device)
        yield replace(found, facts={"activations_peak_gib": None if peak is None else round(peak - held, 2)})
        del step
        torch.cuda.empty_cache()
