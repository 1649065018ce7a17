"""One optimizer step, over any schedule.

A step resets the gradient buffers, runs the schedule over all microbatches and finalises gradients. Finalising
averages over replicas, and sums over ranks that hold copies of a parameter, such as a tied embedding. Then all ranks
agree whether everything is finite, move the biases of routers against their load, clip by the global norm and update.
Every rank reports the same loss, to the bit: the mean over the tokens of the global batch.

One exchange carries the gradient norm and a flag that some loss or gradient on some rank, replicas included, is not
finite. So all ranks update, or none. By `train.on_not_finite` a number that is not finite ends the run or skips the
step. Under fp16 a gradient that overflows skips the step, and the loss scale then shrinks. The tenth skipped step in a
row that shrinks no scale ends the run. The same exchange tells all ranks that one of them was asked to end the run. On
a GPU it reports bad token ids.

Shapes: B micro batch, S sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from labkit.comm.groups import ParallelGroups
from labkit.moe.router import finish_router_step
from labkit.parallel.data_parallel.gradients import GradientStatistics, clip_factor, gradient_statistics
from labkit.parallel.data_parallel.optimizer import MegatronOptimizer
from labkit.parallel.vocab.token_ids import TokenIdChecks, token_ids_checked_late
from labkit.schedules.ir import Schedule
from labkit.train.forward_step import Batch
from labkit.train.interruption import stop_requested
from labkit.train.not_finite import cause_of_skip
from labkit.train.pipeline import Pipeline
from labkit.train.reporting.metrics import Timers

GIVE_UP_AFTER = 10
"""A run ends after so many skipped steps in a row in which the loss scaler could not lower its scale."""


class Observer(Protocol):
    """An onlooker who watches a run without changing it, such as the parity microscope.

    `step` is an index into `TrainResult.losses`: 0 is the first step. Numbers that people read count from 1.
    """

    def on_model(self, groups: ParallelGroups, chunks: Sequence[nn.Module], schedule: Schedule) -> None:
        """See the model after it is built."""

    def on_gradients(self, step: int, chunks: Sequence[nn.Module]) -> None:
        """See the final gradients before clipping; under fp16 the loss scale still multiplies them."""

    def on_update(self, step: int, chunks: Sequence[nn.Module]) -> None:
        """See the model after the update. With `optim.overlap_param_gather` the parts of other ranks are still on their
        way. Do not wait for them here (`finish_param_sync`): the next forward hides that wait."""


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step."""

    loss: float
    """Mean over the tokens of the global batch, the same on every rank."""
    grad_norm: float
    """Global norm before clipping, without the loss scale."""
    skipped: bool = False
    """A number was not finite on some rank, so no rank changed a weight."""
    loss_scale: float = 1.0
    """The factor of this step's loss in its backward."""
    not_finite: str | None = None
    """For a skipped step, the number that was not finite and its rank; the same on every rank."""
    stop: bool = False
    """Some rank was asked to end the run; the same on every rank."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Means beside the loss, such as BERT's `lm_loss`, the same on every rank."""


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
    """Run one optimizer step; `clip_grad` 0 does not clip.

    step: the number of steps before this one. Errors name the step as people count it, from 1.
    Raises before any weight changes. FloatingPointError on every rank, for a number that is not finite on any rank, by
    `cause_of_skip`, or for the `GIVE_UP_AFTER`th in a row. TokenIdError for an id outside the vocabulary. A GPU raises
    it on all ranks as the step ends; a CPU raises it at once, on the ranks that read the id.
    """
    chunks, scaler = pipeline.chunks, pipeline.loss_scaler
    for chunk in chunks:
        chunk.zero_grad_buffer()
    device = pipeline.groups.device
    with timers.phase("forward-backward"), token_ids_checked_late(device) as ids:
        reports = pipeline.forward_backward(batches)
    means, scale = pipeline.means(reports), scaler.scale
    with timers.phase("finalize-grads"):
        pipeline.finalize_grads()
        if observer is not None:
            observer.on_gradients(step, chunks)
        norm, finite, stop = _norm_and_finite(optimizer, reports, ids, device)
    norm /= scale
    fault = None if finite else cause_of_skip(reports, ids, pipeline, step=step, lr=lr)
    scaler.update(found_inf=not finite)
    if pipeline.router_metrics is not None:
        finish_router_step(chunks, pipeline.groups, move_biases=finite)
    if finite:
        with timers.phase("optimizer"):
            optimizer.step(lr, clip_factor(norm, clip_grad or math.inf) / scale)
    elif scaler.hopeless_steps >= GIVE_UP_AFTER:
        raise FloatingPointError(
            f"{GIVE_UP_AFTER} steps in a row were skipped, the last being step {step + 1}, because {fault}; no weight "
            f"was changed in them. {scaler.advice}"
        )
    if observer is not None:
        observer.on_update(step, chunks)
    return StepResult(means.pop("loss"), norm, not finite, scale, fault, stop, means)


def _norm_and_finite(
    optimizer: MegatronOptimizer, reports: Sequence[dict[str, Any]], ids: TokenIdChecks, device: torch.device
) -> GradientStatistics:
    """Exchange the statistics of all ranks; losses and the alarm of token ids must be finite as well."""
    losses = [torch.as_tensor(report["loss_sum"]).detach().to(device, torch.float64) for report in reports]
    others = [*optimizer.uncounted_pieces(), *losses, *ids.alarm()]
    counted, groups = optimizer.gradient_pieces(), optimizer.norm_groups
    return gradient_statistics(counted, others, groups, device, stop=stop_requested())
