"""Steps that the GPU benchmark times: one layer, a whole training step; and how they are timed."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from harness import LEAST, Comparison, interleave
from torch import Tensor, nn

from labkit.config import ModelConfig, RunConfig, TrainConfig, presets
from labkit.fp8 import Float8Recipe
from labkit.models import counts
from labkit.models.blocks import TransformerLayer
from labkit.models.build import Build
from labkit.parallel import single_process_groups
from labkit.schedules import one_f_one_b
from labkit.train.forward_step import gpt_forward_step
from labkit.train.pipeline import Pipeline
from labkit.train.pretraining import Run, layer_spec_with, setup_model_and_optimizer
from labkit.train.reporting.device_peaks import known_peak
from labkit.train.reporting.metrics import Timers
from labkit.train.stepping import train_step

DEVICE = torch.device("cuda", 0)
LOAD = float(os.cpu_count() or 1)
"""The host only launches kernels: its load matters where it has no core left."""
PLAIN: dict[str, Any] = {"embedding_dropout": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0}
PLAIN["use_cpu_initialization"] = False
"""Of models that are timed: no dropout, as peers have none, and weights drawn on the device, which takes no minutes."""
GPT2 = replace(presets.gpt2_124m().model, **PLAIN)
Step = Callable[[], Any]


def synchronize(device: torch.device = DEVICE) -> None:
    """Wait for a GPU; a CPU has done its work already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(
    case: str, steps: Mapping[str, Step], *, repetitions: int = LEAST, warmup: int = 3, device: torch.device = DEVICE
) -> Comparison:
    """Interleaved, with the GPU idle at both ends of every repetition."""
    wait = partial(synchronize, device)
    return interleave(case, steps, repetitions=repetitions, warmup=warmup, synchronize=wait, max_load=LOAD)


def gemm(size: int = 8192, at_once: int = 10, device: torch.device = DEVICE) -> Comparison:
    """A square bf16 GEMM on random data, several at once, with its rate as a fact."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    case = f"bf16 GEMM {size} x {size} x {size}, {at_once} at once"
    found = timed(case, {"torch.mm": lambda: [torch.mm(a, b, out=out) for _ in range(at_once)]}, device=device)
    rate = at_once * 2 * size**3 / found.median("torch.mm")
    return replace(found, facts={"tflop_per_s": round(rate / 1e12, 1)})


@cache
def gemm_rate(device: torch.device = DEVICE) -> float:
    """Operations per second of a bf16 GEMM, measured once in this process; of a small one on a CPU."""
    size = 8192 if device.type == "cuda" else 128
    return 10 * 2 * size**3 / gemm(size, 10, device).median("torch.mm")


def peak_rate(device: torch.device = DEVICE) -> float:
    """Operations per second in dense bf16 by the GPU's data sheet; NaN where labkit does not know it."""
    peak = known_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return float("nan") if peak is None else 1e12 * peak.half


def rates(found: Comparison, flops: float, gemm_rate: float, peak: float) -> Comparison:
    """The comparison with TFLOP/s and both utilisations of ours; without them where it was rejected, and without the
    one against the peak where that is NaN."""
    if found.rejected:
        return found
    rate = flops / found.median(found.ours)
    facts = {"tflop": round(flops / 1e12, 2), "tflop_per_s": round(rate / 1e12, 1)}
    facts |= {} if math.isnan(peak) else {"mfu": round(rate / peak, 3)}
    return replace(found, facts=facts | {"share_of_gemm_rate": round(rate / gemm_rate, 3)} | found.facts)


def forget_peak_memory(device: torch.device = DEVICE) -> None:
    """Begin to look for the largest memory anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_gib(device: torch.device = DEVICE) -> float | None:
    """Largest memory that tensors took since the last reset; None on a CPU, which does not count it."""
    return round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if device.type == "cuda" else None


def layer_flops(config: ModelConfig, batch: int) -> float:
    """Operations of `layer_step`."""
    return 3 * counts.forward_flops(config, samples=batch, causal=True, logits=False).total


def layer_step(
    config: ModelConfig, batch: int, float8: Float8Recipe | None = None, device: torch.device = DEVICE
) -> Callable[[], None]:
    """Forward and backward of one transformer layer in bf16, with gradients of weights and input; in fp8 a whole step,
    so that the weights are cast every time."""
    groups = single_process_groups(device=device)
    spec = layer_spec_with(config, float8)
    precision = spec.precision(groups, device)
    made: dict[str, Any] = {"spec": spec, "precision": precision, "dtype": torch.bfloat16, "device": device}
    layer = TransformerLayer(0, Build(config=config, group=groups.tp, seed=1, **made))
    shape = (config.seq_length, batch, config.hidden)
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(shape, device=device, dtype=torch.bfloat16)

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        with precision.region():
            y = layer(x)
        y.backward(grad)
        precision.end_step()

    return step


def stack_step(config: ModelConfig, batch: int, device: torch.device = DEVICE) -> Callable[[], None]:
    """Forward and backward of `config.layers` layers in bf16, recomputed as `config` says."""
    groups = single_process_groups(device=device)
    build = Build(config=config, group=groups.tp, seed=1, dtype=torch.bfloat16, device=device)
    layers = nn.ModuleList([TransformerLayer(index, build) for index in range(config.layers)])
    shape = (config.seq_length, batch, config.hidden)
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(shape, device=device, dtype=torch.bfloat16)

    def step() -> None:
        layers.zero_grad(set_to_none=True)
        x.grad = None
        build.recompute.run_layers(layers, x, None).backward(grad)

    return step


def batches(model: ModelConfig, micro_batch: int, device: torch.device = DEVICE) -> Iterator[dict[str, Tensor]]:
    """Four microbatches of random tokens on the GPU, over and over."""
    shape = (4, micro_batch, model.seq_length + 1)
    tokens = torch.randint(0, model.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.ones(micro_batch, model.seq_length, device=device)
    made = [
        {"tokens_BS": t[:, :-1].contiguous(), "labels_BS": t[:, 1:].contiguous(), "loss_mask_BS": mask} for t in tokens
    ]
    return itertools.cycle(made)


def our_run(
    model: ModelConfig, micro_batch: int, device: torch.device = DEVICE, **optim: Any
) -> tuple[Pipeline, Any, Iterator[dict[str, Tensor]]]:
    """(pipeline, optimizer, batches) of a training with float32 masters, in bf16 unless `optim` says else."""
    chosen = replace(presets.gpt2_124m().optim, lr_schedule="constant", warmup_steps=0, **optim)
    train = TrainConfig(micro_batch_size=micro_batch, global_batch_size=micro_batch, record_events=False)
    config = RunConfig(model=model, optim=chosen, train=train)
    groups = single_process_groups(device=device)
    schedule = one_f_one_b(1, 1)
    chunks, optimizer, _ = setup_model_and_optimizer(Run(config, groups, schedule, Timers(0)))
    return Pipeline(config, groups, chunks, gpt_forward_step, schedule), optimizer, batches(model, micro_batch, device)


def our_step(model: ModelConfig, micro_batch: int, device: torch.device = DEVICE, **optim: Any) -> Callable[[], Any]:
    """A whole training step of `our_run`: forward, backward, clip, AdamW."""
    pipeline, optimizer, data = our_run(model, micro_batch, device, **optim)
    timers = Timers(0)
    return lambda: train_step(pipeline, optimizer, timers, data, step=0, lr=1e-4, clip_grad=1.0)
