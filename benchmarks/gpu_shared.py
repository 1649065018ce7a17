"""Parts of the GPU benchmark: ranks that share one GPU, over gloo through host memory.

The numbers say what sharing costs; nothing here tells how fast several GPUs would be.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pipeline
import torch
from gpu_steps import synchronize
from torch import Tensor

from labkit.config import ModelConfig, OptimConfig, ParallelConfig, RunConfig, TrainConfig
from labkit.events import recording
from labkit.launch import rank_info, run
from labkit.models import GPTModel
from labkit.parallel import initialize_model_parallel, single_process_groups
from labkit.schedules import Schedule

SHARED = ModelConfig(layers=4, hidden=256, heads=8, vocab_size=1024, seq_length=256)
WIDER = ModelConfig(layers=4, hidden=512, heads=8, vocab_size=1024, seq_length=256)

# ---- tensor parallelism ----


def tensor_parallel_loss(config: ModelConfig, tp: int, steps: int) -> tuple[float, str, float]:
    """(loss, backend and device, seconds of the last forward and backward) on a rank of a tensor-parallel group."""
    groups = initialize_model_parallel(ParallelConfig(tp=tp))
    model = GPTModel(config, groups, layers=range(config.layers), seed=1)
    shape = (4, config.seq_length + 1)
    tokens = torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(groups.device)
    for _ in range(steps):
        synchronize(groups.device)
        start = time.perf_counter()
        loss = model(tokens[:, :-1], labels_BS=tokens[:, 1:]).mean()
        loss.backward()
        synchronize(groups.device)
    return loss.item(), f"{groups.backend} on {groups.device}", time.perf_counter() - start


def tensor_parallel(
    config: ModelConfig = SHARED, sizes: tuple[int, ...] = (2, 4), *, device: str = "cuda"
) -> Iterator[dict[str, Any]]:
    """One group on the same GPU: the loss of one rank, and what the host's memory costs."""
    alone = run(tensor_parallel_loss, 1, config, 1, 5, device=device, timeout=120)[0]
    for tp in sizes:
        found = run(tensor_parallel_loss, tp, config, tp, 5, backend="gloo", device=device, timeout=120)
        yield {
            "case": f"{tp} tensor-parallel ranks on one GPU",
            "transport": found[0][1],
            "loss_difference": max(abs(loss - alone[0]) for loss, _, _ in found),
            "ms": round(1e3 * max(seconds for _, _, seconds in found), 2),
            "ms_one_rank": round(1e3 * alone[2], 2),
        }


# ---- a pipeline ----


def on_device(config: ModelConfig, count: int, device: torch.device) -> list[dict[str, Tensor]]:
    """The microbatches of the pipeline benchmark on the GPU."""
    made = pipeline.make_batches(pipeline.run_config(count, config), count)
    return [{key: tensor.to(device) for key, tensor in batch.items()} for batch in made]


def loss_of_one_rank(config: ModelConfig, count: int, device: torch.device) -> float:
    """Mean loss of the microbatches on the whole model."""
    groups, seed = single_process_groups(device=device), pipeline.run_config(count, config).train.seed
    model = GPTModel(config, groups, layers=range(config.layers), seed=seed)
    with torch.no_grad():
        losses = [
            model(batch["tokens_BS"], labels_BS=batch["labels_BS"]).mean() for batch in on_device(config, count, device)
        ]
    return float(torch.stack(losses).mean())


def pipeline_step(
    config: ModelConfig, schedule: Schedule, steps: int, kind: str
) -> tuple[list[float], float, float, float]:
    """(losses, where this rank has them; seconds of a step, plain and recording Events; share of the recorded step that
    this rank's actions took on the GPU)."""
    count, device = schedule.num_microbatches, torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    side = pipeline.our_side(pipeline.run_config(count, config), on_device(config, count, device), schedule)
    found, losses, actions = [], [], []
    for records in (False, True):
        for _ in range(steps):
            torch.distributed.barrier()
            synchronize(device)
            start = time.perf_counter()
            with recording(rank_info().rank) if records else nullcontext() as recorder:
                losses = side.step()
                synchronize(device)
            seconds = time.perf_counter() - start
            actions = [event for event in recorder.events if event.chunk is not None] if recorder else []
        found.append(seconds)
    return losses, found[0], found[1], sum(event.duration for event in actions) / found[1]


def pipeline_parallel(
    config: ModelConfig = SHARED, count: int = 8, *, device: str = "cuda"
) -> Iterator[dict[str, Any]]:
    """Two stages on the same GPU: the loss of one rank, and what recording by CUDA events costs."""
    alone = loss_of_one_rank(config, count, torch.device(device))
    for name, build in pipeline.OURS.items():
        found = run(pipeline_step, 2, config, build(count), 5, device, backend="gloo", device=device, timeout=120)
        [losses] = [losses for losses, *_ in found if losses]
        yield {
            "case": f"2 pipeline ranks on one GPU, {name}, {count} microbatches",
            "loss_difference": abs(sum(losses) / count - alone),
            "ms": round(1e3 * max(plain for _, plain, _, _ in found), 2),
            "ms_recording_events": round(1e3 * max(recorded for _, _, recorded, _ in found), 2),
            "busy_share_by_rank": [round(busy, 3) for *_, busy in found],
        }


# ---- data parallelism ----


def data_parallel_seconds(model: ModelConfig, overlap: bool, steps: int, precision: str) -> tuple[list[float], float]:
    """(losses, seconds of the later steps) of one of two ranks that train together on one GPU."""
    from labkit.train import pretrain

    config = RunConfig(
        model=model,
        optim=OptimConfig(precision=precision, overlap_grad_reduce=overlap, bucket_size=1_000_000 if overlap else None),
        train=TrainConfig(steps=steps, micro_batch_size=4, global_batch_size=16, record_events=False),
    )
    pretrain(config)  # connections, kernels and the learned order of arrivals
    synchronize(rank_info().device)
    start = time.perf_counter()
    losses = pretrain(config).losses
    synchronize(rank_info().device)
    return losses, time.perf_counter() - start


def overlapped_reduction(
    model: ModelConfig = WIDER, steps: int = 10, *, precision: str = "bf16", device: str = "cuda"
) -> Iterator[dict[str, Any]]:
    """Gradients reduced behind the backward, and after it."""
    found = {
        overlap: run(
            data_parallel_seconds, 2, model, overlap, steps, precision, backend="gloo", device=device, timeout=180
        )
        for overlap in (True, False)
    }
    seconds = {overlap: max(spent for _, spent in results) / steps for overlap, results in found.items()}
    differences = [abs(a - b) for a, b in zip(found[True][0][0], found[False][0][0], strict=True)]
    yield {
        "case": "2 data-parallel ranks on one GPU, gradient reduction behind the backward",
        "ms": round(1e3 * seconds[True], 2),
        "ms_without_overlap": round(1e3 * seconds[False], 2),
        "loss_difference": max(differences),
    }
