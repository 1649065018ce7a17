"""Validations and the test: mean loss over some batches, without gradients and dropout, and data beside the loss.

Every rank returns the same bits of a loss. On a GPU a token id outside the vocabulary raises TokenIdError on every
rank, after the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from labkit.config import TrainConfig
from labkit.parallel.vocab.token_ids import token_ids_checked_late
from labkit.train.forward_step import Batch
from labkit.train.pipeline import Pipeline
from labkit.train.reporting.report import Report

ProcessNonLossData = Callable[[list[Any], int], None]


def validates_after(train: TrainConfig, step: int) -> bool:
    """True if a validation follows `step` (counted from 1): every `eval_interval` steps and after the last."""
    return step == train.steps or (train.eval_interval > 0 and step % train.eval_interval == 0)


def validate(
    pipeline: Pipeline,
    batches: Iterator[Batch],
    report: Report,
    step: int,
    process_non_loss_data: ProcessNonLossData | None,
) -> None:
    """Report the means over `eval_steps` global batches; then run a batch for `process_non_loss_data`, if given."""
    report.evaluation(step, "validation", evaluate(pipeline, batches, pipeline.config.train.eval_steps))
    if process_non_loss_data is None:
        return
    collected = collect_non_loss_data(pipeline, batches)
    groups = pipeline.groups
    last_replica = groups.tp.rank == groups.tp.size - 1 and groups.dp_cp.rank == groups.dp_cp.size - 1
    if last_replica and groups.pp.rank == pipeline.last_stage:
        process_non_loss_data(collected, step)


def evaluate(pipeline: Pipeline, batches: Iterator[Batch], steps: int) -> dict[str, float]:
    """Return `Pipeline.means` over `steps` global batches, without gradients and dropout; the same on every rank."""
    with evaluating(pipeline.chunks), token_ids_checked_late(pipeline.groups.device) as ids:
        reports = [report for _ in range(steps) for report in pipeline.run(batches, forward_only=True)]
    means = pipeline.means(reports)
    if ids.late:  # the host has waited for the loss
        ids.look_together(pipeline.groups.world)
    return means


def collect_non_loss_data(pipeline: Pipeline, batches: Iterator[Batch]) -> list[Any]:
    """Run one global batch without gradients and dropout, with `non_loss_data=True` for the loss function.

    Return its results by microbatch; [] on ranks that do not compute the loss.
    """
    with evaluating(pipeline.chunks), token_ids_checked_late(pipeline.groups.device) as ids:
        collected = pipeline.run(batches, forward_only=True, collect_non_loss_data=True)
    if ids.late:
        ids.look_together(pipeline.groups.world)
    return collected


@contextmanager
def evaluating(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Set evaluation mode during the block. After it, also after an error, restore each chunk's own mode."""
    modes = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk, mode in zip(chunks, modes):
            chunk.train(mode)
