"""A graph that ends inside a layer of experts: how its capture stops there, and how a replay goes on from there.

How many rows travel is known only after routing, so dispatch and experts cannot be captured (unless by drop-and-pad);
norm, shared experts, router and the first permutation can. The layer's code stays one function for all of it, and knows
nothing of this: `CutMoELayer` puts a decorator around the first three of its methods.

    capture   forward starts; behind the last captured step its decorator raises a signal; the wrapper of the whole
              layer catches it and returns what the rest of the forward would have read: the outputs of the graph
    replay    the graph's outputs go into the store (and back into the dispatcher's attributes); forward starts, the
              decorated steps return what is stored, and the rest is computed

| captured up to | outputs of the graph, in order                                                              |
|----------------|---------------------------------------------------------------------------------------------|
| `route`        | hidden, probs, routing map; shared experts' output; residual                                |
| `preprocess`   | permuted rows, their probs; the dispatcher's attributes; shared experts' output; residual   |

The shared experts' output is there only where they are computed inside (present, and not overlapped). The residual
comes last. The dispatcher names the attributes that it hands on (`handed_on`); which of them hold a tensor depends on
the configuration. The list is filtered at the first capture (`valid_cudagraph_attrs`) and the same ever after, since
the positions of a graph's outputs are fixed.

Names are those of Megatron (`megatron/core/transformer/moe/moe_utils.py`).

Shapes: S, B, H, T, E, N as in `labkit/moe/layer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

from labkit.graphs.scope import LayerScope
from labkit.moe.layer import MoELayer
from labkit.parallel.communication.capturing import is_graph_capturing, is_graph_warmup

MoEStep = Literal["shared_experts_compute", "route", "preprocess"]
STEPS: tuple[MoEStep, ...] = ("shared_experts_compute", "route", "preprocess")
"""The methods of a layer of experts that a graph may hold, in their order."""


class CutMoELayer:
    """One layer of experts inside which a graph ends.

    Attributes:
        moe_layer, scope: the layer, and what its graph holds.
        cudagraph_tensor_store: empty but between the replay of a graph and the rest of the forward.
        cudagraph_attrs: attributes (dotted paths) of the token dispatcher that are outputs of a graph that ends behind
            `preprocess`, where they hold a tensor.
        valid_cudagraph_attrs: those of them that held a tensor at the first capture; later captures must find the same.
    """

    def __init__(self, moe_layer: MoELayer, scope: LayerScope) -> None:
        """Decorate the steps of `moe_layer`, and have counts copied to the host behind the graph."""
        self.moe_layer, self.scope = moe_layer, scope
        self.cudagraph_tensor_store = MoECudaGraphTensorStore()
        self.cudagraph_attrs: list[str] = list(moe_layer.token_dispatcher.handed_on)
        self.valid_cudagraph_attrs: list[str] | None = None
        self.captured_shared_output: Tensor | None = None
        """Of `shared_experts_compute`, on the way to the end of a capture."""
        self._point = moe_layer.token_dispatcher.cuda_dtoh_point
        if scope.preprocess:
            moe_layer.token_dispatcher.cuda_dtoh_point = "before_ep_alltoall"
        for step in STEPS:
            setattr(moe_layer, step, maybe_skip_or_early_return_by_cudagraph(self, step)(getattr(moe_layer, step)))

    def __deepcopy__(self, memo: object) -> CutMoELayer:
        raise TypeError(
            f"{self.moe_layer.name} is wrapped for a graph that ends inside it, and a copy would run the original's "
            "steps: copy the model before CudaGraphHelper or wrap_layers, or after unwrap_layers([model])"
        )

    def undo(self) -> None:
        """The layer is as it was."""
        self.moe_layer.token_dispatcher.cuda_dtoh_point = self._point
        for step in STEPS:
            delattr(self.moe_layer, step)

    def captured_modules(self) -> list[nn.Module]:
        """The modules of the layer whose forward the graph holds."""
        layer, found = self.moe_layer, list[nn.Module]([self.moe_layer.router])
        if layer.shared_experts is not None and layer.has_shared_output:
            found.append(layer.shared_experts)
        elif layer.shared_experts is not None and layer.shared_experts.gate is not None and self.scope.preprocess:
            found.append(layer.shared_experts.gate)  # of the overlapped stages the first
        return found

    def resume(self, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The rest of the layer behind a graph with these outputs: (what the layer makes, residual)."""
        residual = fill_store(self, outputs)
        store = self.cudagraph_tensor_store
        try:
            # Behind `preprocess` nobody reads the layer's input any more; the residual has its shape.
            return self.moe_layer(residual if self.scope.preprocess else store.hidden_states), residual
        finally:
            store.clear()


# ---- capture ----


class MoECudaGraphPartialCaptureSignal(Exception):
    """Raised behind the last captured step of a layer, and caught by the layer's wrapper. No error.

    Args:
        cut: the layer that ends here.
        return_step: `route` or `preprocess`.
        tensors: what that step returned; for `route` also the layer's input, `hidden_states`.
    """

    def __init__(self, cut: CutMoELayer, return_step: str, **tensors: Tensor) -> None:
        super().__init__(f"the graph of this layer ends behind {return_step}")
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
            overlapped.join_stream()  # the first of their stages ends with the graph
        shared, cut.captured_shared_output = cut.captured_shared_output, None
        return outputs if shared is None else [*outputs, shared]


def _take_attributes(cut: CutMoELayer) -> list[Tensor]:
    """The dispatcher's tensors. It lets go of them: the memory of a graph must die with its last reader."""
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
    """What the captured steps of one layer made, between the replay of its graph and the rest of its forward.

    It is empty at all other times; above all during capture, which would otherwise record the rest alone.
    """

    hidden_states: Tensor | None = None
    """[S, B, H], or rows [N, H] where the graph holds `preprocess`."""
    probs: Tensor | None = None
    """[T, E], or [N]."""
    routing_map: Tensor | None = None
    """[T, E] bool; None where the graph holds `preprocess`, which alone reads it."""
    shared_expert_output: Tensor | None = None
    """[S, B, H]; None where the graph does not hold the shared experts, or there are none."""

    def is_empty(self) -> bool:
        """Whether no step is to be skipped."""
        return all(getattr(self, field.name) is None for field in fields(self))

    def set(self, **tensors: Tensor | None) -> None:
        """Fill fields; None leaves a field as it is.

        Raises:
            TypeError: a name that is no field, or something that is no tensor.
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
        """Skip nothing any more."""
        for field in fields(self):
            setattr(self, field.name, None)


def fill_store(cut: CutMoELayer, outputs: Sequence[Tensor]) -> Tensor:
    """Take a graph's outputs apart: attributes to the dispatcher, the rest into the store. Returns the residual.

    outputs: of the graph, residual last.

    Raises:
        AssertionError: another number of outputs than this layer's graph has.
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
        dispatcher.hidden_shape = residual.shape  # the rest of what a skipped `dispatch_preprocess` would have left
        if dispatcher.shared_experts is not None:
            dispatcher.shared_experts.follow_stream()
    else:
        (routing_map,) = others
    store = cut.cudagraph_tensor_store
    assert store.is_empty(), "the forward before this one has not used up what its graph made"
    store.set(hidden_states=hidden, probs=probs, routing_map=routing_map, shared_expert_output=shared)
    return residual


def names_of_outputs(cut: CutMoELayer) -> list[str]:
    """What the outputs of the layer's graph are, in order, for reports; attributes once a graph was captured."""
    if cut.scope.preprocess:
        names = ["hidden_states (rows)", "probs (of rows)", *(cut.valid_cudagraph_attrs or ())]
    else:
        names = ["hidden_states", "probs", "routing_map"]
    return [*names, *(["shared_expert_output"] if cut.moe_layer.has_shared_output else []), "residual"]


# ---- the decorator ----

F = TypeVar("F", bound=Callable[..., Any])


def maybe_skip_or_early_return_by_cudagraph(cut: CutMoELayer, step: MoEStep) -> Callable[[F], F]:
    """Decorates a step of a layer of experts: skipped where the store has its result, and the last one where a graph
    ends behind it.

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
    """With a routing map in the store the graph ended before this step."""
    if store.is_empty() or store.routing_map is not None:
        return None
    assert store.hidden_states is not None and store.probs is not None, "a graph gives rows with their weights"
    return store.hidden_states, store.probs


_SKIP: dict[MoEStep, Callable[[MoECudaGraphTensorStore], Any]] = {
    "shared_experts_compute": lambda store: store.shared_expert_output,
    "route": _stored_route,
    "preprocess": _stored_preprocess,
}
"""MoEStep -> its result from the store; None where it must be computed."""
