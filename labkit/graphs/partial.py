"""A graph that ends inside a layer of experts: how its capture stops there, and how a replay goes on from there.

How many rows travel is known only after routing, so dispatch and experts cannot be captured (unless by drop-and-pad);
norm, shared experts, router and the first permutation can. The layer's code stays one function for all of it:

    capture   forward starts; behind the last captured step its decorator raises a signal; the layer catches it and
              returns what the rest of the forward would have read: the outputs of the graph
    replay    the graph's outputs go into the store (and back into the dispatcher's attributes); forward starts, the
              decorated steps return what is stored, and the rest is computed

| captured up to | outputs of the graph, in order                                                              |
|----------------|---------------------------------------------------------------------------------------------|
| `route`        | hidden, probs, routing map; shared experts' output; residual                                |
| `preprocess`   | permuted rows, their probs; the dispatcher's attributes; shared experts' output; residual   |

The shared experts' output is there only where they are computed inside (present, and not overlapped). The layer adds
the residual last. Which attributes hold a tensor depends on the configuration; the list is filtered at the first
capture (`valid_cudagraph_attrs`) and the same ever after, since the positions of a graph's outputs are fixed.

Names are those of Megatron (`megatron/core/transformer/moe/moe_utils.py`).

Shapes: S, B, H, T, E, N as in `labkit/moe/layer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, Literal, Protocol, TypeVar

from torch import Tensor

from labkit.graphs.scope import LayerScope
from labkit.parallel.capturing import is_graph_capturing, is_graph_warmup

Step = Literal["shared_experts_compute", "route", "preprocess"]


class GraphableDispatcher(Protocol):
    """What is needed of a token dispatcher."""

    cudagraph_attrs: list[str]
    valid_cudagraph_attrs: list[str] | None

    def leave_graph(self) -> None:
        """The graph ends here: what runs beside it joins it."""
        ...

    def resume_from_graph(self, hidden_shape: Any) -> None:
        """Set what a skipped `dispatch_preprocess` would have left besides tensors."""
        ...


class PartialMoELayer(Protocol):
    """What is needed of a layer of experts."""

    training: bool
    scope: LayerScope
    cudagraph_tensor_store: MoECudaGraphTensorStore
    token_dispatcher: Any


# ---- capture ----


class MoECudaGraphPartialCaptureSignal(Exception):
    """Raised behind the last captured step of a layer, and caught in the layer's forward. No error.

    Args:
        moe_layer: the layer.
        return_step: `route` or `preprocess`.
        tensors: what that step returned.
    """

    def __init__(self, moe_layer: PartialMoELayer, return_step: str, **tensors: Tensor) -> None:
        super().__init__(f"the graph of this layer ends behind {return_step}")
        self.moe_layer, self.return_step, self.tensors = moe_layer, return_step, tensors

    def get_early_return_outputs(self, hidden_states: Tensor, shared_expert_output: Tensor | None) -> list[Tensor]:
        """Outputs of the graph in the order of the table above, without the residual.

        hidden_states: the layer's input. shared_expert_output: of `shared_experts_compute`.

        Raises:
            AssertionError: attributes hold tensors in other places than at the first capture.
        """
        dispatcher = self.moe_layer.token_dispatcher
        if self.return_step == "route":
            outputs = [hidden_states, self.tensors["probs"], self.tensors["routing_map"]]
        else:
            outputs = [self.tensors["hidden_states"], self.tensors["probs"], *_take_attributes(dispatcher)]
        dispatcher.leave_graph()
        return outputs if shared_expert_output is None else [*outputs, shared_expert_output]


def _take_attributes(dispatcher: GraphableDispatcher) -> list[Tensor]:
    """The dispatcher's tensors. It lets go of them: the memory of a graph must die with its last reader."""
    found = {path: _read(dispatcher, path) for path in dispatcher.cudagraph_attrs}
    valid = [path for path, value in found.items() if isinstance(value, Tensor)]
    if dispatcher.valid_cudagraph_attrs is None:
        dispatcher.valid_cudagraph_attrs = valid
    first = dispatcher.valid_cudagraph_attrs
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


def fill_store(moe_layer: PartialMoELayer, outputs: Sequence[Tensor], *, has_shared_output: bool) -> Tensor:
    """Take a graph's outputs apart: attributes to the dispatcher, the rest into the store. Returns the residual.

    outputs: of the graph, residual last. has_shared_output: whether the shared experts' output is among them.

    Raises:
        AssertionError: another number of outputs than this layer's graph has.
    """
    *rest, residual = outputs
    shared = rest.pop() if has_shared_output else None
    hidden, probs, *others = rest
    dispatcher, routing_map = moe_layer.token_dispatcher, None
    if moe_layer.scope.preprocess:
        names = dispatcher.valid_cudagraph_attrs
        assert names is not None and len(others) == len(names), f"{len(others)} outputs for the attributes {names}"
        for path, value in zip(names, others, strict=True):
            _write(dispatcher, path, value)
        dispatcher.resume_from_graph(residual.shape)
    else:
        (routing_map,) = others
    store = moe_layer.cudagraph_tensor_store
    assert store.is_empty(), "the forward before this one has not used up what its graph made"
    store.set(hidden_states=hidden, probs=probs, routing_map=routing_map, shared_expert_output=shared)
    return residual


def names_of_outputs(moe_layer: PartialMoELayer, *, has_shared_output: bool) -> list[str]:
    """What the outputs of the layer's graph are, in order, for reports; attributes once a graph was captured."""
    if moe_layer.scope.preprocess:
        names = ["hidden_states (rows)", "probs (of rows)", *(moe_layer.token_dispatcher.valid_cudagraph_attrs or ())]
    else:
        names = ["hidden_states", "probs", "routing_map"]
    return [*names, *(["shared_expert_output"] if has_shared_output else []), "residual"]


# ---- the decorator ----

F = TypeVar("F", bound=Callable[..., Any])


def maybe_skip_or_early_return_by_cudagraph(step: Step) -> Callable[[F], F]:
    """Decorates a step of a layer of experts: skipped where the store has its result, and the last one where a graph
    ends behind it.

    step: the name of the method.
    """
    skipped, signalled = _SKIP[step], _SIGNAL.get(step)

    def decorate(method: F) -> F:
        @wraps(method)
        def wrapped(moe_layer: PartialMoELayer, *args: Any, **kwargs: Any) -> Any:
            store, cutting = moe_layer.cudagraph_tensor_store, is_graph_capturing() or is_graph_warmup()
            assert not (cutting and not store.is_empty()), "a capture finds results of an earlier replay in the store"
            if (stored := skipped(store)) is not None:
                return stored
            made = method(moe_layer, *args, **kwargs)
            if signalled and cutting and moe_layer.training and moe_layer.scope.ends_at == step:
                raise MoECudaGraphPartialCaptureSignal(moe_layer, step, **dict(zip(signalled, made, strict=True)))
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


_SKIP: dict[Step, Callable[[MoECudaGraphTensorStore], Any]] = {
    "shared_experts_compute": lambda store: store.shared_expert_output,
    "route": _stored_route,
    "preprocess": _stored_preprocess,
}
"""Step -> its result from the store; None where it must be computed."""
_SIGNAL: dict[Step, tuple[str, ...]] = {"route": ("probs", "routing_map"), "preprocess": ("hidden_states", "probs")}
"""Step that a graph may end behind -> names of what it returns."""
