"""How a running rank gets what an action needs and passes on what it made: the transfers of its program, done.

`Posted` posts receives ahead and lets sends run behind the computation. `Slotted` exchanges at the slots of the
program. What stays on its rank (a stage and the next one on the same rank, as at the turn of a V) is handed over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from labkit.parallel.groups import ParallelGroups
from labkit.parallel.mailbox import Mailbox
from labkit.parallel.payload import Format, Payload
from labkit.parallel.slots import Exchange, Slots
from labkit.schedules.lowering import Message, Program, Step, Transfer, Transport

Greet = Callable[[int], None] | None


class Transfers(Protocol):
    """What the runtime asks for around each action."""

    def take(self, step: Step) -> Payload | None:
        """What the action of `step` reads; None where it reads nothing."""
        ...

    def give(self, step: Step, made: Payload | None) -> None:
        """Pass on what it made; the tensors may be shrunk afterwards."""
        ...

    def close(self) -> None:
        """After the last action: complete everything."""
        ...


def transfers(
    groups: ParallelGroups, program: Program, form: Format[Message], transport: Transport, greet: Greet
) -> Transfers:
    """Those of one run."""
    if transport == "posted":
        return Posted(Mailbox(groups, program.incoming, form, greet=greet))
    if form.variable_lengths:
        return SlottedMailbox(Mailbox(groups, program.incoming, form, greet=greet, post_ahead=False), program)
    return Slotted(Slots(groups, form, transport, greet=greet), program)


class _Local:
    """Messages that stay on their rank."""

    def __init__(self) -> None:
        self._kept: dict[Message, Payload] = {}

    def keep(self, message: Message, made: Payload) -> None:
        """Keep what the next stage, which is here, will read."""
        detached = (x.detach() for x in made)
        self._kept[message] = tuple(x.requires_grad_(x.is_floating_point()) for x in detached)

    def pop(self, message: Message) -> Payload:
        return self._kept.pop(message)


class Posted:
    """Only data is waited for."""

    def __init__(self, mailbox: Mailbox[Message]) -> None:
        self._mailbox, self._local = mailbox, _Local()
        self._fetched: list[Message] = []
        """Messages that came and may have shown that sends were read."""
        self._has_begun = False
        """Whether an action has run. All other ranks wait for the first action of the first, so it comes first."""

    def take(self, step: Step) -> Payload | None:
        """Wait for what the action reads."""
        message = step.needs
        if message is not None and not message.is_local:
            return self._fetch(message)
        if self._has_begun and step.action.kind in "FW":
            self._tidy()
        return None if message is None else self._local.pop(message)

    def _fetch(self, message: Message) -> Payload:
        self._tidy()
        self._fetched.append(message)
        return self._mailbox.fetch(message, message.source)

    def _tidy(self) -> None:
        """Let go of sends that were read, open receives.

        That is done before this rank waits, where it costs nothing, and before a forward, which makes new activations,
        and a W, for which nobody waits. Not between a forward and its backward on the last stage, or between a message
        that came and the one that it leads to: there other ranks wait for it.
        """
        while self._fetched:
            came = self._fetched.pop()
            # The source made this message after reading everything that it consumed up to there.
            self._mailbox.release(came.source, came.produced)
        self._mailbox.refill()

    def give(self, step: Step, made: Payload | None) -> None:
        """Start sending."""
        self._has_begun = True
        message = step.gives
        if message is None:
            return
        assert made is not None
        if message.is_local:
            self._local.keep(message, made)
        else:
            self._mailbox.send(message, made, message.target, message.consumed)

    def close(self) -> None:
        """Complete the sends."""
        self._mailbox.close()


class SlottedMailbox(Posted):
    """Varying lengths in slots: receives are waited for in their slot, sends behind the computation."""

    def __init__(self, mailbox: Mailbox[Message], program: Program) -> None:
        super().__init__(mailbox)
        self._last = program.last
        self._received: dict[Message, Payload] = {}

    def take(self, step: Step) -> Payload | None:
        """Receive what the slot before the action brings, and give what the action reads of it."""
        self._receive(step.transfers)
        message = step.needs
        if message is None or message not in self._received:
            return super().take(step)
        if step.action.kind == "F":
            self._tidy()
        return self._received.pop(message)

    def _receive(self, slot: tuple[Transfer, ...]) -> None:
        for transfer in slot:
            if transfer.operation == "recv":
                self._received[transfer.message] = self._fetch(transfer.message)

    def close(self) -> None:
        """The slot after the last action, and the sends."""
        self._receive(self._last)
        super().close()


class Slotted:
    """What lies between two actions is exchanged there and waited for."""

    def __init__(self, slots: Slots[Message], program: Program) -> None:
        self._slots, self._last, self._local = slots, program.last, _Local()
        self._made: dict[Message, Payload] = {}
        self._received: dict[Message, Payload] = {}

    def _run(self, slot: tuple[Transfer, ...]) -> None:
        if slot:
            exchanges = [Exchange(t.operation, t.message, t.peer, t.channel) for t in slot]
            self._received |= self._slots.run(exchanges, self._made)
            self._made.clear()

    def take(self, step: Step) -> Payload | None:
        """Do the slot before the action."""
        self._run(step.transfers)
        message = step.needs
        if message is None:
            return None
        return self._local.pop(message) if message.is_local else self._received.pop(message)

    def give(self, step: Step, made: Payload | None) -> None:
        """Keep it for the slot after the action."""
        message = step.gives
        if message is None:
            return
        assert made is not None
        if message.is_local:
            self._local.keep(message, made)
        else:
            self._made[message] = tuple(x.detach() for x in made)  # the tensors themselves may be shrunk before

    def close(self) -> None:
        """Do the slot after the last action."""
        self._run(self._last)
