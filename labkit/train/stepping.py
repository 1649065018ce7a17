"""One optimizer step and one evaluation, over any schedule.

A step is: zero gradients, run the schedule over all microbatches, finalise gradients (data-parallel average, sums over
tensor-parallel and tied copies), clip by the global norm, update. The loss that is reported is the token-weighted mean
over the global batch, and every rank has the same bits of it.

Shapes: B micro batch, S sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from labkit.parallel.collectives import all_reduce, broadcast, comm_scope
from labkit.parallel.gradients import clip_factor, finalize_model_grads, gradient_statistics, scale_gradients
from labkit.parallel.groups import ParallelGroups
from labkit.schedules.ir import Schedule
from labkit.train.metrics import Timers
from labkit.train.optimizer import MegatronOptimizer
from labkit.train.pipeline import Batch, Pipeline


class Observer(Protocol):
    """Somebody who looks at a run without changing it, such as the parity microscope."""

    def on_model(self, groups: ParallelGroups, chunks: Sequence[nn.Module], schedule: Schedule) -> None:
        """After the model is built."""

    def on_gradients(self, step: int, chunks: Sequence[nn.Module]) -> None:
        """After finalisation, before clipping."""

    def on_update(self, step: int, chunks: Sequence[nn.Module]) -> None:
        """After the update."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step was."""

    loss: float
    """Mean over the tokens of the global batch, the same on every rank."""
    grad_norm: float
    """Global norm before clipping."""
    skipped: bool
    """Whether the gradient was not finite and no weight was changed."""


def train_step(
    pipeline: Pipeline,
    optimizer: MegatronOptimizer,
    timers: Timers,
    batches: Iterator[Batch],
    *,
    step: int,
    lr: float,
    clip_grad: float,
    observer: Observer | None = None,
) -> StepResult:
    """One optimizer step; `clip_grad` 0 does not clip.

    Raises FloatingPointError on every rank, before any weight changes, if the loss is not finite.
    """
    chunks, groups = pipeline.chunks, pipeline.groups
    for chunk in chunks:
        chunk.zero_grad_buffer()
    with timers("forward-backward", log_level=1):
        reports = pipeline.run(batches)
    loss = global_loss(reports, pipeline)
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"the loss is {loss} at step {step} (learning rate {lr:.3g}); no weight was changed in this step. Lower "
            "optim.lr, lengthen optim.warmup_steps, or look for bad samples in the data"
        )
    with timers("finalize-grads", log_level=1):
        finalize_model_grads(chunks, groups)
        if observer is not None:
            observer.on_gradients(step, chunks)
        norm, finite = gradient_statistics(
            optimizer.gradient_pieces(), optimizer.uncounted_pieces(), optimizer.norm_groups, groups.device
        )
    if finite:
        with timers("optimizer", log_level=1):
            if (factor := clip_factor(norm, clip_grad or math.inf)) != 1.0:
                scale_gradients(chunks, factor)
            optimizer.step(lr)
    if observer is not None:
        observer.on_update(step, chunks)
    return StepResult(loss, norm, skipped=not finite)


def evaluate(pipeline: Pipeline, batches: Iterator[Batch], steps: int) -> float:
    """Mean loss over `steps` global batches, without gradients and dropout; the same on every rank."""
    with evaluating(pipeline.chunks):
        reports = [report for _ in range(steps) for report in pipeline.run(batches, forward_only=True)]
    return global_loss(reports, pipeline)


def collect_non_loss_data(pipeline: Pipeline, batches: Iterator[Batch]) -> list[Any]:
    """What the loss function gives for each microbatch of one global batch under `non_loss_data=True`, without
    gradients and dropout; [] on ranks that do not compute the loss."""
    with evaluating(pipeline.chunks):
        return pipeline.run(batches, forward_only=True, collect_non_loss_data=True)


@contextmanager
def evaluating(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Evaluation mode for the block, and every chunk's own mode after it, also after an error."""
    modes = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk, mode in zip(chunks, modes):
            chunk.train(mode)


def global_loss(reports: Sequence[dict[str, Any]], pipeline: Pipeline) -> float:
    """Sum of losses over number of tokens, over all microbatches and data-parallel ranks, told to every stage."""
    groups = pipeline.groups
    totals = torch.zeros(2, dtype=torch.float64, device=groups.device)
    for report in reports:
        totals += torch.stack([torch.as_tensor(report[key]).to(totals) for key in ("loss_sum", "tokens")])
    with comm_scope(layer="loss", phase="report"):
        if groups.pp.rank == pipeline.last_stage:
            all_reduce(totals, groups.dp_cp)
        broadcast(totals, groups.pp, src=pipeline.last_stage)
    return (totals[0] / totals[1].clamp(min=1)).item()
