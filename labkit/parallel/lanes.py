"""A lane: messages of one direction between this rank and another, over one communicator.

`collectives.isend` decides for every message what is the same for all of them: whether the peer is in the group, what
carries the tensor, whether a start can block. A lane decides it once. Then, unless somebody watches, a message is
torch's own call and a `Pending`: a rank that has slept between two messages finds the code of neither in its caches,
and pays for every line (`benchmarks/pipeline_sleep.py` measures what is left).
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.parallel import transport
from labkit.parallel.groups import Group
from labkit.parallel.pending import Pending, issued


class Lane:
    """Messages from this rank to `peer`, or from `peer` to this rank."""

    __slots__ = ("_handle", "_key", "group", "is_plain", "peer", "position")

    def __init__(self, group: Group, position: int, device: torch.device) -> None:
        """position: of the peer in the group. device: where tensors are, at both ends."""
        self.group, self.position, self.peer = group, position, group.ranks[position]
        self._handle = transport.process_group_of(group)
        self._key = (group.name, group.ranks[0])
        self.is_plain = device.type == "cpu" and not transport.host_start_may_block()
        """Whether `send` and `receive` do all there is to do with a host tensor while nobody observes
        (`labkit.events.observers`). Else `collectives.isend` and `irecv` do what is missing: staging, announcing a
        start, booking, recording."""

    def send(self, x: Tensor) -> Pending:
        """Start sending a host tensor."""
        source = x if x.is_contiguous() else x.contiguous()
        work = self._handle.send([source], self.position, 0)
        issued[self._key] = number = issued[self._key] + 1
        return Pending("send", x, self.group, number, "send", lambda: (work.wait(), x, source)[1])

    def receive(self, x: Tensor) -> Pending:
        """Start receiving into a contiguous host tensor, whose shape and type must be the sender's."""
        work = self._handle.recv([x], self.position, 0)
        issued[self._key] = number = issued[self._key] + 1
        return Pending("recv", x, self.group, number, "recv", lambda: (work.wait(), x)[1])
