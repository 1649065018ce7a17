"""Run a schedule for real: one rank's part of a training step, whatever the rows say.

The runtime walks the program of its rank (`lowering.py`): F, B, I and W compute, `send`, `recv` and their like move
messages between ranks (`parallel/p2p.py`), `gather` and `synchronise` start the communication of data parallelism.
`verify` has shown before that no transport hangs. A single stage takes a plain loop over its microbatches instead.

Gradients add up over microbatches. A split backward is two actions: I computes the gradient of the stage's input and
leaves weight gradients to the `WeightGradStore`, W computes those. Activations die with B, or with W; an output that
goes to another rank is shrunk at once. Every action leaves an Event of its name, such as `2F0`, while recording.

Legend: S = sequence, B = microbatch, H = hidden; tensors between stages are (S, B, H).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from labkit.events import active_recorder
from labkit.parallel.deallocation import custom_backward, deallocate_output_tensor
from labkit.parallel.groups import ParallelGroups
from labkit.parallel.handshake import handshake
from labkit.parallel.p2p import MessageSpec, P2PCommunicator, P2POp, P2PWork, Payload, second_communicator, start
from labkit.parallel.stream_clock import span_on, stream_clock
from labkit.parallel.weight_grad_store import WeightGradStore
from labkit.schedules.builders import without_backward
from labkit.schedules.gradient_sync import GradientSync, NoSync, SyncFunc, check_sync_functions
from labkit.schedules.ir import EVENT_KINDS, Action, Schedule
from labkit.schedules.lowering import (
    Communication,
    Program,
    StageMessage,
    Step,
    Sync,
    Transfer,
    Transport,
    check_transport,
    lower,
)
from labkit.schedules.microbatches import AttachedLosses, MicrobatchLosses, TensorShape, reader, shapes_of_messages
from labkit.schedules.simulator import kept_whole
from labkit.schedules.verifier import check_fit, verify

ForwardStep = Callable[[Any, nn.Module], tuple[Any, Callable[..., Any] | None]]
"""(data iterator, model chunk) -> (output, loss function). The output is a tensor, or a tuple of tensors where the next
stage needs several. The loss function is called on the last stage alone and returns `(loss, metrics)` or `(sum of
losses, number of tokens, metrics)`. Under context parallelism sum and number are of this rank's positions, and a `loss`
is, as Megatron has it, this rank's part of the sample's mean: the parts add up to the mean over cp. A mean over the
rank's own positions gives gradients cp times too large, and nothing here can tell; `pretrain` therefore takes three
items under context parallelism. Without a loss function the output is the loss, and what is reported."""
RECEIVES_AHEAD = {"gloo": 4, "nccl": 1}
"""Receives of one sender that are open beyond the next. A channel is in order of sending, so a message that is needed
soon may wait behind one that is read late. On a GPU every open receive is a kernel, and a second one would wait behind
the first."""


def chunks_of(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The model chunks of a list, a tuple or an `nn.ModuleList`; any other model is one chunk."""
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
        transport: Transport = "posted",
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
    ) -> None:
        """Check that the schedule can run and fits this rank. The first of a layout makes its second communicator.

        tensor_shape: of what stages send on: one shape (S, B, H), a list of shapes where they send several tensors, or
            a function from the sending stage to its list. None is one tensor whose sizes vary.
        variable_seq_lengths: send three sizes ahead of every tensor; of tensor_shape only the number of tensors counts.
        dtype: of these tensors; None is autocast's, else that of the first floating-point parameter.
        grad_scaler: applied to the loss before its backward.
        calculate_per_token_loss: leave a three-item loss unscaled; `num_tokens` divides once at the end of the step.
        no_sync_func: a context in which backwards only accumulate, left for each chunk's last one (its last W where the
            backward is split), or one per chunk; None takes the chunks' own `no_sync`, where they have one.
        grad_sync_func: called with a chunk's parameters where all ranks synchronise them at about the same time, or one
            per chunk. With one stage per rank the first rank leaves it to the hooks of its last backward, as Megatron.
        param_sync_func: called with a chunk's parameters ahead of its first forward, or one per chunk.
        timers: `timers(name, log_level=n)` gives an object with `start` and `stop`; or None.
        autocast_dtype: run forwards, but not the loss function, under torch.autocast with this type; None does not.
        num_microbatches_with_partial_activation_checkpoints: of those in flight on this rank, so many recompute nothing
            (`kept_whole`): their forwards run under the chunk's `set_activation_checkpointing(False)`.
        tokens_per_microbatch: B x S; needed with calculate_per_token_loss and experts alone (`AttachedLosses`).

        Raises ScheduleError for a schedule that cannot run, ValueError where it does not fit the groups or the chunks.
        """
        self.schedule, self.groups, self.chunks = schedule, groups, chunks_of(model_chunks)
        self.transport: Transport = transport
        self.forward_step_func, self.grad_scaler, self.timers = forward_step_func, grad_scaler, timers
        self.calculate_per_token_loss, self.deallocate = calculate_per_token_loss, deallocate_pipeline_outputs
        self.autocast_dtype = autocast_dtype
        self.sync_functions: dict[str, Any] = {
            "no_sync_func": no_sync_func,
            "grad_sync_func": grad_sync_func,
            "param_sync_func": param_sync_func,
        }
        check_transport(transport)
        check_sync_functions(len(self.chunks), **self.sync_functions)
        if groups.pp.rank == 0 and schedule.num_stages == schedule.pp:
            self.sync_functions["grad_sync_func"] = None  # left to the hooks
        count = num_microbatches_with_partial_activation_checkpoints
        self.kept_whole = None if count is None else kept_whole(schedule, groups.pp.rank, count)
        self.num_tokens = torch.zeros((), dtype=torch.int64)
        """Tokens of the last run on the last stage, summed over microbatches; 0 where the loss gives two items."""
        check_fit(schedule, groups.pp.rank, groups.pp.size, self.chunks, recomputes=self.kept_whole is not None)
        if groups.config.split_rank is not None and schedule.num_stages != groups.pp.size:
            raise ValueError(
                f"split_rank puts encoder and decoder on different ranks, and {schedule.name} has several stages on a "
                "rank: run an encoder-decoder with one stage per rank"
            )
        tokens = tokens_per_microbatch
        self.attached_losses = AttachedLosses(self.chunks, schedule.num_microbatches, calculate_per_token_loss, tokens)
        self.counting = [[m for m in chunk.modules() if hasattr(m, "current_microbatch")] for chunk in self.chunks]
        """By chunk, the modules that want to know whose forward is next: those that have a CUDA graph for each."""
        self._is_plain = _is_plain(schedule)
        varies = variable_seq_lengths or tensor_shape is None
        self.p2p = P2PCommunicator(groups, second_communicator(groups), transport == "batched", varies)
        dtype = dtype or autocast_dtype or _dtype_of(self.chunks)
        self.specs = [MessageSpec(shapes, dtype) for shapes in shapes_of_messages(tensor_shape, schedule.num_stages)]
        """By stage, what it sends on; gradients that come back have the same shapes."""
        self._has_met: set[bool] = set()
        """Kinds of runs, with or without backward, before which the ranks have compared what they were given."""
        if not self._is_plain:
            schedule.derived(f"verified, {transport}", lambda rows: verify(rows, transport))

    def _program(self, forward_only: bool) -> Program:
        rank, schedule, transport = self.groups.pp.rank, self.schedule, self.transport
        if forward_only and not schedule.forward_only:
            schedule = schedule.derived("forward only", without_backward)
        ahead = 0 if self.p2p.variable_seq_lengths else RECEIVES_AHEAD.get(self.groups.backend, 1)
        what = f"program of rank {rank}, {transport}, {ahead} ahead"
        return schedule.derived(what, lambda rows: lower(rows, rank, transport, receives_ahead=ahead))

    def _meet(self, program: Program, forward_only: bool) -> None:
        """Compare what this rank was given with the ranks that it exchanges messages with, before the first message."""
        if forward_only in self._has_met:
            return
        schedule, varies = self.schedule, self.p2p.variable_seq_lengths
        given = {
            "the schedule": f"{schedule.name} of {schedule.num_stages} stages and {schedule.num_microbatches} "
            f"microbatches (checksum {schedule.checksum:08x})",
            "transport": self.transport,
            "dtype": str(self.specs[0].dtype) if self.specs else "none",
            "forward_only": str(forward_only),
            "variable_seq_lengths": str(varies),
        }
        for stage, spec in enumerate(self.specs):
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
        """One step: all microbatches through this rank's stages. Returns the metrics of each microbatch on the rank of
        the last stage, in their order, and [] elsewhere.

        data_iterators: one per chunk, or one for a single chunk; each yields the microbatches in order. None is passed
        on as it is. With `collect_non_loss_data` the loss function is called with `non_loss_data=True` and what it
        returns is collected instead; that needs `forward_only`. Raises ValueError where an iterator ends too early.
        """
        wanted = self.schedule.num_microbatches
        if num_microbatches is not None and num_microbatches != wanted:
            raise ValueError(
                f"{self.schedule.name} is for {wanted} microbatches, num_microbatches is {num_microbatches}"
            )
        if collect_non_loss_data and not forward_only:
            raise ValueError("collect_non_loss_data gives no loss to go backward from: set forward_only as well")
        if self.schedule.forward_only and not forward_only:
            raise ValueError(f"{self.schedule.name} has no backward: run it with forward_only=True")
        iterators = list(data_iterators) if isinstance(data_iterators, list | tuple) else [data_iterators]
        if len(iterators) != len(self.chunks):
            raise ValueError(f"{len(iterators)} data iterators for {len(self.chunks)} model chunks: give one each")
        if not forward_only and self.attached_losses.modules:
            one = torch.ones((), dtype=torch.float64, device=self.groups.device)
            self.attached_losses.set_scale(one if self.grad_scaler is None else self.grad_scaler(one))
        state = _Run(self, forward_only, collect_non_loss_data)
        with _timed(self.timers, "forward-backward", 1), torch.set_grad_enabled(not forward_only):
            if self._is_plain:
                state.loop(iterators[0])
            else:
                program = self._program(forward_only)
                self._meet(program, forward_only)
                state.walk(program, iterators)
        if (recorder := active_recorder()) is not None:
            recorder.settle()
        self.num_tokens = state.losses.num_tokens
        return [state.losses.reports[microbatch] for microbatch in sorted(state.losses.reports)]


class _Run:
    """One step of a rank: `loop` for a single stage, `walk` for a program."""

    def __init__(self, runtime: PipelineRuntime, forward_only: bool, non_loss: bool) -> None:
        self.runtime, self.forward_only = runtime, forward_only
        schedule, groups = runtime.schedule, runtime.groups
        self.losses = MicrobatchLosses(
            schedule.num_microbatches,
            groups.cp,
            torch.zeros((), dtype=torch.int64, device=groups.device),
            per_token=runtime.calculate_per_token_loss,
            backward=not forward_only,
            non_loss=non_loss,
        )
        self.sync = GradientSync(() if forward_only else runtime.chunks, **runtime.sync_functions)
        self.messages: dict[StageMessage, Payload] = {}
        """Made and not yet sent, or received and not yet read; of a stage whose neighbour is on this rank, both."""
        self.under_way: dict[Transfer, P2PWork] = {}
        self.saved: dict[tuple[int, int], tuple[Payload | None, Payload]] = {}
        """(stage, microbatch) -> inputs and outputs of its forward, kept for the backward."""
        self.weight_gradients = WeightGradStore()
        self.clock = stream_clock(groups.device)

    def loop(self, iterator: Any) -> None:
        """Forward and backward of each microbatch in turn, gradients synchronised with the last."""
        count = self.runtime.schedule.num_microbatches
        self.readers = [reader(iterator, range(count))]
        with self.sync:
            if not self.forward_only:
                self.sync.gather(0)
            for microbatch in range(count):
                self._compute(Step(Action(0, "F", microbatch), 0, None, None, False))
                if not self.forward_only:
                    self._compute(Step(Action(0, "B", microbatch), 0, None, None, microbatch == count - 1))

    def walk(self, program: Program, iterators: list[Any]) -> None:
        """Run the program."""
        self.readers = [reader(iterator, program.forwards(chunk)) for chunk, iterator in enumerate(iterators)]
        with self.sync:
            for instruction in program.instructions:
                _RUN[instruction.verb](self, instruction)

    # ---- communication ----

    def _start(self, communication: Communication) -> None:
        """Start sends of what was made, and receives."""
        transfers = communication.transfers
        works = start(self.runtime.p2p, [self._op(transfer) for transfer in transfers])
        self.under_way |= zip(transfers, works, strict=True)

    def _op(self, transfer: Transfer) -> P2POp:
        message = transfer.message
        return P2POp(
            transfer.operation,
            transfer.peer,
            transfer.channel,
            self.messages.pop(message) if transfer.operation == "send" else (),
            self.runtime.specs[min(message.from_stage, message.to_stage)],
            str(message),
            "forward" if message.kind == "F" else "backward",
        )

    def _wait(self, communication: Communication) -> None:
        for transfer in communication.transfers:
            payload = self.under_way.pop(transfer).wait()
            if transfer.operation == "recv":
                self.messages[transfer.message] = payload

    def _exchange(self, communication: Communication) -> None:
        self._start(communication)
        self._wait(communication)

    # ---- computation ----

    def _compute(self, step: Step) -> None:
        """Run an action, with an Event and the caller's timer around it."""
        timer = "forward-compute" if step.action.kind == "F" else "backward-compute"
        compute = {"F": self._forward, "W": self._weight}.get(step.action.kind, self._backward)
        if step.ends_chunk:
            self.sync.before_last_backward(step.chunk)
        received = None if step.needs is None else self.messages.pop(step.needs)
        with self._event(step), _timed(self.runtime.timers, timer, 2):
            made = compute(step, received)
        if step.gives is not None:
            self._keep(step.gives, made)
        if step.ends_chunk:
            self.sync.after_last_backward(step.chunk)

    def _event(self, step: Step) -> AbstractContextManager[None]:
        """An Event for the step; on a GPU of when it ran there, which is known at the end of the run."""
        if active_recorder() is None:
            return nullcontext()
        action = step.action
        return span_on(
            self.clock, str(action), EVENT_KINDS[action.kind], microbatch=action.microbatch, chunk=step.chunk
        )

    def _keep(self, message: StageMessage, made: Payload) -> None:
        """Keep what an action made until it is sent, or until the next stage reads it here."""
        kept = tuple([x.detach() for x in made])
        if message.is_local:
            kept = tuple([x.requires_grad_(x.is_floating_point()) for x in kept])
        elif message.kind == "F" and not self.forward_only:
            for output in made:
                deallocate_output_tensor(output, self.runtime.deallocate)
        self.messages[message] = kept

    def _forward(self, step: Step, received: Payload | None) -> Payload:
        action, runtime = step.action, self.runtime
        chunk = runtime.chunks[step.chunk]
        if received is not None:
            chunk.set_input_tensor(received[0] if len(received) == 1 else list(received))  # pyright: ignore[reportCallIssue]
        output, loss_func = self._forward_step(step, chunk)
        if action.stage == runtime.schedule.num_stages - 1:
            output = self.losses.loss(action.microbatch, output, loss_func)
        made = (output,) if isinstance(output, Tensor) else tuple(output)
        if not self.forward_only:
            self.saved[action.stage, action.microbatch] = (received, made)
        return made

    def _forward_step(self, step: Step, chunk: nn.Module) -> tuple[Any, Callable[..., Any] | None]:
        source, action, runtime = self.readers[step.chunk], step.action, self.runtime
        source.wanted = action.microbatch
        for module in runtime.counting[step.chunk]:
            module.current_microbatch = action.microbatch  # type: ignore[assignment]
        if runtime.kept_whole is not None:
            chunk.set_activation_checkpointing((action.stage, action.microbatch) not in runtime.kept_whole)  # pyright: ignore[reportCallIssue]
        autocast = nullcontext()  # of the forward alone, not the loss function, as in Megatron
        if runtime.autocast_dtype is not None:
            autocast = torch.autocast(runtime.groups.device.type, dtype=runtime.autocast_dtype)
        try:
            with autocast:
                return runtime.forward_step_func(source.iterator, chunk)
        except StopIteration as error:
            raise source.ran_short(action.stage, step.chunk) from error
        finally:
            if runtime.kept_whole is not None:
                chunk.set_activation_checkpointing(True)  # pyright: ignore[reportCallIssue]

    def _backward(self, step: Step, received: Payload | None) -> Payload:
        """B or I: the gradients of the stage's inputs, none on the first stage."""
        key = (step.action.stage, step.action.microbatch)
        inputs, outputs = self.saved.pop(key)
        if received is None:
            loss, weight = outputs[0], self.losses.weights.pop(step.action.microbatch, 1.0)
            if self.runtime.grad_scaler is not None:  # it is shown the weighted loss, as in Megatron
                loss, weight = self.runtime.grad_scaler(loss * weight), 1.0
            assert loss.numel() == 1, "only a scalar loss goes backward by itself"
            outputs, received = (loss,), (torch.full_like(loss, weight),)
        with self.weight_gradients.collecting(key) if step.action.kind == "I" else nullcontext():
            custom_backward(outputs, received)
        return tuple([torch.zeros_like(x) if x.grad is None else x.grad for x in inputs or ()])  # even if x is not used

    def _weight(self, step: Step, received: Payload | None) -> Payload:
        """W: the weight gradients that I put off; the activations they were kept for go with them."""
        self.weight_gradients.run((step.action.stage, step.action.microbatch))
        return ()

    # ---- data parallelism ----

    def _sync(self, sync: Sync) -> None:
        (self.sync.gather if sync.verb == "gather" else self.sync.synchronise)(sync.chunk)


_RUN: dict[str, Callable[[_Run, Any], None]] = {
    **dict.fromkeys("FBIW", _Run._compute),
    **dict.fromkeys(("post", "send"), _Run._start),
    **dict.fromkeys(("recv", "sent"), _Run._wait),
    "exchange": _Run._exchange,
    **dict.fromkeys(("gather", "synchronise"), _Run._sync),
}
"""How each instruction of a program runs."""


def _is_plain(schedule: Schedule) -> bool:
    """Whether a single stage runs forward and backward of each microbatch in turn, or forwards in their order."""
    count = schedule.num_microbatches
    kinds = "F" if schedule.forward_only else "FB"
    row = [Action(0, kind, microbatch) for microbatch in range(count) for kind in kinds]
    return schedule.num_stages == schedule.pp == 1 and schedule.actions(0) == row


def _dtype_of(chunks: Sequence[nn.Module]) -> torch.dtype:
    floating = (p.dtype for chunk in chunks for p in chunk.parameters() if p.is_floating_point())
    return next(floating, torch.get_default_dtype())


@contextmanager
def _timed(timers: Any, name: str, log_level: int) -> Iterator[None]:
    """Start and stop a named timer of the caller's, if there is one."""
    if timers is None:
        yield
        return
    timer = timers(name, log_level=log_level)
    timer.start()
    try:
        yield
    finally:
        timer.stop()
