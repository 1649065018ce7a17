"""Messages with names over channels without: any rank of the pipeline to any other, receives posted ahead.

Between two ranks messages arrive in the order of sending. Both sides know that order (it follows from the schedule), so
the receiver posts its receives in it, whatever order it wants to read them in, and files what arrives under its name.
Sends are never waited for on the way; when something arrives that the receiver of a send can only have made after
reading that send, the send is known to be complete, and its buffer is let go.

The two directions between a pair of ranks use two communicators. NCCL runs what one communicator carries between two
ranks in order of issue, so a send and a receive posted in different orders on the two sides would block each other
(pytorch issue 127332); with one direction per communicator there is only one order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from labkit.parallel.collectives import Pending, comm_scope, irecv, isend
from labkit.parallel.groups import Group, ParallelGroups
from labkit.parallel.p2p import second_communicator

Name = TypeVar("Name")
"""Names are hashable and print as what the ledger should call the message."""


class Mailbox(Generic[Name]):
    """The messages of one rank during one run of a schedule. Ranks count from 0 within the pipeline."""

    def __init__(
        self,
        groups: ParallelGroups,
        incoming: Mapping[int, Sequence[Name]],
        *,
        shape: Sequence[int] | None,
        dtype: torch.dtype,
    ) -> None:
        """incoming: by rank, the names of what it will send here, in its order. shape: of every message, or None where
        lengths vary and three integers go ahead of each."""
        self._groups, self._shape, self._dtype = groups, shape, dtype
        self._second = second_communicator(groups)
        self._due = {source: deque(names) for source, names in incoming.items()}
        self._arriving: dict[Name, Pending] = {}
        self._outgoing: dict[int, list[tuple[Name, list[Pending]]]] = {}

    def _channel(self, source: int, target: int) -> Group:
        return self._groups.pp if source < target else self._second

    def send(self, name: Name, tensor: Tensor, target: int, *, phase: str) -> None:
        """Start sending. The storage must not be written to until the end of the run; the tensor may be shrunk."""
        if self._shape is not None and tuple(tensor.shape) != tuple(self._shape):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, rank {target} of the pipeline expects {tuple(self._shape)}: "
                "set tensor_shape to what the stages return, or None where lengths vary"
            )
        if tensor.dtype != self._dtype:
            raise ValueError(f"{name} is {tensor.dtype}, but the pipeline's dtype is {self._dtype}: set dtype")
        group = self._channel(self._groups.pp.rank, target)
        pending = []
        with comm_scope(layer=str(name), phase=phase):
            if self._shape is None:
                if tensor.dim() != 3:
                    raise ValueError(f"{name} has shape {tuple(tensor.shape)}; varying lengths need three sizes")
                sizes = torch.tensor(tensor.shape, dtype=torch.int64, device=self._groups.device)
                pending.append(isend(sizes, group, group.ranks[target]))
            pending.append(isend(tensor.detach(), group, group.ranks[target]))
        self._outgoing.setdefault(target, []).append((name, pending))

    def post(self, name: Name, source: int, *, phase: str) -> None:
        """Post the receive of `name` and of what the source sends before it. Varying lengths cannot be posted ahead."""
        if self._shape is not None:
            self._receive_up_to(name, source, phase)

    def _receive_up_to(self, name: Name, source: int, phase: str) -> None:
        group = self._channel(source, self._groups.pp.rank)
        due = self._due[source]
        while name not in self._arriving:
            following = due.popleft()
            with comm_scope(layer=str(following), phase=phase):
                shape = self._shape
                if shape is None:
                    sizes = torch.empty(3, dtype=torch.int64, device=self._groups.device)
                    shape = irecv(sizes, group, group.ranks[source]).wait().tolist()
                buffer = torch.empty(tuple(shape), dtype=self._dtype, device=self._groups.device)
                self._arriving[following] = irecv(buffer, group, group.ranks[source])

    def fetch(self, name: Name, source: int, *, phase: str) -> Tensor:
        """Wait for `name`; returns a leaf that collects a gradient."""
        self._receive_up_to(name, source, phase)
        tensor = self._arriving.pop(name).wait()
        return tensor.requires_grad_() if tensor.is_floating_point() else tensor

    def release(self, target: int, is_read: Callable[[Name], bool]) -> None:
        """Let go of the sends to `target` of which it is known that they were received."""
        kept = []
        for name, pending in self._outgoing.get(target, ()):
            if is_read(name):
                _wait_all(pending)
            else:
                kept.append((name, pending))
        self._outgoing[target] = kept

    def close(self) -> None:
        """Complete every send."""
        for messages in self._outgoing.values():
            for _, pending in messages:
                _wait_all(pending)
        self._outgoing.clear()


def _wait_all(pending: list[Pending]) -> None:
    for work in pending:
        work.wait()
