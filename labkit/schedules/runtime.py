"""Run a schedule for real: one rank's part of a training step, as the rows say.

`PipelineRuntime` checks that the schedule can run and fits this rank, and turns the row of the rank into a program
(`lowering.py`), which `execution.py` runs. A single stage that runs each microbatch forward and backward in turn takes
a plain loop instead.

Legend: S = sequence, B = microbatch, H = hidden; tensors between stages are (S, B, H).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.groups import ParallelGroups
from labkit.comm.handshake import handshake
from labkit.comm.p2p import MessageSpec, P2PCommunicator, second_communicator
from labkit.events import active_recorder
from labkit.schedules.builders import without_backward
from labkit.schedules.execution import RankSetup, RankStep
from labkit.schedules.gradient_sync import GradientSync, NoSync, SyncFunc, check_sync_functions
from labkit.schedules.ir import Action, Schedule
from labkit.schedules.lowering import DEFAULT_TRANSPORT, Program, Transport, check_transport, lower
from labkit.schedules.merged_execution import MergedStep
from labkit.schedules.message_shapes import TensorShape, shapes_of_messages
from labkit.schedules.microbatches import AttachedLosses, MicrobatchLosses
from labkit.schedules.simulator import kept_whole
from labkit.schedules.verifier import verify

ForwardStep = Callable[[Any, nn.Module], tuple[Any, Callable[..., Any] | None]]
"""(data iterator, model chunk) -> (output, loss function). The output is a tensor, or a tuple of tensors where the next
stage needs several. The loss function is called on the last stage alone and returns `(loss, metrics)` or `(sum of
losses, number of tokens, metrics)`. Under context parallelism sum and number are of this rank's positions. A `loss` is,
as in Megatron, this rank's part of the sample's mean: the parts add up to the mean over cp. A mean over the rank's own
positions gives gradients cp times too large, and nothing here can tell. `pretrain` therefore takes three items under
context parallelism. Without a loss function the output is the loss, and what is reported."""
RECEIVES_AHEAD = {"gloo": 4, "nccl": 1}
"""Receives of one sender that are open beyond the next. A channel is in order of sending, so a message that is needed
soon may wait behind one that is read late. On a GPU every open receive is a kernel, and a second one would wait behind
the first."""


def chunks_of(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the model chunks of a list, a tuple or an `nn.ModuleList`; any other model is one chunk."""
    if isinstance(model, Sequence) or type(model) is nn.ModuleList:
        return list(model)  # pyright: ignore[reportArgumentType]
    return [model]


class PipelineRuntime:
    """Executes `schedule` on the model chunks of this rank; all ranks of a pipeline make one with the same schedule."""

    def __init__(
        self,
        schedule: Schedule,
        model_chunks: nn.Module | Sequence[nn.Module],
        groups: ParallelGroups,
        *,
        forward_step_func: ForwardStep,
        tensor_shape: TensorShape = None,
        variable_seq_lengths: bool = False,
        dtype: torch.dtype | None = None,
        transport: Transport = DEFAULT_TRANSPORT,
        grad_scaler: Callable[[Tensor], Tensor] | None = None,
        calculate_per_token_loss: bool = False,
        no_sync_func: NoSync | Sequence[NoSync] | None = None,
        grad_sync_func: SyncFunc | Sequence[SyncFunc] | None = None,
        param_sync_func: SyncFunc | Sequence[SyncFunc] | None = None,
        deallocate_pipeline_outputs: bool = True,
        timers: Any = None,
        autocast_dtype: torch.dtype | None = None,
        num_microbatches_with_partial_activation_checkpoints: int | None = None,
        tokens_per_microbatch: int | None = None,
        delay_wgrad_compute: bool = False,
    ) -> None:
        """Check that the schedule can run and fits this rank. The first runtime of a layout makes a communicator.

        tensor_shape: of what stages send on: one shape (S, B, H), a list of shapes where they send several tensors, or
            a function from the sending stage to its list. None is one tensor whose sizes vary.
        variable_seq_lengths: send three sizes before every tensor; of tensor_shape only the number of tensors counts.
        dtype: of these tensors; None is autocast's, else that of the first floating-point parameter.
        grad_scaler: applied to the loss before its backward.
        calculate_per_token_loss: leave a three-item loss unscaled; `num_tokens` divides once at the end of the step.
        no_sync_func: a context in which backwards only accumulate, left for each chunk's last one (its last W where the
            backward is split), or one per chunk; None takes the chunks' own `no_sync`, where they have one.
        grad_sync_func: called with a chunk's parameters where all ranks synchronise them at about the same time, or one
            per chunk. With one stage per rank the first rank leaves it to the hooks of its last backward, as Megatron.
        param_sync_func: called with a chunk's parameters before its first forward, or one per chunk.
        timers: `timers(name, log_level=n)` gives an object with `start` and `stop`; or None.
        autocast_dtype: run forwards, but not the loss function, under torch.autocast with this type; None does not.
        num_microbatches_with_partial_activation_checkpoints: of those in flight on this rank, this many recompute
            nothing (`kept_whole`): their forwards run under the chunk's `set_activation_checkpointing(False)`.
        tokens_per_microbatch: B x S; needed with calculate_per_token_loss and experts alone (`AttachedLosses`).
        delay_wgrad_compute: in a schedule with merged pairs, whole backwards compute weight gradients apart.

        Raises ScheduleError for a schedule that cannot run, ValueError where it does not fit the groups or the chunks.
        """
        check_transport(transport)
        self.schedule, self.groups = schedule, groups
        self.transport: Transport = transport
        self.calculate_per_token_loss = calculate_per_token_loss
        self.num_tokens = torch.zeros((), dtype=torch.int64)
        """Tokens of the last run on the last stage, summed over microbatches; 0 where the loss gives two items."""
        chunks, rank = chunks_of(model_chunks), groups.pp.rank
        count = num_microbatches_with_partial_activation_checkpoints
        _check_fit(schedule, groups, chunks, recomputes=count is not None, delays=delay_wgrad_compute)
        self.sync_functions: dict[str, Any] = {
            "no_sync_func": no_sync_func,
            "grad_sync_func": grad_sync_func,
            "param_sync_func": param_sync_func,
        }
        check_sync_functions(len(chunks), **self.sync_functions)
        if rank == 0 and schedule.num_stages == schedule.pp:
            self.sync_functions["grad_sync_func"] = None  # left to the hooks
        self.attached_losses = AttachedLosses(
            chunks, schedule.num_microbatches, calculate_per_token_loss, tokens_per_microbatch
        )
        varies = variable_seq_lengths or tensor_shape is None
        dtype = dtype or autocast_dtype or _dtype_of(chunks)
        autocast = partial(torch.autocast, groups.device.type, dtype=autocast_dtype)
        self.setup = RankSetup(
            chunks=chunks,
            num_stages=schedule.num_stages,
            p2p=P2PCommunicator(groups, second_communicator(groups), transport == "batched", varies),
            specs=[MessageSpec(shapes, dtype) for shapes in shapes_of_messages(tensor_shape, schedule.num_stages)],
            forward_step_func=forward_step_func,
            autocast=nullcontext if autocast_dtype is None else autocast,
            grad_scaler=grad_scaler,
            timers=timers,
            deallocate=deallocate_pipeline_outputs,
            kept_whole=None if count is None else kept_whole(schedule, rank, count),
            delay_wgrad=delay_wgrad_compute,
        )
        self._has_met: set[bool] = set()
        """The kinds of runs, with or without backward, for which the ranks have compared their settings."""
        self._has_backward, self._is_plain = not schedule.forward_only, _is_plain(schedule)
        if not self._is_plain:
            schedule.derived(f"verified, {transport}", lambda rows: verify(rows, transport))

    def _program(self, forward_only: bool) -> Program:
        rank, schedule, transport = self.groups.pp.rank, self.schedule, self.transport
        if forward_only and not schedule.forward_only:
            schedule = schedule.derived("forward only", without_backward)
        ahead = 0 if self.setup.p2p.variable_seq_lengths else RECEIVES_AHEAD.get(self.groups.backend, 1)
        what = f"program of rank {rank}, {transport}, {ahead} ahead"
        return schedule.derived(what, lambda rows: lower(rows, rank, transport, receives_ahead=ahead))

    def _meet(self, program: Program, forward_only: bool) -> None:
        """Compare the settings of this rank with those of its peers, before the first message."""
        if forward_only in self._has_met:
            return
        schedule, varies = self.schedule, self.setup.p2p.variable_seq_lengths
        given = {
            "the schedule": f"{schedule.name} of {schedule.num_stages} stages and {schedule.num_microbatches} "
            f"microbatches (checksum {schedule.checksum:08x})",
            "transport": self.transport,
            "dtype": ", ".join({str(spec.dtype) for spec in self.setup.specs}),
            "forward_only": str(forward_only),
            "variable_seq_lengths": str(varies),
        }
        for stage, spec in enumerate(self.setup.specs):
            text = f"{len(spec.shapes)} tensors" if varies else ", ".join(map(str, spec.shapes))
            given[f"tensor_shape of what stage {stage} sends"] = text
        handshake(self.groups, given, program.peers)
        self._has_met.add(forward_only)

    def run(
        self,
        data_iterators: Any,
        num_microbatches: int | None = None,
        forward_only: bool = False,
        *,
        collect_non_loss_data: bool = False,
    ) -> list[Any]:
        """Run one step: all microbatches through this rank's stages. Return the metrics of each microbatch, in their
        order, on the rank of the last stage, and [] elsewhere.

        data_iterators: one per chunk, or one for a single chunk; each yields the microbatches in order. None is passed
        on as it is. With `collect_non_loss_data` the loss function is called with `non_loss_data=True` and what it
        returns is collected instead; that needs `forward_only`. Raises ValueError where an iterator ends too early.
        """
        wanted = self.schedule.num_microbatches
        if num_microbatches is not None and num_microbatches != wanted:
            raise ValueError(
                f"{self.schedule.name} is for {wanted} microbatches, but num_microbatches is {num_microbatches}: give "
                f"{wanted}, or run another schedule"
            )
        if collect_non_loss_data and not forward_only:
            raise ValueError("collect_non_loss_data gives no loss to go backward from: set forward_only as well")
        if not (self._has_backward or forward_only):
            raise ValueError(f"{self.schedule.name} has no backward: run it with forward_only=True")
        iterators = list(data_iterators) if isinstance(data_iterators, list | tuple) else [data_iterators]
        chunks = self.setup.chunks
        if len(iterators) != len(chunks):
            raise ValueError(f"{len(iterators)} data iterators for {len(chunks)} model chunks: give one each")
        if not forward_only and self.attached_losses.modules:
            one = torch.ones((), dtype=torch.float64, device=self.groups.device)
            self.attached_losses.set_scale(one if self.setup.grad_scaler is None else self.setup.grad_scaler(one))
        losses = MicrobatchLosses(
            wanted,
            self.groups.cp,
            torch.zeros((), dtype=torch.int64, device=self.groups.device),
            per_token=self.calculate_per_token_loss,
            backward=not forward_only,
            non_loss=collect_non_loss_data,
        )
        sync = GradientSync(() if forward_only else chunks, **self.sync_functions)
        kind = MergedStep if self.schedule.has_pairs and not forward_only else RankStep
        step = kind(self.setup, losses, sync, forward_only=forward_only)
        with step.timed("forward-backward", 1), torch.set_grad_enabled(not forward_only):
            if self._is_plain:
                step.run_microbatches(iterators[0], wanted)
            else:
                program = self._program(forward_only)
                self._meet(program, forward_only)
                step.run_program(program, iterators)
        if (recorder := active_recorder()) is not None:
            recorder.settle()
        self.num_tokens = losses.num_tokens
        return [losses.reports[microbatch] for microbatch in sorted(losses.reports)]


def _check_fit(
    schedule: Schedule, groups: ParallelGroups, chunks: Sequence[Any], *, recomputes: bool, delays: bool
) -> None:
    """Raise ValueError if `schedule` does not fit the pipeline of `groups`, or the model chunks of this rank.

    recomputes: chunks must be able to leave out recomputation. delays: the schedule must have merged pairs.
    """
    rank = groups.pp.rank
    schedule.check_pp(groups.pp.size)
    if groups.config.split_rank is not None and schedule.num_stages != schedule.pp:
        raise ValueError(
            f"split_rank puts encoder and decoder on different ranks, and {schedule.name} has several stages on a "
            "rank: run an encoder-decoder with one stage per rank"
        )
    stages = schedule.stages_of(rank)
    if len(stages) != len(chunks):
        raise ValueError(f"{schedule.name} has {len(stages)} stages on rank {rank}: {len(chunks)} chunks given")
    for stage, chunk in zip(stages, chunks, strict=True):
        if stage > 0 and not hasattr(chunk, "set_input_tensor"):
            raise ValueError(f"stage {stage} needs set_input_tensor(x) to be given the previous stage's output")
        if schedule.has_pairs and not hasattr(chunk, "in_parts"):
            raise ValueError(
                f"stage {stage} needs in_parts(...) to run merged pairs, as labkit.models.GPTModel has it; without it "
                "choose a schedule whose actions run one by one"
            )
        if recomputes and not hasattr(chunk, "set_activation_checkpointing"):
            raise ValueError(f"stage {stage} needs set_activation_checkpointing(on) to keep microbatches whole")
    if delays and not schedule.has_pairs:
        raise ValueError(f"delay_wgrad_compute is about merged pairs, and {schedule.name} has none: leave it out")


def _is_plain(schedule: Schedule) -> bool:
    """Return True where a single stage runs forward and backward of each microbatch in turn, or forwards in their
    order."""
    count = schedule.num_microbatches
    kinds = "F" if schedule.forward_only else "FB"
    row = [Action(0, kind, microbatch) for microbatch in range(count) for kind in kinds]
    return schedule.num_stages == schedule.pp == 1 and schedule.actions(0) == row


def _dtype_of(chunks: Sequence[nn.Module]) -> torch.dtype:
    floating = (p.dtype for chunk in chunks for p in chunk.parameters() if p.is_floating_point())
    return next(floating, torch.get_default_dtype())
