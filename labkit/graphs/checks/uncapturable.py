"""Refusals of work that no graph can hold, found in one run of a callable or in the declaration of a layer.

A graph on a GPU holds messages of NCCL, which are kernels, and never messages of gloo. The reason is that gloo copies
tensors to the host and waits there; no graph can hold that, and a replay would send nothing. Ranks that share a GPU
talk through gloo, because NCCL refuses them. Emulated graphs on the host hold gloo's messages as operations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten

from labkit.comm.capturing import GraphCaptureError
from labkit.comm.groups import Group
from labkit.config import ConfigError
from labkit.graphs.call_arguments import Arguments, Place
from labkit.moe.router import routers_of

_NOT_THE_USER = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), contextlib.__file__, "<frozen")


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
    """Refuse a callable whose outputs depend on a tensor that requires grad and would get none from a replay.

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


def raised_at(error: BaseException) -> str:
    """`file:line (in code)` of the innermost line that is neither torch's nor of labkit.graphs; empty without one."""
    found, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(_NOT_THE_USER):
            found = f"{code.co_filename}:{trace.tb_lineno} (in {code.co_name})"
        trace = trace.tb_next
    return found


# ---- layers ----


def refuse_gloo(groups: Iterable[Group], device: torch.device, impl: str) -> None:
    """Refuse captured messages of gloo on a GPU.

    groups: the groups over which the captured code communicates. device: the device of its tensors.
    impl: `graph.cuda_graph_impl`, for the message.

    Raises:
        ConfigError: on a GPU, a group has several ranks that talk through gloo; all ranks raise the same.
    """
    if device.type != "cuda":
        return
    inside = {group.name: group.size for group in groups if group.size > 1 and _backend(group) == "gloo"}
    if inside:
        named = ", ".join(f"{name} ({size} ranks)" for name, size in inside.items())
        problem = (
            f"graph.cuda_graph_impl = {impl} would capture messages over {named}, which go through gloo (as where "
            "ranks share a GPU), and no CUDA graph can hold messages of gloo. Give every rank a GPU of its own (NCCL), "
            "capture parts of layers that send nothing over these groups, or set graph.cuda_graph_impl to none"
        )
        raise ConfigError([problem])


def _backend(group: Group) -> str:
    return "none" if group.process_group is None else dist.get_backend(group.process_group)


def refuse_records(module: nn.Module) -> None:
    """Refuse a module with a router that records its choices or repeats recorded choices.

    Raises:
        GraphCaptureError: there is such a router.
    """
    for router in routers_of([module]):
        if router.record is not None or router.replay is not None:
            raise GraphCaptureError(
                f"{router.name}: Python records and repeats a router's choices, and a CUDA graph does not run Python: "
                "take moe_router out of graph.cuda_graph_modules, or leave out the record"
            )
