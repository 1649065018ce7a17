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

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic

from labkit.events import observers
from labkit.parallel.collectives import Pending
from labkit.parallel.groups import ParallelGroups
from labkit.parallel.lanes import Lane
from labkit.parallel.p2p import second_communicator
from labkit.parallel.payload import Format, Name, Payload, arrived, start_receive, start_send

AHEAD = {"gloo": 4, "nccl": 1}
"""Receives open per sender. A channel is in order of sending, so behind what is read late something may wait that is
needed soon. On a GPU every open receive is a kernel, and a second one would wait behind the first; it is opened ahead
of the computation (`fetch`), because NCCL lets it start after what was launched before."""
SMALL, MOST = 2**20, 16
"""Through gloo more are open, at most MOST, while their buffers take less than SMALL bytes."""
FEW = 2
"""Below so many, `refill` opens receives again, all at once: several cost little more than one, because a rank that has
slept finds none of the code in its caches."""


def receives_ahead(backend: str, form: Format[Any]) -> int:
    """Receives open per sender. None where lengths vary: a buffer's size is known when its message is on its way."""
    if form.variable_lengths:
        return 0
    least = AHEAD.get(backend, 1)
    if backend != "gloo" or form.only_shape is None:
        return least
    size = math.prod(form.only_shape) * form.dtype.itemsize
    return max(least, min(MOST, SMALL // max(1, size)))


class _Inbox(Generic[Name]):
    """What comes from one rank."""

    __slots__ = ("arriving", "due", "is_connected", "lane")

    def __init__(self, lane: Lane, due: Sequence[Name], is_connected: bool) -> None:
        self.lane, self.due = lane, deque(due)
        self.is_connected = is_connected
        """Something has come. NCCL (and gloo, if told to) connects with the first message: a first receive blocks until
        the other rank sends, so that one opened ahead could wait for ever."""
        self.arriving: dict[Name, list[Pending]] = {}
        """Posted and not fetched yet."""

    def post(self, form: Format[Name]) -> None:
        """Open the next receive."""
        name = self.due.popleft()
        self.arriving[name] = start_receive(name, form, self.lane)

    def post_up_to(self, count: int, form: Format[Name]) -> None:
        """Open receives until so many are."""
        while self.due and len(self.arriving) < count:
            self.post(form)


class _Outbox:
    """What goes to one rank."""

    __slots__ = ("lane", "sent")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.sent: deque[tuple[int, list[Pending]]] = deque()
        """What may be under way, with the position of the action that reads it; oldest first, and so read first."""


class Mailbox(Generic[Name]):
    """The messages of one rank during one run of a schedule. Ranks count from 0 within the pipeline, and so do the
    actions of each rank."""

    def __init__(
        self,
        groups: ParallelGroups,
        incoming: Mapping[int, Sequence[Name]],
        form: Format[Name],
        *,
        greet: Callable[[int], None] | None = None,
        post_ahead: bool = True,
    ) -> None:
        """Nothing is posted before the first `refill` or `fetch`.

        incoming: by rank, the names of what it will send here, in its order.
        greet: called with a rank before the first message to or from it; may raise.
        post_ahead: False posts no receive before its message is asked for.
        """
        self._groups, self._form, self._greet = groups, form, greet
        self._second = second_communicator(groups)
        self._inboxes = {source: _Inbox(self._lane(source), names, greet is None) for source, names in incoming.items()}
        self._outboxes: dict[int, _Outbox] = {}
        self._greeted: set[int] = set()
        self._ahead = receives_ahead(groups.backend, form) if post_ahead else 0

    def _lane(self, source: int, target: int | None = None) -> Lane:
        """From another rank to this one, or from this one to another."""
        rank, form = self._groups.pp.rank, self._form
        group = self._groups.pp if source < (rank if target is None else target) else self._second
        return Lane(group, source if target is None else target, form.device, form.dtype, form.only_shape)

    def _meet(self, rank: int) -> None:
        assert self._greet is not None
        if rank not in self._greeted:
            self._greeted.add(rank)
            self._greet(rank)

    def send(self, name: Name, payload: Payload, target: int, read_at: int) -> None:
        """Start sending. The storages must not be written to until the end of the run; the tensors may be shrunk.

        read_at: position of the action of `target` that reads it.
        """
        if self._greet is not None:
            self._meet(target)
        outbox = self._outboxes.get(target)
        if outbox is None:
            outbox = self._outboxes[target] = _Outbox(self._lane(self._groups.pp.rank, target))
        outbox.sent.append((read_at, start_send(name, payload, self._form, outbox.lane)))

    def fetch(self, name: Name, source: int) -> Payload:
        """Wait for `name`; returns leaves that collect a gradient."""
        if self._greet is not None:
            self._meet(source)
        inbox = self._inboxes[source]
        while name not in inbox.arriving:
            inbox.post(self._form)
        payload = arrived(inbox.arriving.pop(name))
        inbox.is_connected = True
        if not inbox.arriving:
            inbox.post_up_to(self._ahead, self._form)
        return payload

    def refill(self) -> None:
        """Open receives where few are left, from ranks that something came from: only these can be opened ahead."""
        for inbox in self._inboxes.values():
            if inbox.due and inbox.is_connected and len(inbox.arriving) < FEW:
                inbox.post_up_to(self._ahead, self._form)

    def release(self, target: int, position: int) -> None:
        """`target` has run its actions up to `position`: let go of what these read."""
        outbox = self._outboxes.get(target)
        while outbox is not None and outbox.sent and outbox.sent[0][0] <= position:
            pending = outbox.sent.popleft()[1]
            if observers or not outbox.lane.is_plain:  # else there is nothing to do with it
                for transfer in pending:
                    transfer.collect()

    def close(self) -> None:
        """Complete every send."""
        for outbox in self._outboxes.values():
            for _, pending in outbox.sent:
                for transfer in pending:
                    transfer.wait()
        self._outboxes.clear()
