"""Validations and the test: mean loss over some batches, without gradients and dropout, and data besides the loss.

Every rank returns the same bits of a loss. On a GPU a token id outside the vocabulary raises TokenIdError on every
rank, after the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from labkit.parallel.vocab.token_ids import token_ids_checked_late
from labkit.train.forward_step import Batch
from labkit.train.pipeline import Pipeline
from labkit.train.reporting.report import Report

ProcessNonLossData = Callable[[list[Any], int], None]


class Evaluations:
    """The validations and the test of a run, as its training loop asks for them. All ranks call every method."""

    def __init__(
        self,
        pipeline: Pipeline,
        validation: Callable[[], Iterator[Batch]],
        test: Callable[[], Iterator[Batch]] | None,
        report: Report,
        process_non_loss_data: ProcessNonLossData | None = None,
    ) -> None:
        """validation, test: each call returns a new iterator of batches; `test` is None without a test split.

        process_non_loss_data: see `pretrain`.
        """
        self._pipeline, self._report, self._process_non_loss_data = pipeline, report, process_non_loss_data
        self._validation, self._test = validation, test
        self._train = pipeline.config.train
        self._test_is_due = True

    def make_up_for_missing(self, step: int) -> None:
        """Run the validation after `step` that an earlier process was stopped before; 0 starts a new run.

        The test of a run that had finished all its steps is due only if the files of that run do not have it.
        """
        missing = self._report.missing_evaluations(step)
        if "validation_loss" in missing:
            self.validate_if_due(step)
        self._test_is_due = step < self._train.steps or "test_loss" in missing

    def validate_if_due(self, step: int) -> None:
        """Report the means over `eval_steps` global batches; then run a batch for `process_non_loss_data`, if given.

        A validation is due every `eval_interval` steps and after the last. `step` counts from 1.
        """
        train = self._train
        last = step == train.steps
        if train.eval_steps == 0 or not (last or (train.eval_interval > 0 and step % train.eval_interval == 0)):
            return
        pipeline, report, batches = self._pipeline, self._report, self._validation()
        with report.naming_what_is_kept():
            report.evaluation(step, "validation", evaluate(pipeline, batches, train.eval_steps))
            if self._process_non_loss_data is not None:
                collected = collect_non_loss_data(pipeline, batches)
                if _is_last_that_computes_the_loss(pipeline):
                    self._process_non_loss_data(collected, step)
        if pipeline.graphs is not None:
            report.graphs(step, pipeline.graphs)

    def test(self) -> None:
        """Report the means over `eval_steps` global batches of the test split, if there is one and it is due."""
        if self._test is None or self._train.eval_steps == 0 or not self._test_is_due:
            return
        with self._report.naming_what_is_kept():
            means = evaluate(self._pipeline, self._test(), self._train.eval_steps)
            self._report.evaluation(self._train.steps, "test", means)


def _is_last_that_computes_the_loss(pipeline: Pipeline) -> bool:
    groups = pipeline.groups
    last_replica = groups.tp.rank == groups.tp.size - 1 and groups.dp_cp.rank == groups.dp_cp.size - 1
    return last_replica and groups.pp.rank == pipeline.last_stage


def evaluate(pipeline: Pipeline, batches: Iterator[Batch], steps: int) -> dict[str, float]:
    """Return `Pipeline.means` over `steps` global batches, without gradients and dropout; the same on every rank."""
    with evaluating(pipeline.chunks), token_ids_checked_late(pipeline.groups.device) as ids:
        reports = [report for _ in range(steps) for report in pipeline.forward_backward(batches, forward_only=True)]
    means = pipeline.means(reports)
    if ids.late:  # the host has waited for the loss
        ids.look_together(pipeline.groups.world)
    return means


def collect_non_loss_data(pipeline: Pipeline, batches: Iterator[Batch]) -> list[Any]:
    """Run one global batch without gradients and dropout, with `non_loss_data=True` for the loss function.

    Return its results by microbatch; [] on ranks that do not compute the loss.
    """
    with evaluating(pipeline.chunks), token_ids_checked_late(pipeline.groups.device) as ids:
        collected = pipeline.forward_backward(batches, forward_only=True, collect_non_loss_data=True)
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
