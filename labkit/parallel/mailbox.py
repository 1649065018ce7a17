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
from typing import Generic

from labkit.parallel.collectives import Pending
from labkit.parallel.groups import Group, ParallelGroups
from labkit.parallel.p2p import second_communicator
from labkit.parallel.payload import Format, Name, Payload, arrived, start_receive, start_send

AHEAD = {"gloo": 4, "nccl": 1}
"""Receives open per sender. A channel is in order of sending, so behind what is read late something may wait that is
needed soon. On a GPU every open receive is a kernel, and a second one would wait behind the first; it is opened ahead
of the computation (`fetch`), because NCCL lets it start after what was launched before."""
FEW = 2
"""Below so many, `refill` opens receives again, up to AHEAD: several at once cost little more than one, because a rank
that has slept finds none of the code in its caches."""


class Mailbox(Generic[Name]):
    """The messages of one rank during one run of a schedule. Ranks count from 0 within the pipeline."""

    def __init__(
        self,
        groups: ParallelGroups,
        incoming: Mapping[int, Sequence[Name]],
        form: Format[Name],
        *,
        greet: Callable[[int], None] | None = None,
        post_ahead: bool = True,
    ) -> None:
        """Post the first receives.

        incoming: by rank, the names of what it will send here, in its order.
        greet: called with a rank before the first message to or from it; may raise.
        post_ahead: False posts no receive before its message is asked for. Varying lengths never do: the size of a
            buffer is known only when the message is on its way.
        """
        self._groups, self._form, self._greet = groups, form, greet
        self._second = second_communicator(groups)
        self._due = {source: deque(names) for source, names in incoming.items()}
        self._arriving: dict[Name, list[Pending]] = {}
        self._open = dict.fromkeys(self._due, 0)
        self._greeted: set[int] = set()
        self._outgoing: dict[int, deque[tuple[Name, list[Pending]]]] = {}
        self._ahead = AHEAD.get(groups.backend, 1) if post_ahead and not form.variable_lengths else 0
        if greet is None:
            for source in self._due:
                self._post_ahead(source)

    def _meet(self, rank: int) -> None:
        if self._greet is not None and rank not in self._greeted:
            self._greeted.add(rank)
            self._greet(rank)

    def _channel(self, source: int, target: int) -> Group:
        return self._groups.pp if source < target else self._second

    def send(self, name: Name, payload: Payload, target: int) -> None:
        """Start sending. The storages must not be written to until the end of the run; the tensors may be shrunk."""
        self._meet(target)
        pending = start_send(name, payload, self._form, self._channel(self._groups.pp.rank, target), target)
        self._outgoing.setdefault(target, deque()).append((name, pending))

    def _post_ahead(self, source: int) -> None:
        while self._open[source] < self._ahead and self._due[source]:
            self._post(source)

    def _post(self, source: int) -> None:
        name = self._due[source].popleft()
        group = self._channel(source, self._groups.pp.rank)
        self._arriving[name] = start_receive(name, self._form, group, source)
        self._open[source] += 1

    def fetch(self, name: Name, source: int) -> Payload:
        """Wait for `name`; returns leaves that collect a gradient."""
        self._meet(source)
        while name not in self._arriving:
            self._post(source)
        payload = arrived(self._arriving.pop(name))
        self._open[source] -= 1
        if not self._open[source]:
            self._post_ahead(source)
        return payload

    def refill(self) -> None:
        """Open receives where few are left. Called when nobody waits for this rank: after it has sent."""
        for source, count in self._open.items():
            if count < FEW:
                self._post_ahead(source)

    def release(self, target: int, is_read: Callable[[Name], bool]) -> None:
        """Let go of the sends to `target` of which it is known that they were received: they are the oldest ones up to
        the first that `is_read` denies."""
        outgoing = self._outgoing.get(target)
        while outgoing and is_read(outgoing[0][0]):
            for pending in outgoing.popleft()[1]:
                pending.collect()

    def close(self) -> None:
        """Complete every send."""
        for messages in self._outgoing.values():
            for _, pending in messages:
                for transfer in pending:
                    transfer.wait()
        self._outgoing.clear()
