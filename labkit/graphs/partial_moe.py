"""A graph that ends inside a layer of experts: its capture stops there, and a replay goes on from there.

Only routing tells how many rows travel, so dispatch and experts cannot be captured (unless by drop-and-pad). Norm,
shared experts, router and the first permutation can. The layer's forward is one function and knows nothing of graphs:
`CutMoELayer` puts a decorator around three methods that the forward calls.

    capture   forward starts; the decorator of the last captured step raises a signal; the wrapper of the whole layer
              catches the signal and returns the tensors that the rest of the forward reads: the outputs of the graph
    replay    the graph's outputs go into the store (and back into the dispatcher's attributes); forward starts, the
              decorated steps return the stored tensors, and the rest of the forward computes

| captured up to | outputs of the graph, in order                                                              |
|----------------|---------------------------------------------------------------------------------------------|
| `route`        | hidden, probs, routing map; shared experts' output; residual                                |
| `preprocess`   | permuted rows, their probs; the dispatcher's attributes; shared experts' output; residual   |

The graph has an output of shared experts only where it computes them: they exist and are not overlapped. The residual
comes last. The dispatcher names the attributes that it hands on (`handed_on`). The configuration decides on those that
hold a tensor. The first capture filters the list (`valid_cudagraph_attrs`), and later captures use the same list, since
a graph's outputs have fixed positions.

The signal is an exception and no error, used as control flow on purpose. Megatron does the same, and the names are its
own (`megatron/core/transformer/moe/moe_utils.py`). A graph has to end several calls below the wrapper, in the middle of
a forward. If it ended by early returns, every function on the way would have to know of graphs. The exception leaves
all of them at once, and only during warm-up and capture: no eager run and no replay raises it.

Shapes: S, B, H, T, E, N as in `labkit/moe/layer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

from labkit.comm.capturing import is_graph_capturing, is_graph_warmup
from labkit.graphs.scope import LayerScope
from labkit.moe.layer import MoELayer

MoEStep = Literal["shared_experts_compute", "route", "preprocess"]
STEPS: tuple[MoEStep, ...] = ("shared_experts_compute", "route", "preprocess")
"""Methods of a layer of experts that a graph may hold, in the order of their calls."""


class CutMoELayer:
    """A layer of experts inside which a graph ends: its three decorated steps, and its store.

    Attributes:
        moe_layer, scope: the layer, and the captured parts.
        cudagraph_tensor_store: holds tensors only between the replay of a graph and the rest of the forward.
        cudagraph_attrs: attributes (dotted paths) of the token dispatcher. Those that hold a tensor are outputs of a
            graph that ends after `preprocess`.
        valid_cudagraph_attrs: the attributes that held a tensor at the first capture; later captures must find the
            same.
    """

    def __init__(self, moe_layer: MoELayer, scope: LayerScope) -> None:
        """Decorate the steps of `moe_layer`, and have counts copied to the host after the graph."""
        self.moe_layer, self.scope = moe_layer, scope
        self.cudagraph_tensor_store = MoECudaGraphTensorStore()
        self.cudagraph_attrs: list[str] = list(moe_layer.token_dispatcher.handed_on)
        self.valid_cudagraph_attrs: list[str] | None = None
        self.captured_shared_output: Tensor | None = None
        """Output of `shared_experts_compute`, kept until the capture ends."""
        self._point = moe_layer.token_dispatcher.cuda_dtoh_point
        if scope.preprocess:
            moe_layer.token_dispatcher.cuda_dtoh_point = "before_ep_alltoall"
        for step in STEPS:
            setattr(moe_layer, step, maybe_skip_or_early_return_by_cudagraph(self, step)(getattr(moe_layer, step)))

    def __deepcopy__(self, memo: object) -> CutMoELayer:
        raise TypeError(
            f"{self.moe_layer.name} is wrapped for a graph that ends inside it, and a copy would run the original's "
            "steps. Copy the model before CudaGraphHelper or wrap_layers, or after unwrap_layers([model])"
        )

    def undo(self) -> None:
        """Restore the layer's methods."""
        self.moe_layer.token_dispatcher.cuda_dtoh_point = self._point
        for step in STEPS:
            delattr(self.moe_layer, step)

    def captured_modules(self) -> list[nn.Module]:
        """Modules of the layer whose forward the graph holds."""
        layer, found = self.moe_layer, list[nn.Module]([self.moe_layer.router])
        if layer.shared_experts is not None and layer.has_shared_output:
            found.append(layer.shared_experts)
        elif layer.shared_experts is not None and layer.shared_experts.gate is not None and self.scope.preprocess:
            found.append(layer.shared_experts.gate)  # used in the first of the overlapped stages
        return found

    def resume(self, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Run the rest of the layer after a graph with these outputs; return (the layer's output, residual)."""
        residual = fill_store(self, outputs)
        store = self.cudagraph_tensor_store
        try:
            # After `preprocess` nothing reads the layer's input; the residual has its shape.
            return self.moe_layer(residual if self.scope.preprocess else store.hidden_states), residual
        finally:
            store.clear()


# ---- capture ----


class MoECudaGraphPartialCaptureSignal(Exception):
    """Leaves the forward of a layer where its graph ends; control flow and no error, as in Megatron.

    The last captured step raises it during warm-up and capture; the layer's `GraphableMegatronModule` catches it. The
    top of this file says why it is an exception.

    Args:
        cut: the layer whose graph ends here.
        return_step: `route` or `preprocess`.
        tensors: results of that step; for `route` also the layer's input, `hidden_states`.
    """

    def __init__(self, cut: CutMoELayer, return_step: str, **tensors: Tensor) -> None:
        super().__init__(f"the graph of this layer ends after {return_step}")
        self.cut, self.return_step, self.tensors = cut, return_step, tensors

    def get_early_return_outputs(self) -> list[Tensor]:
        """Outputs of the graph in the order of the table above, without the residual.

        Raises:
            AssertionError: attributes hold tensors in other places than at the first capture.
        """
        cut, overlapped = self.cut, self.cut.moe_layer.token_dispatcher.shared_experts
        outputs = [self.tensors["hidden_states"], self.tensors["probs"]]
        outputs += [self.tensors["routing_map"]] if self.return_step == "route" else _take_attributes(cut)
        if overlapped is not None:
            overlapped.join_stream()  # their first stage ends with the graph
        shared, cut.captured_shared_output = cut.captured_shared_output, None
        return outputs if shared is None else [*outputs, shared]


def _take_attributes(cut: CutMoELayer) -> list[Tensor]:
    """Take the tensors out of the dispatcher, so that a graph's memory is free once its last reader is gone."""
    dispatcher = cut.moe_layer.token_dispatcher
    found = {path: _read(dispatcher, path) for path in cut.cudagraph_attrs}
    valid = [path for path, value in found.items() if isinstance(value, Tensor)]
    if cut.valid_cudagraph_attrs is None:
        cut.valid_cudagraph_attrs = valid
    first = cut.valid_cudagraph_attrs
    assert first == valid, f"attributes with tensors were {first} at the first capture and are {valid} now"
    for path in valid:
        _write(dispatcher, path, None)
    return [found[path] for path in valid]


def _read(owner: Any, path: str) -> Any:
    """`owner.a.b` for the path `a.b`; None where one of them is missing."""
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner


def _write(owner: Any, path: str, value: Any) -> None:
    *before, last = path.split(".")
    for name in before:
        owner = getattr(owner, name)
    setattr(owner, last, value)


# ---- replay ----


@dataclass
class MoECudaGraphTensorStore:
    """Results of the captured steps of one layer, between the replay of its graph and the rest of its forward.

    At all other times the store is empty. A capture with a filled store would skip the steps and record only the rest.
    """

    hidden_states: Tensor | None = None
    """[S, B, H], or rows [N, H] where the graph holds `preprocess`."""
    probs: Tensor | None = None
    """[T, E], or [N]."""
    routing_map: Tensor | None = None
    """[T, E] bool; None where the graph holds `preprocess`, its only reader."""
    shared_expert_output: Tensor | None = None
    """[S, B, H]; None without shared experts in the graph."""

    def is_empty(self) -> bool:
        """True where no step is to be skipped."""
        return all(getattr(self, field.name) is None for field in fields(self))

    def set(self, **tensors: Tensor | None) -> None:
        """Fill fields; None leaves a field as it is.

        Raises:
            TypeError: a name that is no field, or a value that is no tensor.
        """
        known = [field.name for field in fields(self)]
        for name, value in tensors.items():
            if name not in known:
                raise TypeError(f"the store has no field {name!r}; its fields are {', '.join(known)}")
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise TypeError(f"{name} is a tensor that a graph has made, got {type(value).__name__}")
            setattr(self, name, value)

    def clear(self) -> None:
        """Empty all fields, so that no step is skipped."""
        for field in fields(self):
            setattr(self, field.name, None)


def fill_store(cut: CutMoELayer, outputs: Sequence[Tensor]) -> Tensor:
    """Give a graph's outputs to the dispatcher's attributes and to the store; return the residual.

    outputs: outputs of the graph, the residual last.

    Raises:
        AssertionError: this layer's graph has another number of outputs.
    """
    *rest, residual = outputs
    shared = rest.pop() if cut.moe_layer.has_shared_output else None
    hidden, probs, *others = rest
    dispatcher, routing_map = cut.moe_layer.token_dispatcher, None
    if cut.scope.preprocess:
        names = cut.valid_cudagraph_attrs
        assert names is not None and len(others) == len(names), f"{len(others)} outputs for the attributes {names}"
        for path, value in zip(names, others, strict=True):
            _write(dispatcher, path, value)
        dispatcher.hidden_shape = residual.shape  # the skipped `dispatch_preprocess` would set it
        if dispatcher.shared_experts is not None:
            dispatcher.shared_experts.follow_stream()
    else:
        (routing_map,) = others
    store = cut.cudagraph_tensor_store
    assert store.is_empty(), "the forward before this one has not used up what its graph made"
    store.set(hidden_states=hidden, probs=probs, routing_map=routing_map, shared_expert_output=shared)
    return residual


# ---- the decorator ----

F = TypeVar("F", bound=Callable[..., Any])


def maybe_skip_or_early_return_by_cudagraph(cut: CutMoELayer, step: MoEStep) -> Callable[[F], F]:
    """Decorator of a step of a layer of experts.

    A decorated step returns its result from the store, if the store has one. During warm-up and capture the last
    captured step raises the signal.

    step: the name of the method.
    """
    skipped = _SKIP[step]

    def decorate(method: F) -> F:
        @wraps(method)
        def wrapped(x_SBH: Tensor, *args: Any) -> Any:
            store, cutting = cut.cudagraph_tensor_store, is_graph_capturing() or is_graph_warmup()
            assert not (cutting and not store.is_empty()), "a capture finds results of an earlier replay in the store"
            if (stored := skipped(store)) is not None:
                return stored
            made = method(x_SBH, *args)
            if not (cutting and cut.moe_layer.training):
                return made
            if step == "shared_experts_compute":
                cut.captured_shared_output = made
            elif step == cut.scope.ends_at:
                first, second = made
                tensors = (
                    {"hidden_states": x_SBH, "probs": first, "routing_map": second}
                    if step == "route"
                    else {"hidden_states": first, "probs": second}
                )
                raise MoECudaGraphPartialCaptureSignal(cut, step, **tensors)
            return made

        return wrapped  # type: ignore[return-value]

    return decorate


def _stored_route(store: MoECudaGraphTensorStore) -> tuple[Tensor, Tensor | None] | None:
    return None if store.probs is None else (store.probs, store.routing_map)


def _stored_preprocess(store: MoECudaGraphTensorStore) -> tuple[Tensor, Tensor] | None:
    """None where the store has a routing map: the graph then ended before this step."""
    if store.is_empty() or store.routing_map is not None:
        return None
    assert store.hidden_states is not None and store.probs is not None, "a graph gives rows with their weights"
    return store.hidden_states, store.probs


_SKIP: dict[MoEStep, Callable[[MoECudaGraphTensorStore], Any]] = {
    "shared_experts_compute": lambda store: store.shared_expert_output,
    "route": _stored_route,
    "preprocess": _stored_preprocess,
}
"""MoEStep -> function that reads its result from the store; None where the step must compute it."""
