"""Does a set of sends and receives come to an end? An interpreter, so that deadlocks can be looked at without hanging.

Each rank runs its list of steps. A step is a batch: all its operations are posted together, and the rank goes on when
all of them are complete. Messages carry no name: the k-th send from a to b meets the k-th receive of b from a. A send
is complete when the other side has posted its receive (rendezvous, as NCCL and large MPI messages do), or at once
where sends are buffered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from labkit.schedules.ir import Schedule
from labkit.schedules.lowering import Message, lower


class Op(NamedTuple):
    """One side of a message."""

    operation: Literal["send", "recv"]
    peer: int
    name: str

    def __str__(self) -> str:
        return f"{self.operation} {self.name} {'to' if self.operation == 'send' else 'from'} rank {self.peer}"


BatchOfOps = Sequence[Op]


@dataclass(frozen=True)
class Outcome:
    """What happened."""

    finished: bool
    """Whether every rank reached its end."""
    order: list[str]
    """Each completed step, as `rank 0: send 0F0>1 to rank 1`, in an order in which it can happen."""
    circle: list[str]
    """For ranks that wait for each other: who waits for what, in the order of the circle. Empty where finished."""
    crossed: list[str]
    """Messages that met the receive of another."""

    def __str__(self) -> str:
        if self.finished:
            return "\n".join(["finished", *(f"crossed: {pair}" for pair in self.crossed)])
        return "\n".join(["stuck, these wait for each other:", *self.circle])


def interpret(programs: Sequence[Sequence[BatchOfOps]], *, buffered: bool = False) -> Outcome:
    """Run the ranks' programs until all are done or none can go on."""
    heads = [0] * len(programs)
    posted: dict[tuple[int, int], tuple[list[str], list[str]]] = {}
    for_step: list[list[tuple[Op, int]]] = [[] for _ in programs]
    order: list[str] = []

    def post(rank: int) -> None:
        for_step[rank] = []
        for op in programs[rank][heads[rank]] if heads[rank] < len(programs[rank]) else ():
            pair = (rank, op.peer) if op.operation == "send" else (op.peer, rank)
            queue = posted.setdefault(pair, ([], []))[op.operation == "recv"]
            queue.append(op.name)
            for_step[rank].append((op, len(queue)))

    def is_complete(rank: int, op: Op, number: int) -> bool:
        if op.operation == "send":
            return buffered or len(posted[rank, op.peer][1]) >= number
        return len(posted.get((op.peer, rank), ([], []))[0]) >= number

    for rank in range(len(programs)):
        post(rank)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            if heads[rank] < len(program) and all(is_complete(rank, op, n) for op, n in for_step[rank]):
                order.append(f"rank {rank}: " + " + ".join(str(op) for op, _ in for_step[rank]))
                heads[rank] += 1
                post(rank)
                moved = True
    crossed = [
        f"{sent} met the receive of {wanted}, rank {pair[0]} to rank {pair[1]}"
        for pair, (sends, receives) in posted.items()
        for sent, wanted in zip(sends, receives)
        if sent != wanted
    ]
    open_ops = {
        rank: next(op for op, number in for_step[rank] if not is_complete(rank, op, number))
        for rank in range(len(programs))
        if heads[rank] < len(programs[rank])
    }
    return Outcome(not open_ops, order, _circle(open_ops), crossed)


def _circle(open_ops: dict[int, Op]) -> list[str]:
    """Follow who waits for whom until a rank repeats, or until one that has ended and will never answer."""
    if not open_ops:
        return []
    path = [min(open_ops)]
    while (following := open_ops[path[-1]].peer) in open_ops and following not in path:
        path.append(following)
    if following not in open_ops:
        return [f"rank {path[-1]} waits: {open_ops[path[-1]]}, which has reached its end"]
    return [f"rank {rank} waits: {open_ops[rank]}" for rank in path[path.index(following) :]]


Transport = Literal["blocking", "batched", "posted"]


def communication(schedule: Schedule, transport: Transport) -> list[list[list[Op]]]:
    """The sends and receives of a schedule, for `interpret`.

    `blocking`: one after the other, each receive before its action and each send after. `batched`: what lies between
    two actions in one batch. `posted`: the receives alone wait, sends run behind the computation (use `buffered=True`).
    """
    programs = []
    for rank in range(schedule.pp):
        before: list[Op] = []
        program: list[list[Op]] = []
        for step in lower(schedule, rank).steps:
            receive = _ops("recv", step.needs)
            program += [before + receive] if transport == "batched" else [[op] for op in (*before, *receive)]
            before = _ops("send", step.gives)
        programs.append([ops for ops in [*program, before] if ops])
    return programs


def _ops(operation: Literal["send", "recv"], message: Message | None) -> list[Op]:
    if message is None or message.is_local:
        return []
    return [Op(operation, message.target if operation == "send" else message.source, str(message))]
