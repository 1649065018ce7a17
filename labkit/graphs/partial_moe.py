"""A graph that ends inside a layer of experts: its capture stops there, and a replay goes on from there.

Only routing tells how many rows travel, so dispatch and experts cannot be captured (unless by drop-and-pad). Norm,
shared experts, router and the first permutation can. The layer's forward is one function and knows nothing of graphs:
`CutMoELayer` puts a decorator around three methods that the forward calls.

    capture   forward starts; the decorator of the last captured step raises a signal; the wrapper of the whole layer
              catches the signal and returns the tensors that the rest of the forward reads: the outputs of the graph
    replay    the graph's outputs go into the store; forward starts, the decorated steps return what is stored, and the
              rest of the forward computes

| captured up to | outputs of the graph, in order                                                              |
|----------------|---------------------------------------------------------------------------------------------|
| `route`        | hidden, probs, routing map; shared experts' output; residual                                |
| `preprocess`   | permuted rows, their probs; tensors of the metadata; shared experts' output; residual       |

With the all-gather dispatcher the rows of `preprocess` are the tokens, not sorted yet. The graph has an output of
shared experts only where it computes them: they exist and are not overlapped. The residual comes last. `preprocess`
returns the metadata that the dispatcher's later steps read (`labkit/moe/dispatch`). Its configuration decides which
fields hold a tensor (`valid_cudagraph_attrs`). A graph's outputs have fixed positions, so all captures of a layer must
find the same fields.

The signal is an exception and no error, used as control flow on purpose. Megatron does the same, and the names are its
own (`megatron/core/transformer/moe/moe_utils.py`). A graph has to end several calls below the wrapper, in the middle of
a forward. If it ended by early returns, every function on the way would have to know of graphs. The exception leaves
all of them at once, and only during warm-up and capture: no eager run and no replay raises it.

In Megatron the steps leave attributes on the dispatcher in place of metadata, and `cudagraph_attrs` lists them.

Shapes: S, B, H, T, E, N as in `labkit/moe/layer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, Literal, TypeVar

from torch import Size, Tensor, nn
from torch.utils._pytree import keystr, tree_leaves, tree_map, tree_map_with_path

from labkit.comm.capturing import is_graph_capturing, is_graph_warmup
from labkit.graphs.scope import LayerScope
from labkit.moe.dispatch.dispatcher import Metadata
from labkit.moe.layer import MoELayer

MoEStep = Literal["shared_experts_compute", "route", "preprocess"]
STEPS: tuple[MoEStep, ...] = ("shared_experts_compute", "route", "preprocess")
"""Methods of a layer of experts that a graph may hold, in the order of their calls."""


class CutMoELayer:
    """A layer of experts inside which a graph ends: its three decorated steps, and its store.

    Attributes:
        moe_layer, scope: the layer, and the captured parts.
        cudagraph_tensor_store: holds tensors only between the replay of a graph and the rest of the forward.
        metadata_form: the metadata of the first capture with a `TensorField` in place of each tensor; None before
            it, and where the graph ends after `route`. `CudaGraphHelper` empties it before it captures anew.
    """

    def __init__(self, moe_layer: MoELayer, scope: LayerScope) -> None:
        """Decorate the steps of `moe_layer`, and have counts copied to the host after the graph."""
        self.moe_layer, self.scope = moe_layer, scope
        self.cudagraph_tensor_store = MoECudaGraphTensorStore()
        self.metadata_form: Metadata | None = None
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

    @property
    def valid_cudagraph_attrs(self) -> list[str]:
        """Names of the fields of metadata that are outputs of the graph, such as `token_of_row_N`, in their order."""
        return [field.name for field in tree_leaves(self.metadata_form) if isinstance(field, TensorField)]

    def tensors_of(self, metadata: Metadata) -> list[Tensor]:
        """The tensors of a capture's metadata, in the order of its fields.

        Raises:
            AssertionError: the rest of the metadata is not that of the first capture.
        """
        form = tree_map_with_path(
            lambda path, leaf: TensorField(keystr(path)[1:]) if isinstance(leaf, Tensor) else leaf,
            metadata,
            is_leaf=_is_shape,
        )
        if self.metadata_form is None:
            self.metadata_form = form
        first = self.metadata_form
        assert form == first, f"the metadata was {first} at the first capture and is {form} now"
        return [leaf for leaf in tree_leaves(metadata) if isinstance(leaf, Tensor)]

    def metadata_of(self, tensors: Sequence[Tensor]) -> Metadata:
        """The metadata of a replay, which has made these tensors; the reverse of `tensors_of`."""
        names = self.valid_cudagraph_attrs
        assert len(tensors) == len(names), f"{len(tensors)} outputs for the fields {names}"
        made = iter(tensors)
        return tree_map(
            lambda leaf: next(made) if isinstance(leaf, TensorField) else leaf,
            self.metadata_form,
            is_leaf=_is_shape,
        )

    def captured_modules(self) -> list[nn.Module]:
        """Modules of the layer whose forward the graph holds."""
        layer, found = self.moe_layer, list[nn.Module]([self.moe_layer.router])
        if layer.shared_experts is not None and layer.has_shared_output:
            found.append(layer.shared_experts)
        elif layer.shared_experts is not None and layer.shared_experts.gate is not None and self.scope.preprocess:
            found.append(layer.shared_experts.gate)  # used in the first of the overlapped stages
        return found

    def resume(self, outputs: Sequence[Tensor], rest: Callable[[Any], Any] | None = None) -> tuple[Any, Tensor]:
        """Run the rest of the layer after a graph with these outputs; return (the layer's output, residual).

        rest: a part of the layer's forward from its start on, in place of the whole; its output is then returned.
        """
        residual = fill_store(self, outputs)
        store = self.cudagraph_tensor_store
        try:
            # After `preprocess` nothing reads the layer's input; the residual has its shape.
            x_SBH = residual if self.scope.preprocess else store.hidden_states
            return (self.moe_layer if rest is None else rest)(x_SBH), residual
        finally:
            store.clear()


@dataclass(frozen=True)
class TensorField:
    """The place of a tensor in the form of metadata."""

    name: str


def _is_shape(leaf: object) -> bool:
    return isinstance(leaf, Size)  # which would come back as a tuple


# ---- capture ----


class MoECudaGraphPartialCaptureSignal(Exception):
    """Leaves the forward of a layer where its graph ends; control flow and no error, as in Megatron.

    The last captured step raises it during warm-up and capture; the layer's `GraphableMegatronModule` catches it. The
    top of this file says why it is an exception.

    Args:
        cut: the layer whose graph ends here.
        return_step: `route` or `preprocess`.
        results: results of that step; for `route` also the layer's input, `hidden_states`.
    """

    def __init__(self, cut: CutMoELayer, return_step: str, **results: Any) -> None:
        super().__init__(f"the graph of this layer ends after {return_step}")
        self.cut, self.return_step, self.results = cut, return_step, results

    def get_early_return_outputs(self) -> list[Tensor]:
        """Outputs of the graph in the order of the table above, without the residual.

        Raises:
            AssertionError: the metadata holds tensors in other places than at the first capture.
        """
        cut, overlapped = self.cut, self.cut.moe_layer.token_dispatcher.shared_experts
        outputs = [self.results["hidden_states"], self.results["probs"]]
        if self.return_step == "route":
            outputs.append(self.results["routing_map"])
        else:
            outputs += cut.tensors_of(self.results["metadata"])
        if overlapped is not None:
            overlapped.join_stream()  # their first stage ends with the graph
        shared, cut.captured_shared_output = cut.captured_shared_output, None
        return outputs if shared is None else [*outputs, shared]


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
    metadata: Metadata | None = None
    """For the steps after `preprocess`, where the graph holds it."""
    shared_expert_output: Tensor | None = None
    """[S, B, H]; None without shared experts in the graph."""

    def is_empty(self) -> bool:
        """True where no step is to be skipped."""
        return all(getattr(self, field.name) is None for field in fields(self))

    def set(self, *, metadata: Metadata | None = None, **tensors: Tensor | None) -> None:
        """Fill fields; None leaves a field as it is.

        Raises:
            TypeError: a name that is not a field, or a value that is not a tensor.
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
        self.metadata = metadata if metadata is not None else self.metadata

    def clear(self) -> None:
        """Empty all fields, so that no step is skipped."""
        for field in fields(self):
            setattr(self, field.name, None)


def fill_store(cut: CutMoELayer, outputs: Sequence[Tensor]) -> Tensor:
    """Give a graph's outputs to the store; return the residual.

    outputs: outputs of the graph, the residual last.

    Raises:
        AssertionError: this layer's graph has another number of outputs.
    """
    *rest, residual = outputs
    shared = rest.pop() if cut.moe_layer.has_shared_output else None
    hidden, probs, *others = rest
    routing_map = metadata = None
    if cut.scope.preprocess:
        metadata = cut.metadata_of(others)
        overlapped = cut.moe_layer.token_dispatcher.shared_experts
        if overlapped is not None:
            overlapped.follow_stream(metadata.shared_experts)
    else:
        (routing_map,) = others
    store = cut.cudagraph_tensor_store
    assert store.is_empty(), "the forward before this one has not used up what its graph made"
    store.set(
        hidden_states=hidden, probs=probs, routing_map=routing_map, metadata=metadata, shared_expert_output=shared
    )
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
                results = (x_SBH, *made) if step == "route" else made
                raise MoECudaGraphPartialCaptureSignal(cut, step, **dict(zip(_RESULTS[step], results, strict=True)))
            return made

        return wrapped  # type: ignore[return-value]

    return decorate


def _stored_route(store: MoECudaGraphTensorStore) -> tuple[Tensor, Tensor | None] | None:
    return None if store.probs is None else (store.probs, store.routing_map)


def _stored_preprocess(store: MoECudaGraphTensorStore) -> tuple[Tensor, Tensor, Metadata] | None:
    """None without metadata: the graph then ended before this step, or nothing is stored."""
    if store.metadata is None:
        return None
    assert store.hidden_states is not None and store.probs is not None, "a graph gives rows with their weights"
    return store.hidden_states, store.probs, store.metadata


_RESULTS = {
    "route": ("hidden_states", "probs", "routing_map"),
    "preprocess": ("hidden_states", "probs", "metadata"),
}
"""Step -> names of what the graph returns that ends there; of `route` the first is the input of the layer."""

_SKIP: dict[MoEStep, Callable[[MoECudaGraphTensorStore], Any]] = {
    "shared_experts_compute": lambda store: store.shared_expert_output,
    "route": _stored_route,
    "preprocess": _stored_preprocess,
}
"""MoEStep -> function that reads its result from the store; None where the step must compute it."""
