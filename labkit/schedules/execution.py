"""One step of a rank: a plain loop over its microbatches, or its program, instruction by instruction.

F is a forward, B a whole backward, I the gradient of the input, W that of the weights. Other instructions move messages
between ranks (`comm/p2p.py`). `post` starts receives and `recv` waits for one, `send` starts a send and `sent`
waits for sends. `exchange` starts its transfers and waits for all. `gather` and `synchronise` start the communication
of data parallelism (`gradient_sync.py`).

Gradients add up over microbatches. A split backward is two actions: I computes the gradient of the stage's input and
leaves weight gradients to the `WeightGradStore`, W computes those. B frees the activations; in a split backward W does.
A sent output shrinks to one element at once. While recording, every action leaves an Event of its name, `2F0`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from labkit.comm.p2p import MessageSpec, P2PCommunicator, P2POp, P2PWork, Payload, start
from labkit.comm.stream_clock import StreamClock
from labkit.events import active_recorder, span, timed, watchers
from labkit.parallel.deallocation import custom_backward, deallocate_output_tensor
from labkit.parallel.weight_grad_store import WeightGradStore
from labkit.schedules.gradient_sync import GradientSync
from labkit.schedules.ir import EVENT_KINDS, Action
from labkit.schedules.lowering import Communication, Compute, Program, StageMessage, Sync, Transfer
from labkit.schedules.microbatches import MicrobatchLosses, reader


@dataclass(frozen=True, kw_only=True, eq=False)
class RankSetup:
    """What all steps of a rank have in common; `PipelineRuntime` describes these arguments."""

    chunks: Sequence[Any]
    num_stages: int
    p2p: P2PCommunicator
    specs: Sequence[MessageSpec]
    """By stage, what it sends on; gradients that come back have the same shapes."""
    forward_step_func: Callable[[Any, Any], tuple[Any, Callable[..., Any] | None]]
    autocast: Callable[[], AbstractContextManager[Any]]
    """Context of each forward; not of the loss function, as in Megatron."""
    grad_scaler: Callable[[Any], Any] | None
    timers: Any
    deallocate: bool
    kept_whole: Collection[tuple[int, int]] | None
    """The (stage, microbatch) pairs whose forward keeps everything; None leaves recomputation to the model."""
    delay_wgrad: bool
    """Merged pairs compute weight gradients apart (`merging.py`)."""


class RankStep:
    """One step of a rank: `run_microbatches` of a single stage, or `run_program`."""

    RUN: ClassVar[dict[str, Callable[[Any, Any], None]]]
    """Method that runs each kind of instruction."""

    def __init__(self, setup: RankSetup, losses: MicrobatchLosses, sync: GradientSync, *, forward_only: bool) -> None:
        self.setup, self.losses, self.sync, self.forward_only = setup, losses, sync, forward_only
        self.messages: dict[StageMessage, Payload] = {}
        """Messages that were made and not yet sent, or that were received or made for a stage on this rank and not yet
        read."""
        self.under_way: dict[Transfer, P2PWork] = {}
        self.saved: dict[tuple[int, int], tuple[Payload | None, Payload]] = {}
        """(stage, microbatch) -> inputs and outputs of its forward, kept for the backward."""
        device = setup.p2p.groups.device
        self.span = StreamClock(device).span if device.type == "cuda" and active_recorder() is not None else span
        """Makes an Event: by the host's clock, or on a GPU by the time at which the work ran there."""
        has_graphs = lambda m: "current_microbatch" in vars(m) or hasattr(type(m), "current_microbatch")  # noqa: E731
        self.graphed = [list(filter(has_graphs, chunk.modules())) for chunk in setup.chunks]
        """By chunk, the modules that have one CUDA graph for each microbatch, and so must know the next microbatch."""

    def run_microbatches(self, iterator: Any, count: int) -> None:
        """Run forward and backward of each of `count` microbatches in turn; gradients are synchronised with the
        last."""
        self.readers = [reader(iterator, range(count))]
        with self.sync:
            if not self.forward_only:
                self.sync.gather(0)
            for microbatch in range(count):
                self._compute(Compute(Action(0, "F", microbatch), chunk=0, needs=None, gives=None, ends_chunk=False))
                if not self.forward_only:
                    last = microbatch == count - 1
                    self._compute(Compute(Action(0, "B", microbatch), chunk=0, needs=None, gives=None, ends_chunk=last))

    def run_program(self, program: Program, iterators: list[Any]) -> None:
        """Run the instructions of the program one by one."""
        self.weight_gradients = WeightGradStore()
        self.readers = [reader(iterator, program.forwards(chunk)) for chunk, iterator in enumerate(iterators)]
        with self.sync:
            for instruction in program.instructions:
                self.RUN[instruction.verb](self, instruction)

    # ---- communication ----

    def _start_transfers(self, communication: Communication) -> None:
        """Start the sends and the receives of one instruction."""
        transfers = communication.transfers
        works = start(self.setup.p2p, [self._op(transfer) for transfer in transfers])
        self.under_way |= zip(transfers, works, strict=True)

    def _op(self, transfer: Transfer) -> P2POp:
        message = transfer.message
        return P2POp(
            transfer.operation,
            transfer.peer,
            transfer.channel,
            self.messages.pop(message) if transfer.operation == "send" else (),
            self.setup.specs[min(message.from_stage, message.to_stage)],
            message,
            "forward" if message.kind == "F" else "backward",
        )

    def _wait_for(self, communication: Communication) -> None:
        for transfer in communication.transfers:
            payload = self.under_way.pop(transfer).wait()
            if transfer.operation == "recv":
                self.messages[transfer.message] = payload

    def _exchange(self, communication: Communication) -> None:
        self._start_transfers(communication)
        self._wait_for(communication)

    # ---- computation ----

    def _compute(self, step: Compute) -> None:
        """Run an action, with an Event and the caller's timer around it."""
        timer = "forward-compute" if step.action.kind == "F" else "backward-compute"
        compute = {"F": self._forward, "W": self._weight}.get(step.action.kind, self._backward)
        if step.ends_chunk:
            self.sync.before_last_backward(step.chunk)
        received = None if step.needs is None else self.messages.pop(step.needs)
        with self._event(step), self.timed(timer, 2):
            made = compute(step, received)
        if step.gives is not None:
            self._keep(step.gives, made)
        if step.ends_chunk:
            self.sync.after_last_backward(step.chunk)

    def timed(self, name: str, log_level: int) -> AbstractContextManager[None]:
        """Start and stop a named timer of the caller's, if there is one."""
        return nullcontext() if self.setup.timers is None else timed(self.setup.timers, name, log_level)

    def _event(self, step: Compute) -> AbstractContextManager[None]:
        """Return the context of an action: an Event or a profiler's range if somebody watches, else nothing."""
        if not watchers:
            return nullcontext()
        action = step.action
        return self.span(str(action), EVENT_KINDS[action.kind], microbatch=action.microbatch, chunk=step.chunk)

    def _keep(self, message: StageMessage, made: Payload) -> None:
        """Keep what an action made until it is sent, or until the next stage reads it here."""
        kept = tuple([x.detach() for x in made])
        if message.is_local:
            kept = tuple([x.requires_grad_(x.is_floating_point()) for x in kept])
        elif message.kind == "F" and not self.forward_only:
            for output in made:
                deallocate_output_tensor(output, self.setup.deallocate)
        self.messages[message] = kept

    def _forward(self, step: Compute, received: Payload | None) -> Payload:
        action, setup = step.action, self.setup
        chunk = setup.chunks[step.chunk]
        if received is not None:
            chunk.set_input_tensor(received[0] if len(received) == 1 else list(received))
        output, loss_func = self._forward_step(step, chunk)
        if action.stage == setup.num_stages - 1:
            output = self.losses.loss(action.microbatch, output, loss_func)
        made = tuple(output) if isinstance(output, tuple | list) else (output,)
        if not self.forward_only:
            self.saved[action.stage, action.microbatch] = (received, made)
        return made

    def _forward_step(self, step: Compute, chunk: Any) -> tuple[Any, Callable[..., Any] | None]:
        source, action, setup = self.readers[step.chunk], step.action, self.setup
        source.wanted = action.microbatch
        for module in self.graphed[step.chunk]:
            module.current_microbatch = action.microbatch
        if setup.kept_whole is not None:
            chunk.set_activation_checkpointing((action.stage, action.microbatch) not in setup.kept_whole)
        try:
            with setup.autocast():
                return setup.forward_step_func(source.iterator, chunk)
        except StopIteration as error:
            raise source.ran_short(action.stage, step.chunk) from error
        finally:
            if setup.kept_whole is not None:
                chunk.set_activation_checkpointing(True)

    def _backward(self, step: Compute, received: Payload | None) -> Payload:
        """Run B or I; return the gradients of the stage's inputs, none on the first stage."""
        key = (step.action.stage, step.action.microbatch)
        inputs, outputs = self.saved.pop(key)
        if received is None:
            loss, weight = outputs[0], self.losses.loss_weights.pop(step.action.microbatch, 1.0)
            if self.setup.grad_scaler is not None:  # the scaler gets the weighted loss, as in Megatron
                loss, weight = self.setup.grad_scaler(loss * weight), 1.0
            assert loss.numel() == 1, "only a scalar loss goes backward by itself"
            outputs, received = (loss,), (loss.new_full(loss.shape, weight),)
        with self.weight_gradients.collecting(key) if step.action.kind == "I" else nullcontext():
            custom_backward(outputs, received)
        # an input that the stage does not use still owes its neighbour a gradient
        return tuple([x.new_zeros(x.shape) if x.grad is None else x.grad for x in inputs or ()])

    def _weight(self, step: Compute, received: Payload | None) -> Payload:
        """Run W: the weight gradients that I deferred; the activations that were kept for them are freed."""
        self.weight_gradients.run((step.action.stage, step.action.microbatch))
        return ()

    # ---- data parallelism ----

    def _sync(self, sync: Sync) -> None:
        (self.sync.gather if sync.verb == "gather" else self.sync.synchronise)(sync.chunk)


RankStep.RUN = {
    **dict.fromkeys("FBIW", RankStep._compute),
    **dict.fromkeys(("post", "send"), RankStep._start_transfers),
    **dict.fromkeys(("recv", "sent"), RankStep._wait_for),
    "exchange": RankStep._exchange,
    **dict.fromkeys(("gather", "synchronise"), RankStep._sync),
}
