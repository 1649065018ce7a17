"""Prove that a schedule can run before any process starts, or reject it and draw the place of the mistake.

`verify` checks in this order and stops at the first failure:

1. **Complete**: each stage runs each microbatch once forward and once backward (B, or I and W), on one rank.
2. **Order**: no stage has run more backwards than forwards at any point of its row. With (1) these are the invariants
   of Transformer Engine's `_order` (signed chunk numbers, no split backward): length 2MV, sum 0, each chunk M times
   each way, count(-c) <= count(c) in every prefix.
3. **Dependencies**: the rows do not wait for each other in a circle. The proof is a time line at unit costs.
4. **Memory**, if a limit is given: activations in flight, counted along the row.
5. **Transport**: the sends and receives that follow from the rows (`lowering.py`) all complete, and no message meets
   the receive of another message. NCCL matches in posting order, so `verify` asks for this order on gloo too.
   `posted` follows from (3). `batched` has a certificate, which array operations check for every message: its moment
   falls into the slot of either end. `verify` interprets the programs of `even_odd` and `blocking`.

`interpret` decides if a set of sends and receives completes, so a reader can study a deadlock without a hang. Each rank
runs its list of steps. A step is a batch: the rank posts all operations of the step together, and goes on when all are
complete. Messages carry no name, so order alone pairs sends with receives:

- By direction (MPI, gloo, one NCCL group call): the k-th send from a to b meets the k-th receive of b from a.
- `mirrored` (NCCL, operations one by one on the communicator of a pair): the k-th operation of a on it meets the k-th
  of b, whatever they are. Two sends, or two receives, that meet never complete, nor does anything posted after them.

A send with rendezvous, as NCCL and large MPI messages have, is complete when the peer has posted the receive. A
buffered send is complete at once.

Legend: A = actions of the schedule, P = ranks, S = stages, M = microbatches, V = model chunks of a rank.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from labkit.comm.posting_order import Operation
from labkit.schedules.dependencies import producers, require_complete
from labkit.schedules.ir import KINDS, Schedule, ScheduleError, grid
from labkit.schedules.lowering import (
    DEFAULT_TRANSPORT,
    Compute,
    Pair,
    Program,
    Transfer,
    Transport,
    check_pairs,
    check_transport,
    lower,
    receive_slots,
)
from labkit.schedules.simulator import Timeline, simulate

_CHANGE = np.array([1, -1, 0, -1], dtype=np.int8)
"""Activations in flight that an action of each kind adds."""


def verify(
    schedule: Schedule,
    transport: Transport = DEFAULT_TRANSPORT,
    *,
    memory_limit: int | Sequence[int] | None = None,
    megatron_rules: bool = False,
) -> Timeline:
    """Prove that `schedule` can run over `transport`, and return its time line at unit costs (F, I and W take 1, B 2).

    transport: the default is that of a training run, unless `schedule.batch_p2p_comm` says otherwise.
    memory_limit: most microbatches in flight on a rank (over all its stages), one number or one for each rank.
    megatron_rules: also check an interleaved schedule against Megatron's rules for M, N and PP (`interleaving_rules`).
        labkit's runtime does not need them.

    Raises:
        ScheduleError: the grid with the bad cells marked; for a deadlock also the circle of waiting ranks.
        RuntimeError: labkit itself lowered batches that the certificate does not cover.
    """
    check_transport(transport)
    check_pairs(schedule, transport)
    limits = None if memory_limit is None else _limits(schedule, memory_limit)
    require_complete(schedule)
    _require_order(schedule)
    if megatron_rules:
        interleaving_rules(schedule)
    timeline = simulate(schedule)
    if limits is not None:
        _require_memory(schedule, limits)
    if transport == "batched":
        if not certificate(schedule, timeline):  # no assert: the proof must not vanish under python -O
            raise RuntimeError(
                f"{schedule.name} has no certificate: a message's moment is outside the slots of its two ends. "
                "That is a mistake in lowering.py, not in the schedule; over posted transfers it can run"
            )
    elif transport != "posted":
        _require_end(schedule, transport)
    return timeline


def _require_order(schedule: Schedule) -> None:
    """Check that no prefix of a row has more backwards than forwards of a stage."""
    if schedule.forward_only:
        return
    for rank in range(schedule.pp):
        row = schedule.span(rank)
        stages, changes = schedule.stages[row], _CHANGE[schedule.kinds[row]]
        for chunk, stage in enumerate(schedule.stages_of(rank), start=1):
            own = np.flatnonzero(stages == stage)
            early = np.flatnonzero(np.cumsum(changes[own], dtype=np.int32) < 0)
            if len(early):
                position = int(own[early[0]])
                action = schedule.action(int(row.start) + position)
                passes = np.count_nonzero(changes[own[: early[0] + 1]] < 0)
                sentence = (
                    f"{action} is backward number {passes} of chunk {chunk} after {passes - 1} forwards of it: "
                    "every prefix of a row needs at least as many forwards as backwards"
                )
                _refuse(schedule, "cannot run:", {(rank, position): sentence})


def interleaving_rules(schedule: Schedule) -> None:
    """Megatron's rules for M microbatches, groups of N, PP ranks: PP <= N <= M, and M mod N is 0 or at least PP.

    The rules concern schedules with several chunks per rank and looped placement. Every rank must run its forwards in
    the order of one table (`get_schedule_table`): runs of N microbatches, and in each run all chunks in turn.
    """
    pp, m = schedule.pp, schedule.num_microbatches
    chunks = schedule.num_stages // pp
    looped = np.arange(schedule.num_stages) % pp
    if pp == 1 or chunks < 2 or not np.array_equal(schedule.placement_of_stages, looped):
        return
    first = schedule.stages[: schedule.offsets[1]][schedule.kinds[: schedule.offsets[1]] == KINDS.index("F")]
    n = int(np.argmax(first != 0))  # the rank 0 runs N microbatches of chunk 0, then chunk 1
    if n == 0 or not _follows_table(schedule, n, chunks):
        return
    rest, names = m % n, f"with M = {m} microbatches in groups of N = {n} on PP = {pp} ranks"
    if n < pp:
        fewer = f"M = {m} microbatches are fewer than the ranks" if m < pp else "a group is smaller than the pipeline"
        sentence = f"N is at least PP, but {fewer}: rank 0 comes to chunk 2 before the last rank has finished chunk 1"
    elif 0 < rest < pp:
        sentence = f"M is a multiple of N, or the last group has at least PP microbatches; it has M mod N = {rest}"
    else:
        return
    _refuse(schedule, f"is interleaved {names}, which Megatron rejects:", {(0, n): sentence})


def _follows_table(schedule: Schedule, n: int, chunks: int) -> bool:
    groups = [
        np.arange(start, min(start + n, schedule.num_microbatches)) for start in range(0, schedule.num_microbatches, n)
    ]
    microbatches = np.concatenate([np.tile(group, chunks) for group in groups])
    chunk_ids = np.concatenate([np.repeat(np.arange(chunks), len(group)) for group in groups])
    for rank in range(schedule.pp):
        row = schedule.span(rank)
        forward = schedule.kinds[row] == KINDS.index("F")
        if not (
            np.array_equal(schedule.stages[row][forward], chunk_ids * schedule.pp + rank)
            and np.array_equal(schedule.microbatches[row][forward], microbatches)
        ):
            return False
    return True


def _limits(schedule: Schedule, memory_limit: int | Sequence[int]) -> list[int]:
    limits = np.broadcast_to(memory_limit, schedule.pp) if np.ndim(memory_limit) == 0 else np.asarray(memory_limit)
    if limits.shape != (schedule.pp,) or (limits < 1).any():
        raise ValueError(
            f"memory_limit is {memory_limit}: give one number, or one for each of the {schedule.pp} ranks, at least 1"
        )
    return limits.tolist()


def _require_memory(schedule: Schedule, limits: Sequence[int]) -> None:
    if schedule.forward_only:
        return  # nothing waits for a backward
    marks = {}
    for rank, limit in enumerate(limits):
        row = schedule.span(rank)
        over = np.flatnonzero(np.cumsum(_CHANGE[schedule.kinds[row]], dtype=np.int32) > limit)
        if len(over):
            action = schedule.action(int(row.start + over[0]))
            marks[rank, int(over[0])] = f"{action} puts {limit + 1} activations in flight, the limit is {limit}"
    if marks:
        _refuse(schedule, "needs more memory than it may:", marks)


# ---- transports ----
def certificate(schedule: Schedule, timeline: Timeline) -> bool:
    """Return True if each message's moment lies in the slot of its sender and in the slot of its receiver.

    A slot covers the time after the start of the action before it, up to the start of the action after it. The slot of
    the receiver must come no later than the action that reads. `lowering.py` proves that batches then complete.
    """
    producer = producers(schedule)
    for rank in range(schedule.pp):
        row = schedule.span(rank)
        starts = np.concatenate([[-np.inf], timeline.start[row], [np.inf]])  # slot j lies between j and j + 1 of these
        positions, slots, moments = receive_slots(schedule, timeline, producer, rank)
        received = (starts[slots] < moments) & (moments <= starts[slots + 1]) & (slots <= positions)
        made = timeline.end[row]  # a send is in the slot after its action, so this line checks every action
        sent = (starts[1:-1] < made) & (made <= starts[2:])
        if not (received.all() and sent.all()):
            return False
    return True


def _require_end(schedule: Schedule, transport: Transport) -> None:
    placed = placed_communication(schedule, transport)
    programs = [[ops for _, ops in steps] for steps in placed]
    outcome = interpret(programs, mirrored=transport == "even_odd")
    if outcome.finished and not outcome.crossed:
        return
    if outcome.finished:
        lines = [f"{schedule.name} cannot run over {transport} transfers, messages cross:", *outcome.crossed[:10]]
        raise ScheduleError("\n".join(lines))
    marks = {}
    for line, (rank, step) in zip(outcome.circle, outcome.stuck.items(), strict=True):
        slot = placed[rank][step][0]
        length = int(schedule.offsets[rank + 1] - schedule.offsets[rank])
        side = "before" if slot < length else "after"
        marks[rank, min(slot, length - 1)] = f"{side} this action it waits: {line.partition(' waits: ')[2]}"
    ranks = " -> ".join(f"rank {rank}" for rank in [*outcome.stuck, next(iter(outcome.stuck))])
    _refuse(schedule, f"stops over {transport} transfers, these wait for each other: {ranks}", marks)


def _refuse(schedule: Schedule, problem: str, marks: dict[tuple[int, int], str]) -> None:
    raise ScheduleError("\n".join([f"{schedule.name} {problem}", grid(schedule, marks)]))


# ---- the interpreter ----


class Op(NamedTuple):
    """One side of a message."""

    operation: Operation
    peer: int
    name: str
    channel: int = 0
    """Number of the communicator between the two ranks that carries it."""

    def __str__(self) -> str:
        return f"{self.operation} {self.name} {'to' if self.operation == 'send' else 'from'} rank {self.peer}"


@dataclass(frozen=True)
class Outcome:
    """The end of an interpretation."""

    finished: bool
    """True where every rank reached its end."""
    circle: list[str]
    """A line for each rank of the circle: the operation that the rank waits for. Empty if finished."""
    crossed: list[str]
    """Messages that met the receive of another message."""
    stuck: dict[int, int]
    """Rank of the circle -> number of the step that this rank cannot leave."""

    def __str__(self) -> str:
        if self.finished:
            return "\n".join(["finished", *(f"crossed: {pair}" for pair in self.crossed)])
        return "\n".join(["stuck, these wait for each other:", *self.circle])


@dataclass
class _Channel:
    """Operations that the two sides have posted, and the number that have met, in order."""

    sides: tuple[list[Op], list[Op]] = field(default_factory=lambda: ([], []))
    met: int = 0

    def post(self, side: int, op: Op) -> int:
        """Post `op` on its side; return its number there."""
        self.sides[side].append(op)
        both = min(map(len, self.sides))
        while self.met < both and self.sides[0][self.met].operation != self.sides[1][self.met].operation:
            self.met += 1
        return len(self.sides[side]) - 1


def interpret(programs: Sequence[Sequence[Sequence[Op]]], *, buffered: bool = False, mirrored: bool = False) -> Outcome:
    """Run the programs of all ranks until each has finished or none can go on."""
    heads = [-1] * len(programs)
    channels: dict[tuple[int, int, int, str], _Channel] = {}
    waiting: list[list[tuple[Op, _Channel, int]]] = [[] for _ in programs]
    awake = deque(range(len(programs)))

    def post(rank: int) -> None:
        heads[rank] += 1
        waiting[rank] = []
        for op in programs[rank][heads[rank]] if heads[rank] < len(programs[rank]) else ():
            low, high = sorted((rank, op.peer))
            upward = (op.operation == "send") == (rank == low)
            key = (low, high, op.channel, "" if mirrored else "up" if upward else "down")
            channel = channels.setdefault(key, _Channel())
            waiting[rank].append((op, channel, channel.post(int(rank == high), op)))
            awake.append(op.peer)

    def open_op(rank: int) -> Op | None:
        """Return the first operation of the rank's step that is not complete; None if all are."""
        done = (channel.met > number or (buffered and op.operation == "send") for op, channel, number in waiting[rank])
        return next((op for (op, _, _), complete in zip(waiting[rank], done) if not complete), None)

    for rank in range(len(programs)):
        post(rank)
    while awake:
        rank = awake.popleft()
        while heads[rank] < len(programs[rank]) and open_op(rank) is None:
            post(rank)
    open_ops = {r: op for r in range(len(programs)) if (op := open_op(r)) is not None and heads[r] < len(programs[r])}
    circle = _circle(open_ops)
    lines = [f"rank {rank} waits: {open_ops[rank]}" for rank in circle]
    if circle and open_ops[circle[-1]].peer not in open_ops:
        lines = [f"{lines[-1]}, which has reached its end"]
    crossed = [pair for key, channel in channels.items() for pair in _crossed(key, channel)]
    return Outcome(not open_ops, lines, crossed, {rank: heads[rank] for rank in circle})


def _circle(open_ops: dict[int, Op]) -> list[int]:
    """Follow the waiting ranks until a rank repeats, or until a rank that has ended and will never answer."""
    if not open_ops:
        return []
    path = [min(open_ops)]
    while (following := open_ops[path[-1]].peer) in open_ops and following not in path:
        path.append(following)
    return path[path.index(following) :] if following in open_ops else path[-1:]


def _crossed(key: tuple[int, int, int, str], channel: _Channel) -> list[str]:
    low, high = key[:2]
    found = []
    for mine, other in zip(channel.sides[0][: channel.met], channel.sides[1][: channel.met]):
        sent, wanted, source, target = (
            (mine, other, low, high) if mine.operation == "send" else (other, mine, high, low)
        )
        if sent.name != wanted.name:
            found.append(f"{sent.name} met the receive of {wanted.name}, rank {source} to rank {target}")
    return found


# ---- the programs of a schedule ----
def communication(schedule: Schedule, transport: Transport) -> list[list[list[Op]]]:
    """Return the sends and receives of a schedule by rank and step, for `interpret`; see `lowering` for the transports.

    Run those of `posted` with `buffered=True`, those of `even_odd` with `mirrored=True`.
    """
    return [[ops for _, ops in steps] for steps in placed_communication(schedule, transport)]


def placed_communication(schedule: Schedule, transport: Transport) -> list[list[tuple[int, list[Op]]]]:
    """Return the same as `communication`, with the slot before each step: the position of the action that follows
    it."""
    programs = []
    for rank in range(schedule.pp):
        program = lower(schedule, rank, transport)
        steps = _posted(program) if transport == "posted" else _in_slots(program, transport)
        programs.append([(slot, ops) for slot, ops in steps if ops])
    return programs


def _in_slots(program: Program, transport: Transport) -> list[tuple[int, list[Op]]]:
    slots = [[_op(transfer) for transfer in slot] for slot in program.slots]
    if transport == "blocking":
        return [(number, [op]) for number, ops in enumerate(slots) for op in ops]
    return list(enumerate(slots))


def _posted(program: Program) -> list[tuple[int, list[Op]]]:
    """Return the steps of a `posted` program. To read a message, a rank first completes the receives that it posted
    before."""
    posted: defaultdict[int, deque[Transfer]] = defaultdict(deque)
    steps: list[tuple[int, list[Op]]] = []
    position = 0
    for instruction in program.instructions:
        if isinstance(instruction, Compute | Pair):
            position += 1 if isinstance(instruction, Compute) else 2
        elif instruction.verb == "post":
            for transfer in instruction.transfers:
                posted[transfer.peer].append(transfer)
        elif instruction.verb == "send":
            steps.append((position, [_op(transfer) for transfer in instruction.transfers]))
        elif instruction.verb == "recv":
            (wanted,) = instruction.transfers
            ops = []
            while wanted in posted[wanted.peer]:
                ops.append(_op(posted[wanted.peer].popleft()))
            steps.append((position, ops))
    return steps


def _op(transfer: Transfer) -> Op:
    return Op(transfer.operation, transfer.peer, str(transfer.message), transfer.channel)
