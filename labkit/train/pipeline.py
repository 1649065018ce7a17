"""`Pipeline`: what a training step asks of one rank's model: forward and backward, means of losses, final gradients.

The schedule of the run orders the microbatches, for one stage or many. `PipelineRuntime` runs it; CUDA graphs, if there
are any, replay what they have captured of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from labkit.comm.collectives import all_reduce, broadcast
from labkit.comm.groups import ParallelGroups
from labkit.comm.ledger import comm_scope
from labkit.config import RunConfig
from labkit.launch.info import announce
from labkit.models.chunks import DTYPES
from labkit.moe.router import TopKRouter
from labkit.parallel.data_parallel.distributed_data_parallel import DataParallel
from labkit.parallel.data_parallel.gradients import finalize_model_grads
from labkit.parallel.data_parallel.optimizer import named_parameters
from labkit.parallel.layers import Precision
from labkit.plan.sizes import decoder_length
from labkit.schedules.ir import Schedule
from labkit.schedules.message_shapes import TensorShape, stage_shapes
from labkit.schedules.runtime import PipelineRuntime
from labkit.train.cuda_graphs import TrainingGraphs, build_graphs
from labkit.train.forward_step import Batch, ForwardStep, parts_of
from labkit.train.loss_form import checked_forward_step
from labkit.train.loss_scaler import LossScaler, build_loss_scaler
from labkit.train.reporting.router_metrics import RouterMetrics
from labkit.train.run_schedule import transport_of


class Pipeline:
    """One rank's model chunks under the schedule of the run; made once, used in every step."""

    def __init__(
        self,
        config: RunConfig,
        groups: ParallelGroups,
        chunks: Sequence[DataParallel],
        forward_step: ForwardStep,
        schedule: Schedule,
    ) -> None:
        """schedule: fits the batch and the layers (`train.run_schedule.check_schedule`). Nothing is communicated.

        The loss is scaled and normalised as `config.optim` says.

        Raises ScheduleError for a schedule that cannot run.
        """
        self.config, self.groups, self.chunks = config, groups, list(chunks)
        self.num_microbatches, self.schedule = config.num_microbatches(groups.world_size), schedule
        self.loss_scaler: LossScaler = build_loss_scaler(config.optim)
        self.graphs: TrainingGraphs | None = None
        """The CUDA graphs of the run, if there are any."""
        if config.graph.cuda_graph_impl != "none":
            self.graphs = build_graphs(config, groups, self.chunks, schedule, self._eager, self._eager_and_finalized)
        held = [getattr(chunk, "precision", None) for chunk in chunks]
        self._precisions = [p for p in held if isinstance(p, Precision) and type(p) is not Precision]
        """Those that keep a history of each step, as fp8 does."""
        modules = (module for chunk in self.chunks for module in chunk.modules())
        self.router_metrics = RouterMetrics(chunks, groups) if any(isinstance(m, TopKRouter) for m in modules) else None
        """Counts of the routers; None in a model without experts."""
        self._runtime = PipelineRuntime(
            self.schedule,
            self.chunks,
            groups,
            forward_step_func=checked_forward_step(forward_step, cp=groups.cp.size),
            tensor_shape=shapes_between_stages(config),
            variable_seq_lengths=config.schedule.variable_seq_lengths,
            dtype=None if any(named_parameters(chunks)) else DTYPES[config.optim.precision],  # empty stages tell none
            transport=transport_of(config),
            deallocate_pipeline_outputs=config.schedule.deallocate_pipeline_outputs,
            **self._synchronisation(),
            num_microbatches_with_partial_activation_checkpoints=(
                config.model.num_microbatches_with_partial_activation_checkpoints
            ),
            grad_scaler=self.loss_scaler.scale_loss if config.optim.precision == "fp16" else None,
            calculate_per_token_loss=config.optim.calculate_per_token_loss,
            tokens_per_microbatch=config.train.micro_batch_size * config.model.seq_length,
            delay_wgrad_compute=config.schedule.delay_wgrad_compute,
        )

    def _synchronisation(self) -> dict[str, Any]:
        """Return the functions that start to reduce gradients and to gather parameters at fixed places of the schedule,
        so that ranks and chunks keep in step. A lone stage needs none: the hooks of its wrapper start both."""
        optim, found = self.config.optim, {}
        if self.groups.pp.size > 1 or len(self.chunks) > 1:
            if optim.overlap_grad_reduce:
                found["grad_sync_func"] = [chunk.start_grad_sync for chunk in self.chunks]
            if optim.overlap_param_gather:
                found["param_sync_func"] = [chunk.start_param_sync for chunk in self.chunks]
        return found

    @property
    def last_stage(self) -> int:
        """Position in the pipeline group of the rank that computes the loss."""
        return self.schedule.placement(self.schedule.num_stages - 1)

    @property
    def num_tokens(self) -> Tensor | None:
        """With `optim.calculate_per_token_loss` the loss tokens of this rank in its last step, for
        `finalize_model_grads`; None where each microbatch's loss was a mean already."""
        return self._runtime.num_tokens if self.config.optim.calculate_per_token_loss else None

    def forward_backward(
        self, batches: Iterator[Batch], *, forward_only: bool = False, collect_non_loss_data: bool = False
    ) -> list[Any]:
        """Run all microbatches of one global batch; return the loss function's reports on the rank of the last stage,
        else [].

        With CUDA graphs the first training step after the warm-up captures them.
        """
        if self.graphs is None or collect_non_loss_data:
            return self._eager(batches, forward_only=forward_only, collect_non_loss_data=collect_non_loss_data)
        return self.graphs.forward_backward(batches, forward_only=forward_only)

    def _eager(
        self, batches: Iterator[Batch], *, forward_only: bool = False, collect_non_loss_data: bool = False
    ) -> list[Any]:
        iterators: list[Iterator[Batch]] = [batches]
        if len(self.chunks) > 1:  # every chunk reads each microbatch
            read = list(islice(batches, self.num_microbatches))
            iterators = [iter(read) for _ in self.chunks]
        return self._runtime.run(iterators, forward_only=forward_only, collect_non_loss_data=collect_non_loss_data)

    def means(self, reports: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Return means over the global batch of `reports`, the same on every rank: `loss` and the family's others.

        `loss` is the sum of all losses over the number of tokens, of all microbatches and data-parallel ranks. Without
        any token it is NaN, as in Megatron-LM, and rank 0 says why. The others (`parts_of`) are means of those
        microbatches that report them; one that none reports is left out. A microbatch counts once, or as often as it
        says (`lm_loss_count`).
        """
        groups, parts = self.groups, parts_of(self.config.model)
        totals = torch.zeros(2 + 2 * len(parts), dtype=torch.float64, device=groups.device)
        for report in reports:
            found = [report["loss_sum"], report["tokens"]]
            for name in parts:
                found += [report.get(name, 0.0), report.get(f"{name}_count", float(name in report))]
            totals += torch.stack([torch.as_tensor(number).to(totals) for number in found])
        with comm_scope(layer="loss", phase="report"):
            if groups.pp.rank == self.last_stage:
                all_reduce(totals, groups.dp_cp)
            broadcast(totals, groups.pp, src=self.last_stage)
        numbers = totals.tolist()  # here the host waits, once
        pairs = zip(("loss", *parts), numbers[::2], numbers[1::2])
        means = {name: total / n for name, total, n in pairs if n}
        if "loss" not in means and groups.world.rank == 0:
            announce("no token of this batch counts for the loss (its loss mask is 0 everywhere), so the loss is nan")
        return {"loss": math.nan, **means}

    def finalize_grads(self) -> None:
        """Make every `main_grad` the gradient of the global batch, after the last backward. A graph of the whole
        iteration has done so already."""
        if self.graphs is None or not self.graphs.finalizes:
            self._finalize()

    def _finalize(self) -> None:
        for precision in self._precisions:
            precision.end_step()
        finalize_model_grads(self.chunks, self.groups, num_tokens=self.num_tokens, last_stage=self.last_stage)

    def _eager_and_finalized(self, batches: Iterator[Batch]) -> list[Any]:
        reports = self._eager(batches)
        self._finalize()
        return reports


def shapes_between_stages(config: RunConfig) -> TensorShape:
    """Return the shapes of the tensors that stages of the configured model send (`stage_shapes`)."""
    parallel, model = config.parallel, config.model
    return stage_shapes(
        model.seq_length,
        config.train.micro_batch_size,
        model.hidden,
        cp=parallel.cp,
        tp=parallel.tp if parallel.sequence_parallel else 1,
        split_rank=parallel.split_rank,
        decoder_seq_length=decoder_length(model),
    )
