"""What layers do and no graph can hold: messages of gloo on a GPU, and choices of experts that Python records.

A graph on a GPU holds messages of NCCL, which are kernels, and never those of gloo.
Ranks that share a GPU talk through gloo (NCCL refuses them). It brings tensors to the host and waits there, which no
graph may; replays would not send anything either. Emulated graphs on the host hold gloo's messages as operations.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from labkit.config import ConfigError
from labkit.moe.router import routers_of
from labkit.parallel.capturing import GraphCaptureError
from labkit.parallel.groups import Group


def refuse_gloo(groups: Iterable[Group], device: torch.device, impl: str) -> None:
    """groups: over which the captured code communicates. device: of its tensors. impl: `graph.cuda_graph_impl`.

    Raises:
        ConfigError: on a GPU, if one of them has several ranks that talk through gloo; the same on all ranks.
    """
    if device.type != "cuda":
        return
    inside = {group.name: group.size for group in groups if group.size > 1 and _backend(group) == "gloo"}
    if inside:
        named = ", ".join(f"{name} ({size} ranks)" for name, size in inside.items())
        problem = (
            f"graph.cuda_graph_impl = {impl} would capture messages over {named}, which go through gloo (as where "
            "ranks share a GPU), and no CUDA graph can hold those: give every rank a GPU of its own (NCCL), capture "
            "parts of layers that send nothing over these groups, or set it to none"
        )
        raise ConfigError([problem])


def _backend(group: Group) -> str:
    return "none" if group.process_group is None else dist.get_backend(group.process_group)


def refuse_records(module: nn.Module) -> None:
    """Raises GraphCaptureError where a router in `module` is to record its choices, or to repeat recorded ones."""
    for router in routers_of([module]):
        if router.record is not None or router.replay is not None:
            raise GraphCaptureError(
                f"{router.name}: choices are recorded and replayed by Python, which a CUDA graph does not run: leave "
                "out moe_router (graph.cuda_graph_scope), or the record"
            )
