"""Parts of the GPU benchmark: a GEMM, and the whole step of the paper's 1.2B model (row G2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import gpu_steps
import torch
from gpu_steps import DEVICE, PLAIN, our_step, peak_memory_gib, rates, timed
from harness import Comparison

from labkit.config import ModelConfig, presets
from labkit.models import counts
from labkit.parallel.data_parallel.bucket_layout import bytes_per_parameter

STACK = replace(presets.table1("1.2B").model, **PLAIN)


def gemm(size: int = 8192, *, device: torch.device = DEVICE) -> Iterator[Comparison]:
    """The product that the hardware is best at; nothing else here can be faster."""
    yield gpu_steps.gemm(size, device=device)


def stack(model: ModelConfig = STACK, micro_batch: int = 8, *, device: torch.device = DEVICE) -> Iterator[Comparison]:
    """G2: the paper's 1.2B model (40 layers, hidden 1536), the whole step at its batch of 8."""
    gpu_steps.forget_peak_memory(device)
    case = f"G2: 1.2B ({model.layers} layers, h{model.hidden}), s{model.seq_length} b{micro_batch}, whole step"
    found = timed(case, {"labkit": our_step(model, micro_batch, device)}, device=device)
    parameters = counts.stage_parameters(model, layers=model.layers)
    state = parameters * float(bytes_per_parameter(param_dtype="bf16", stage=0).total)
    facts = {"parameters": parameters, "state_gib": round(state / 2**30, 2)}
    found = replace(found, facts=facts | {"peak_gib": peak_memory_gib(device)})
    flops = counts.step_flops(model, samples=micro_batch, causal=True).total
    yield rates(found, flops, gpu_steps.gemm_rate(device), gpu_steps.peak_rate(device))
