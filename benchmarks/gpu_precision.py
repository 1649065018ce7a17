"""Parts of the GPU benchmark: fp8 beside bf16 (row G3), types of a whole step, recomputation, hidden reductions."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

import torch
from gpu_steps import layer_flops, layer_step, our_step, rates, stack_step, timed
from harness import Comparison

from labkit.config import ModelConfig, OptimConfig, RunConfig, TrainConfig
from labkit.launch import run
from labkit.launch.transformer_engine import why_no_transformer_engine
from labkit.parallel.fp8 import Float8Recipe

SIZES = ((4096, 8), (1024, 8))
"""Hidden size and samples: fp8 should win at the first (aim 1.25) and may lose at the second."""
SHARED = ModelConfig(layers=4, hidden=512, heads=8, vocab_size=1024, seq_length=256)
RECOMPUTED = ModelConfig(layers=8, hidden=2048, heads=16, seq_length=2048)


def fp8_layer(gemm_rate: float, peak: float) -> list[Comparison]:
    """G3: one layer in fp8 and in bf16, by our layers (`torch._scaled_mm`) and, where it is, by Transformer Engine."""
    found = []
    for hidden, batch in SIZES:
        config = ModelConfig(layers=1, hidden=hidden, heads=hidden // 128, seq_length=2048)
        steps = {
            "labkit, fp8 delayed": layer_step(config, batch, Float8Recipe("delayed")),
            "labkit, fp8 current": layer_step(config, batch, Float8Recipe("current")),
            "labkit, bf16": layer_step(config, batch),
        }
        if (missing := why_no_transformer_engine()) is None:
            engine = replace(config, transformer_impl="transformer_engine")
            steps |= {
                "Transformer Engine, bf16": layer_step(engine, batch),
                "Transformer Engine, fp8 delayed": layer_step(engine, batch, Float8Recipe("delayed")),
                "Transformer Engine, fp8 current": layer_step(engine, batch, Float8Recipe("current")),
            }
        compared = timed(f"layer h{hidden} s2048 b{batch} in fp8, forward and backward", steps)
        facts = {} if missing is None else {"transformer_engine": missing}
        found.append(rates(replace(compared, facts=facts), layer_flops(config, batch), gemm_rate, peak))
    return found


def precisions(model: ModelConfig) -> list[Comparison]:
    """A whole training step in each type, and the loss after the timed steps."""
    micro_batch = 16
    chosen: dict[str, dict[str, Any]] = {
        "labkit, bf16": {"precision": "bf16"},
        "labkit, fp16": {"precision": "fp16"},
        "labkit, fp8 delayed": {"precision": "bf16", "fp8": "hybrid"},
        "labkit, fp32": {"precision": "fp32"},
    }
    steps = {name: our_step(model, micro_batch, **optim) for name, optim in chosen.items()}
    found = timed("GPT-2 124M, s1024 b16, whole step by type", steps, repetitions=8, warmup=3)
    last = {name: step() for name, step in steps.items()}
    losses = {name: round(result.loss, 3) for name, result in last.items()}
    return [replace(found, facts={"loss": losses, "fp16_loss_scale": last["labkit, fp16"].loss_scale})]


def recomputation() -> list[dict[str, Any]]:
    """Peak memory of activations and time by `recompute_granularity`, eight layers at hidden 2048."""
    rows = []
    choices: dict[str, dict[str, Any]] = {
        "none": {},
        "selective, layernorm": {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
        "selective, mlp": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
        "full": {"recompute_granularity": "full"},
    }
    for name, choice in choices.items():
        step = stack_step(replace(RECOMPUTED, **choice), 4)
        step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found = timed(f"recomputation {name}", {"labkit": step}, repetitions=8, warmup=2)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        ms = None if found.rejected else round(1e3 * found.median("labkit"), 2)
        rows.append({"case": f"8 layers h2048 s2048 b4, recomputation {name}", "peak_gib": round(peak, 2), "ms": ms})
        del step
        torch.cuda.empty_cache()
    return rows


def data_parallel_seconds(overlap: bool, steps: int) -> tuple[list[float], float]:
    """(losses, seconds of the later steps) of one of two ranks that train together on one GPU."""
    from labkit.train import pretrain

    config = RunConfig(
        model=SHARED,
        optim=OptimConfig(precision="bf16", overlap_grad_reduce=overlap, bucket_size=1_000_000 if overlap else None),
        train=TrainConfig(steps=steps, micro_batch_size=4, global_batch_size=16, record_events=False),
    )
    pretrain(config)  # connections, kernels and the learned order of arrivals
    torch.cuda.synchronize()
    start = time.perf_counter()
    losses = pretrain(config).losses
    torch.cuda.synchronize()
    return losses, time.perf_counter() - start


def overlapped_reduction(steps: int = 10) -> list[dict[str, Any]]:
    """Two data-parallel ranks on one GPU, gradients through host memory: reduced behind the backward, and after it."""
    found = {
        overlap: run(data_parallel_seconds, 2, overlap, steps, backend="gloo", device="cuda", timeout=180)
        for overlap in (True, False)
    }
    seconds = {overlap: max(spent for _, spent in results) / steps for overlap, results in found.items()}
    differences = [abs(a - b) for a, b in zip(found[True][0][0], found[False][0][0], strict=True)]
    return [
        {
            "case": "2 data-parallel ranks on one GPU, gradient reduction behind the backward",
            "ms": round(1e3 * seconds[True], 2),
            "ms_without_overlap": round(1e3 * seconds[False], 2),
            "loss_difference": max(differences),
        }
    ]


if __name__ == "__main__":
    sys.exit("benchmarks/gpu_precision.py is a part of the GPU benchmark: run benchmarks/gpu.py, which needs a GPU")
