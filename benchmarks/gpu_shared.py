"""Parts of the GPU benchmark: ranks that share one GPU, over gloo through host memory.

Each part starts its ranks once. They build all alternatives, and time their steps in turn; the slowest rank counts. The
numbers say what sharing costs; nothing here tells how fast several GPUs would be.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pipeline
import torch
from gpu_steps import batches, built, synchronize, timed
from harness import Comparison
from torch import Tensor

from labkit.comm.groups import ParallelGroups
from labkit.config import ModelConfig, OptimConfig, ParallelConfig, RunConfig, TrainConfig
from labkit.events import recording
from labkit.launch import rank_info, run
from labkit.models import GPTModel
from labkit.parallel import initialize_model_parallel, single_process_groups, token_ids_checked_late
from labkit.train.reporting.metrics import Timers
from labkit.train.stepping import train_step

SHARED = ModelConfig(layers=4, hidden=256, heads=8, vocab_size=1024, seq_length=256)
WIDER = ModelConfig(layers=4, hidden=512, heads=8, vocab_size=1024, seq_length=256)


def on_ranks(measure: Callable[..., list[Comparison]], ranks: int, device: str, *given: Any) -> list[Comparison]:
    """What rank 0 found; all ranks run `measure`."""
    return run(measure, ranks, *given, backend="gloo", device=device, timeout=180)[0]


# ---- tensor parallelism ----


def tensor_parallel_step(config: ModelConfig, groups: ParallelGroups) -> Callable[[], Tensor]:
    """Forward and backward of a whole model cut over `groups`; returns the loss, on its device."""
    model = GPTModel(config, groups, layers=range(config.layers), seed=1)
    shape = (4, config.seq_length + 1)
    tokens = torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(groups.device)

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(tokens[:, :-1], labels_BS=tokens[:, 1:]).mean()
        loss.backward()
        return loss.detach()

    return partial(ids_checked_late, step, groups.device)


def tensor_parallel_sides(config: ModelConfig) -> list[Comparison]:
    """All ranks as one group, and rank 0 alone while the others wait."""
    groups = initialize_model_parallel(ParallelConfig(tp=rank_info().world_size))
    together = tensor_parallel_step(config, groups)
    alone = tensor_parallel_step(config, single_process_groups(device=groups.device)) if groups.rank == 0 else None
    name = f"{groups.tp.size} tensor-parallel ranks"
    steps = {name: together, "one rank": alone or (lambda: None)}
    found = timed(f"{name} on one GPU, forward and backward", steps, across_ranks=True, device=groups.device)
    loss = together()
    difference = 0.0 if alone is None else abs(float(loss) - float(alone()))
    facts = {"transport": f"{groups.backend} on {groups.device.type}", "loss_difference": difference}
    return [replace(found, facts=facts)]


def tensor_parallel(
    config: ModelConfig = SHARED, sizes: tuple[int, ...] = (2, 4), *, device: str = "cuda"
) -> Iterator[Comparison]:
    """One group on the same GPU beside one rank: the loss of both, and what the host's memory costs."""
    for tp in sizes:
        yield from on_ranks(tensor_parallel_sides, tp, device, config)


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


def pipeline_sides(config: ModelConfig, count: int) -> list[Comparison]:
    """Each schedule, recording Events and not."""
    device = rank_info().device
    given = pipeline.run_config(count, config), on_device(config, count, device)
    expected, found = loss_of_one_rank(config, count, device), []
    for name, build in pipeline.OURS.items():
        side = pipeline.our_side(*given, build(count))
        step, busy = partial(ids_checked_late, side.step, device), list[float]()
        steps = {"labkit": step, "labkit, recording Events": partial(recorded, step, busy, device)}
        case = f"2 pipeline ranks on one GPU, {name}, {count} microbatches"
        one = timed(case, steps, across_ranks=True, device=device)
        mine: list[Any] = [step(), statistics.median(busy)]
        ranks: list[Any] = [None] * 2
        torch.distributed.all_gather_object(ranks, mine)
        [losses] = [losses for losses, _ in ranks if losses]
        facts = {"loss_difference": abs(sum(losses) / count - expected)}
        found.append(replace(one, facts=facts | {"busy_share_by_rank": [round(share, 3) for _, share in ranks]}))
    return found


def ids_checked_late(step: Callable[[], Any], device: torch.device) -> Any:
    """A step that waits for no token ids, as in training."""
    with token_ids_checked_late(device):
        return step()


def recorded(step: Callable[[], Any], busy: list[float], device: torch.device) -> None:
    """A step that records Events; adds the share of its time, from first start to last end, that the actions took."""
    with recording(rank_info().rank) as recorder:
        step()
        synchronize(device)
    actions = [event for event in recorder.events if event.chunk is not None]
    span = max(event.end for event in actions) - min(event.start for event in actions)
    busy.append(sum(event.duration for event in actions) / span)


def pipeline_parallel(config: ModelConfig = SHARED, count: int = 8, *, device: str = "cuda") -> Iterator[Comparison]:
    """Two stages on the same GPU: the loss of one rank, and what recording by CUDA events costs."""
    yield from on_ranks(pipeline_sides, 2, device, config, count)


# ---- data parallelism ----


def reduction_sides(model: ModelConfig, precision: str) -> list[Comparison]:
    """Two trainings of the same weights on the same batches."""
    groups, losses, steps = initialize_model_parallel(ParallelConfig()), {}, {}
    for name, overlap in {"reduction during the backward": True, "reduction after the backward": False}.items():
        size = 1_000_000 if overlap else None
        config = RunConfig(
            model=model,
            optim=OptimConfig(precision=precision, overlap_grad_reduce=overlap, bucket_size=size),
            train=TrainConfig(micro_batch_size=4, global_batch_size=16, record_events=False),
        )
        losses[name] = list[float]()
        steps[name] = partial(trained, *built(config, groups), batches(model, 4, groups.device), losses[name])
    case = "2 data-parallel ranks on one GPU, a training step"
    found = timed(case, steps, across_ranks=True, device=groups.device)
    during, after = losses.values()
    facts = {"loss_difference": max(abs(a - b) for a, b in zip(during, after, strict=True))}
    return [replace(found, facts=facts)]


def trained(run_: Any, optimizer: Any, data: Iterator[dict[str, Tensor]], losses: list[float]) -> None:
    """A training step; adds its loss."""
    done = train_step(run_, optimizer, Timers(0), data, step=len(losses), lr=1e-4, clip_grad=1.0)
    losses.append(done.loss)


def overlapped_reduction(
    model: ModelConfig = WIDER, *, precision: str = "bf16", device: str = "cuda"
) -> Iterator[Comparison]:
    """Gradients reduced during the backward, and after it."""
    yield from on_ranks(reduction_sides, 2, device, model, precision)
