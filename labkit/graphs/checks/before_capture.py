"""Checks before anything is captured: they reject callables, samples, groups and routers that no replay could follow.

A graph on a GPU holds messages of NCCL, which are kernels, and never messages of gloo. The reason is that gloo copies
tensors to the host and waits there; no graph can hold that, and a replay would send nothing. Ranks that share a GPU
talk through gloo, because NCCL rejects them. Emulated graphs on the host hold gloo's messages as operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.comm.capturing import GraphCaptureError
from labkit.comm.groups import Group
from labkit.config import ConfigError
from labkit.graphs.checks.replay_guards import HOOKS, global_hooks
from labkit.graphs.planned_captures import PlannedCapture
from labkit.graphs.static_inputs import Arguments
from labkit.moe.router import routers_of

# ---- callables ----


def check_callables(callables: Sequence[Callable[..., Any]]) -> None:
    """Reject callables that a replay could not follow.

    Raises:
        TypeError: an object that cannot be called.
        GraphCaptureError: modules in training together with modules in evaluation, hooks, buffers that require grad,
            autocast's cache.
    """
    for function in callables:
        if not callable(function):
            raise TypeError(f"a callable is expected, got a {type(function).__name__}")
    modules = [function for function in callables if isinstance(function, nn.Module)]
    if len({module.training for module in modules}) > 1:
        raise GraphCaptureError(
            "some modules are in training and some in evaluation mode: graphs that share a pool are captured in one "
            "mode. Call .train() or .eval() on all of them"
        )
    casts = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
    if casts and torch.is_autocast_cache_enabled():
        raise GraphCaptureError(
            "autocast keeps cast weights from one forward to the next, and a replay would read the old weights: "
            "capture inside torch.autocast(.., cache_enabled=False)"
        )
    if modules and any(global_hooks()):
        raise GraphCaptureError(
            "a hook is registered for all modules (register_module_forward_hook and the like); it would run at "
            "capture and at no replay: remove it before the capture"
        )
    for module in modules:
        for name, inner in module.named_modules():
            _check_module(f"{type(module).__name__}{'.' if name else ''}{name}", inner)


def _check_module(name: str, module: nn.Module) -> None:
    for attribute, what in HOOKS.items():
        if getattr(module, attribute):
            raise GraphCaptureError(
                f"{name} has {what}, which would run at capture and at no replay: remove it before the capture. To "
                "keep its effect, call it before each replay (cuda_graph_manual_hooks)"
            )
    for buffer, tensor in module.named_buffers(recurse=False):
        if tensor.requires_grad:
            raise GraphCaptureError(
                f"buffer {name}.{buffer} requires grad, and only parameters and inputs of a graph get gradients: "
                "make it a parameter, or requires_grad_(False)"
            )


# ---- samples ----


def check_samples(arguments: Sequence[Arguments]) -> None:
    """Reject samples that cannot hold what a call brings.

    Raises:
        GraphCaptureError: several elements of a sample have one address (an expanded tensor), or two arguments of one
            callable share memory.
    """
    seen: set[tuple[int, ...]] = set()
    for one in arguments:
        if (key := tuple(map(id, one.tensors))) in seen:
            continue
        seen.add(key)
        for name, x in zip(one.names, one.tensors, strict=True):
            if x.layout is torch.strided and any(s == 0 and n > 1 for n, s in zip(x.size(), x.stride(), strict=True)):
                raise GraphCaptureError(
                    f"{one.place}: {name} is expanded: several of its elements are at one address, so a call could not "
                    "bring different values. Give .contiguous() as the sample"
                )
        for i, x in enumerate(one.tensors):
            for j in range(i):
                if share_memory(x, one.tensors[j]):
                    raise GraphCaptureError(
                        f"{one.place}: {one.names[j]} and {one.names[i]} of the sample share memory, and a call would "
                        "copy the second over the first. Give each a tensor of its own"
                    )


def check_samples_apart(
    captures: Sequence[PlannedCapture], arguments: Sequence[Arguments], owner: Sequence[int]
) -> None:
    """Reject samples that share memory while two callables need it for different values.

    owner: as `owners` returns it.

    Raises:
        GraphCaptureError: between forward and backward of one callable, the forward of another would overwrite its
            input.
    """
    held: dict[int, dict[int, list[Tensor]]] = {}  # by storage: owner -> its tensors
    for one in captures:
        me = owner[one.place]
        for x in arguments[me].tensors:
            if not x.numel() or x.layout is not torch.strided:
                continue
            there = held.setdefault(x.untyped_storage().data_ptr(), {})
            if one.kind != "F":
                there.pop(me, None)
                continue
            for other, tensors in there.items():
                if other != me and any(share_memory(x, y) for y in tensors):
                    raise GraphCaptureError(
                        f"{arguments[other].place} and {arguments[one.place].place} were given one tensor as their "
                        "sample: the second call would overwrite the input that the backward of the first reads. Give "
                        "each a tensor of its own, and put a value that never changes into the callable (a buffer, "
                        "functools.partial)"
                    )
            there.setdefault(me, []).append(x)


def share_memory(a: Tensor, b: Tensor) -> bool:
    """True where an element of `a` and an element of `b` lie at one address."""
    if not (a.numel() and b.numel()) or torch.strided != a.layout or torch.strided != b.layout:
        return False
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    if a.dtype != b.dtype:
        return True  # rare, so the elements are not compared
    if a.data_ptr() == b.data_ptr():
        return True
    taken = torch.zeros(max(_end(a), _end(b)), dtype=torch.bool)
    taken.as_strided(a.size(), a.stride(), a.storage_offset()).fill_(True)
    return bool(taken.as_strided(b.size(), b.stride(), b.storage_offset()).any())


def _end(x: Tensor) -> int:
    """Number of elements from the start of the storage to the end of the tensor."""
    return 1 + int(x.storage_offset()) + sum((n - 1) * s for n, s in zip(x.size(), x.stride(), strict=True))


# ---- layers ----


def refuse_gloo(groups: Iterable[Group], device: torch.device, impl: str) -> None:
    """Reject captured messages of gloo on a GPU.

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
    """Reject a module with a router that records its choices or repeats recorded choices.

    Raises:
        GraphCaptureError: there is such a router.
    """
    for router in routers_of([module]):
        if router.record is not None or router.replay is not None:
            raise GraphCaptureError(
                f"{router.name}: Python records and repeats a router's choices, and a CUDA graph does not run Python: "
                "take moe_router out of graph.cuda_graph_modules, or leave out the record"
            )
