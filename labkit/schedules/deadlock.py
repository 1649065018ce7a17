"""Does a set of sends and receives come to an end? An interpreter, so that deadlocks can be looked at without hanging.

Each rank runs its list of steps. A step is a batch: all its operations are posted together, and the rank goes on when
all of them are complete. Messages carry no name, so what meets what is decided by order alone:

- By direction (MPI, gloo, one NCCL group call): the k-th send from a to b meets the k-th receive of b from a.
- `mirrored` (NCCL, operations one by one on the communicator of a pair): the k-th operation of a on it meets the k-th
  of b, whatever they are. Two sends, or two receives, that meet never complete, nor does anything posted after them.

A send is complete when the other side has posted its receive (rendezvous, as NCCL and large MPI messages do), or at
once where sends are buffered.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from labkit.schedules.ir import Schedule
from labkit.schedules.lowering import Program, Step, Transfer, Transport, lower


class Op(NamedTuple):
    """One side of a message."""

    operation: Literal["send", "recv"]
    peer: int
    name: str
    channel: int = 0
    """Which communicator between the two ranks carries it."""

    def __str__(self) -> str:
        return f"{self.operation} {self.name} {'to' if self.operation == 'send' else 'from'} rank {self.peer}"


BatchOfOps = Sequence[Op]


@dataclass(frozen=True)
class Outcome:
    """What happened."""

    finished: bool
    """Whether every rank reached its end."""
    circle: list[str]
    """For ranks that wait for each other: who waits for what, in the order of the circle. Empty where finished."""
    crossed: list[str]
    """Messages that met the receive of another."""
    stuck: dict[int, int]
    """By rank of the circle, the number of the step that it cannot leave."""

    def __str__(self) -> str:
        if self.finished:
            return "\n".join(["finished", *(f"crossed: {pair}" for pair in self.crossed)])
        return "\n".join(["stuck, these wait for each other:", *self.circle])


@dataclass
class _Channel:
    """What the two sides have posted, and how many of them have met, in order."""

    sides: tuple[list[Op], list[Op]] = field(default_factory=lambda: ([], []))
    met: int = 0

    def post(self, side: int, op: Op) -> int:
        """The number of `op` on its side."""
        self.sides[side].append(op)
        both = min(map(len, self.sides))
        while self.met < both and self.sides[0][self.met].operation != self.sides[1][self.met].operation:
            self.met += 1
        return len(self.sides[side]) - 1


def interpret(programs: Sequence[Sequence[BatchOfOps]], *, buffered: bool = False, mirrored: bool = False) -> Outcome:
    """Run the ranks' programs until all are done or none can go on."""
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
        """The first operation of the rank's step that is not complete."""
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
    """Follow who waits for whom until a rank repeats, or until one that has ended and will never answer."""
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
    """The sends and receives of a schedule by rank and step, for `interpret`; see `lowering` for the transports.

    Run those of `posted` with `buffered=True`, those of `even_odd` with `mirrored=True`.
    """
    return [[ops for _, ops in steps] for steps in placed_communication(schedule, transport)]


def placed_communication(schedule: Schedule, transport: Transport) -> list[list[tuple[int, list[Op]]]]:
    """As `communication`, with the slot of each step in front: the position of the action that follows it."""
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
    """To read a message a rank receives what was posted before it, too; what it sends runs behind."""
    posted: defaultdict[int, deque[Transfer]] = defaultdict(deque)
    steps: list[tuple[int, list[Op]]] = []
    position = 0
    for instruction in program.instructions:
        if isinstance(instruction, Step):
            position += 1
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
