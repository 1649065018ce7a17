"""The collectives and messages by which ranks exchange tensors.

Each function takes an explicit `Group`; a group of size 1 is the identity and records nothing. Each tensor operation
has an `_async` form that returns a `Pending`; between the call and `.wait()` the transfer runs in the background.

All but `barrier` and `gather_objects` go through `issue`. It calls the function of `gloo.py` or `nccl.py` that moves
the bytes, and returns the `Pending` that waits for it (`pending.py`). Whenever a call blocks, it writes its name into
the launcher's status slot, so that the report of a hang can name it. While somebody watches (`labkit.events.watchers`),
a call also

- is made again at each replay of an emulated graph capture (`capturing.py`),
- may be changed by `dropped` and `delayed` blocks (`fault_injection.py`),
- is written into the open `CommLedger` under the current `comm_scope` (`ledger.py`),
- becomes an arrow of an open `Motion` (`motion.py`),
- becomes Events: kind `collective` from issue to completion (`send`, `recv` for messages), and kind `wait` for the
  blocking part of the asynchronous forms.

Sums over ranks are bit-identical on every rank of the group, and repeat bit-equally for the same shapes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from labkit.comm import gloo, nccl
from labkit.comm.capturing import active_capture, refuse_host_sync
from labkit.comm.fault_injection import dropped_result, due_time, started_in_due_time
from labkit.comm.groups import Group
from labkit.comm.handshake import checked_by_torch
from labkit.comm.ledger import book, dtype_name
from labkit.comm.motion import noted
from labkit.comm.pending import Done, Finish, Pending
from labkit.events import ranged, watchers
from labkit.launch import waiting

OPERATIONS = ("sum", "avg", "max")

# ---- the start of every transfer ----


def issue(
    operation: str, move: Callable[..., Finish], x: Tensor, group: Group, *details: Any, kept: int = 0
) -> Pending:
    """Start a transfer, by `move(x, group, *details)`, and return its `Pending`.

    operation: its name for ledger and Events.
    move: a function of `gloo.py` or `nccl.py`.
    kept: bytes of x that stay on this rank, for the ledger.
    """
    if watchers or _start_may_block(x):
        return _issue_guarded(operation, move, x, group, *details, kept=kept)
    return Pending(operation, x, group, move(x, group, *details))


def _issue_guarded(
    operation: str, move: Callable[..., Finish], x: Tensor, group: Group, *details: Any, kept: int = 0
) -> Pending:
    """Start a transfer like `issue`, but for all who watch, and with the call's name in the status slot."""
    if (capture := active_capture()) is not None:  # it makes this call now, and again at each replay
        return capture.transfer(issue, operation, move, x, group, *details, kept=kept)
    if (own := dropped_result(operation, x, group, *details)) is not None:
        return Done(own)
    book(operation, group, x.nbytes, dtype_name(x.dtype), kept)
    pending = Pending(operation, x, group)
    pending.due = due_time(operation, group, x.nbytes)
    with ranged(pending.name), waiting(pending.label):
        finish = started_in_due_time(
            lambda: move(x, group, *details), pending.due, leaves_late=operation == "send" and not x.is_cuda
        )
        pending.finish = noted(operation, finish, x, group, details)
    return pending


_CONNECTS_LAZILY = os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0")
"""gloo connects with the first message instead of where a group is made."""


def _start_may_block(x: Tensor) -> bool:
    """Return True if the start of a transfer of x can wait for another rank.

    Staging waits for a GPU, NCCL connects lazily, and torch's debug mode first compares calls. Every other start
    returns at once.
    """
    return x.is_cuda or _CONNECTS_LAZILY or checked_by_torch()


def backend(x: Tensor, group: Group) -> ModuleType:
    """Return `gloo.py` or `nccl.py`: host tensors travel by gloo, CUDA tensors too if the group has nothing else."""
    return gloo if not x.is_cuda or dist.get_backend(group.process_group) == "gloo" else nccl


# ---- all-reduce ----


def all_reduce(x: Tensor, group: Group, op: str = "sum", *, in_place: bool = True) -> Tensor:
    """Reduce x over the group (`sum`, `avg` or `max`), in place; returns x.

    With `in_place=False` x does not change, and a new tensor is returned without an extra copy. A group of size 1
    returns x itself.
    """
    return all_reduce_async(x, group, op, in_place=in_place).wait(event=False)


def all_reduce_async(x: Tensor, group: Group, op: str = "sum", *, in_place: bool = True) -> Pending:
    """Start `all_reduce`; `.wait()` returns its result."""
    _check_reduction(op)
    if group.size == 1:
        return Done(x)
    return issue("all_reduce", backend(x, group).all_reduce, x, group, op, in_place)


def _check_reduction(op: str) -> None:
    if op not in OPERATIONS:
        raise ValueError(f"reduction {op!r} is unknown; choose one of {', '.join(OPERATIONS)}")


# ---- all-gather, reduce-scatter ----


def all_gather(x: Tensor, group: Group, dim: int = 0, *, sizes: Sequence[int] | None = None) -> Tensor:
    """Concatenate the ranks' tensors along `dim` in the order of ranks, in a new tensor.

    sizes: rows of each rank, if they differ; then `dim` is 0. Tensor-parallel experts receive different numbers of
        tokens, and every rank knows all of them. Without `sizes` all tensors have x's shape.

    Raises:
        ValueError: sizes that do not fit the group or x.
    """
    return all_gather_async(x, group, dim, sizes=sizes).wait(event=False)


def all_gather_async(
    x: Tensor, group: Group, dim: int = 0, *, sizes: Sequence[int] | None = None, out: Tensor | None = None
) -> Pending:
    """Start `all_gather`; `.wait()` returns its result.

    out: contiguous tensor for the result, along dimension 0. If x is this rank's part of `out`, nothing is copied.
    """
    dim = dim % max(1, x.dim())
    if group.size == 1:
        return Done(_alone(x, out))
    if sizes is not None:
        _check_sizes(group, sizes, dim, out)
        if sizes[group.rank] != len(x):
            raise ValueError(f"sizes gives this rank {sizes[group.rank]} rows; x has {len(x)}")
    return issue("all_gather", backend(x, group).all_gather, x, group, dim, sizes, out)


def reduce_scatter(
    x: Tensor, group: Group, dim: int = 0, op: str = "sum", *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Reduce x over the group and return this rank's part of `dim`: part r of the sum on rank r; a new tensor.

    sizes: rows of each rank's part, if they differ; then `dim` is 0. Without `sizes` all parts are equal.

    Raises:
        ValueError: `dim` is not a multiple of the group's size, or sizes that do not fit the group or x.
    """
    return reduce_scatter_async(x, group, dim, op, sizes=sizes).wait(event=False)


def reduce_scatter_async(
    x: Tensor,
    group: Group,
    dim: int = 0,
    op: str = "sum",
    *,
    sizes: Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Pending:
    """Start `reduce_scatter`; `.wait()` returns its result.

    out: contiguous tensor for the result. If it is this rank's part of x itself, nothing is copied.
    """
    _check_reduction(op)
    if group.size == 1:
        return Done(_alone(x, out))
    dim = dim % x.dim()
    if sizes is not None:
        _check_sizes(group, sizes, dim, out)
        if sum(sizes) != len(x):
            raise ValueError(f"sizes add up to {sum(sizes)}; x has {len(x)} rows")
    elif x.shape[dim] % group.size:
        raise ValueError(
            f"reduce_scatter over {group.name} cuts dimension {dim} of {tuple(x.shape)} into {group.size} equal parts: "
            f"{x.shape[dim]} must be a multiple of {group.size}"
        )
    return issue("reduce_scatter", backend(x, group).reduce_scatter, x, group, dim, op, sizes, out)


def _alone(x: Tensor, out: Tensor | None) -> Tensor:
    """Return the result in a group of size 1: x, copied into `out` if `out` is given."""
    return x if out is None else out if out.data_ptr() == x.data_ptr() else out.copy_(x)


def _check_sizes(group: Group, sizes: Sequence[int], dim: int, out: Tensor | None) -> None:
    assert dim == 0 and out is None, "parts of unequal sizes are rows, and make a new tensor"
    if len(sizes) != group.size:
        raise ValueError(f"sizes has {len(sizes)} entries; group {group.name} has {group.size} ranks")


# ---- all-to-all, broadcast ----


def all_to_all(
    x: Tensor, group: Group, output_splits: Sequence[int] | None = None, input_splits: Sequence[int] | None = None
) -> Tensor:
    """Send rows of x to every rank, and return the rows of all ranks in the order of ranks.

    `input_splits[i]` rows go to rank i, `output_splits[i]` rows come from it; None cuts into equal parts.

    Raises:
        ValueError: splits that do not fit the group or x.
    """
    return all_to_all_async(x, group, output_splits, input_splits).wait(event=False)


def all_to_all_async(
    x: Tensor, group: Group, output_splits: Sequence[int] | None = None, input_splits: Sequence[int] | None = None
) -> Pending:
    """Start `all_to_all`; `.wait()` returns its result."""
    if group.size == 1:
        return Done(x)
    _check_splits(x, group, output_splits, input_splits)
    splits = [None if s is None else list(s) for s in (output_splits, input_splits)]
    stay = x.shape[0] // group.size if input_splits is None else input_splits[group.rank]
    kept = stay * prod(x.shape[1:]) * x.element_size()
    return issue("all_to_all", backend(x, group).all_to_all, x, group, *splits, kept=kept)


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


def broadcast(x: Tensor, group: Group, src: int = 0) -> Tensor:
    """Overwrite x with the tensor of the rank at position `src` of the group; returns x."""
    return broadcast_async(x, group, src).wait(event=False)


def broadcast_async(x: Tensor, group: Group, src: int = 0) -> Pending:
    """Start `broadcast`; `.wait()` returns its result."""
    if not 0 <= src < group.size:
        raise ValueError(f"src is a position in group {group.name} of {group.size} ranks, got {src}")
    if group.size == 1:
        return Done(x)
    return issue("broadcast", backend(x, group).broadcast, x, group, src)


# ---- without tensors ----


def barrier(group: Group) -> None:
    """Return when every rank of the group has called it."""
    if group.size > 1:
        refuse_host_sync("barrier")
        book("barrier", group)
        with waiting(f"barrier {group.name}"):
            dist.barrier(group.process_group)


def gather_objects(obj: Any, group: Group) -> list[Any]:
    """Return the picklable objects of all ranks, in the order of ranks, on every rank. They should be small."""
    if group.size == 1:
        return [obj]
    refuse_host_sync("gather_objects")
    book("gather_objects", group, dtype="object")
    gathered: list[Any] = [None] * group.size
    with waiting(f"gather_objects {group.name}"):
        dist.all_gather_object(gathered, obj, group=group.process_group)
    return gathered


# ---- point to point: p2p.py builds on these ----


def isend(x: Tensor, group: Group, dst: int) -> Pending:
    """Start sending x to global rank `dst`. Messages between two ranks of a group arrive in the order of sending."""
    _check_peer(group, dst)
    return issue("send", backend(x, group).send, x, group, dst)


def irecv(x: Tensor, group: Group, src: int) -> Pending:
    """Start receiving from global rank `src` into x, whose shape and type must be the sender's; `.wait()` returns x."""
    _check_peer(group, src)
    return issue("recv", backend(x, group).recv, x, group, src)


def _check_peer(group: Group, peer: int) -> None:
    own = group.ranks[group.rank]
    if peer not in group.ranks or peer == own:
        raise ValueError(
            f"rank {own} cannot exchange messages with rank {peer}: group {group.name} has ranks {list(group.ranks)}"
        )


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


def batch(messages: Sequence[Message]) -> list[Pending]:
    """Start several sends and receives at once; one Pending for each, in order.

    On NCCL they form one group call, which cannot deadlock on their order. On gloo each starts by itself, and cannot
    deadlock either, since nothing blocks before `wait()`.
    """
    if not messages or backend(messages[0].tensor, messages[0].group) is gloo:
        return [(isend if m.operation == "send" else irecv)(m.tensor, m.group, m.peer) for m in messages]
    for m in messages:
        _check_peer(m.group, m.peer)
    finishes = nccl.batch([(m.operation, m.tensor, m.group, m.peer) for m in messages])
    return [
        issue(m.operation, lambda *_, f=f: f, m.tensor, m.group, m.peer)
        for m, f in zip(messages, finishes, strict=True)
    ]
