"""Process groups whose other ranks do not exist: each transfer reads and writes its buffers on a stream of its own.

In the order of ProcessGroupNCCL: a transfer starts after what its caller's stream was given so far, on the group's own
stream, and `wait` makes the caller's stream wait for its end; the host goes on. A message has a stream for each peer.
What others would have sent is not computed. labkit's code for NCCL runs as it is (`comm/nccl.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from fake_device.audit import Audit
from fake_device.places import where
from labkit.comm.groups import Group, ParallelGroups, initialize_model_parallel
from labkit.config import ParallelConfig
from labkit.schedules import runtime


class Work:
    """A transfer under way. It keeps its tensors until somebody waits for it, as torch does."""

    def __init__(self, group: ProcessGroup, end: dict[int, int], tensors: Sequence[Tensor]) -> None:
        self._group, self._end, self._tensors = group, end, tensors

    def wait(self, *_: Any) -> bool:
        machine = self._group.audit.machine
        machine.clocks.join(machine.stream, self._end)
        self._tensors = ()
        return True


class ProcessGroup(dist.ProcessGroup):
    """In the place of a process group of NCCL."""

    audit: Audit

    def __init__(self, group: Group, audit: Audit) -> None:
        super().__init__(group.rank, group.size)
        self.group, self.audit = group, audit
        self.streams: dict[int | None, int] = {}
        """By peer; None has the collectives."""

    def _start(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], peer: int | None = None) -> Work:
        machine = self.audit.machine
        stream = self.streams.setdefault(peer, machine.new_stream())
        machine.clocks.join(stream, machine.clocks.now(machine.stream))
        time, what = machine.clocks.tick(stream), f"{name} {self.group.name} at {where()}"
        for x in (*reads, *writes):
            if not x.is_cuda or not x.is_contiguous():
                raise ValueError(f"{what}: NCCL takes contiguous tensors of the device, got {x.stride()} on {x.device}")
        for tensors, write in ((reads, False), (writes, True)):
            for x in tensors:
                self.audit.touch(x, writes=write, place=stream, time=time, what=what)
        return Work(self, machine.clocks.now(stream), (*reads, *writes))

    def _require(self, holds: bool, name: str, *tensors: Tensor) -> None:
        if not holds:
            shapes = " and ".join(str(tuple(x.shape)) for x in tensors)
            raise ValueError(f"{name} {self.group.name} of {self.group.size} ranks does not fit {shapes} at {where()}")

    def allreduce(self, tensors: Any, _: Any = None) -> Any:
        return self._start("all_reduce", tensors, tensors)

    def broadcast(self, tensors: Any, _: Any = None) -> Any:
        return self._start("broadcast", tensors, tensors)

    def all_gather_single(self, out: Tensor, x: Tensor, _: Any = None) -> Any:
        self._require(out.numel() == x.numel() * self.group.size and out.dtype == x.dtype, "all_gather", x, out)
        return self._start("all_gather", [x], [out])

    def reduce_scatter_single(self, out: Tensor, x: Tensor, _: Any = None) -> Any:
        self._require(x.numel() == out.numel() * self.group.size and out.dtype == x.dtype, "reduce_scatter", x, out)
        return self._start("reduce_scatter", [x], [out])

    def all_to_all_single(self, out: Tensor, x: Tensor, received: Any, sent: Any, _: Any = None) -> Any:
        for splits, tensor in ((received, out), (sent, x)):
            rows = sum(splits) if splits else tensor.shape[0]
            self._require(rows == tensor.shape[0] and (splits or rows % self.group.size == 0), "all_to_all", tensor)
        return self._start("all_to_all", [x], [out])

    def send(self, tensors: Any, peer: int, _: int = 0) -> Any:
        return self._start("send", tensors, [], peer)

    def recv(self, tensors: Any, peer: int, _: int = 0) -> Any:
        return self._start("recv", [], tensors, peer)

    # The names before torch 2.13.
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single


@contextmanager
def fake_groups(audit: Audit, config: ParallelConfig, world_size: int, rank: int = 0) -> Iterator[ParallelGroups]:
    """The groups of one rank of a layout on cuda:0; the other ranks do not exist."""
    groups = initialize_model_parallel(config, rank=rank, world_size=world_size, device=torch.device("cuda", 0))
    made: dict[tuple[str, tuple[int, ...]], ProcessGroup] = {}
    changed: dict[str, Any] = {}
    for field in fields(groups):
        group = getattr(groups, field.name)
        if isinstance(group, Group) and group.size > 1 and group.rank >= 0:
            handle = made[group.name, group.ranks] = ProcessGroup(group, audit)
            changed[field.name] = replace(group, lease=handle)
    world = distributed_c10d._world
    with (
        patch.object(runtime, "handshake", lambda *_: None),  # by torch's store, with ranks that do not exist
        patch.dict(world.pg_map, dict.fromkeys(made.values(), ("nccl", None))),
        patch.dict(world.pg_group_ranks, {h: {r: i for i, r in enumerate(ranks)} for (_, ranks), h in made.items()}),
    ):
        yield replace(groups, backend="nccl" if made else "none", **changed)
