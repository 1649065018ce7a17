"""Recomputation of activations: keep a function's inputs, drop its activations, and compute them again in backward.

A backward needs the activations of its forward. Activations that are kept take most of the memory of training. Computed
again, they cost one more forward of the recomputed part (arXiv 1604.06174; for transformers arXiv 2205.05198). The
second forward must repeat the first bit for bit: the same inputs, the same random numbers, the same autocast. Random
numbers come from torch's generators and from every named state of an `RngTracker`. A ledger books the communication
of the second forward under the phase `recompute`. In a CUDA graph no state of a generator can be set back, so
`RefusesDraws` rejects a recomputed part that draws.

| form                      | keeps               | makes again          | right before                  |
|---------------------------|---------------------|----------------------|-------------------------------|
| `checkpoint`              | the inputs          | everything           | the function's own backward   |
| `CheckpointWithoutOutput` | all but the output  | the output           | the backward of its consumer  |

The first form is for layers, core attention and MLPs. The second form is for norms, whose output is as large as their
input. Under a split backward I recomputes, because the input gradient needs the activations; W finds them ready.

Code that counts microbatches must count once for each microbatch, in the order of the forwards. Second forwards run in
the order of the backwards, and a microbatch that is kept whole has none. `once` serves such code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from labkit.comm import collectives
from labkit.comm.capturing import active_capture, is_graph_capturing, refuse_host_sync
from labkit.comm.groups import Group
from labkit.comm.ledger import Scope, comm_scope, current_scope
from labkit.parallel.random import RngTracker
from labkit.parallel.refused_draws import RefusesDraws


@dataclass(frozen=True)
class RandomStates:
    """States of all generators that a layer may draw from: about 5 kB each on the host, 16 bytes on a GPU."""

    host: Tensor
    device: Tensor | None
    """State of the current GPU, if one is in use."""
    named: Mapping[str, Tensor] | None
    """States of the tracker."""

    @classmethod
    def now(cls, rng: RngTracker | None) -> RandomStates:
        """Return copies of the current states.

        Raises GraphCaptureError during a capture, because a GPU's states cannot be read then.
        """
        refuse_host_sync("reading random states")
        device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return cls(torch.get_rng_state(), device, {} if rng is None else rng.get_states())

    def restore(self, rng: RngTracker | None) -> None:
        """Set all generators back to these states."""
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device)
        if rng is not None and self.named is not None:
            rng.set_states(self.named)


def _autocast_now() -> list[dict[str, Any]]:
    """Return the arguments of `torch.autocast` that restore the current state, for each device that has one."""
    kinds = ("cuda", "cpu") if torch.cuda.is_initialized() else ("cpu",)
    cached = torch.is_autocast_cache_enabled()
    return [
        {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": cached,
        }
        for kind in kinds
    ]


T = TypeVar("T")


class _Run:
    """One run of a recomputed part, the first or the second. Runs of parts inside parts are nested."""

    def __init__(self, notes: list[Any], *, second: bool) -> None:
        """notes: results of `once` in the first run."""
        self.notes, self.second, self.read = notes, second, 0
        self.outer: _Run | None = None

    def once(self, make: Callable[[], T]) -> T:
        if self.second:
            assert self.read < len(self.notes), "the second run of a recomputed part asks for what the first did not"
            self.read += 1
            return self.notes[self.read - 1]
        made = make() if self.outer is None else self.outer.once(make)
        self.notes.append(made)
        return made

    def __enter__(self) -> None:
        self.outer, _current.run = _current.run, self

    def __exit__(self, *exception: object) -> None:
        _current.run = self.outer


class _Current(threading.local):  # one for each thread: autograd makes second runs on threads of its own
    run: _Run | None = None


_current = _Current()


def once(make: Callable[[], T]) -> T:
    """Return `make()`, or in the second run of a recomputed part the result of the same call in the first run.

    Use it for work that must happen once for each forward of a microbatch. Both runs must call it equally often, in the
    same order. Outside recomputed parts, as in evaluation, it is a plain call.
    """
    return make() if _current.run is None else _current.run.once(make)


def will_run_again() -> bool:
    """Return True in the first run of a recomputed part, because backward will run this code again."""
    return _current.run is not None and not _current.run.second


class _Again:
    """A function with everything that its second run needs besides its inputs."""

    def __init__(self, function: Callable[..., Any], rng: RngTracker | None) -> None:
        self.function, self.rng = function, rng
        self.autocast = _autocast_now()
        self.in_graph = is_graph_capturing()
        self.states = None if self.in_graph else RandomStates.now(rng)
        self.scope = Scope(current_scope().layer, "recompute")
        self.notes: list[Any] = []

    def first(self, *args: Any) -> Any:
        """Run the function for the first time."""
        with _Run(self.notes, second=False), RefusesDraws() if self.in_graph else nullcontext():
            return self.function(*args)

    @contextmanager
    def _same_numbers(self) -> Iterator[None]:
        """Draw the first run's numbers inside the block; after it, restore the generators."""
        if self.states is None:  # in a graph the first run drew nothing
            yield
            return
        before = RandomStates.now(self.rng)
        self.states.restore(self.rng)
        try:
            yield
        finally:
            before.restore(self.rng)

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Restore the first run's random states, autocast, ledger scope and notes inside the block."""
        with ExitStack() as stack:
            stack.enter_context(self._same_numbers())
            stack.enter_context(comm_scope(*self.scope))
            stack.enter_context(_Run(self.notes, second=True))
            for arguments in self.autocast:
                stack.enter_context(torch.autocast(**arguments))
            yield

    def __call__(self, *args: Any) -> Any:
        with self.surroundings():
            return self.function(*args)


class _Checkpoint(Function):
    """Runs `function` without autograd's graph. Backward runs it again with the graph, then goes backward through it.

    forward   y = function(x, ..), no graph           saves x (or 1/t of it)
    backward  y = function(x, ..), with a graph, then dx = dL/dx through it; parameters inside get their gradients
    """

    @staticmethod
    def forward(ctx: Any, again: _Again, group: Group | None, anchor: Tensor | None, *args: Any) -> Any:
        ctx.set_materialize_grads(False)
        outputs = again.first(*args)
        tensors = [x for x in args if isinstance(x, Tensor)]
        ctx.shape = None
        if group is not None and group.size > 1:
            ctx.shape, tensors[0] = tensors[0].shape, _own_part(tensors[0], group)
        ctx.save_for_backward(*tensors)
        ctx.again, ctx.group = again, group
        ctx.others = [None if isinstance(x, Tensor) else x for x in args]
        ctx.is_tensor = [isinstance(x, Tensor) for x in args]
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if not torch.autograd._is_checkpoint_valid():  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
            raise RuntimeError(
                "a recomputed part gives its parameters their gradients itself, which torch.autograd.grad and "
                "backward(inputs=...) forbid: call backward() without inputs, or do not recompute"
            )
        tensors = list(ctx.saved_tensors)
        if ctx.shape is not None:
            with comm_scope(*ctx.again.scope):
                tensors[0] = collectives.all_gather(tensors[0], ctx.group).view(ctx.shape)
        wanted, remaining = ctx.needs_input_grad[3:], iter(tensors)
        inputs = [
            next(remaining).detach().requires_grad_(wants) if is_tensor else other
            for is_tensor, other, wants in zip(ctx.is_tensor, ctx.others, wanted, strict=True)
        ]
        del tensors, remaining
        with torch.enable_grad():
            outputs = ctx.again(*inputs)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        pairs = [
            (y, grad)
            for y, grad in zip(outputs, grads, strict=True)
            if isinstance(y, Tensor) and y.requires_grad and grad is not None
        ]
        del outputs
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))  # pyright: ignore[reportArgumentType]
        return None, None, None, *(x.grad if isinstance(x, Tensor) else None for x in inputs)


def _own_part(x: Tensor, group: Group) -> Tensor:
    """Return a copy of this rank's 1/t of the elements of x."""
    if x.numel() % group.size:
        raise ValueError(
            f"an input of shape {tuple(x.shape)} has {x.numel()} elements, which the {group.size} ranks of "
            f"{group.name} cannot share equally; keep it whole (distribute_saved_activations=None)"
        )
    return x.reshape(-1).chunk(group.size)[group.rank].clone()


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    rng: RngTracker | None = None,
    distribute_saved_activations: Group | None = None,
) -> Any:
    """Return `function(*args)`, keeping only the tensors in `args` for backward, which computes the rest again.

    Outside grad mode it is a plain call. Gradients, also of parameters inside, are bit-equal to those without
    recomputation. This also holds under `WeightGradStore` and with dropout.

    Args:
        function: returns a tensor or a tuple of tensors. It runs twice, so it must have no other effect, except by
            `once`.
        args: arguments. Only a tensor given here gets a gradient; other values may also come with the function.
        rng: named random states that `function` draws from; torch's own generators are always replayed.
        distribute_saved_activations: a group whose ranks all hold the same first tensor. Each keeps 1/t of it, and
            backward gathers it (Megatron's option of that name). It serves tensor parallelism without sequence
            parallelism, when layer inputs are whole on every rank.

    Raises:
        ValueError: the ranks of the group cannot share the first tensor equally.
        RuntimeError: in backward, under `torch.autograd.grad`.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    # Without an input that wants a gradient, autograd would not call backward for the parameters inside.
    wants = any(isinstance(x, Tensor) and x.requires_grad for x in args)
    anchor = None if wants else torch.empty(0, requires_grad=True)
    return _Checkpoint.apply(_Again(function, rng), distribute_saved_activations, anchor, *args)


class CheckpointWithoutOutput:
    """Drop a function's output once its consumer has used it, and make it again for the consumer's backward.

    `checkpoint` would save nothing for a norm. Its consumer, a linear layer, keeps the norm's output as its own input,
    and this output is as large as the norm's input. This class frees the memory of the output and fills it again.
    Megatron's class of this name also drops the tensors that the function saves for its own backward. They stay here: a
    norm saves two numbers per token, and its input, which is needed anyway.

        y = dropped.checkpoint(norm, x)
        z = linear(y)
        dropped.discard_output_and_register_recompute(z)
    """

    def __init__(self, rng: RngTracker | None = None) -> None:
        """rng: named random states that the function draws from."""
        self._rng = rng
        self._again: _Again | None = None
        self._args: tuple[Any, ...] = ()
        self._output: Tensor | None = None

    def checkpoint(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """Call `function(*args)` and remember the call. The result must be a new tensor, not a view of an argument."""
        self._again = _Again(function, self._rng)
        self._args = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
        self._output = output = self._again.first(*args)
        shared = {x.untyped_storage().data_ptr() for x in self._args if isinstance(x, Tensor)}
        if output._base is not None or output.untyped_storage().data_ptr() in shared:
            self._forget()
            raise ValueError("the output shares its memory with another tensor, so it cannot be dropped")
        return output

    def discard_output_and_register_recompute(self, *hook_tensors: Tensor) -> None:
        """Free the output. It is filled again when the first gradient of `hook_tensors`, made from it, arrives.

        Nobody may use the output's values in between. Outside grad mode this does nothing.
        """
        assert self._output is not None, "call checkpoint first"
        hooked = False
        if torch.is_grad_enabled() and active_capture() is None:
            for x in hook_tensors:
                if x.requires_grad:
                    x.register_hook(self._fill)
                    hooked = True
        if hooked:
            self._output.untyped_storage().resize_(0)
        else:  # an emulated graph's memory cannot shrink: it keeps the output, and the values are the same
            self._forget()

    def _fill(self, _: Tensor) -> None:
        if self._again is None or self._output is None:
            return
        with torch.no_grad():
            made = self._again(*self._args).untyped_storage()
        # Autograd does not see this: the tensor keeps its identity, its values and its version.
        memory = self._output.untyped_storage()
        memory.resize_(made.nbytes())
        memory.copy_(made)
        self._forget()

    def _forget(self) -> None:
        self._again, self._args, self._output = None, (), None
