"""From rows of actions to programs: what each rank sends, receives and synchronises between its actions.

Communication is never written down in a schedule, because it follows from it: F of stage s needs the message that F of
stage s - 1 sends, B (or I) of stage s the one of stage s + 1. What remains to be decided is when a message travels.

**Slots.** Before each action of a rank, and after its last, lies a slot. A send is in the slot right after the action
that makes the message. With one exchange per slot (`batched`, `even_odd`) the receive cannot simply stand before the
action that reads it: two ranks could then wait for each other's next slot. So every rank predicts all starts and ends
at unit costs (`simulate`). A message's *moment* is the end of the action that makes it, and slot j of a rank covers
the time from after the start of action j - 1 to the start of action j. Both ends of a message are put in the slot that
its moment falls into; for the sender that is the slot right after the action.

**Why that cannot deadlock**, for any rows whose data dependencies have no circle, with any placement. Suppose ranks are
stuck, each in a slot, waiting for a message whose other end its peer has not posted yet. The peer is stuck, too, in a
slot that ends before that moment, so the message it waits for has an earlier moment. Following who waits for whom,
moments fall for ever, which finitely many messages cannot do. Nor can messages cross: all that one rank sends another
has different moments, and both sides post in their order.

| transport  | receives | sends | waits |
|------------|----------|-------|-------|
| `posted`   | ahead of their action, in the sender's order (`Program.incoming`) | behind the computation | for data |
| `batched`  | in their slot, in one batch with its sends, ordered by moment | the same | for the whole slot |
| `even_odd` | in their slot, one by one in Megatron's order (below) | the same | for the whole slot |
| `blocking` | right before their action | right after theirs | for each on its own |

Megatron's order without batches: even ranks send to the next stage, receive from the previous, send to the previous,
receive from the next; odd ranks receive from the previous first, and so on. That settles which neighbour is served
first. Between two ranks NCCL wants more: on one communicator the k-th operation of one side must be the counterpart
of the k-th of the other. Megatron's order gives that where both sides exchange the same messages in the same slot, as
in 1F1B; a V with a single microbatch would already hang. So what a slot exchanges with one peer goes by moment (of the
same moment: activations before gradients, then the lower rank's first), and the two sequences mirror each other however
the slots of the two sides lie. With two ranks, what the odd one sends goes over a second communicator (channel 1), so
that both directions can overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from labkit.schedules.dependencies import dependencies
from labkit.schedules.ir import Action, Schedule
from labkit.schedules.simulator import Timeline, simulate

Transport = Literal["posted", "batched", "even_odd", "blocking"]
"""How messages travel."""


class Message(NamedTuple):
    """An activation (F) or a gradient (B) on its way from one stage to a neighbouring one; prints as `1F0>2`."""

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
    """Position of the action that makes it, in the row of `source`."""
    consumed: int
    """Position of the action that needs it, in the row of `target`."""
    is_local: bool
    """Whether that is the rank that sends: it holds both stages, and nothing is transferred."""

    def __str__(self) -> str:
        return f"{self.from_stage}{self.kind}{self.microbatch}>{self.to_stage}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One end of a message between two ranks; prints as `send 1F0>2 to rank 2`."""

    operation: Literal["send", "recv"]
    message: Message
    channel: Literal[0, 1] = 0
    """Which of two communicators carries it."""

    @property
    def peer(self) -> int:
        """The rank at the other end."""
        return self.message.target if self.operation == "send" else self.message.source

    def __str__(self) -> str:
        second = ", second channel" if self.channel else ""
        return (
            f"{self.operation} {self.message} {'to' if self.operation == 'send' else 'from'} rank {self.peer}{second}"
        )


@dataclass(frozen=True, slots=True)
class Step:
    """An action with what surrounds it: first `param_gather`, then `transfers`, the action, last `grad_sync`."""

    action: Action
    chunk: int
    """Model chunk of the action's stage on this rank."""
    needs: Message | None
    """What the action reads, from another rank or its own; None at the ends of the model and for weight gradients."""
    gives: Message | None
    """What it makes for another stage."""
    ends_chunk: bool
    """Whether this is the last backward of its chunk: gradients are complete after it."""
    transfers: tuple[Transfer, ...] = ()
    """What the rank exchanges in the slot just before the action, in the order of posting; empty under `posted`."""
    grad_sync: tuple[int, ...] = ()
    """Chunks whose gradients start to be synchronised after the action."""
    param_gather: tuple[int, ...] = ()
    """Chunks whose parameters start to be gathered before the action."""


@dataclass(frozen=True, slots=True)
class Program:
    """What one rank does. `str` has one line per slot that exchanges something and one per action."""

    steps: list[Step]
    last: tuple[Transfer, ...]
    """The slot after the last action."""
    incoming: dict[int, list[Message]]
    """By sending rank, the messages that come from it, in the order it sends them."""
    forwards: tuple[tuple[int, ...], ...]
    """By chunk, the microbatches of its forwards in their order."""

    @property
    def slots(self) -> list[tuple[Transfer, ...]]:
        """All slots, the last one included."""
        return [*(step.transfers for step in self.steps), self.last]

    def __str__(self) -> str:
        lines = []
        for step in self.steps:
            lines += [f"    gather parameters of chunk {chunk}" for chunk in step.param_gather]
            lines += _slot_line(step.transfers)
            lines.append(str(step.action))
            lines += [f"    synchronise gradients of chunk {chunk}" for chunk in step.grad_sync]
        return "\n".join(lines + _slot_line(self.last))


def _slot_line(transfers: Sequence[Transfer]) -> list[str]:
    return ["    " + " + ".join(map(str, transfers))] if transfers else []


def lower(schedule: Schedule, rank: int, transport: Transport = "posted") -> Program:
    """The program of `rank`.

    The schedule must be complete (`verify` says so); under `batched` and `even_odd` it is simulated, which raises
    ScheduleError where that is impossible. Raises ValueError for an unknown transport.
    """
    check_transport(transport)
    needs, gives = _messages(schedule, rank)
    slots = _slots(schedule, rank, transport, needs, gives)
    actions = schedule.actions(rank)
    of_stage = {stage: chunk for chunk, stage in enumerate(schedule.stages_of(rank))}
    chunks = [of_stage[action.stage] for action in actions]
    ends = {chunk: i for i, (action, chunk) in enumerate(zip(actions, chunks)) if action.kind in "BW"}
    grad_sync, param_gather = _synchronisation(schedule, rank, actions, chunks)
    steps = [
        Step(action, chunk, needs[i], gives[i], ends.get(chunk) == i, slots[i], grad_sync[i], param_gather[i])
        for i, (action, chunk) in enumerate(zip(actions, chunks))
    ]
    incoming: dict[int, list[Message]] = {}
    for message in sorted((m for m in needs if m and not m.is_local), key=lambda m: m.produced):
        incoming.setdefault(message.source, []).append(message)
    forwards: list[list[int]] = [[] for _ in of_stage]
    for action, chunk in zip(actions, chunks):
        if action.kind == "F":
            forwards[chunk].append(action.microbatch)
    return Program(steps, slots[-1], incoming, tuple(map(tuple, forwards)))


def check_transport(transport: str) -> None:
    """Raises ValueError for an unknown transport."""
    if transport not in get_args(Transport):
        raise ValueError(f"transport is {transport!r}; choose one of {', '.join(get_args(Transport))}")


def _messages(schedule: Schedule, rank: int) -> tuple[list[Message | None], list[Message | None]]:
    """For each action of the row the message that it needs, and the one that it gives."""
    producer, consumer = schedule.derived(*_PRODUCERS), schedule.derived(*_CONSUMERS)
    row = np.arange(schedule.offsets[rank], schedule.offsets[rank + 1])
    return _between(schedule, producer[row], row), _between(schedule, row, consumer[row])


def _between(schedule: Schedule, produced: np.ndarray, consumed: np.ndarray) -> list[Message | None]:
    """The messages from actions to actions, given by their indices; None where one of the two is -1."""
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
    return [Message("F" if kind == 0 else "B", *rest) if exists else None for exists, kind, *rest in rows]


def producers(schedule: Schedule) -> np.ndarray:
    """Index of the action whose result each action reads from a neighbouring stage (A,); -1 for none."""
    return dependencies(schedule)[0].copy()  # not a view, which would keep the other column


def _consumers(schedule: Schedule) -> np.ndarray:
    """The inverse of `producers`."""
    producer = schedule.derived(*_PRODUCERS)
    reads = np.flatnonzero(producer >= 0)
    consumer = np.full(len(schedule), -1, dtype=np.int32)
    consumer[producer[reads]] = reads
    return consumer


_PRODUCERS = ("action whose result each reads", producers)
_CONSUMERS = ("action that reads each one's result", _consumers)


# ---- slots ----
def _slots(
    schedule: Schedule,
    rank: int,
    transport: Transport,
    needs: Sequence[Message | None],
    gives: Sequence[Message | None],
) -> list[tuple[Transfer, ...]]:
    """What each slot of the rank exchanges, in the order of posting; one slot more than actions."""
    if transport == "posted":
        return [()] * (len(needs) + 1)
    slots: list[list[Transfer]] = [[] for _ in range(len(needs) + 1)]
    for i, message in enumerate(gives):
        if message is not None and not message.is_local:
            slots[i + 1].append(Transfer("send", message, _channel(schedule, transport, rank)))
    arriving = [(i, message) for i, message in enumerate(needs) if message is not None and not message.is_local]
    timeline = None if transport == "blocking" else schedule.derived("unit costs", simulate)
    in_slot: dict[int, int] = {}
    if timeline is not None:
        positions, numbers, _ = receive_slots(schedule, timeline, schedule.derived(*_PRODUCERS), rank)
        in_slot = dict(zip(positions.tolist(), numbers.tolist()))
    for i, message in arriving:
        slots[in_slot.get(i, i)].append(Transfer("recv", message, _channel(schedule, transport, message.source)))
    if timeline is None:
        return [tuple(slot) for slot in slots]

    def when(transfer: Transfer) -> tuple[float, bool, int]:
        message = transfer.message
        moment = timeline.end[schedule.offsets[message.source] + message.produced]
        return float(moment), message.kind == "B", message.source

    by_moment = [sorted(slot, key=when) for slot in slots]
    return [tuple(slot if transport == "batched" else _even_odd(slot, rank)) for slot in by_moment]


def receive_slots(
    schedule: Schedule, timeline: Timeline, producer: np.ndarray, rank: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every message that `rank` receives: the position of the action that reads it, its slot and its moment.

    The slot is the one before the first action that starts at or after the moment. producer: as from `producers`.
    """
    row = slice(schedule.offsets[rank], schedule.offsets[rank + 1])
    made = producer[row]
    positions = np.flatnonzero((made >= 0) & (schedule.ranks[made] != rank))
    moments = timeline.end[made[positions]]
    return positions, np.searchsorted(timeline.start[row], moments), moments


def _channel(schedule: Schedule, transport: Transport, source: int) -> Literal[0, 1]:
    return 1 if transport == "even_odd" and schedule.pp == 2 and source % 2 == 1 else 0


_MEGATRON = {("send", "F"): 0, ("recv", "F"): 1, ("send", "B"): 2, ("recv", "B"): 3}
"""Even ranks: send to the next stage, receive from the previous, send to the previous, receive from the next. Odd ranks
swap the members of each pair."""


def _even_odd(by_moment: Iterable[Transfer], rank: int) -> list[Transfer]:
    """Megatron's order says which peer comes when; among the transfers with one peer the moment decides."""
    by_moment = list(by_moment)
    queues: dict[tuple[int, int], list[Transfer]] = {}
    for transfer in by_moment:
        queues.setdefault((transfer.peer, transfer.channel), []).append(transfer)
    in_turn = sorted(by_moment, key=lambda t: _MEGATRON[t.operation, t.message.kind] ^ (rank % 2))
    return [queues[transfer.peer, transfer.channel].pop(0) for transfer in in_turn]


# ---- gradients and parameters ----
def _synchronisation(
    schedule: Schedule, rank: int, actions: Sequence[Action], chunks: Sequence[int]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """For each action, the chunks whose gradient synchronisation follows it and whose parameter gathering precedes it.

    Collectives slow computation down, so Megatron starts them at the same time on all ranks: the gradients of a chunk
    after the backward number k + pp_rank of the rank, where k is the chunk's last, since backward reaches rank 0 last;
    the parameters of the chunk that follows chunk c before the forward number k - pp_rank, where k is the first of c.
    In general a stage is as far behind as its chunk's lowest stage is below it, which is pp_rank where placement is
    looped. What is not reached goes after the last action; chunks 0 and 1 are gathered before the first.
    """
    after: list[list[int]] = [[] for _ in actions]
    before: list[list[int]] = [[] for _ in actions]
    if schedule.forward_only:
        return [()] * len(actions), [()] * len(actions)
    lags = schedule.derived("lags", _lags)
    stages = schedule.stages_of(rank)
    backwards = [i for i, action in enumerate(actions) if action.kind in "BW"]
    last = {chunks[i]: k for k, i in enumerate(backwards)}
    for chunk, k in sorted(last.items()):
        due = k + lags[stages[chunk]]
        after[backwards[due] if due < len(backwards) else -1].append(chunk)
    forwards = [i for i, action in enumerate(actions) if action.kind == "F"]
    first = {chunks[i]: k for k, i in reversed(list(enumerate(forwards)))}
    before[0] = list(range(len(stages)))[:2]
    for chunk, k in sorted(first.items()):
        if 1 < chunk + 1 < len(stages):
            before[forwards[max(0, k - lags[stages[chunk]])]].append(chunk + 1)
    return [tuple(sorted(c)) for c in after], [tuple(sorted(c)) for c in before]


def _lags(schedule: Schedule) -> list[int]:
    """By stage, how many stages above the lowest one of its chunk number it is."""
    chunks = {stage: chunk for rank in range(schedule.pp) for chunk, stage in enumerate(schedule.stages_of(rank))}
    lowest: dict[int, int] = {}
    for stage in range(schedule.num_stages):
        lowest.setdefault(chunks[stage], stage)
    return [stage - lowest[chunks[stage]] for stage in range(schedule.num_stages)]
