"""Parts of the GPU benchmark: a GEMM, one layer (row G1) and whole training steps (row G2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import gpu_steps
import torch
from gpu_steps import DEVICE, batches, layer_flops, layer_step, our_step, peak_memory_gib, rates, timed
from harness import Comparison
from plain_gpt import PlainGPT

from labkit.config import ModelConfig, presets
from labkit.models import counts

NO_DROPOUT: dict[str, Any] = {"embedding_dropout": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0}
LAYER = ModelConfig(layers=1, hidden=4096, heads=32, seq_length=2048)
GPT2 = replace(presets.gpt2_124m().model, **NO_DROPOUT)
STACK = replace(presets.table1("1.2B").model, **NO_DROPOUT)


def gemm(size: int = 8192, *, device: torch.device = DEVICE) -> Iterator[Comparison]:
    """The product that the hardware is best at; nothing else here can be faster."""
    yield gpu_steps.gemm(size, device=device)


def with_rates(found: Comparison, flops: float, device: torch.device) -> Comparison:
    """The comparison with its utilisations on this device."""
    return rates(found, flops, gpu_steps.gemm_rate(device), gpu_steps.peak_rate(device))


def one_layer(config: ModelConfig = LAYER, batch: int = 8, *, device: torch.device = DEVICE) -> Iterator[Comparison]:
    """G1: aim at most 34 ms on an H200."""
    gpu_steps.forget_peak_memory(device)
    case = f"G1: layer h{config.hidden} s{config.seq_length} b{batch}, forward and backward"
    found = timed(case, {"labkit": layer_step(config, batch, device=device)}, device=device)
    facts = {"peak_gib": peak_memory_gib(device), "attention_kernel": attention_kernel(config, batch, device)}
    yield with_rates(replace(found, facts=facts), layer_flops(config, batch), device)


def attention_kernel(config: ModelConfig, batch: int, device: torch.device = DEVICE) -> str:
    """The implementation that `scaled_dot_product_attention` chose, by the operator that it called."""
    from torch.profiler import ProfilerActivity, profile

    step = layer_step(config, batch, device=device)
    step()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
        gpu_steps.synchronize(device)
    names = {event.key.removeprefix("aten::") for event in seen.key_averages() if "scaled_dot_product" in event.key}
    chosen = sorted(name for name in names if name.startswith("_") and not name.endswith("_backward"))
    return ", ".join(chosen) or "unknown"


def plain_step(model: ModelConfig, micro_batch: int, device: torch.device = DEVICE) -> Callable[[], Any]:
    """The same step as one writes it for one GPU: compiled, autocast to bf16, torch's clipping and fused AdamW."""
    plain = PlainGPT(model).to(device)
    compiled = torch.compile(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, betas=(0.9, 0.999), weight_decay=0.01, fused=True)
    data = batches(model, micro_batch, device)

    def step() -> float:
        batch = next(data)
        with torch.autocast(device.type, torch.bfloat16):
            loss = compiled(batch["tokens_BS"], batch["labels_BS"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def gpt2(model: ModelConfig = GPT2, micro_batch: int = 16, *, device: torch.device = DEVICE) -> Iterator[Comparison]:
    """G2: GPT-2 124M, the whole step, beside the compiled plain model."""
    steps = {
        "labkit": our_step(model, micro_batch, device),
        "plain model, compiled": plain_step(model, micro_batch, device),
    }
    case = f"G2: GPT-2 124M, s{model.seq_length} b{micro_batch}, whole step"
    found = timed(case, steps, warmup=5, device=device)
    yield with_rates(found, counts.step_flops(model, samples=micro_batch, causal=True).total, device)


def stack(model: ModelConfig = STACK, micro_batch: int = 8, *, device: torch.device = DEVICE) -> Iterator[Comparison]:
    """G2: the paper's 1.2B model (40 layers, hidden 1536), the whole step at its batch of 8."""
    gpu_steps.forget_peak_memory(device)
    case = f"G2: 1.2B ({model.layers} layers, h{model.hidden}), s{model.seq_length} b{micro_batch}, whole step"
    found = timed(case, {"labkit": our_step(model, micro_batch, device)}, device=device)
    parameters = counts.stage_parameters(model, layers=model.layers)
    facts = {"parameters": parameters, "state_gib": round(counts.state_bytes(parameters, "bf16").total / 2**30, 2)}
    found = replace(found, facts=facts | {"peak_gib": peak_memory_gib(device)})
    yield with_rates(found, counts.step_flops(model, samples=micro_batch, causal=True).total, device)
