"""A lane: messages of one direction between this rank and another, over one communicator.

`collectives.isend` decides for every message what is the same for all of them: whether the peer is in the group, what
carries the tensor, whether a start can block, what it is called. A lane decides it once. Then, unless somebody must see
a message start, it is torch's own call and an `OnLane`: a rank that has slept between two messages finds the code of
neither in its caches, and pays for every line (`benchmarks/pipeline_sleep.py` measures what is left).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from labkit.events import observers
from labkit.launch import status
from labkit.parallel import transport
from labkit.parallel.groups import Group
from labkit.parallel.pending import Pending, described, numbers


class Lane:
    """Messages from this rank to `peer`, or from `peer` to this rank."""

    __slots__ = ("_handle", "_numbers", "device", "dtype", "group", "is_plain", "peer", "position", "shape", "text")

    def __init__(
        self, group: Group, position: int, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...] | None
    ) -> None:
        """position: of the peer in the group. device: where tensors are, at both ends. shape: of every message, if each
        is one tensor of the same shape; else None."""
        self.group, self.position, self.peer = group, position, group.ranks[position]
        self.device, self.dtype, self.shape = device, dtype, shape
        self.text = "" if shape is None else described(torch.Size(shape), dtype)
        self._handle, self._numbers = transport.process_group_of(group), numbers(group)
        self.is_plain = shape is not None and device.type == "cpu" and not transport.host_start_may_block()
        """Whether `send` and `receive` do all there is to do, while nobody must see a message start
        (`labkit.events.start_observers`). Else `collectives.isend` and `irecv` do what is missing: staging, announcing
        a start, booking, recording in a graph."""

    def send(self, x: Tensor) -> Pending:
        """Start sending a host tensor of the lane's shape and type."""
        source = x if x.is_contiguous() else x.contiguous()
        work = self._handle.send([source], self.position, 0)
        return OnLane(self, "send", x, next(self._numbers), work, source)

    def receive(self) -> Pending:
        """Start receiving one."""
        assert self.shape is not None, "buffers are made for messages of one shape"
        x = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return OnLane(self, "recv", x, next(self._numbers), self._handle.recv([x], self.position, 0), x)


class OnLane(Pending):
    """A message on a lane, under way: a `Pending` that where nobody observes does no more than it must."""

    __slots__ = ("_lane", "_source", "_work")

    def __init__(self, lane: Lane, operation: str, x: Tensor, number: int, work: Any, source: Tensor) -> None:
        """source: the memory that is read or written until the end: x, or its contiguous copy."""
        super().__init__(operation, x, lane.group, number, operation, None)
        self._lane, self._work, self._source = lane, work, source

    def wait(self) -> Tensor:
        """Block until it is through and return its tensor."""
        work, slot = self._work, status.current
        if work is None or slot is None or observers:
            return self._complete(waits=True)
        outer = slot.enter(f"{self._operation} {self._group.name} #{self._number} {self._lane.text}")
        try:
            work.wait()
        finally:
            slot.leave(outer)
        self._result, self._work, self._source = self._x, None, None
        return self._x

    def _complete(self, waits: bool, announced: bool = True) -> Tensor:
        if self._work is not None:
            work, x = self._work, self._x
            self._finish, self._work = (lambda: (work.wait(), x)[1]), None
        result = super()._complete(waits, announced)
        self._source = None
        return result
