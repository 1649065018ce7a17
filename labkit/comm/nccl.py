"""Collectives and messages on NCCL: torch's own functions.

Every function starts a transfer on NCCL's stream and returns a function that finishes it: this one makes the current
stream wait, not the host, and returns the result. `gloo.py` has the same functions. NCCL rounds sums as NCCL does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.comm.groups import Group
from labkit.comm.handshake import check_message
from labkit.comm.pending import Finish

_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}

# torch 2.13 gave both a new name, and every rank that calls the old name prints a warning
gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(x: Tensor, group: Group, op: str, in_place: bool) -> Finish:
    """Start the reduction of x over the group; the result replaces x or is a new tensor."""
    result = x if in_place and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    work: Any = dist.all_reduce(result, op=_OPS[op], group=group.process_group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return x.copy_(result) if in_place and result is not x else result

    return finish


def all_gather(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None, out: Tensor | None) -> Finish:
    """Start gathering along `dim`, or along dimension 0 if rank r has `sizes[r]` rows; into `out` if it is given."""
    handle = group.process_group
    if sizes is not None:
        joined = x.new_empty(sum(sizes), *x.shape[1:])
        work: Any = dist.all_gather(list(joined.split(list(sizes))), x.contiguous(), group=handle, async_op=True)
        return lambda: (work.wait(), joined)[1]
    shape = (group.size, *x.shape)
    parts = x.new_empty(shape) if out is None else out.view(shape)
    work = gather_into(parts, x.contiguous(), group=handle, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return join(parts, dim) if out is None else out

    return finish


def join(parts: Tensor, dim: int) -> Tensor:
    """Join the parts of all ranks: (size, ..., n at dim, ...) -> (..., size x n at dim, ...)."""
    if parts.dim() == 1:
        return parts
    return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(0), dim=dim)


def reduce_scatter(
    x: Tensor, group: Group, dim: int, op: str, sizes: Sequence[int] | None, out: Tensor | None
) -> Finish:
    """Start reducing x so that rank r keeps part r of `dim`, or `sizes[r]` rows; in `out` if it is given."""
    handle = group.process_group
    if sizes is not None:
        parts = list(x.contiguous().split(list(sizes)))
        own = torch.empty_like(parts[group.rank])
        work: Any = dist.reduce_scatter(own, parts, op=_OPS[op], group=handle, async_op=True)
    else:
        parts = x.chunk(group.size, dim)
        own = x.new_empty(parts[0].shape) if out is None else out.view(parts[0].shape)
        whole = x.contiguous() if dim == 0 else torch.cat(parts)
        work = _reduce_scatter_into(own, whole, op=_OPS[op], group=handle, async_op=True)
    return lambda: (work.wait(), own)[1]


def all_to_all(
    x: Tensor, group: Group, output_splits: Sequence[int] | None, input_splits: Sequence[int] | None
) -> Finish:
    """Start sending rows of x: split i (equal ones if None) goes to rank i; the parts arrive ordered by rank."""
    rows = x.shape[0] if output_splits is None else sum(output_splits)
    result = x.new_empty(rows, *x.shape[1:])
    splits: Any = (output_splits, input_splits)
    work: Any = dist.all_to_all_single(result, x.contiguous(), *splits, group=group.process_group, async_op=True)
    return lambda: (work.wait(), result)[1]


def broadcast(x: Tensor, group: Group, src: int) -> Finish:
    """Start overwriting x with the tensor of the rank at position `src` of the group."""
    buffer = x if x.is_contiguous() else x.contiguous()
    return arriving(x, buffer, dist.broadcast(buffer, group=group.process_group, group_src=src, async_op=True))


def send(x: Tensor, group: Group, dst: int) -> Finish:
    """Start sending x to global rank `dst`."""
    source = x.contiguous()
    check_message("send", source, group.process_group, dst)
    work = group.process_group.send([source], group.ranks.index(dst), 0)
    return lambda: (work.wait(), x, source)[1]  # the closure keeps the copy alive until the send ends


def recv(x: Tensor, group: Group, src: int) -> Finish:
    """Start receiving into x from global rank `src`."""
    buffer = x if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)
    check_message("recv", buffer, group.process_group, src)
    return arriving(x, buffer, group.process_group.recv([buffer], group.ranks.index(src), 0))


def arriving(x: Tensor, buffer: Tensor, work: Any) -> Finish:
    """Return what waits for `work`, and then copies the buffer into x unless it is x."""

    def finish() -> Tensor:
        work.wait()
        return x if buffer is x else x.copy_(buffer)

    return finish


def batch(ops: Sequence[tuple[str, Tensor, Group, int]]) -> list[Finish]:
    """Start sends and receives as one NCCL group call, which cannot deadlock on their order.

    ops: `send` or `recv`, the tensor, the group, and the global rank of the other side.
    """
    kinds = {"send": dist.isend, "recv": dist.irecv}
    works = dist.batch_isend_irecv(
        [dist.P2POp(kinds[kind], x, peer, group.process_group) for kind, x, group, peer in ops]
    )

    def finisher(x: Tensor) -> Finish:
        def finish() -> Tensor:
            for work in works:
                work.wait()
            return x

        return finish

    return [finisher(x) for _, x, _, _ in ops]
