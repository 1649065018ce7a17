"""Every byte that ranks exchange passes through here.

Each function takes an explicit `Group`; a group of size 1 is the identity and records nothing. Each tensor operation
has an `_async` form that returns a `Pending`; between the call and `.wait()` the transfer runs in the background.
Each call

- is written into the open `CommLedger` under the current `comm_scope` (`ledger.py`),
- names itself in the launcher's status slot while it blocks, so that a hang can be named,
- becomes Events while recording: kind `collective` from issue to completion (`send`, `recv` for messages), and kind
  `wait` for the blocking part of the asynchronous forms,
- is recorded by an emulated graph capture as a start and a wait, and made again at each replay
  (`capturing.py`).

`pending.py` holds a transfer under way. `backends.py` moves the bytes: it replaces slow algorithms of gloo, and passes
CUDA tensors on gloo through the host.

Sums over ranks are bit-identical on every rank of the group, and repeat bit-equally for the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.comm import backends
from labkit.comm.capturing import active_capture, refuse_host_sync
from labkit.comm.groups import Group
from labkit.comm.ledger import (
    CommLedger,
    CommRecord,
    Scope,
    book,
    comm_scope,
    current_scope,
    delayed,
    dropped,
    is_dropped,
)
from labkit.comm.pending import Done, Pending, start
from labkit.events import start_observers
from labkit.launch import waiting

__all__ = [
    "CommLedger",
    "CommRecord",
    "Message",
    "Pending",
    "Scope",
    "all_gather",
    "all_gather_async",
    "all_reduce",
    "all_reduce_async",
    "all_to_all",
    "all_to_all_async",
    "barrier",
    "batch",
    "broadcast",
    "broadcast_async",
    "comm_scope",
    "current_scope",
    "delayed",
    "dropped",
    "gather_objects",
    "irecv",
    "isend",
    "reduce_scatter",
    "reduce_scatter_async",
]

OPERATIONS = ("sum", "avg", "max")

P = ParamSpec("P")


def recordable(
    function: Callable[Concatenate[Tensor, Group, P], Pending],
) -> Callable[Concatenate[Tensor, Group, P], Pending]:
    """Decorator for a call that an emulated capture records. Each replay starts the call again and waits for it.

    In a group of size 1 nothing travels, and a copy that the call makes is an operation like any other.
    """

    @wraps(function)
    def started(x: Tensor, group: Group, *args: P.args, **kwargs: P.kwargs) -> Pending:
        capture = active_capture() if start_observers else None
        if capture is None or group.size == 1:
            return function(x, group, *args, **kwargs)
        return capture.transfer(function, x, group, *args, **kwargs)

    return started


def _kept(x: Tensor, out: Tensor | None) -> Tensor:
    """The result of a call without communication: x, copied into `out` if `out` is given."""
    return x if out is None else out if out.data_ptr() == x.data_ptr() else out.copy_(x)


def _unknown(op: str) -> ValueError:
    return ValueError(f"reduction {op!r} is unknown; choose one of {', '.join(OPERATIONS)}")


# ---- all-reduce ----


@recordable
def _all_reduce(x: Tensor, group: Group, op: str, in_place: bool) -> Pending:
    if op not in OPERATIONS:
        raise _unknown(op)
    if group.size == 1:
        return Done(x)
    if start_observers and is_dropped("all_reduce", group.name):
        return Done(x if in_place else x.clone())
    return start("all_reduce", x, group, lambda: backends.all_reduce(x, group, op, in_place))


def all_reduce(x: Tensor, group: Group, op: str = "sum", *, in_place: bool = True) -> Tensor:
    """Reduce x over the group (`sum`, `avg` or `max`), in place; returns x.

    With `in_place=False` x does not change, and a new tensor is returned without an extra copy. A group of size 1
    returns x itself.
    """
    return _all_reduce(x, group, op, in_place)._complete(wait_event=False)


def all_reduce_async(x: Tensor, group: Group, op: str = "sum", *, in_place: bool = True) -> Pending:
    """Start `all_reduce`; `.wait()` returns its result."""
    return _all_reduce(x, group, op, in_place)


# ---- all-gather ----


@recordable
def all_gather_async(x: Tensor, group: Group, dim: int = 0, *, out: Tensor | None = None) -> Pending:
    """Start `all_gather`; `.wait()` returns its result.

    out: contiguous; takes the result, along dimension 0. x may be this rank's part of `out`; then nothing is copied.
    """
    if group.size == 1:
        return Done(_kept(x, out))
    if is_dropped("all_gather", group.name):
        return Done(torch.cat([x] * group.size, dim=dim) if out is None else out)
    dim = dim % max(1, x.dim())

    def finish_of() -> Callable[[], Tensor]:
        finish = backends.all_gather(x, group, out)
        return lambda: _join_rows(finish(), dim) if out is None else (finish(), out)[1]

    return start("all_gather", x, group, finish_of)


def _join_rows(rows: Tensor, dim: int) -> Tensor:
    """(size, ..., n at dim, ...) -> (..., size x n at dim, ...)."""
    if rows.dim() == 1:
        return rows
    return rows.flatten(0, 1) if dim == 0 else torch.cat(rows.unbind(0), dim=dim)


def all_gather(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Concatenate the ranks' tensors, all of x's shape, along `dim` in the order of ranks; a new tensor."""
    return all_gather_async(x, group, dim)._complete(wait_event=False)


# ---- reduce-scatter ----


@recordable
def reduce_scatter_async(
    x: Tensor, group: Group, dim: int = 0, op: str = "sum", *, out: Tensor | None = None
) -> Pending:
    """Start `reduce_scatter`; `.wait()` returns its result.

    out: contiguous; takes the result. It may be this rank's part of x itself; then nothing is copied.
    """
    if op not in OPERATIONS:
        raise _unknown(op)
    if group.size == 1:
        return Done(_kept(x, out))
    if x.shape[dim] % group.size:
        raise ValueError(
            f"reduce_scatter over {group.name} cuts dimension {dim} of {tuple(x.shape)} into {group.size} equal parts: "
            f"{x.shape[dim]} must be a multiple of {group.size}"
        )
    rows = torch.stack(x.chunk(group.size, dim=dim)) if dim % x.dim() else x.unflatten(0, (group.size, -1))
    if is_dropped("reduce_scatter", group.name):
        return Done(_kept(rows[group.rank], out) if out is not None else rows[group.rank].clone())
    return start("reduce_scatter", x, group, lambda: backends.reduce_scatter(rows, group, op, out))


def reduce_scatter(x: Tensor, group: Group, dim: int = 0, op: str = "sum") -> Tensor:
    """Reduce x over the group and return this rank's part of `dim`: part r of the sum on rank r; a new tensor.

    Raises:
        ValueError: `dim` is not a multiple of the group's size.
    """
    return reduce_scatter_async(x, group, dim, op)._complete(wait_event=False)


# ---- all-to-all, broadcast ----


@recordable
def all_to_all_async(
    x: Tensor, group: Group, output_splits: Sequence[int] | None = None, input_splits: Sequence[int] | None = None
) -> Pending:
    """Start `all_to_all`; `.wait()` returns its result."""
    if group.size == 1:
        return Done(x)
    _check_splits(x, group, output_splits, input_splits)
    if is_dropped("all_to_all", group.name):
        rows = x.shape[0] if output_splits is None else sum(output_splits)
        left = x.new_zeros(max(0, rows - x.shape[0]), *x.shape[1:])
        return Done(torch.cat([x[:rows], left]))  # as many rows as expected: this rank's own, then zeros
    splits = [None if s is None else list(s) for s in (output_splits, input_splits)]
    own = x.shape[0] // group.size if input_splits is None else input_splits[group.rank]
    return start("all_to_all", x, group, lambda: backends.all_to_all(x, group, *splits), kept=x[:own].nbytes)


def _check_splits(
    x: Tensor, group: Group, output_splits: Sequence[int] | None, input_splits: Sequence[int] | None
) -> None:
    for name, splits in (("output_splits", output_splits), ("input_splits", input_splits)):
        if splits is not None and len(splits) != group.size:
            raise ValueError(f"{name} has {len(splits)} entries; group {group.name} has {group.size} ranks")
    if input_splits is not None and sum(input_splits) != x.shape[0]:
        raise ValueError(f"input_splits add up to {sum(input_splits)}; x has {x.shape[0]} rows")
    if (input_splits is None or output_splits is None) and x.shape[0] % group.size:
        raise ValueError(f"without splits the {x.shape[0]} rows of x must be a multiple of the {group.size} ranks")


def all_to_all(
    x: Tensor, group: Group, output_splits: Sequence[int] | None = None, input_splits: Sequence[int] | None = None
) -> Tensor:
    """Send rows of x to every rank, and return the rows of all ranks in the order of ranks.

    `input_splits[i]` rows go to rank i, `output_splits[i]` rows come from it; None cuts into equal parts.

    Raises:
        ValueError: splits that do not fit the group or x.
    """
    return all_to_all_async(x, group, output_splits, input_splits)._complete(wait_event=False)


@recordable
def broadcast_async(x: Tensor, group: Group, src: int = 0) -> Pending:
    """Start `broadcast`; `.wait()` returns its result."""
    if not 0 <= src < group.size:
        raise ValueError(f"src is a position in group {group.name} of {group.size} ranks, got {src}")
    if group.size == 1 or is_dropped("broadcast", group.name):
        return Done(x)
    return start("broadcast", x, group, lambda: backends.broadcast(x, group, src))


def broadcast(x: Tensor, group: Group, src: int = 0) -> Tensor:
    """Overwrite x with the tensor of the rank at position `src` of the group; returns x."""
    return broadcast_async(x, group, src)._complete(wait_event=False)


# ---- without tensors ----


def barrier(group: Group) -> None:
    """Return when every rank of the group has called it."""
    if group.size > 1:
        refuse_host_sync("barrier")
        book("barrier", group.name, group.size, 0, "none")
        with waiting(f"barrier {group.name}"):
            dist.barrier(group.process_group)


def gather_objects(obj: Any, group: Group) -> list[Any]:
    """The picklable objects of all ranks, in the order of ranks, on every rank. For small objects: results, names."""
    if group.size == 1:
        return [obj]
    refuse_host_sync("gather_objects")
    book("gather_objects", group.name, group.size, 0, "object")
    gathered: list[Any] = [None] * group.size
    with waiting(f"gather_objects {group.name}"):
        dist.all_gather_object(gathered, obj, group=group.process_group)
    return gathered


# ---- point to point: p2p.py builds on these ----


@dataclass(frozen=True, slots=True)
class Message:
    """One send or receive of a batch."""

    operation: str
    """`send` or `recv`."""
    tensor: Tensor
    """The tensor to send, or the tensor to overwrite."""
    group: Group
    """Both ranks are members."""
    peer: int
    """Global rank of the other side."""


def _check_peer(group: Group, peer: int, own: int) -> None:
    if peer not in group.ranks or peer == own:
        raise ValueError(
            f"rank {own} cannot exchange messages with rank {peer}: group {group.name} has ranks {list(group.ranks)}"
        )


@recordable
def isend(x: Tensor, group: Group, dst: int) -> Pending:
    """Start sending x to global rank `dst`. Messages between two ranks of a group arrive in the order of sending."""
    _check_peer(group, dst, group.ranks[group.rank])
    return start("send", x, group, lambda: backends.send(x, group, dst), kind="send")


@recordable
def irecv(x: Tensor, group: Group, src: int) -> Pending:
    """Start receiving from global rank `src` into x, whose shape and type must be the sender's; `.wait()` returns x."""
    _check_peer(group, src, group.ranks[group.rank])
    return start("recv", x, group, lambda: backends.recv(x, group, src), kind="recv")


def batch(messages: Sequence[Message]) -> list[Pending]:
    """Start several sends and receives at once; one Pending for each, in order.

    On NCCL they form one group call, which cannot deadlock on their order. On gloo each starts by itself. gloo cannot
    deadlock either, since nothing blocks before `wait()`.
    """
    ops = list(messages)
    if not ops or backends.on_gloo(ops[0].tensor, ops[0].group):
        return [(isend if m.operation == "send" else irecv)(m.tensor, m.group, m.peer) for m in ops]
    for m in ops:
        _check_peer(m.group, m.peer, m.group.ranks[m.group.rank])
    finishes = backends.batch_nccl([(m.operation, m.tensor, m.group, m.peer) for m in ops])
    return [start(m.operation, m.tensor, m.group, lambda f=f: f, kind=m.operation) for m, f in zip(ops, finishes)]
