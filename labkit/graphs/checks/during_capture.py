"""A run of a callable in a warm-up or a capture: its outputs, and checks that reject what no replay could repeat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten

from labkit.comm.capturing import GraphCaptureError
from labkit.graphs.planned_captures import Place
from labkit.graphs.static_inputs import Arguments
from labkit.graphs.user_line import raised_at


def called(
    place: Place, arguments: Arguments, inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], TreeSpec, tuple[int, ...]]:
    """Run the callable on its static inputs: (flat outputs, their structure, indices of inputs changed in place).

    Raises:
        TypeError: an output is neither a tensor nor None.
        GraphCaptureError: an input that takes a gradient was changed in place.
    """
    versions = _versions(inputs)
    args, kwargs = arguments.rebuilt(inputs)
    try:
        outputs, spec = tree_flatten(place.function(*args, **kwargs))
    except RuntimeError as error:
        if "leaf Variable that requires grad" not in str(error):
            raise
        raise GraphCaptureError(
            f"{raised_at(error) or 'the callable'}: {place.name} changes an input or a parameter in place that "
            "requires grad; the static inputs of a graph are leaves. Work on a copy (x = x.clone()), or out of place"
        ) from error
    for output in outputs:
        if output is not None and not isinstance(output, Tensor):
            raise TypeError(
                f"{place.name} returned a {type(output).__name__}: a graph returns only tensors and None, and another "
                "value would stay as it was at capture. Return a tensor, or capture a part that returns tensors"
            )
    changed = tuple(i for i, (old, new) in enumerate(zip(versions, _versions(inputs), strict=True)) if old != new)
    return outputs, spec, changed


def check_differentiated(place: Place, outputs: Iterable[Tensor | None], known: Iterable[Tensor]) -> None:
    """Reject a callable whose outputs depend on a tensor that requires grad and would get none from a replay.

    known: the tensors that get a gradient: inputs, and parameters of modules.

    Raises:
        GraphCaptureError: there is such a tensor, as in a function that closes over a module, or in a bound method.
    """
    served = set(map(id, known))
    for node in _nodes(outputs):
        variable = getattr(node, "variable", None) if node.name() == "torch::autograd::AccumulateGrad" else None
        if variable is not None and id(variable) not in served:
            raise GraphCaptureError(
                f"{place.name} reads a tensor of shape {tuple(variable.shape)} that requires grad, and is neither an "
                "argument nor a parameter of a module that was given, so a replay would bring it no gradient. Pass the "
                "module itself in the place of a function or method that calls it, or the tensor as an argument"
            )


def outputs_read(outputs: Sequence[Tensor | None]) -> tuple[int, ...]:
    """Indices of the outputs that the backward reads, as the backward of tanh does; only nodes that say so count."""
    read: set[int] = set()
    for node in _nodes(outputs):
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                try:
                    value = getattr(node, name)
                except RuntimeError:  # freed or changed since: the backward will say so
                    continue
                many = value if isinstance(value, tuple | list) else (value,)
                read |= {x.untyped_storage().data_ptr() for x in many if isinstance(x, Tensor) and _has_address(x)}
    found = ((i, y) for i, y in enumerate(outputs) if y is not None and _has_address(y))
    return tuple(i for i, y in found if y.untyped_storage().data_ptr() in read)


def _has_address(x: Tensor) -> bool:
    return x.layout is torch.strided and x.numel() > 0


def _nodes(outputs: Iterable[Tensor | None]) -> list[Any]:
    """Every node of autograd's graph below the outputs."""
    open_nodes = [y.grad_fn for y in outputs if y is not None and y.grad_fn is not None]
    seen, found = set(open_nodes), []
    while open_nodes:
        node = open_nodes.pop()
        found.append(node)
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                open_nodes.append(below)
    return found


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [0 if x.is_inference() else x._version for x in tensors]
