"""From the loop's point of view: run all microbatches of a step, get back what the loss function reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.config import RunConfig
from labkit.parallel.data_parallel import NaiveDataParallel
from labkit.parallel.groups import ParallelGroups
from labkit.schedules.ir import Schedule

Batch = dict[str, Tensor]
ForwardStep = Callable[[Iterator[Batch], nn.Module], tuple[Tensor, Any]]
"""(data iterator, model chunk) -> (output tensor, loss function)."""


class Pipeline:
    """One rank's model chunks under a schedule (so far: one stage, microbatch after microbatch)."""

    def __init__(
        self,
        config: RunConfig,
        groups: ParallelGroups,
        chunks: Sequence[NaiveDataParallel],
        forward_step: ForwardStep,
        *,
        schedule: Schedule | None = None,
    ) -> None:
        self.config, self.groups, self.chunks, self.forward_step = config, groups, list(chunks), forward_step
        if groups.pp.size > 1 or schedule is not None:
            raise NotImplementedError("the pipeline runtime is not connected yet")
        self.last_stage = groups.pp.size - 1
        self.num_microbatches = config.num_microbatches(groups.world_size)

    def run(
        self, batches: Iterator[Batch], *, forward_only: bool = False, collect_non_loss_data: bool = False
    ) -> list[Any]:
        """Forward (and backward) of every microbatch; the reports by microbatch."""
        reports = []
        with torch.set_grad_enabled(not forward_only):
            for _ in range(self.num_microbatches):
                output, loss_func = self.forward_step(batches, self.chunks[0])
                if collect_non_loss_data:
                    reports.append(loss_func(output, non_loss_data=True))
                    continue
                loss_sum, tokens, report = loss_func(output)
                if not forward_only:
                    (loss_sum / tokens.clamp(min=1) / self.num_microbatches).backward()
                reports.append(report)
        return reports
