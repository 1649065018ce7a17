"""A torch DeviceMesh over process groups that exist already, for DTensor, FSDP2 and distributed checkpoints."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from labkit.comm.group_plan import GROUP_TOKENS


def mesh_dims(order: str) -> tuple[str, ...]:
    """Return the dims of a mesh without names: `pp`, `dp`, `cp`, `tp` in the layout's order, slowest first."""
    listed = order.lower().split("-")
    listed += [axis for axis in ("tp", "cp", "dp", "pp") if axis not in listed]
    return tuple(axis for axis in reversed(listed) if axis != "ep")


def check_mesh_dims(names: Sequence[str]) -> None:
    """Raise ValueError for names that share an axis, mix dense with expert groups, or are not a product of axes."""
    for name in names:
        if name not in GROUP_TOKENS:
            raise ValueError(f"{name!r} is not a mesh dim; choose among {', '.join(GROUP_TOKENS)}")
    axes = [axis for name in names for axis in GROUP_TOKENS[name][1].split("-")]
    if len(set(axes)) < len(axes):
        raise ValueError(f"the mesh dims {', '.join(names)} share an axis; each axis may appear once")
    if len({GROUP_TOKENS[name][0] for name in names if name != "pp"}) > 1:
        raise ValueError(f"the mesh dims {', '.join(names)} mix groups of the dense layers with groups of the experts")


def mesh_of(
    rank: int, device_type: str, dims: Sequence[tuple[str, tuple[int, ...], Any]], leases: object
) -> DeviceMesh:
    """Return the mesh of `rank`, which keeps `leases` alive.

    dims: for each dim its name, this rank's group as global ranks, and the process group.
    """
    names, handles = tuple(name for name, _, _ in dims), [handle for _, _, handle in dims]
    if len(dims) == 1:
        mesh = DeviceMesh.from_group(handles[0], device_type, mesh_dim_names=names)
    else:
        positions = torch.tensor(rank)
        for _, ranks, _ in dims:
            positions = positions[..., None] + (torch.tensor(ranks) - rank)
        mesh = DeviceMesh.from_group(handles, device_type, positions.contiguous(), mesh_dim_names=names)
    weakref.finalize(mesh, lambda _: None, leases).atexit = False
    return mesh
