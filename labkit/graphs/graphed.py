"""What comes back from `make_graphed_callables`: called like what was captured, and part of autograd's graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec

from labkit.events import span
from labkit.graphs.arguments import Arguments
from labkit.parallel.capturing import GraphCaptureError
from labkit.parallel.weight_grad_store import deferred

if TYPE_CHECKING:
    from labkit.graphs.backend import Graph, Pool


class Graphs(NamedTuple):
    """The graphs of one callable at one microbatch."""

    forward: Graph
    backward: Graph | None = None
    """None where nothing wanted a gradient."""
    weight: Graph | None = None
    """Of the weight gradients that the backward leaves out; None where it computes them."""


class Captured:
    """Everything that a replay reads and writes, with the addresses of the capture."""

    def __init__(self, arguments: Arguments, inputs: Sequence[Tensor]) -> None:
        self.arguments = arguments
        self.inputs: tuple[Tensor, ...] = tuple(inputs)
        """Static inputs: a call copies into them."""
        self.graphs: Graphs | None = None
        self.output_spec: TreeSpec | None = None
        self.outputs: tuple[Tensor | None, ...] = ()
        """Static outputs; weak references where their memory was given back to the pool."""
        self.differentiable: tuple[bool, ...] = ()
        """Which outputs take a gradient."""
        self.grad_outputs: tuple[Tensor | None, ...] = ()
        self.grad_inputs: tuple[Tensor | None, ...] = ()
        self.parameters: tuple[nn.Parameter, ...] = ()
        """Those the backward comes by. Autograd calls their hooks after a replay."""
        self.grad_parameters: tuple[Tensor | None, ...] = ()
        """None for one whose gradient is added to `main_grad` inside the graph, or is left to the weight graph."""
        self.late: tuple[tuple[nn.Parameter, Tensor | None], ...] = ()
        """Parameters of the weight graph, in the order in which it completes them, and their gradients."""

        self.read: tuple[nn.Parameter, ...] = ()
        """All parameters of the callable, used by the captured part or not."""

    def fixed_addresses(self) -> tuple[int, ...]:
        """Where parameters, and the gradients that graphs add to, lie."""
        mains = [getattr(parameter, "main_grad", None) for parameter in self.parameters]
        return tuple(x.data_ptr() for x in (*self.read, *mains) if x is not None)


def copy_in(static: Tensor, given: Tensor) -> None:
    """Bring a value to its fixed address, unless it lies there already."""
    if static.data_ptr() != given.data_ptr():
        static.copy_(given)
    elif static.stride() != given.stride():
        static.copy_(given.clone())  # another view of the same memory


class _Replay(Function):
    """Replays two graphs in the place of a callable y = f(x, p).

    forward    static x <- x; replay f             [..] -> [..]; y is a new tensor object at the static address of y
    backward   static dy <- dy; replay df          [..] -> [..]; dx, and dp for every parameter that has one
    """

    @staticmethod
    def forward(ctx: Any, graphed: GraphedCallable, *tensors: Tensor) -> Any:
        captured = graphed.captured
        inputs = tensors[: len(captured.inputs)]
        ctx.graphed = graphed
        ctx.set_materialize_grads(False)
        # The gradient of a leaf becomes its `.grad`, and would then be overwritten by the next replay.
        ctx.owned = tuple(graphed.clones_grad_inputs or x.is_leaf for x in inputs)
        outputs = graphed.replay_forward(inputs)
        ctx.mark_non_differentiable(
            *(y for y, wants in zip(outputs, captured.differentiable, strict=True) if y is not None and not wants)
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *ctx.graphed.replay_backward(grads, ctx.owned)


class GraphedCallable:
    """Called like the callable it was made of; where the mode is that of the capture, its graphs run instead.

    In another mode (evaluation after a capture in training, `torch.no_grad()` after one with gradients) the callable
    itself runs. Attributes it does not have are those of the callable (`.weight`, `.parameters()`, ..).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        captured: Captured,
        *,
        impl: str,
        pool: Pool | None,
        clone_param_grads: bool = True,
        clones_grad_inputs: bool = False,
    ) -> None:
        """clones_grad_inputs: dx leaves as a copy. For the first layer of a chunk, whose dx is sent to another rank:
        the transfer may still be under way when the next backward replays and writes that address."""
        self.function = function
        self.captured = captured
        self.impl = impl
        self.pool = pool
        """Where its graphs find their memory; shared with the callables captured together with it."""
        self.clone_param_grads = clone_param_grads
        self.clones_grad_inputs = clones_grad_inputs
        self.has_backward = captured.graphs is not None and captured.graphs.backward is not None
        """Whether it was captured with gradients, so that it runs in grad mode; otherwise it runs outside."""
        self._is_module = isinstance(function, nn.Module)
        self._training = getattr(function, "training", True) if self._is_module else True
        self._is_reset = False
        self._addresses = captured.fixed_addresses()

    # ---- what it holds ----

    @property
    def graphs(self) -> Graphs:
        """Forward, backward, and weight gradients where they have one."""
        self._require_alive()
        assert self.captured.graphs is not None
        return self.captured.graphs

    @property
    def static_inputs(self) -> tuple[Tensor, ...]:
        """Where a call copies its tensors to."""
        return self.captured.inputs

    @property
    def static_outputs(self) -> tuple[Tensor | None, ...]:
        """Where a replay leaves its results."""
        return self.captured.outputs

    @property
    def name(self) -> str:
        """Which callable, at which microbatch."""
        return self.captured.arguments.place

    def __getattr__(self, name: str) -> Any:
        if name in ("function", "captured") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.function, name)

    def __repr__(self) -> str:
        return f"GraphedCallable({self.name}, impl={self.impl})"

    # ---- calls ----

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The callable's outputs, at their fixed addresses: the next replay of the graph overwrites them.

        Raises:
            TypeError: other arguments than the sample had.
            GraphCaptureError: a changed shape, type or device, a parameter that was moved, a callable that was reset.
        """
        self._require_alive()
        if not self._fits_mode(args, kwargs):
            return self.eager(*args, **kwargs)
        tensors = self.captured.arguments.of_call(args, kwargs)
        self._require_addresses()
        return self._replayed(tensors)

    def _replayed(self, tensors: Sequence[Tensor]) -> Any:
        captured = self.captured
        applied = _Replay.apply(self, *tensors, *captured.parameters) if self.has_backward else None
        assert captured.output_spec is not None
        return captured.output_spec.unflatten(self.replay_forward(tensors) if applied is None else applied)  # pyright: ignore[reportArgumentType]

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """The callable itself."""
        if self._is_module:  # not its own __call__, which may be what replays
            return nn.Module.__call__(self.function, *args, **kwargs)  # pyright: ignore[reportArgumentType]
        return self.function(*args, **kwargs)

    def _fits_mode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self._is_module and self.function.training != self._training:  # pyright: ignore[reportFunctionMemberAccess]
            return False
        if self.has_backward:
            return torch.is_grad_enabled()
        return not torch.is_grad_enabled() or not self._wants_gradients(args, kwargs)

    def _wants_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = (*args, *kwargs.values())
        return any(isinstance(x, Tensor) and x.requires_grad for x in (*self.captured.read, *given))

    def replay_forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Copy inputs in, replay; new tensor objects (a consumer may empty them by `.data`) at the static addresses."""
        captured = self.captured
        for static, given in zip(captured.inputs, inputs, strict=True):
            copy_in(static, given)
        with span(f"{self.name} forward", "graph_replay"):
            self.graphs.forward.replay()
        return tuple(None if y is None else y.detach() for y in captured.outputs)

    def replay_backward(self, grads: Sequence[Tensor | None], owned: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """Copy output gradients in, replay; gradients of inputs (copies where `owned`), then of parameters."""
        graphs, captured = self.graphs, self.captured
        assert graphs.backward is not None
        for static, given in zip(captured.grad_outputs, grads, strict=True):
            if static is not None:
                static.zero_() if given is None else copy_in(static, given)
        with span(f"{self.name} backward", "graph_replay"):
            graphs.backward.replay()
        of_inputs = [
            None if dx is None else dx.clone() if copy else dx.detach()
            for dx, copy in zip(captured.grad_inputs, owned, strict=True)
        ]
        if graphs.weight is not None:  # taken by a `WeightGradStore` that collects, else left to `backward_dw`
            deferred([parameter for parameter, _ in captured.late], self._weight_gradients)
        return *of_inputs, *(self._handed_out(dp) for dp in captured.grad_parameters)

    def _weight_gradients(self) -> list[Tensor | None]:
        """Replay their graph: the gradients of `late`, in its order."""
        graph = self.graphs.weight
        assert graph is not None
        with span(f"{self.name} weight gradients", "graph_replay"):
            graph.replay()
        return [self._handed_out(dp) for _, dp in self.captured.late]

    def _handed_out(self, gradient: Tensor | None) -> Tensor | None:
        """A parameter's gradient may become its `.grad`, which the next replay would overwrite."""
        if gradient is None:
            return None
        return gradient.clone() if self.clone_param_grads else gradient.detach()

    def backward_dw(self) -> None:
        """Compute the weight gradients that the backward left out; they arrive in `.grad` or `main_grad`, with the
        hooks of the parameters. Nothing to do where the backward computes them."""
        if self.graphs.weight is None:
            return
        for (parameter, _), gradient in zip(self.captured.late, self._weight_gradients(), strict=True):
            if gradient is not None:
                torch.autograd.backward(parameter, gradient)
            elif (hook := getattr(parameter, "main_grad_hook", None)) is not None:
                hook(parameter)

    # ---- life ----

    def reset(self) -> None:
        """Let graphs and memory go; a later call is an error. Its pool is empty once all that share it are reset."""
        if self._is_reset:
            return
        graphs, self._is_reset = self.captured.graphs, True
        for graph in graphs or ():
            if graph is not None:
                graph.reset()
        self.captured = Captured(self.captured.arguments, ())
        self.pool = None

    def _require_alive(self) -> None:
        if self._is_reset:
            raise GraphCaptureError(f"{self.name} was reset: its graphs are gone; make new ones")

    def _require_addresses(self) -> None:
        if self._addresses != self.captured.fixed_addresses():
            raise GraphCaptureError(
                f"{self.name}: a parameter or its main_grad was moved since the capture, and the graph would use the "
                "old memory. Change parameters in place (copy_, the optimizer's step), or capture again"
            )
