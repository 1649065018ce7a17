"""From rows of actions to programs: what each rank sends, receives and synchronises between its actions.

A schedule does not list its messages, because they follow from the rows. F of stage s needs the message that F of
stage s - 1 sends. B (or I) of stage s needs the message of stage s + 1. Lowering decides when each message travels.

**Slots.** A slot lies before each action of a rank, and another after the last action. The sender puts a message in the
slot right after the action that makes the message. Under `batched` and `even_odd` each slot is one exchange, and the
receive cannot simply come before the action that reads it. Two ranks could then wait for each other's next slot.
So every rank predicts all starts and ends at unit costs (`simulate`). The *moment* of a message is the end of the
action that makes it. Slot j of a rank covers the time after the start of action j - 1, up to the start of action j.
Both ranks put a message in the slot that contains its moment. On the sender this is the slot right after the action.

**Proof that slots cannot deadlock**, for any placement and any rows whose data dependencies have no circle. Suppose
that several ranks are stuck, each in a slot. Each waits for a message whose other end the peer has not posted. The peer
is stuck too, in a slot that ends before the moment of this message. So the peer waits for a message with an earlier
moment. From rank to rank the moments get earlier without end, but the number of messages is finite. Messages cannot
cross either: all messages from one rank to another have different moments, and both ranks post them in this order.

| transport  | receives | sends | waits |
|------------|----------|-------|-------|
| `posted`   | ahead of their action, in the sender's order (`Program.incoming`) | behind the computation | for data |
| `batched`  | in their slot, in one batch with its sends, ordered by moment | the same | for the whole slot |
| `even_odd` | in their slot, one by one in Megatron's order (below) | the same | for the whole slot |
| `blocking` | right before their action | right after theirs | for each on its own |

Megatron's even/odd order (`comm/posting_order.py`) says which neighbour a rank serves first. NCCL asks for
more between two ranks: on one communicator, the k-th operations of the two ranks must belong together. Megatron's order
gives this if both ranks exchange the same messages in the same slot, as in 1F1B. A V with one microbatch would hang.
So a rank orders the messages of a slot to and from one peer by their moment. At equal moments activations come before
gradients, then messages of the lower rank first. The sequences of the two ranks then mirror each other, wherever their
slots lie. With two ranks the odd rank sends over a second communicator (channel 1), so both directions can overlap.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple, get_args

import numpy as np

from labkit.comm.posting_order import Operation, channel, even_odd_place
from labkit.schedules.dependencies import consumers, producers
from labkit.schedules.ir import Action, Schedule, ScheduleError
from labkit.schedules.simulator import Timeline, simulate
from labkit.schedules.sync_places import sync_places

Transport = Literal["posted", "batched", "even_odd", "blocking"]
"""Way in which messages travel: see the table above."""
DEFAULT_TRANSPORT: Transport = "posted"
"""Transport where none is given: in a training run, the runtime, the entry points, `lower`, `verify`, `labkit order`.
The source documents batch (Megatron's `batch_p2p_comm` True), which makes both ends of a message wait for a slot."""


class StageMessage(NamedTuple):
    """An activation (F) or a gradient (B) from one stage to a neighbouring stage; prints as `1F0>2`."""

    kind: str
    """`F` to the next stage, `B` to the previous one."""
    microbatch: int
    from_stage: int
    to_stage: int
    source: int
    """Rank that sends."""
    target: int
    """Rank that receives."""
    produced: int
    """Position of the action that makes the message, in the row of `source`."""
    consumed: int
    """Position of the action that reads the message, in the row of `target`."""
    is_local: bool
    """True if `source` is `target`: this rank holds both stages and transfers nothing."""

    def __str__(self) -> str:
        return f"{self.from_stage}{self.kind}{self.microbatch}>{self.to_stage}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One end of a message between two ranks; prints as `send 1F0>2 to rank 2`."""

    operation: Operation
    message: StageMessage
    channel: Literal[0, 1] = 0
    """First or second communicator."""

    @property
    def peer(self) -> int:
        """The rank at the other end."""
        return self.message.target if self.operation == "send" else self.message.source

    @property
    def other_end(self) -> str:
        """`to rank 2`, or `from rank 2`."""
        return f"{'to' if self.operation == 'send' else 'from'} rank {self.peer}"

    def __str__(self) -> str:
        return f"{self.operation} {self.message} {self.other_end}{', second channel' if self.channel else ''}"


@dataclass(frozen=True, slots=True)
class Compute:
    """An action of the row, with the message it reads and the message it makes; prints as the action."""

    action: Action
    chunk: int
    """Model chunk of the action's stage on this rank."""
    needs: StageMessage | None
    """Message that the action reads, from another rank or its own. None for W and at the ends of the model."""
    gives: StageMessage | None
    """Message that the action makes for another stage."""
    ends_chunk: bool
    """True for the last backward of its chunk, which completes the gradients."""

    @property
    def verb(self) -> str:
        """F, B, I or W."""
        return self.action.kind

    @property
    def receives(self) -> StageMessage | None:
        """`needs`, if another rank sends it."""
        return None if self.needs is None or self.needs.is_local else self.needs

    @property
    def sends(self) -> StageMessage | None:
        """`gives`, if it goes to another rank."""
        return None if self.gives is None or self.gives.is_local else self.gives

    def __str__(self) -> str:
        return str(self.action)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two merged actions; prints as `2F5&2B3`. Their messages are received before, and sent after."""

    forward: Compute
    backward: Compute
    verb: Literal["merged"] = "merged"

    def __str__(self) -> str:
        return f"{self.forward}&{self.backward}"


@dataclass(frozen=True, slots=True)
class Communication:
    """Start transfers, end them, or both."""

    verb: Literal["post", "recv", "send", "sent", "exchange"]
    """`post` starts receives whose messages are read later; `recv` waits for one receive. `send` starts a send; `sent`
    waits for sends that the peer has read by now. `exchange` starts all its transfers in order and waits for them."""
    transfers: tuple[Transfer, ...]

    def __str__(self) -> str:
        if self.verb == "exchange":
            return "    " + " + ".join(map(str, self.transfers))
        by_rank = groupby(self.transfers, lambda transfer: transfer.other_end)
        ends = (f"{', '.join(str(t.message) for t in transfers)} {end}" for end, transfers in by_rank)
        return f"    {self.verb} {' + '.join(ends)}"


@dataclass(frozen=True, slots=True)
class Sync:
    """The start of a chunk's gradient synchronisation, or of the gathering of its parameters."""

    verb: Literal["gather", "synchronise"]
    chunk: int

    def __str__(self) -> str:
        what = "parameters" if self.verb == "gather" else "gradients"
        return f"    {self.verb} {what} of chunk {self.chunk}"


Instruction = Compute | Pair | Communication | Sync


@dataclass(frozen=True, slots=True)
class Program:
    """Everything that one rank does, in order. `str` has a line for each instruction."""

    instructions: list[Instruction]
    incoming: dict[int, list[StageMessage]]
    """Sending rank -> the messages that come from this rank, in the order in which it sends them."""

    @property
    def steps(self) -> list[Compute]:
        """The actions that compute: the row."""
        found: list[Compute] = []
        for instruction in self.instructions:
            if isinstance(instruction, Pair):
                found += [instruction.forward, instruction.backward]
            elif isinstance(instruction, Compute):
                found.append(instruction)
        return found

    @property
    def slots(self) -> list[tuple[Transfer, ...]]:
        """The transfers of each slot: before each action, and after the last. All empty under `posted`."""
        slots: list[tuple[Transfer, ...]] = [()]
        for instruction in self.instructions:
            if isinstance(instruction, Compute):
                slots.append(())
            elif isinstance(instruction, Communication) and instruction.verb == "exchange":
                slots[-1] += instruction.transfers
        return slots

    @property
    def peers(self) -> set[int]:
        """The ranks that this rank exchanges messages with."""
        transfers = [i.transfers for i in self.instructions if isinstance(i, Communication)]
        return {transfer.peer for each in transfers for transfer in each}

    def forwards(self, chunk: int) -> list[int]:
        """Return the microbatches of a chunk's forwards, in their order."""
        return [step.action.microbatch for step in self.steps if step.chunk == chunk and step.action.kind == "F"]

    def __str__(self) -> str:
        return "\n".join(map(str, self.instructions))


def lower(
    schedule: Schedule, rank: int, transport: Transport = DEFAULT_TRANSPORT, *, receives_ahead: int = 4
) -> Program:
    """Return the program of `rank`. The schedule must be complete, as `verify` checks.

    receives_ahead: number of receives from one sender that `posted` opens beyond the message that is read next. Varying
        lengths need 0: then no receive is open early, and each direction has its own channel under every transport.

    Raises:
        ValueError: an unknown transport.
        ScheduleError: `batched` or `even_odd`, and a schedule that `simulate` rejects; merged pairs over another
            transport than `posted`.
    """
    check_transport(transport)
    check_pairs(schedule, transport)
    actions, stages = schedule.actions(rank), schedule.stages_of(rank)
    chunks = [stages.index(action.stage) for action in actions]
    ends = {chunk: i for i, (action, chunk) in enumerate(zip(actions, chunks)) if action.kind in "BW"}
    needs, gives = _messages(schedule, rank)
    steps = [
        Compute(action, chunk, needs[i], gives[i], ends.get(chunk) == i)
        for i, (action, chunk) in enumerate(zip(actions, chunks))
    ]
    incoming: dict[int, list[StageMessage]] = {}
    for message in sorted((step.receives for step in steps if step.receives), key=lambda m: m.produced):
        incoming.setdefault(message.source, []).append(message)
    if transport == "posted":
        before, after = _posted(steps, incoming, receives_ahead)
    else:
        before = _exchanges(_slots(schedule, rank, transport, steps, receives_ahead == 0), transport)
        after = [[] for _ in steps]
    grad_sync, param_gather = sync_places(schedule, rank, actions, chunks)
    program: list[Instruction] = []
    for cell in _cells(schedule, rank):
        program += [Sync("gather", chunk) for i in cell for chunk in param_gather[i]]
        program += [instruction for i in cell for instruction in before[i]]
        program.append(Pair(steps[cell[0]], steps[cell[1]]) if len(cell) == 2 else steps[cell[0]])
        program += [instruction for i in cell for instruction in after[i]]
        program += [Sync("synchronise", chunk) for i in cell for chunk in grad_sync[i]]
    return Program(program + before[-1], incoming)


def _cells(schedule: Schedule, rank: int) -> list[range]:
    """Return the positions of the row's actions by cells."""
    starts = np.flatnonzero(~schedule.merged[schedule.span(rank)]).tolist()
    ends = [*starts[1:], int(schedule.offsets[rank + 1] - schedule.offsets[rank])]
    return [range(start, end) for start, end in zip(starts, ends, strict=True)]


def check_pairs(schedule: Schedule, transport: Transport) -> None:
    """Raise ScheduleError for merged pairs over another transport than `posted`."""
    if schedule.has_pairs and transport != "posted":
        raise ScheduleError(
            f"{schedule.name} has merged pairs, which receive for two actions at once: they run over posted transfers "
            f"alone, not {transport}"
        )


def check_transport(transport: str) -> None:
    """Raise ValueError for an unknown transport."""
    if transport not in get_args(Transport):
        raise ValueError(f"transport is {transport!r}; choose one of {', '.join(get_args(Transport))}")


def _messages(schedule: Schedule, rank: int) -> tuple[list[StageMessage | None], list[StageMessage | None]]:
    """Return two lists: the message that each action of the row needs, and the message that it gives."""
    producer, consumer = producers(schedule), consumers(schedule)
    row = np.arange(schedule.offsets[rank], schedule.offsets[rank + 1])
    return _between(schedule, producer[row], row), _between(schedule, row, consumer[row])


def _between(schedule: Schedule, produced: np.ndarray, consumed: np.ndarray) -> list[StageMessage | None]:
    """Return the messages from the actions `produced` to the actions `consumed`; None if either index is -1."""
    source, target = schedule.ranks[produced], schedule.ranks[consumed]
    columns = (
        schedule.kinds[produced],
        schedule.microbatches[produced],
        schedule.stages[produced],
        schedule.stages[consumed],
        source,
        target,
        produced - schedule.offsets[source],
        consumed - schedule.offsets[target],
        source == target,
    )
    there = ((produced >= 0) & (consumed >= 0)).tolist()
    rows = zip(there, *(column.tolist() for column in columns))
    return [StageMessage("F" if kind == 0 else "B", *rest) if exists else None for exists, kind, *rest in rows]


# ---- posted ----
def _posted(
    steps: Sequence[Compute], incoming: Mapping[int, Sequence[StageMessage]], ahead: int
) -> tuple[list[list[Instruction]], list[list[Instruction]]]:
    """Return the communication before each action (and after the last), and the communication after each action."""
    receives = [*_posted_receives(steps, incoming, ahead), []]
    before = [ended + here for ended, here in zip(_ended_sends(steps), receives, strict=True)]
    sends = [_send(step.sends) if step.sends else None for step in steps]
    return before, [[Communication("send", (send,))] if send else [] for send in sends]


def _send(message: StageMessage) -> Transfer:
    return Transfer("send", message, channel(message.source, message.target))


def _posted_receives(
    steps: Sequence[Compute], incoming: Mapping[int, Sequence[StageMessage]], ahead: int
) -> list[list[Instruction]]:
    """Return the receive of each action's message, and posts of later receives. A rank posts receives in the sender's
    order.

    The first receive from a sender is posted only when its message is needed. NCCL connects two ranks at their first
    message, so an earlier post would block until the sender sends. A rank posts later ones when it must wait anyway.
    """
    place = {message: k for messages in incoming.values() for k, message in enumerate(messages, start=1)}
    posted: Counter[int] = Counter()
    needed: Counter[int] = Counter()

    def post(source: int, count: int) -> list[Instruction]:
        """Post receives until `count` are posted."""
        messages = incoming[source][posted[source] : count]
        posted[source] += len(messages)
        transfers = tuple(Transfer("recv", m, channel(m.source, m.target)) for m in messages)
        return [Communication("post", transfers)] if transfers else []

    def receive(message: StageMessage) -> list[Instruction]:
        source, is_first = message.source, not posted[message.source]
        needed[source] = max(needed[source], place[message])
        posts = post(source, needed[source] + (0 if is_first else ahead))
        recv = Communication("recv", (Transfer("recv", message, channel(source, message.target)),))
        return [*posts, recv, *post(source, needed[source] + ahead)]

    return [receive(step.receives) if step.receives else [] for step in steps]


def _ended_sends(steps: Sequence[Compute]) -> list[list[Instruction]]:
    """Return the sends that end before each action, and after the last action.

    A message from a peer proves that the peer has read everything that its earlier actions consumed. So the sends of
    those messages are complete. They end before this rank waits the next time, or before its next forward or W. They do
    not end between a receive and the backward that reads it, because other ranks wait for that backward.
    """
    unread: defaultdict[int, deque[StageMessage]] = defaultdict(deque)
    read: list[StageMessage] = []
    ended: list[list[Instruction]] = []
    for step in steps:
        ended.append([])
        if read and (step.receives or step.action.kind in "FW"):
            ended[-1].append(Communication("sent", tuple(map(_send, read))))
            read.clear()
        if came := step.receives:
            while unread[came.source] and unread[came.source][0].consumed <= came.produced:
                read.append(unread[came.source].popleft())
        if step.sends:
            unread[step.sends.target].append(step.sends)
    left = [*read, *(message for queue in unread.values() for message in queue)]
    return [*ended, [Communication("sent", tuple(map(_send, left)))] if left else []]


# ---- slots ----
def _exchanges(slots: Iterable[Sequence[Transfer]], transport: Transport) -> list[list[Instruction]]:
    """Return each slot as one exchange; under `blocking` each transfer as one exchange."""
    if transport == "blocking":
        return [[Communication("exchange", (transfer,)) for transfer in slot] for slot in slots]
    return [[Communication("exchange", tuple(slot))] if slot else [] for slot in slots]


def _slots(
    schedule: Schedule, rank: int, transport: Transport, steps: Sequence[Compute], varies: bool
) -> list[list[Transfer]]:
    """Return the transfers of each slot of the rank in the order of posting; there is one slot more than actions.

    varies: lengths vary, so posting a receive waits for the sizes of its message. Then only the order by moment, with
        a channel for each direction, never waits in a circle.
    """
    one_way = varies or (transport == "even_odd" and schedule.pp == 2)
    slots: list[list[Transfer]] = [[] for _ in range(len(steps) + 1)]

    def put(slot: int, operation: Operation, message: StageMessage) -> None:
        slots[slot].append(Transfer(operation, message, channel(message.source, message.target) if one_way else 0))

    for i, step in enumerate(steps):
        if step.sends:
            put(i + 1, "send", step.sends)
    timeline = None if transport == "blocking" else schedule.derived("unit costs", simulate)
    in_slot: dict[int, int] = {}
    if timeline is not None:
        positions, numbers, _ = receive_slots(schedule, timeline, producers(schedule), rank)
        in_slot = dict(zip(positions.tolist(), numbers.tolist()))
    for i, step in enumerate(steps):
        if step.receives:
            put(in_slot.get(i, i), "recv", step.receives)
    if timeline is None:
        return slots

    def when(transfer: Transfer) -> tuple[float, bool, int]:
        message = transfer.message
        moment = timeline.end[schedule.offsets[message.source] + message.produced]
        return float(moment), message.kind == "B", message.source

    by_moment = [sorted(slot, key=when) for slot in slots]
    return by_moment if transport == "batched" or varies else [_even_odd(slot, rank) for slot in by_moment]


def receive_slots(
    schedule: Schedule, timeline: Timeline, producer: np.ndarray, rank: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three columns for the messages that `rank` receives: position of the reading action, slot, and moment.

    The slot lies before the first action that starts at or after the moment. producer: as from `producers`.
    """
    row = schedule.span(rank)
    made = producer[row]
    positions = np.flatnonzero((made >= 0) & (schedule.ranks[made] != rank))
    moments = timeline.end[made[positions]]
    return positions, np.searchsorted(timeline.start[row], moments), moments


def _even_odd(by_moment: Iterable[Transfer], rank: int) -> list[Transfer]:
    """Order a slot: Megatron's order picks the peer, and the moment orders the transfers with this peer."""
    by_moment = list(by_moment)
    queues: dict[tuple[int, int], list[Transfer]] = {}
    for transfer in by_moment:
        queues.setdefault((transfer.peer, transfer.channel), []).append(transfer)
    in_turn = sorted(by_moment, key=lambda t: even_odd_place(t.operation, t.message.kind, rank))
    return [queues[transfer.peer, transfer.channel].pop(0) for transfer in in_turn]
