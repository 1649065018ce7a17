"""`GraphedCallable`, the result of `make_graphed_callables`: it is called like its callable, and autograd knows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._pytree import tree_leaves

from labkit.comm.capturing import GraphCaptureError, call_site, is_graph_capturing
from labkit.events import span
from labkit.graphs.capture_result import CallableGraphs, CaptureResult
from labkit.graphs.checks.in_flight_forwards import InFlightForward
from labkit.graphs.checks.replay_guards import ReplayGuards
from labkit.graphs.planned_captures import Place
from labkit.graphs.static_inputs import copy_in, lie_together
from labkit.parallel.parameters.parameter_record import record_of
from labkit.parallel.weight_grad_store import deferred

if TYPE_CHECKING:
    from labkit.graphs.backend import Pool


class _Replay(Function):
    """Replays two graphs in place of a callable y = f(x, p).

        forward    static x <- x; replay f        [..] -> [..]; y is a new tensor object at the static address of y
        backward   static dy <- dy; replay df     [..] -> [..]; dx, and dp for every parameter that has one

    The backward runs once for every forward, because its replay overwrites memory that it reads.
    """

    @staticmethod
    def forward(ctx: Any, graphed: GraphedCallable, *tensors: Tensor) -> Any:
        captured = graphed.captured
        inputs = tensors[: len(captured.inputs)]
        ctx.graphed = graphed
        ctx.set_materialize_grads(False)
        ctx.owned = tuple(graphed.owns_gradient_of(x) for x in inputs)
        outputs = graphed.replay_forward(inputs)
        ctx.flight, ctx.versions = graphed.flight, captured.versions_read()
        ctx.mark_non_differentiable(
            *(y for y, wants in zip(outputs, captured.differentiable, strict=True) if y is not None and not wants)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise GraphCaptureError(
                f"{ctx.graphed.name}: create_graph=True asks for gradients of gradients, and the captured backward has "
                "none: call the module itself (.function) where they are needed"
            )
        ctx.graphed.require_alive()
        if ctx.versions != ctx.graphed.captured.versions_read():
            raise GraphCaptureError(
                f"{ctx.graphed.name}: an output was changed in place since its forward, and the backward reads it: "
                "work on a copy (y = y.clone()), or out of place"
            )
        return None, *ctx.graphed.replay_backward(grads, ctx.owned, ctx.flight)


class GraphedCallable:
    """A callable with graphs. It is called like the callable; in the mode of the capture its graphs run instead.

    In another mode the callable itself runs, as in evaluation after a capture in training, or under `torch.no_grad()`
    after a capture with gradients. All other attributes are the callable's (`.weight`, `.parameters()`, ..).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        captured: CaptureResult,
        *,
        impl: str,
        pool: Pool | None,
        clone_param_grads: bool = True,
    ) -> None:
        self.function = function
        self.captured = captured
        self.impl = impl
        self.pool = pool
        """Memory of its graphs, shared with the callables captured together with it."""
        self.clone_param_grads = clone_param_grads
        self.has_backward = captured.graphs is not None and captured.graphs.backward is not None
        """True after a capture with gradients; the graphs then run in grad mode."""
        self.flight: InFlightForward | None = None
        """The last forward; it knows whether the tensors for its backward are still there."""
        self._is_module = isinstance(function, nn.Module)
        self._is_reset = False
        device_type = captured.inputs[0].device.type if captured.inputs else "cpu"
        self._guards = ReplayGuards(function, device_type, captured.parameters)
        self._wants = [x.requires_grad for x in captured.inputs]
        self._storages = {x.untyped_storage().data_ptr() for x in captured.inputs if x.layout is torch.strided}

    # ---- what it holds ----

    @property
    def graphs(self) -> CallableGraphs:
        """Graphs of forward, backward and, where separate, weight gradients."""
        self.require_alive()
        assert self.captured.graphs is not None
        return self.captured.graphs

    @property
    def static_inputs(self) -> tuple[Tensor, ...]:
        """The tensors that a call copies its arguments into."""
        return self.captured.inputs

    @property
    def static_outputs(self) -> tuple[Tensor | None, ...]:
        """The tensors that a replay writes its results into."""
        return self.captured.outputs

    @property
    def name(self) -> str:
        """Name of the callable and its microbatch."""
        return self.captured.arguments.place

    def __getattr__(self, name: str) -> Any:
        if name in ("function", "captured") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.function, name)

    def __repr__(self) -> str:
        return f"GraphedCallable({self.name}, impl={self.impl})"

    # ---- calls ----

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The callable's outputs, at their fixed addresses. The next replay of the graph overwrites them.

        Raises:
            TypeError: the sample had other arguments.
            GraphCaptureError: a shape, type or device changed, a parameter moved, or the callable was reset.
        """
        self.require_alive()
        if is_graph_capturing():
            raise GraphCaptureError(
                f"{call_site()}: {self.name} is a graph, called while another one is captured, which cannot hold it: "
                "capture the callable itself (.function) instead"
            )
        if not self._fits_mode(args, kwargs):
            if hasattr(self.function, "cuda_graph_manual_hooks"):  # a wrapped layer: the graph may be a part of it
                raise GraphCaptureError(
                    f"{self.name}: a module inside is in another mode than at capture (training, autocast). Call "
                    ".train() or .eval() of the whole model, or capture again"
                )
            return self.eager(*args, **kwargs)
        tensors = self.captured.arguments.of_call(args, kwargs)
        self._guards.require(self.name, gradients=self.captured.in_grad_mode)
        if self.has_backward:
            self._require_wanted(tensors)
        return self._replayed(tensors)

    def _replayed(self, tensors: Sequence[Tensor]) -> Any:
        captured = self.captured
        applied = _Replay.apply(self, *tensors, *captured.parameters) if self.has_backward else None
        assert captured.output_spec is not None
        return captured.output_spec.unflatten(self.replay_forward(tensors) if applied is None else applied)  # pyright: ignore[reportArgumentType]

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """Call the callable itself."""
        if self._is_module:  # a module's own __call__ may be the one that replays
            return nn.Module.__call__(self.function, *args, **kwargs)  # pyright: ignore[reportArgumentType]
        return self.function(*args, **kwargs)

    def _fits_mode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not self._guards.fit_mode():
            return False
        if self.has_backward:
            return torch.is_grad_enabled()
        if self.captured.in_inference_mode and not torch.is_inference_mode_enabled():
            raise GraphCaptureError(
                f"{self.name} was captured in inference mode, and code outside may not write to its tensors: call it "
                "in inference mode, or capture under torch.no_grad()"
            )
        if not torch.is_grad_enabled():
            return True
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not self.captured.in_grad_mode:
            return not (self._guards.wants_gradients() or any(x.requires_grad for x in given))
        # Captured with gradients enabled, and no output required grad: the same inputs give the same now.
        return not any(x.requires_grad and not wants for x, wants in zip(given, self._wants, strict=False))

    def _require_wanted(self, tensors: Sequence[Tensor]) -> None:
        for i, (x, wants) in enumerate(zip(tensors, self._wants, strict=True)):
            if x.requires_grad and not wants:
                raise GraphCaptureError(
                    f"{self.name}: {self.captured.arguments.names[i]} requires grad, and its sample did not, so the "
                    "graph has no gradient for it: capture with a sample that requires grad, or pass x.detach()"
                )

    def owns_gradient_of(self, x: Tensor) -> bool:
        """True where the gradient of input `x` leaves as a copy.

        The next replay overwrites the original. By then the graph right below has read it, since its backward runs
        next. Any other receiver may keep the gradient, for example as `.grad` of a leaf, may wait for more of it, or
        may still be sending it to another rank.
        """
        below, here = self._place_below(x), self.captured.place
        if below is None or here is None:
            return True
        return (below.chunk, below.layer, below.microbatch) != (here.chunk, here.layer - 1, here.microbatch)

    def _place_below(self, x: Tensor) -> Place | None:
        """The place whose replay returned `x`; None where other code made `x`, or hooks read its gradient."""
        node: Any = x.grad_fn
        return None if type(node) is not _REPLAYED or x._backward_hooks else node.graphed.captured.place

    def replay_forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Copy inputs in and replay; return tensor objects of their own, since a reader may empty their `.data`."""
        captured = self.captured
        for static, given in zip(captured.inputs, self.apart(inputs), strict=True):
            copy_in(static, given)
        self._watch_forward()
        with span(f"{self.name} forward", "graph_replay"):
            self.graphs.forward.replay()
        for i in captured.changed:
            if not lie_together(captured.inputs[i], inputs[i]):
                inputs[i].copy_(captured.inputs[i])
        return tuple(None if y is None else y.detach() for y in captured.outputs)

    def apart(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """`inputs`, copied where they lie in another static input: this call may overwrite it before it reads them."""
        if len(inputs) < 2:
            return inputs
        pairs = zip(self.captured.inputs, inputs, strict=True)
        is_apart = lambda s, x: lie_together(s, x) or x.untyped_storage().data_ptr() not in self._storages  # noqa: E731
        return [x if is_apart(static, x) else x.clone() for static, x in pairs]

    def _watch_forward(self) -> None:
        in_flight, times, self.flight = self.captured.in_flight, self.captured.times, None
        if in_flight is not None and times is not None:
            in_flight.replayed(times.forward, self.name)
            self.flight = in_flight.begun(times.forward, times.weight or times.backward)

    def _watch(self, flight: InFlightForward | None, time: int | None, *, is_last: bool) -> None:
        in_flight = self.captured.in_flight
        if flight is not None and in_flight is not None and time is not None:
            in_flight.require(flight, self.name, is_last=is_last)
            in_flight.replayed(time, self.name)

    def replay_backward(
        self, grads: Sequence[Tensor | None], owned: Sequence[bool], flight: InFlightForward | None = None
    ) -> tuple[Tensor | None, ...]:
        """Copy output gradients in and replay; return gradients of inputs (copies where `owned`), then of parameters.

        flight: the forward.

        Raises:
            GraphCaptureError: this backward has run already, or another replay overwrote what its forward left.
        """
        graphs, captured, times = self.graphs, self.captured, self.captured.times
        assert graphs.backward is not None
        if flight is not None and times is not None:
            if flight.has_been_back:
                raise GraphCaptureError(
                    f"{self.name}: the backward of this forward has run already, and a graph runs it once. Add the "
                    "losses and call backward of their sum, or call the module itself (.function)"
                )
            self._watch(flight, times.backward, is_last=graphs.weight is None)
            flight.has_been_back = True
        for static, given in zip(captured.grad_outputs, grads, strict=True):
            if static is not None:
                static.zero_() if given is None else copy_in(static, given)
        with span(f"{self.name} backward", "graph_replay"):
            graphs.backward.replay()
        of_inputs = [
            None if dx is None else dx.clone() if copy else dx.detach()
            for dx, copy in zip(captured.grad_inputs, owned, strict=True)
        ]
        if graphs.weight is not None:  # a `WeightGradStore` that collects takes them; else `backward_dw` computes them
            deferred([parameter for parameter, _ in captured.late], partial(self._weight_gradients, flight))
        return *of_inputs, *(self._handed_out(dp) for dp in captured.grad_parameters)

    def _weight_gradients(self, flight: InFlightForward | None) -> list[Tensor | None]:
        """Replay the graph of the weight gradients; return them in the order of `late`."""
        graph, times = self.graphs.weight, self.captured.times
        assert graph is not None
        self._watch(flight, times and times.weight, is_last=True)
        with span(f"{self.name} weight gradients", "graph_replay"):
            graph.replay()
        return [self._handed_out(dp) for _, dp in self.captured.late]

    def _handed_out(self, gradient: Tensor | None) -> Tensor | None:
        """The gradient of a parameter, or a copy, since autograd may keep it as `.grad` until the next replay."""
        if gradient is None:
            return None
        return gradient.clone() if self.clone_param_grads else gradient.detach()

    def backward_dw(self) -> None:
        """Compute the weight gradients that the backward left out, if any, and call the hooks of their parameters.

        The gradients arrive in `.grad` or `main_grad`.
        """
        if self.graphs.weight is None:
            return
        for (parameter, _), gradient in zip(self.captured.late, self._weight_gradients(self.flight), strict=True):
            if gradient is not None:
                torch.autograd.backward(parameter, gradient)
            elif (hook := record_of(parameter).on_gradient) is not None:
                hook(parameter)

    # ---- life ----

    def reset(self) -> None:
        """Free graphs and memory; a later call is an error. A pool is empty once all its callables are reset."""
        if self._is_reset:
            return
        graphs, self._is_reset = self.captured.graphs, True
        for graph in graphs or ():
            if graph is not None:
                graph.reset()
        self.captured = CaptureResult(self.captured.arguments, ())
        self.pool = None

    def require_alive(self) -> None:
        """Raise GraphCaptureError after a reset."""
        if self._is_reset:
            raise GraphCaptureError(f"{self.name} was reset: its graphs are gone; make new ones")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self.name}: graphs live at addresses of this process and can be neither copied nor pickled: copy "
            ".function, and capture the copy"
        )


_REPLAYED: Any = _Replay._backward_cls  # pyright: ignore[reportAttributeAccessIssue]
"""Type of a replay's node in autograd's graph."""
