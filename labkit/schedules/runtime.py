"""Run a schedule for real: one rank's part of a training step, whatever the rows say.

The runtime walks its row. Before an action it takes the message that the action needs, after it it sends what the
action made; which messages these are, and when they travel, comes from `lowering.py`, how they travel from
`transports.py`. Under `posted` (the default) receives are posted ahead and sends run behind the computation, so only
data can be waited for. `batched`, `even_odd` and `blocking` exchange between two actions, as Megatron does without
overlap. `verify` has shown before that no transport hangs.

Gradients add up over microbatches. A split backward is two actions: I computes the gradient of the stage's input and
leaves weight gradients to the `WeightGradStore`, W computes those. Activations die with B, or with W; a sent output is
shrunk at once. Every action leaves an Event of its name, such as `2F0`, while recording.

Legend: S = sequence, B = microbatch, H = hidden; tensors between stages are (S, B, H).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from labkit.events import active_recorder, observers
from labkit.parallel.collectives import all_reduce, comm_scope
from labkit.parallel.deallocation import custom_backward, deallocate_output_tensor
from labkit.parallel.groups import ParallelGroups
from labkit.parallel.p2p import second_communicator
from labkit.parallel.payload import Format, Payload
from labkit.parallel.stream_clock import StreamClock, span_on, stream_clock
from labkit.parallel.weight_grad_store import WeightGradStore
from labkit.schedules.agreement import pipeline_agreement
from labkit.schedules.attached_losses import AttachedLosses
from labkit.schedules.builders import without_backward
from labkit.schedules.gradient_sync import GradientSync, NoSync, SyncFunc, check_sync_functions
from labkit.schedules.ir import EVENT_KINDS, Schedule
from labkit.schedules.lowering import Message, Program, Step, Transport, lower
from labkit.schedules.partial_checkpoints import kept_whole
from labkit.schedules.reading import reader
from labkit.schedules.shapes import TensorShape, only_shape, shapes_of_messages
from labkit.schedules.transports import transfers
from labkit.schedules.verifier import verify

ForwardStep = Callable[[Any, nn.Module], tuple[Any, Callable[..., Any] | None]]
"""(data iterator, model chunk) -> (output, loss function). The output is a tensor, or a tuple of tensors where the next
stage needs several. The loss function is called on the last stage alone and returns `(loss, metrics)` or `(sum of
losses, number of tokens, metrics)`. Under context parallelism sum and number are of this rank's positions, and a `loss`
is, as Megatron has it, this rank's part of the sample's mean: the parts add up to the mean over cp. A mean over the
rank's own positions gives gradients cp times too large, and nothing here can tell; `pretrain` therefore takes three
items under context parallelism. Without a loss function the output is the loss, and what is reported."""
_NOTHING: AbstractContextManager[None] = nullcontext()


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
        grad_sync_func: called with a chunk's parameters where all ranks synchronise it at about the same time
            (`Step.grad_sync`), or one per chunk. With one stage per rank the first rank leaves it to the hooks of its
            last backward, as Megatron does.
        param_sync_func: called with a chunk's parameters ahead of its first forward (`Step.param_gather`), or one each.
        timers: `timers(name, log_level=n)` gives an object with `start` and `stop`; or None.
        autocast_dtype: run forwards, but not the loss function, under torch.autocast with this type; None does not.
        num_microbatches_with_partial_activation_checkpoints: of those in flight on this rank, so many recompute nothing
            (`kept_whole`): their forwards run under the chunk's `set_activation_checkpointing(False)`.
        tokens_per_microbatch: B x S; needed with calculate_per_token_loss and experts alone (`AttachedLosses`).

        Raises ScheduleError for a schedule that cannot run, ValueError where it does not fit the groups or the chunks.
        """
        self.schedule, self.groups = schedule, groups
        self.transport: Transport = transport
        self.chunks = chunks_of(model_chunks)
        self.forward_step_func, self.grad_scaler, self.timers = forward_step_func, grad_scaler, timers
        self.calculate_per_token_loss, self.deallocate = calculate_per_token_loss, deallocate_pipeline_outputs
        self.autocast_dtype = autocast_dtype
        self.sync_functions: dict[str, Any] = {
            "no_sync_func": no_sync_func,
            "grad_sync_func": grad_sync_func,
            "param_sync_func": param_sync_func,
        }
        check_sync_functions(len(self.chunks), **self.sync_functions)
        if groups.pp.rank == 0 and schedule.num_stages == schedule.pp:
            self.sync_functions["grad_sync_func"] = None  # left to the hooks
        count = num_microbatches_with_partial_activation_checkpoints
        self.kept_whole = None if count is None else kept_whole(schedule, groups.pp.rank, count)
        self.num_tokens = torch.zeros((), dtype=torch.int64)
        """Tokens of the last run on the last stage, summed over microbatches; 0 where the loss gives two items."""
        self._check()
        tokens = tokens_per_microbatch
        self.attached_losses = AttachedLosses(self.chunks, schedule.num_microbatches, calculate_per_token_loss, tokens)
        self.counting = [[m for m in chunk.modules() if hasattr(m, "current_microbatch")] for chunk in self.chunks]
        """By chunk, the modules that want to know whose forward is next: those that have a CUDA graph for each."""
        schedule.derived(f"verified, {transport}", lambda rows: verify(rows, transport))
        self.shapes = shapes = shapes_of_messages(tensor_shape, schedule.num_stages)
        varying = variable_seq_lengths or tensor_shape is None
        self.form = Format[Message](
            lambda message: shapes[min(message.from_stage, message.to_stage)],
            lambda message: "forward" if message.kind == "F" else "backward",
            dtype or autocast_dtype or _dtype_of(self.chunks),
            groups.device,
            varying,
            None if varying else only_shape(shapes),
        )
        second_communicator(groups)
        self._agreed: set[bool] = set()

    def _check(self) -> None:
        schedule, pp = self.schedule, self.groups.pp
        if schedule.pp != pp.size:
            raise ValueError(f"{schedule.name} is for {schedule.pp} ranks, the pipeline has {pp.size}")
        stages = schedule.stages_of(pp.rank)
        if len(stages) != len(self.chunks):
            raise ValueError(
                f"{schedule.name} has {len(stages)} stages on rank {pp.rank}: {len(self.chunks)} chunks given"
            )
        if self.groups.config.split_rank is not None and schedule.num_stages != pp.size:
            raise ValueError(
                f"split_rank puts encoder and decoder on different ranks, and {schedule.name} has several stages on a "
                "rank: run an encoder-decoder with one stage per rank"
            )
        for stage, chunk in zip(stages, self.chunks, strict=True):
            if stage > 0 and not hasattr(chunk, "set_input_tensor"):
                raise ValueError(f"stage {stage} needs set_input_tensor(x) to be given the previous stage's output")
            if self.kept_whole is not None and not hasattr(chunk, "set_activation_checkpointing"):
                raise ValueError(f"stage {stage} needs set_activation_checkpointing(on) to keep microbatches whole")

    def _program(self, forward_only: bool) -> Program:
        rank, schedule = self.groups.pp.rank, self.schedule
        if forward_only and not schedule.forward_only:
            schedule = schedule.derived("forward only", without_backward)
        return schedule.derived(
            f"program of rank {rank}, {self.transport}", lambda rows: lower(rows, rank, self.transport)
        )

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
        state = _Step(self, self._program(forward_only), iterators, forward_only, collect_non_loss_data)
        with _timed(self.timers, "forward-backward", 1), torch.set_grad_enabled(not forward_only):
            state.walk()
        self._agreed.add(forward_only)
        if (recorder := active_recorder()) is not None:
            recorder.settle()
        self.num_tokens = state.num_tokens
        return [state.reports[microbatch] for microbatch in sorted(state.reports)]


class _Step:
    """What lives during one `run`."""

    def __init__(
        self, runtime: PipelineRuntime, program: Program, iterators: list[Any], forward_only: bool, non_loss: bool
    ) -> None:
        self.runtime, self.program, self.forward_only, self.non_loss = runtime, program, forward_only, non_loss
        self.iterators = [reader(iterator, program, chunk) for chunk, iterator in enumerate(iterators)]
        greet = None
        if forward_only not in runtime._agreed:
            greet = pipeline_agreement(runtime, program, forward_only).confirm
        self.transfers = transfers(runtime.groups, program, runtime.form, runtime.transport, greet)
        self.saved: dict[tuple[int, int], tuple[Payload | None, Payload]] = {}
        self._spent: tuple[Payload | None, Payload] | None = None
        """What a backward was the last to need. It is let go after its gradient has left: freeing takes time."""
        self.weight_gradients = WeightGradStore()
        self.reports: dict[int, Any] = {}
        self.weights: dict[int, float] = {}
        """Of each microbatch's loss on its way backward; 1 where it has none here."""
        self.num_tokens = torch.zeros((), dtype=torch.int64, device=runtime.groups.device)
        self.clock = stream_clock(runtime.groups.device)

    def walk(self) -> None:
        """Run the row."""
        runtime = self.runtime
        with GradientSync(() if self.forward_only else runtime.chunks, **runtime.sync_functions) as sync:
            for step in self.program.steps:
                received = self.transfers.take(step)
                is_due = step.ends_chunk or step.param_gather or step.grad_sync
                if is_due:
                    sync.before(step)
                run = _Step._observed if observers or runtime.timers else _RUN[step.action.kind]
                made = run(self, step, received)
                self.transfers.give(step, made)
                self._spent = None
                if step.action.kind == "F":
                    self._after_send(step, made)
                if is_due:
                    sync.after(step)
            self.transfers.close()

    def _observed(self, step: Step, received: Payload | None) -> Payload | None:
        """An action with what is around it where somebody may want to see it; otherwise nothing is made for that."""
        kind = step.action.kind
        timer = "forward-compute" if kind == "F" else "backward-compute"
        with _measured(step, self.clock), _timed(self.runtime.timers, timer, 2):
            return _RUN[kind](self, step, received)

    def _forward(self, step: Step, received: Payload | None) -> Payload:
        action, runtime = step.action, self.runtime
        chunk = runtime.chunks[step.chunk]
        if received is not None:
            given = received[0] if len(received) == 1 else list(received)
            chunk.set_input_tensor(given)  # pyright: ignore[reportCallIssue]
        output, loss_func = self._forward_step(step, chunk)
        if action.stage == runtime.schedule.num_stages - 1:
            output = self._loss(action.microbatch, output, loss_func)
        made = (output,) if isinstance(output, Tensor) else tuple(output)
        if not self.forward_only:
            self.saved[action.stage, action.microbatch] = (received, made)
        return made

    def _forward_step(self, step: Step, chunk: nn.Module) -> tuple[Any, Callable[..., Any] | None]:
        source = self.iterators[step.chunk]
        action, runtime = step.action, self.runtime
        source.wanted = action.microbatch
        for module in runtime.counting[step.chunk]:
            module.current_microbatch = action.microbatch  # type: ignore[assignment]
        if runtime.kept_whole is not None:
            chunk.set_activation_checkpointing((action.stage, action.microbatch) not in runtime.kept_whole)  # pyright: ignore[reportCallIssue]
        try:
            if runtime.autocast_dtype is None:
                return runtime.forward_step_func(source.iterator, chunk)
            with torch.autocast(runtime.groups.device.type, dtype=runtime.autocast_dtype):  # not the loss function, as
                return runtime.forward_step_func(source.iterator, chunk)  # in Megatron
        except StopIteration as error:
            raise source.ran_short(step) from error
        finally:
            if runtime.kept_whole is not None:
                chunk.set_activation_checkpointing(True)  # pyright: ignore[reportCallIssue]

    def _loss(self, microbatch: int, output: Any, loss_func: Callable[..., Any] | None) -> Any:
        """The loss, whose weight is left to its backward: with it the gradients of all microbatches add up to those of
        their mean. (Multiplied into the loss, it would be one more operation each way where all ranks wait.)"""
        runtime = self.runtime
        if loss_func is None:
            if not self.forward_only and not (isinstance(output, Tensor) and output.numel() == 1):
                raise ValueError(
                    "the forward step of the last stage gave no loss function, and its output is not one number that "
                    "could be the loss; return (output, loss function)"
                )
            self.reports[microbatch] = output
            return output
        if self.non_loss:
            self.reports[microbatch] = loss_func(output, non_loss_data=True)
            return output
        returned = loss_func(output)
        count = runtime.schedule.num_microbatches
        if not isinstance(returned, tuple | list) or len(returned) not in (2, 3):
            given = f"{len(returned)} items" if isinstance(returned, tuple | list) else f"a {type(returned).__name__}"
            raise ValueError(f"the loss function returned {given}: (loss, metrics) or (sum, tokens, metrics)")
        if len(returned) == 3:
            loss, tokens, self.reports[microbatch] = returned
            tokens = torch.as_tensor(tokens, device=loss.device)
            self.num_tokens += tokens.to(self.num_tokens)
            if runtime.calculate_per_token_loss:
                return loss
            self.weights[microbatch] = 1 / count
            return self._mean(loss, tokens)
        if runtime.calculate_per_token_loss:
            raise ValueError("calculate_per_token_loss needs a loss function that returns (sum, tokens, metrics)")
        loss, self.reports[microbatch] = returned
        self.weights[microbatch] = runtime.groups.cp.size / count
        return loss

    def _mean(self, loss_sum: Tensor, tokens: Tensor) -> Tensor:
        """This rank's part of the microbatch's mean loss, times cp because gradients are averaged over cp as well.

        Its positions and those of the other ranks of cp are parts of the same samples, which may count unequal numbers
        of tokens: what divides is the number in the samples.
        """
        cp = self.runtime.groups.cp
        with comm_scope(layer="loss", phase="forward"):
            tokens = all_reduce(tokens, cp, in_place=False)
        return loss_sum * cp.size / tokens.clamp(min=1)

    def _backward(self, step: Step, received: Payload | None) -> Payload | None:
        """B or I: the gradients of the stage's inputs, or None on the first stage."""
        key = (step.action.stage, step.action.microbatch)
        self._spent = inputs, outputs = self.saved.pop(key)
        if received is None:
            loss, weight = outputs[0], self.weights.pop(step.action.microbatch, 1.0)
            if self.runtime.grad_scaler is not None:  # it is shown the weighted loss, as in Megatron
                loss, weight = self.runtime.grad_scaler(loss * weight), 1.0
            assert loss.numel() == 1, "only a scalar loss goes backward by itself"
            outputs, received = (loss,), (torch.full_like(loss, weight),)
        if step.action.kind == "I":
            with self.weight_gradients.collecting(key):
                custom_backward(outputs, received)
        else:
            custom_backward(outputs, received)
        return None if inputs is None else tuple([_gradient(x) for x in inputs])

    def _weight(self, step: Step, received: Payload | None) -> None:
        """W: the weight gradients that I put off; the activations they were kept for go with them."""
        self.weight_gradients.run((step.action.stage, step.action.microbatch))

    def _after_send(self, step: Step, made: Payload | None) -> None:
        if step.gives is not None and not step.gives.is_local and not self.forward_only:
            for output in made or ():
                deallocate_output_tensor(output, self.runtime.deallocate)


_RUN = {"F": _Step._forward, "B": _Step._backward, "I": _Step._backward, "W": _Step._weight}
"""How each kind of action runs."""


def _dtype_of(chunks: Sequence[nn.Module]) -> torch.dtype:
    floating = (p.dtype for chunk in chunks for p in chunk.parameters() if p.is_floating_point())
    return next(floating, torch.get_default_dtype())


def _gradient(x: Tensor) -> Tensor:
    """Of a stage's input. A stage that does not use it still owes its neighbour one."""
    gradient = x.grad
    return torch.zeros_like(x) if gradient is None else gradient


def _measured(step: Step, clock: StreamClock | None) -> AbstractContextManager[None]:
    """An Event for the step; on a GPU of when it ran there, which is known at the end of the run."""
    if active_recorder() is None:
        return _NOTHING
    action = step.action
    return span_on(clock, str(action), EVENT_KINDS[action.kind], microbatch=action.microbatch, chunk=step.chunk)


def _timed(timers: Any, name: str, log_level: int) -> AbstractContextManager[None]:
    """Start and stop a named timer of the caller's, if there is one."""
    return _NOTHING if timers is None else _running(timers(name, log_level=log_level))


@contextmanager
def _running(timer: Any) -> Iterator[None]:
    timer.start()
    try:
        yield
    finally:
        timer.stop()
