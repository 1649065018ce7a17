"""How the GPU benchmark times steps and counts their rates; and the training step that several parts time."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from harness import LEAST, Comparison, interleave
from torch import Tensor
from torch.nn.attention import SDPBackend

from labkit import plan
from labkit.config import GraphConfig, ModelConfig, MoEConfig, OptimConfig, RunConfig, TrainConfig, presets
from labkit.parallel import ParallelGroups, single_process_groups
from labkit.parallel.parameters.weights import DeviceSeed
from labkit.schedules import one_f_one_b
from labkit.train.forward_step import gpt_forward_step
from labkit.train.pipeline import Pipeline
from labkit.train.pretraining import Run, setup_model_and_optimizer
from labkit.train.reporting.device_peaks import peak_of
from labkit.train.reporting.metrics import Timers
from labkit.train.stepping import train_step

DEVICE = torch.device("cuda", 0)
MAX_OTHERS = float((os.cpu_count() or 2) - 1)
"""The host only launches kernels: others' work matters where it has no core left."""
PLAIN: dict[str, Any] = {"embedding_dropout": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0}
PLAIN["use_cpu_initialization"] = False
"""Of models that are timed: no dropout, as peers have none, and weights drawn on the device, which takes no minutes."""
BF16 = OptimConfig(precision="bf16")
ON_DEVICE = DeviceSeed(1)
"""Draws weights there, too, for parts of a model that are built without a configuration."""
GPT2 = replace(presets.gpt2_124m().model, **PLAIN)
Step = Callable[[], Any]


def synchronize(device: torch.device = DEVICE) -> None:
    """Wait for a GPU; a CPU has done its work already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(
    case: str,
    steps: Mapping[str, Step],
    *,
    repetitions: int = LEAST,
    warmup: int = 3,
    across_ranks: bool = False,
    device: torch.device = DEVICE,
) -> Comparison:
    """Interleaved, with the GPU idle at both ends of every repetition."""
    return interleave(
        case, steps, repetitions=repetitions, warmup=warmup, across_ranks=across_ranks,
        synchronize=partial(synchronize, device), max_others=MAX_OTHERS,
    )  # fmt: skip


# ---- rates ----


def gemm(size: int = 8192, at_once: int = 10, *, device: torch.device = DEVICE) -> Iterator[Comparison]:
    """A square bf16 GEMM on random data, the product that the hardware is best at; nothing else here can be faster."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    case = f"bf16 GEMM {size} x {size} x {size}, {at_once} at once"
    found = timed(case, {"torch.mm": lambda: [torch.mm(a, b, out=out) for _ in range(at_once)]}, device=device)
    rate = at_once * 2 * size**3 / found.median("torch.mm")
    yield replace(found, facts={"tflop_per_s": round(rate / 1e12, 1)})


@cache
def gemm_rate(device: torch.device = DEVICE) -> float:
    """Operations per second of a bf16 GEMM, measured once in this process, of a small one on a CPU; NaN where the
    machine was too busy to measure."""
    size = 8192 if device.type == "cuda" else 128
    [found] = gemm(size, 10, device=device)
    return float("nan") if found.rejected else 10 * 2 * size**3 / found.median("torch.mm")


def peak_rate(device: torch.device = DEVICE, optim: OptimConfig = BF16) -> float:
    """Operations per second by the GPU's data sheet in the precision of a run with `optim`, the peak that training's
    MFU has; NaN where labkit does not know it."""
    peak = peak_of(torch.cuda.get_device_name(device), optim) if device.type == "cuda" else None
    return float("nan") if peak is None else 1e12 * peak


def rates(
    found: Comparison,
    flops: float,
    device: torch.device,
    *,
    share: str = "mfu",
    optims: Mapping[str, OptimConfig] = MappingProxyType({}),
) -> Comparison:
    """The comparison with everyone's TFLOP/s, share of the data sheet's peak, and share of the rate of a GEMM; as it is
    where it was rejected. A share of what is unknown is left out.

    flops: of a step, the same for all. MFU needs the operations of a model by `labkit.plan`: all S^2 pairs of
        attention, nothing recomputed (model FLOPs). Training reports the same, as Megatron-LM does now, and PaLM
        (arXiv 2204.02311), so the numbers compare.
    share: name of the share of the peak; `mfu`, or `share_of_peak` where the operations are those of kernels.
    optims: whose precision chooses the peak, by name of the alternative; bf16 for others.
    """
    if found.rejected:
        return found
    by_name = {name: flops / found.median(name) for name in found.seconds}
    facts: dict[str, Any] = {"tflop": round(flops / 1e12, 2)}
    facts["tflop_per_s"] = {name: round(rate / 1e12, 1) for name, rate in by_name.items()}
    best = {share: {name: peak_rate(device, optims.get(name, BF16)) for name in by_name}}
    best["share_of_gemm_rate"] = dict.fromkeys(by_name, gemm_rate(device))
    for key, most in best.items():
        shares = {name: round(rate / most[name], 3) for name, rate in by_name.items() if not math.isnan(most[name])}
        facts |= {key: shares} if shares else {}
    return replace(found, facts=facts | found.facts)


def layer_flops(config: ModelConfig, batch: int) -> float:
    """Operations of forward and backward of `config.layers` layers."""
    return 3 * plan.forward_flops(config, samples=batch, logits=False).total


# ---- attention ----


def sdpa_choice(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> str:
    """Name of the backend that scaled_dot_product_attention takes for these tensors, in `SDPBackend`'s words."""
    choice = torch.ops.aten._fused_sdp_choice(q, k, v, is_causal=causal)
    backends: dict[str, Any] = dict(SDPBackend.__members__)
    return next((name for name, one in backends.items() if int(one) == choice), str(choice))


def attention_backend(model: ModelConfig, batch: int, device: torch.device, dtype: torch.dtype) -> str:
    """What a layer of labkit computes attention with: torch's choice for its q, k and v, views of one projection."""
    if model.attention_backend != "fused":
        return model.attention_backend
    shape = (model.seq_length, batch * model.heads, 3, model.hidden // model.heads)
    mixed = torch.empty(shape, device=device, dtype=dtype, requires_grad=True)
    q, k, v = (mixed[:, :, i].transpose(0, 1)[None] for i in range(3))
    return sdpa_choice(q, k, v)


# ---- a whole training step ----


def batches(model: ModelConfig, micro_batch: int, device: torch.device = DEVICE) -> Iterator[dict[str, Tensor]]:
    """Four microbatches of random tokens on the GPU, over and over."""
    shape = (4, micro_batch, model.seq_length + 1)
    tokens = torch.randint(0, model.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.ones(micro_batch, model.seq_length, device=device)
    made = [
        {"tokens_BS": t[:, :-1].contiguous(), "labels_BS": t[:, 1:].contiguous(), "loss_mask_BS": mask} for t in tokens
    ]
    return itertools.cycle(made)


def built(config: RunConfig, groups: ParallelGroups) -> tuple[Pipeline, Any]:
    """(pipeline, optimizer) of a training without pipeline parallelism."""
    schedule = one_f_one_b(1, config.num_microbatches(groups.world_size))
    chunks, optimizer, _ = setup_model_and_optimizer(Run(config, groups, schedule, Timers(0)))
    return Pipeline(config, groups, chunks, gpt_forward_step, schedule), optimizer


def our_run(
    model: ModelConfig,
    micro_batch: int,
    device: torch.device = DEVICE,
    *,
    moe: MoEConfig | None = None,
    graph: GraphConfig | None = None,
    **optim: Any,
) -> tuple[Pipeline, Any, Iterator[dict[str, Tensor]]]:
    """(pipeline, optimizer, batches) of a training with float32 masters, in bf16 unless `optim` says else."""
    config = RunConfig(
        model=model,
        moe=moe or MoEConfig(),
        optim=replace(presets.gpt2_124m().optim, lr_schedule="constant", warmup_steps=0, **optim),
        train=TrainConfig(micro_batch_size=micro_batch, global_batch_size=micro_batch, record_events=False),
        graph=graph or GraphConfig(),
    )
    return *built(config, single_process_groups(device=device)), batches(model, micro_batch, device)


def our_step(model: ModelConfig, micro_batch: int, device: torch.device = DEVICE, **optim: Any) -> Callable[[], Any]:
    """A whole training step of `our_run`: forward, backward, clip, AdamW."""
    pipeline, optimizer, data = our_run(model, micro_batch, device, **optim)
    timers = Timers(0)
    return lambda: train_step(pipeline, optimizer, timers, data, step=0, lr=1e-4, clip_grad=1.0)
