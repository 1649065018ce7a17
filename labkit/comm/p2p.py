"""Send and receive between pipeline stages: messages that start together, for the runtime and for `neighbours.py`.

`start` starts a list of `P2POp`s, and returns one `P2PWork` for each.

Notable:
- **Batched** starts the messages as one batch, **even/odd** one by one: see `posting_order.py`.
- **Variable lengths**: three integers (the shape) are sent before every tensor. Then all sends start before any
  receive, and nothing is one batch, because a receive needs its sizes to make a buffer, and the rank that sends them
  may itself wait for a tensor that this rank has not sent yet (Megatron-LM issue 5100).
- **Two communicators.** If messages start one by one, each direction between two ranks needs its own (`channel`).
- The transfers themselves are `collectives.isend/irecv/batch`: ledger, Events and status slot see each.

Legend: S = sequence, B = microbatch, H = hidden; tensors between stages are (S, B, H).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from labkit.comm.collectives import Message, batch, irecv, isend
from labkit.comm.groups import Group, ParallelGroups, further_communicator
from labkit.comm.ledger import comm_scope
from labkit.comm.pending import Pending
from labkit.comm.posting_order import Operation
from labkit.events import watchers

Shape = Sequence[int]
Payload = tuple[Tensor, ...]
"""Tensors of one message: one, or two from a decoder stage (the decoder's hidden states and the encoder's output)."""


@dataclass(frozen=True, eq=False)
class P2PCommunicator:
    """Communicators between this rank and its pipeline neighbours. Make one with `p2p_communicator`."""

    groups: ParallelGroups
    """Place of this rank."""
    second: Group
    """A second communicator over the ranks of `groups.pp`; with one stage `groups.pp` itself."""
    batch_p2p_comm: bool = True
    """One batch per exchange (True), or one by one in even/odd order; with variable lengths neither, see above."""
    variable_seq_lengths: bool = False
    """Send the shape before every tensor."""

    @property
    def is_first(self) -> bool:
        """True if this rank holds the first stage of an uninterleaved pipeline."""
        return self.groups.pp.rank == 0

    @property
    def is_last(self) -> bool:
        """True if this rank holds the last stage of an uninterleaved pipeline."""
        return self.groups.pp.rank == self.groups.pp.size - 1


def p2p_communicator(
    groups: ParallelGroups,
    *,
    batch_p2p_comm: bool = True,
    variable_seq_lengths: bool = False,
    use_ring_exchange_p2p: bool = False,
) -> P2PCommunicator:
    """Return this rank's communicator. All ranks of the layout make the first call at the same point of their code.

    Raises ValueError for `use_ring_exchange_p2p`.
    """
    if use_ring_exchange_p2p:
        raise ValueError(
            "use_ring_exchange_p2p: torch.distributed has no ring_exchange (it needs a patched build of torch); leave "
            "it False, batch_p2p_comm=True makes the same four transfers in one batch"
        )
    return P2PCommunicator(groups, second_communicator(groups), batch_p2p_comm, variable_seq_lengths)


_second: WeakKeyDictionary[ParallelGroups, Group] = WeakKeyDictionary()


def second_communicator(groups: ParallelGroups) -> Group:
    """Return a second process group over the pipeline's ranks, made once and kept as long as `groups` lives."""
    if groups.pp.size == 1:
        return groups.pp
    if groups not in _second:
        _second[groups] = further_communicator(groups, groups.pp, "pp second")
    return _second[groups]


# ---- the core: messages that start together ----


@dataclass(frozen=True)
class MessageSpec:
    """Shapes and type of the tensors of one message, the same on sender and receiver."""

    shapes: tuple[tuple[int, ...], ...]
    """Shape of each tensor. With variable lengths only their number counts."""
    dtype: torch.dtype
    """Type of every tensor."""

    def check(self, payload: Payload, name: object, source: int, target: int, *, variable: bool) -> None:
        """Raise ValueError, naming both ranks and both shapes, if `target` will expect other tensors."""
        given = tuple(tuple(tensor.shape) for tensor in payload)
        if len(given) != len(self.shapes):
            raise ValueError(
                f"rank {source} of the pipeline sends {name} as {len(given)} tensors {_listed(given)}, rank {target} "
                f"expects {len(self.shapes)}: set tensor_shape to the shapes that this stage returns"
            )
        if not variable and given != self.shapes:
            raise ValueError(
                f"{name} has shape {_listed(given)} on rank {source} of the pipeline, rank {target} expects "
                f"{_listed(self.shapes)}: set tensor_shape to what the stages return, or let lengths vary"
            )
        for tensor in payload:
            if tensor.dtype != self.dtype:
                raise ValueError(f"{name} is {tensor.dtype}, but the pipeline's dtype is {self.dtype}: set dtype")


def _listed(shapes: Sequence[Shape]) -> str:
    return str(shapes[0]) if len(shapes) == 1 else ", ".join(map(str, shapes))


@dataclass(frozen=True, slots=True, eq=False)
class P2POp:
    """One message to send or to receive."""

    operation: Operation
    """`send` or `recv`."""
    peer: int
    """Rank at the other end, counted within the pipeline."""
    channel: int
    """0 for the first communicator, 1 for the second."""
    tensors: Payload = ()
    """Tensors to send. Their storages must not change until the end; the tensors themselves may be shrunk."""
    spec: MessageSpec | None = None
    """Specification of the tensors. A receive needs it; for a send it asks for a check."""
    name: object = ""
    """Prints as the name of the message in the ledger, such as `0F1>1`."""
    phase: str = ""
    """`forward` or `backward`, for the ledger."""


class P2PWork:
    """One message under way."""

    def __init__(self, op: P2POp, pending: list[Pending]) -> None:
        self._is_received, self._pending = op.operation == "recv", pending

    def wait(self) -> Payload:
        """Block until the end. Return received tensors as leaves that collect a gradient, or () for a send."""
        tensors = tuple([transfer.wait() for transfer in self._pending])
        return tuple([x.requires_grad_(x.is_floating_point()) for x in tensors]) if self._is_received else ()


def start(p2p: P2PCommunicator, ops: Sequence[P2POp]) -> list[P2PWork]:
    """Start `ops`, as one batch or one by one in this order, and return one P2PWork for each.

    With variable lengths sends start first, and a receive waits here for its sizes. The peers must start the
    counterparts in a matching order, because messages have no names on the wire.

    Raises ValueError for tensors that do not fit the receiver's specification.
    """
    for op in ops:
        if op.operation == "send":
            _check_send(p2p, op)
    if p2p.variable_seq_lengths:
        works = {op: _start_one(p2p, op) for op in sorted(ops, key=lambda op: op.operation == "recv")}
        return [works[op] for op in ops]
    if not p2p.batch_p2p_comm:
        return [_start_one(p2p, op) for op in ops]
    # even for one message: NCCL carries batches on another communicator than single messages
    transfers = [(op, _tensors_of(p2p, op)) for op in ops]
    messages = [
        Message(op.operation, x, p2p.groups.pp, p2p.groups.pp.ranks[op.peer])
        for op, tensors in transfers
        for x in tensors
    ]
    with _scope("+".join(str(op.name) for op in ops if op.name), ops[0].phase if ops else ""):
        pending = iter(batch(messages))
    return [P2PWork(op, [next(pending) for _ in tensors]) for op, tensors in transfers]


def _check_send(p2p: P2PCommunicator, op: P2POp) -> None:
    for tensor in op.tensors if p2p.variable_seq_lengths else ():
        if tensor.dim() != 3:
            raise ValueError(
                f"variable lengths send three sizes (S, B, H); this tensor has shape {tuple(tensor.shape)}"
            )
    if op.spec is not None:
        op.spec.check(op.tensors, op.name, p2p.groups.pp.rank, op.peer, variable=p2p.variable_seq_lengths)


def _start_one(p2p: P2PCommunicator, op: P2POp) -> P2PWork:
    group = p2p.second if op.channel else p2p.groups.pp
    peer, device = group.ranks[op.peer], p2p.groups.device
    with _scope(op.name, op.phase):
        if op.operation == "send":
            shapes = [x.shape for x in op.tensors]
            sizes = [torch.tensor(shapes, dtype=torch.int64, device=device)] if p2p.variable_seq_lengths else []
            return P2PWork(op, [isend(x, group, peer) for x in sizes + _tensors_of(p2p, op)])
        assert op.spec is not None
        shapes = op.spec.shapes
        if p2p.variable_seq_lengths:
            room = torch.empty(len(shapes), 3, dtype=torch.int64, device=device)
            shapes = irecv(room, group, peer).wait().tolist()
        return P2PWork(op, [irecv(buffer, group, peer) for buffer in _buffers(p2p, op.spec, shapes)])


def _tensors_of(p2p: P2PCommunicator, op: P2POp) -> list[Tensor]:
    """Return the tensors to send, or new buffers to receive into."""
    if op.operation == "send":
        return [x.detach() for x in op.tensors]
    assert op.spec is not None
    return _buffers(p2p, op.spec, op.spec.shapes)


def _buffers(p2p: P2PCommunicator, spec: MessageSpec, shapes: Sequence[Shape]) -> list[Tensor]:
    return [torch.empty(tuple(shape), dtype=spec.dtype, device=p2p.groups.device) for shape in shapes]


def _scope(name: object, phase: str) -> AbstractContextManager[Any]:
    """Tell everyone who watches the name of the message that starts."""
    return comm_scope(layer=str(name), phase=phase) if name and watchers else nullcontext()
