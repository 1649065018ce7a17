"""Messages exchanged at fixed points, the slots between two actions, and waited for there.

What is exchanged in a slot, and in which order, is decided elsewhere (`schedules/lowering.py`); here it is done, in one
of three ways, in Megatron's terms:

- `batched`: all transfers of a slot start as one batch and the slot ends when all are complete (batch_p2p_comm);
- `even_odd`: they start one by one in the order given, and the slot ends when all are complete;
- `blocking`: each is waited for before the next starts.

With variable lengths a slot cannot be one batch: a buffer can be made only when its sizes are here, and whoever sends
them may itself be waiting for a tensor that this rank has not sent yet (Megatron-LM issue 5100). Then messages go
through a `Mailbox`, which waits for data alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal

from labkit.parallel.collectives import Message, Pending, batch, comm_scope, irecv, isend
from labkit.parallel.groups import Group, ParallelGroups
from labkit.parallel.p2p import second_communicator
from labkit.parallel.payload import Format, Name, Payload, arrived

Manner = Literal["batched", "even_odd", "blocking"]


@dataclass(frozen=True)
class Exchange(Generic[Name]):
    """One transfer of a slot."""

    operation: Literal["send", "recv"]
    name: Name
    peer: int
    """The other rank, counted within the pipeline."""
    channel: int
    """0, or 1 for the second communicator."""


class Slots(Generic[Name]):
    """The exchanges of one rank during one run of a schedule, lengths fixed."""

    def __init__(
        self, groups: ParallelGroups, form: Format[Name], manner: Manner, *, greet: Callable[[int], None] | None = None
    ) -> None:
        """greet: called with a rank before the first message to or from it; may raise."""
        self._channels = (groups.pp, second_communicator(groups))
        self._form, self._manner, self._greet = form, manner, greet
        self._greeted: set[int] = set()

    def run(self, slot: Sequence[Exchange[Name]], sending: Mapping[Name, Payload]) -> dict[Name, Payload]:
        """Do one slot; returns what was received, as leaves that collect a gradient."""
        for item in slot:
            if self._greet is not None and item.peer not in self._greeted:
                self._greeted.add(item.peer)
                self._greet(item.peer)
        started: list[tuple[Exchange[Name], list[Pending]]] = []
        if self._manner == "batched":
            started = self._start_batch(slot, sending)
        for item in slot if self._manner != "batched" else ():
            group = self._channels[item.channel]
            start = isend if item.operation == "send" else irecv
            with comm_scope(layer=str(item.name), phase=self._form.phase(item.name)):
                pending = [start(x, group, group.ranks[item.peer]) for x in self._tensors(item, sending, group)]
            if self._manner == "blocking":
                for transfer in pending:
                    transfer.wait()
            started.append((item, pending))
        done = [(item, arrived(pending) if item.operation == "recv" else _finish(pending)) for item, pending in started]
        return {item.name: payload for item, payload in done if payload is not None}

    def _tensors(self, item: Exchange[Name], sending: Mapping[Name, Payload], group: Group) -> Payload:
        if item.operation == "recv":
            return tuple(self._form.buffers(self._form.shapes(item.name)))
        payload = sending[item.name]
        self._form.check(item.name, payload, group.rank, item.peer)
        return payload

    def _start_batch(
        self, slot: Sequence[Exchange[Name]], sending: Mapping[Name, Payload]
    ) -> list[tuple[Exchange[Name], list[Pending]]]:
        tensors = [self._tensors(item, sending, self._channels[item.channel]) for item in slot]
        messages = [
            Message(item.operation, x, self._channels[item.channel], self._channels[item.channel].ranks[item.peer])
            for item, payload in zip(slot, tensors, strict=True)
            for x in payload
        ]
        names = "+".join(str(item.name) for item in slot)
        with comm_scope(layer=names, phase=self._form.phase(slot[0].name)):
            works = iter(batch(messages))
        return [(item, [next(works) for _ in payload]) for item, payload in zip(slot, tensors, strict=True)]


def _finish(pending: list[Pending]) -> None:
    for transfer in pending:
        transfer.wait()
