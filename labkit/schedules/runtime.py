"""Run a schedule for real: one rank's part of a training step, whatever the rows say.

The runtime walks its row. Before an action it takes the message that the action needs, after it it sends what the
action made; which messages these are comes from `lowering.py`. Three transports:

- `posted` (default): receives are posted one action ahead, sends run behind the computation and are never waited for
  before the end. Only data dependencies can block, and `simulate` has checked that those have no circle, so no
  schedule that it accepts can hang, on gloo or NCCL (`parallel/mailbox.py` says why the order of messages cannot).
- `batched`, `even_odd`: what lies between two actions is one exchange of `parallel/p2p.py`, waited for as a whole, as
  in Megatron. One stage per rank.

Gradients add up over microbatches. Activations die with their backward; a sent one is shrunk at once. Every action
leaves an Event of its name, such as `2F0`, while recording.

Legend: S = sequence, B = microbatch, H = hidden; tensors between stages are (S, B, H).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from labkit.events import active_recorder
from labkit.parallel.deallocation import custom_backward, deallocate_output_tensor
from labkit.parallel.groups import ParallelGroups
from labkit.parallel.mailbox import Mailbox
from labkit.parallel.p2p import exchange, p2p_communicator, second_communicator
from labkit.parallel.stream_clock import StreamClock, span_on, stream_clock
from labkit.schedules.builders import without_backward
from labkit.schedules.ir import EVENT_KINDS, Schedule
from labkit.schedules.lowering import Message, Program, Step, lower
from labkit.schedules.reading import reader
from labkit.schedules.simulator import simulate

Transport = Literal["posted", "batched", "even_odd"]
ForwardStep = Callable[[Any, nn.Module], tuple[Tensor, Callable[..., Any] | None]]
"""(data iterator, model chunk) -> (output, loss function). The loss function is called on the last stage alone and
returns `(loss, metrics)` or `(sum of losses, number of tokens, metrics)`."""
_PHASE = {"F": "forward", "B": "backward"}


class PipelineRuntime:
    """Executes `schedule` on the model chunks of this rank; all ranks of a pipeline make one with the same schedule."""

    def __init__(
        self,
        schedule: Schedule,
        model_chunks: nn.Module | Sequence[nn.Module],
        groups: ParallelGroups,
        *,
        forward_step_func: ForwardStep,
        tensor_shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        transport: Transport = "posted",
        grad_scaler: Callable[[Tensor], Tensor] | None = None,
        calculate_per_token_loss: bool = False,
        no_sync_func: Callable[[], AbstractContextManager[Any]] | None = None,
        grad_sync_func: Callable[[list[nn.Parameter]], None] | None = None,
        deallocate_pipeline_outputs: bool = True,
        timers: Any = None,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        """Check that the schedule can run and fits this rank. The first of a layout makes its second communicator.

        tensor_shape: of every tensor between stages, (S, B, H); None lets them vary and sends their sizes ahead.
        dtype: of these tensors; None is autocast's, else that of the first floating-point parameter.
        grad_scaler: applied to the loss before its backward.
        calculate_per_token_loss: leave a three-item loss unscaled; `num_tokens` divides once at the end of the step.
        no_sync_func: a context in which backwards only accumulate, left before each chunk's last one; None takes the
            chunk's own `no_sync`, where it has one.
        grad_sync_func: called with a chunk's parameters after its last backward, on all ranks but the first, which
            synchronises in that backward (Megatron's arrangement).
        timers: `timers(name, log_level=n)` gives an object with `start` and `stop`; or None.
        autocast_dtype: run forwards under torch.autocast with this type; None does not.

        Raises ScheduleError for a schedule that cannot run, ValueError where it does not fit the groups or the chunks.
        """
        self.schedule, self.groups = schedule, groups
        self.chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
        self.forward_step_func, self.grad_scaler, self.timers = forward_step_func, grad_scaler, timers
        self.calculate_per_token_loss, self.deallocate = calculate_per_token_loss, deallocate_pipeline_outputs
        self.no_sync_func, self.grad_sync_func, self.autocast_dtype = no_sync_func, grad_sync_func, autocast_dtype
        self.transport, self.tensor_shape = transport, None if tensor_shape is None else tuple(tensor_shape)
        self.num_tokens = torch.zeros((), dtype=torch.int64)
        """Tokens of the last run on the last stage, summed over microbatches; 0 where the loss gives two items."""
        self._check()
        self.dtype = dtype or autocast_dtype or _dtype_of(self.chunks)
        simulate(schedule)
        second_communicator(groups)
        rank = groups.pp.rank
        self._full = None if schedule.forward_only else lower(schedule, rank)
        self._forwards = lower(schedule if schedule.forward_only else without_backward(schedule), rank)

    def _check(self) -> None:
        schedule, pp = self.schedule, self.groups.pp
        if schedule.pp != pp.size:
            raise ValueError(f"{schedule.name} is for {schedule.pp} ranks, the pipeline has {pp.size}")
        stages = schedule.stages_of(pp.rank)
        if len(stages) != len(self.chunks):
            raise ValueError(
                f"{schedule.name} has {len(stages)} stages on rank {pp.rank}: {len(self.chunks)} chunks given"
            )
        if "W" in (action.kind for action in schedule.actions(pp.rank)):
            raise ValueError(f"{schedule.name} splits its backward (I and W), which the runtime does not execute yet")
        if self.transport not in ("posted", "batched", "even_odd"):
            raise ValueError(f"transport is {self.transport!r}; choose posted, batched or even_odd")
        if self.transport != "posted" and schedule.num_stages != schedule.pp:
            raise ValueError(f"{self.transport} transfers take one stage per rank; {schedule.name} needs posted")
        for stage, chunk in zip(stages, self.chunks, strict=True):
            if stage > 0 and not hasattr(chunk, "set_input_tensor"):
                raise ValueError(f"stage {stage} needs set_input_tensor(x) to be given the previous stage's output")

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
        returns is collected instead; that needs `forward_only`.
        """
        wanted = self.schedule.num_microbatches
        if num_microbatches is not None and num_microbatches != wanted:
            raise ValueError(
                f"{self.schedule.name} is for {wanted} microbatches, num_microbatches is {num_microbatches}"
            )
        if collect_non_loss_data and not forward_only:
            raise ValueError("collect_non_loss_data gives no loss to go backward from: set forward_only as well")
        program = self._forwards if forward_only else self._full
        if program is None:
            raise ValueError(f"{self.schedule.name} has no backward: run it with forward_only=True")
        iterators = list(data_iterators) if isinstance(data_iterators, list | tuple) else [data_iterators]
        if len(iterators) != len(self.chunks):
            raise ValueError(f"{len(iterators)} data iterators for {len(self.chunks)} model chunks: give one each")
        state = _Step(self, program, iterators, forward_only, collect_non_loss_data)
        with _timed(self.timers, "forward-backward", 1), torch.set_grad_enabled(not forward_only):
            state.walk()
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
        self.transport = _Posted(runtime, program) if runtime.transport == "posted" else _Exchanged(runtime)
        self.saved: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self.reports: dict[int, Any] = {}
        self.num_tokens = torch.zeros((), dtype=torch.int64, device=runtime.groups.device)
        self.sync = [ExitStack() for _ in runtime.chunks]
        self.clock = stream_clock(runtime.groups.device)

    def walk(self) -> None:
        """Run the row."""
        steps, runtime = self.program.steps, self.runtime
        if not self.forward_only:
            for stack, chunk in zip(self.sync, runtime.chunks, strict=True):
                stack.enter_context((runtime.no_sync_func or getattr(chunk, "no_sync", nullcontext))())
        try:
            for step, following in zip(steps, [*steps[1:], None], strict=True):
                received = self.transport.take(step)
                self.transport.announce(following)
                made = self._forward(step, received) if step.action.kind == "F" else self._backward(step, received)
                self.transport.give(step, made)
                if step.action.kind == "F":
                    self._after_send(step, made)
            self.transport.close()
        finally:
            for stack in self.sync:
                stack.close()

    def _forward(self, step: Step, received: Tensor | None) -> Tensor:
        action, runtime = step.action, self.runtime
        chunk = runtime.chunks[step.chunk]
        with _measured(step, self.clock), _timed(runtime.timers, "forward-compute", 2), _autocast(runtime):
            if received is not None:
                chunk.set_input_tensor(received)  # pyright: ignore[reportCallIssue]
            self.iterators[step.chunk].reads(action.microbatch)
            output, loss_func = runtime.forward_step_func(self.iterators[step.chunk].iterator, chunk)
            if action.stage == runtime.schedule.num_stages - 1:
                output = self._loss(action.microbatch, output, loss_func)
        if not self.forward_only:
            self.saved[action.stage, action.microbatch] = (received, output)
        return output

    def _loss(self, microbatch: int, output: Tensor, loss_func: Callable[..., Any] | None) -> Tensor:
        """Scale the loss so that the gradients of all microbatches add up to those of their mean."""
        runtime = self.runtime
        if loss_func is None:
            self.reports[microbatch] = output
            return output
        if self.non_loss:
            self.reports[microbatch] = loss_func(output, non_loss_data=True)
            return output
        returned = loss_func(output)
        count = runtime.schedule.num_microbatches
        if len(returned) == 3:
            loss, tokens, self.reports[microbatch] = returned
            tokens = torch.as_tensor(tokens, device=loss.device)
            self.num_tokens += tokens.to(self.num_tokens)
            return loss if runtime.calculate_per_token_loss else loss / tokens.clamp(min=1) / count
        if len(returned) != 2:
            raise ValueError(
                f"the loss function returned {len(returned)} items: (loss, metrics) or (sum, tokens, metrics)"
            )
        loss, self.reports[microbatch] = returned
        return loss * (runtime.groups.cp.size / count)

    def _backward(self, step: Step, received: Tensor | None) -> Tensor | None:
        """The gradient of the stage's input, or None on the first stage."""
        action, runtime = step.action, self.runtime
        stage_input, output = self.saved.pop((action.stage, action.microbatch))
        if step.ends_chunk and (runtime.grad_sync_func is None or runtime.groups.pp.rank == 0):
            self.sync[step.chunk].close()
        with _measured(step, self.clock), _timed(runtime.timers, "backward-compute", 2):
            if received is None and runtime.grad_scaler is not None:
                output = runtime.grad_scaler(output)
            if output.requires_grad:
                custom_backward(output, received)
        if step.ends_chunk and runtime.grad_sync_func is not None and runtime.groups.pp.rank > 0:
            self.sync[step.chunk].close()
            runtime.grad_sync_func(list(runtime.chunks[step.chunk].parameters()))
        if stage_input is None:
            return None
        # A stage that does not use its input still owes its neighbour a gradient.
        return torch.zeros_like(stage_input) if stage_input.grad is None else stage_input.grad

    def _after_send(self, step: Step, output: Tensor | None) -> None:
        if step.gives is not None and not step.gives.is_local and not self.forward_only:
            deallocate_output_tensor(output, self.runtime.deallocate)


class _Posted:
    """Receives posted one action ahead, sends left to run."""

    def __init__(self, runtime: PipelineRuntime, program: Program) -> None:
        self.local: dict[Message, Tensor] = {}
        self.mailbox = Mailbox(runtime.groups, program.incoming, shape=runtime.tensor_shape, dtype=runtime.dtype)
        self._post(program.steps[0].needs)

    def _post(self, message: Message | None) -> None:
        if message is not None and not message.is_local:
            self.mailbox.post(message, message.source, phase=_PHASE[message.kind])

    def announce(self, following: Step | None) -> None:
        self._post(following.needs if following else None)

    def take(self, step: Step) -> Tensor | None:
        message = step.needs
        if message is None:
            return None
        if message.is_local:
            return self.local.pop(message)
        tensor = self.mailbox.fetch(message, message.source, phase=_PHASE[message.kind])
        # The source made this message after reading everything that it consumed up to there.
        self.mailbox.release(message.source, lambda sent: sent.consumed <= message.produced)
        return tensor

    def give(self, step: Step, made: Tensor | None) -> None:
        message = step.gives
        if message is None:
            return
        assert made is not None
        if message.is_local:
            self.local[message] = made.detach().requires_grad_(made.is_floating_point())
        else:
            self.mailbox.send(message, made, message.target, phase=_PHASE[message.kind])

    def close(self) -> None:
        self.mailbox.close()


class _Exchanged:
    """What the last action made and what the next one needs, in one exchange with the neighbours."""

    def __init__(self, runtime: PipelineRuntime) -> None:
        self.runtime = runtime
        self.p2p = p2p_communicator(
            runtime.groups,
            batch_p2p_comm=runtime.transport == "batched",
            variable_seq_lengths=runtime.tensor_shape is None,
        )
        self.made: tuple[Message, Tensor] | None = None

    def announce(self, following: Step | None) -> None:
        """Nothing goes ahead."""

    def take(self, step: Step) -> Tensor | None:
        message, outgoing, self.made = step.needs, self.made, None
        if message is None and outgoing is None:
            return None
        wanted: dict[str, Any] = {}
        if message is not None:
            wanted["recv_prev" if message.kind == "F" else "recv_next"] = self.runtime.tensor_shape or ()
        if outgoing is not None:
            wanted["send_next" if outgoing[0].kind == "F" else "send_prev"] = outgoing[1]
        from_prev, from_next = exchange(self.p2p, dtype=self.runtime.dtype, **wanted).wait()
        return from_prev if from_next is None else from_next

    def give(self, step: Step, made: Tensor | None) -> None:
        if step.gives is not None:
            assert made is not None
            self.made = (
                step.gives,
                made.detach(),
            )  # its own view of the storage: `made` may be shrunk before it leaves

    def close(self) -> None:
        if self.made is not None:
            side = "send_next" if self.made[0].kind == "F" else "send_prev"
            leaving: dict[str, Any] = {side: self.made[1]}
            exchange(self.p2p, dtype=self.runtime.dtype, **leaving).wait()


def _dtype_of(chunks: Sequence[nn.Module]) -> torch.dtype:
    floating = (p.dtype for chunk in chunks for p in chunk.parameters() if p.is_floating_point())
    return next(floating, torch.get_default_dtype())


def _measured(step: Step, clock: StreamClock | None) -> AbstractContextManager[None]:
    """An Event for the step; on a GPU of when it ran there, which is known at the end of the run."""
    action = step.action
    return span_on(clock, str(action), EVENT_KINDS[action.kind], microbatch=action.microbatch, chunk=step.chunk)


class _timed(AbstractContextManager[None]):
    """Start and stop a named timer of the caller's, if there is one."""

    def __init__(self, timers: Any, name: str, log_level: int) -> None:
        self._timer = None if timers is None else timers(name, log_level=log_level)

    def __enter__(self) -> None:
        if self._timer is not None:
            self._timer.start()

    def __exit__(self, *exception: Any) -> None:
        if self._timer is not None:
            self._timer.stop()


def _autocast(runtime: PipelineRuntime) -> AbstractContextManager[Any]:
    if runtime.autocast_dtype is None:
        return nullcontext()
    return torch.autocast(runtime.groups.device.type, dtype=runtime.autocast_dtype)
