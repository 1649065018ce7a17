"""Collectives and messages on gloo, which carries host tensors, and CUDA tensors through pinned host memory.

Every function starts a transfer and returns a function that finishes it: this one waits, reduces locally if it must,
and returns the result. In between, gloo's own threads move the data. `nccl.py` has the same functions.

Another algorithm replaces gloo's own if gloo's is slow (measured on two cores, torch 2.13):

- All-reduce: up to 1 MiB two ranks exchange and add, which is up to 2 times faster on an idle machine. Beyond that
  gloo's own is equal or faster. Both ranks get the same bits, because IEEE addition commutes.
- Reduce-scatter: gloo emulates it by an all-reduce of everything. So two ranks exchange halves, and more ranks do an
  all-to-all. Each rank then adds the parts in the order of ranks, so the result does not depend on timing.
- All-gather: two ranks exchange. gloo has no all-gather of parts of unequal size, so these take an all-to-all that
  sends the same rows to everyone, as many bytes as any other gather.

Sums of bfloat16 and float16 are taken in float32 and rounded once, for any number of ranks, because gloo by itself
would round after every addition.

Under `TORCH_DISTRIBUTED_DEBUG=DETAIL` the plain torch collectives run instead. torch checks these, and only these, for
calls that do not fit each other. `handshake.py` checks messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.comm.capturing import refuse_host_sync
from labkit.comm.groups import Group
from labkit.comm.handshake import check_message, checked_by_torch
from labkit.comm.nccl import arriving, gather_into, join
from labkit.comm.pending import Finish

EXCHANGE_TAG = 7391
"""Keeps the messages of exchanges apart from point-to-point messages (tag 0) of the same two ranks."""

EXCHANGE_LIMIT = 1 << 20
"""Two ranks exchange up to this many bytes by a message each way, which starts fastest. Beyond, gloo's own collectives
use less of the processor: the calling thread does not copy, so it does not compete with the other rank's copy."""

_HALF = (torch.bfloat16, torch.float16)


# ---- host memory ----


def to_host(x: Tensor) -> Tensor:
    """Return x itself if it is in host memory, else a copy in pinned host memory, after a wait for the copy."""
    if not x.is_cuda:
        return x
    refuse_host_sync("a collective of CUDA tensors over gloo")
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x)


def host_buffer(x: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Return an empty host tensor of x's type, pinned if x is on a GPU."""
    return torch.empty(shape, dtype=x.dtype, pin_memory=x.is_cuda)


# ---- the exchange of two ranks ----


def _exchange(send: Tensor, received: Tensor, group: Group) -> list[Any]:
    """Send a flat tensor to the other rank of two, and receive its counterpart. Returns the works to wait for.

    A send through the process group skips the checks of `dist.isend`, which cost 40 us after a rank has slept.
    """
    peer, handle = 1 - group.rank, group.process_group
    if send.nbytes > EXCHANGE_LIMIT:
        splits = [0, 0]
        splits[peer] = send.numel()
        return [dist.all_to_all_single(received, send, splits, splits, group=handle, async_op=True)]
    return [handle.send([send], peer, EXCHANGE_TAG), handle.recv([received], peer, EXCHANGE_TAG)]


def _exchange_and_reduce(send: Tensor, mine: Tensor, out: Tensor | None, group: Group, op: str) -> Finish:
    """Reduce `mine` with the flat tensor of the other rank, into `out` (may be `mine`) or into a new tensor."""
    received = torch.empty_like(mine)
    works = _exchange(send, received, group)
    target = received if out is None else out

    def finish() -> Tensor:
        for work in works:
            work.wait()
        if op == "max":
            torch.maximum(mine, received, out=target)
        else:
            torch.add(mine, received, out=target)
        return target.mul_(0.5) if op == "avg" else target

    return finish


# ---- collectives ----


def all_reduce(x: Tensor, group: Group, op: str, in_place: bool) -> Finish:
    """Start the reduction of x over the group; the result replaces x or is a new tensor."""
    direct = not x.is_cuda and x.is_contiguous()
    host = x if direct else to_host(x).contiguous()
    if group.size == 2 and host.nbytes <= EXCHANGE_LIMIT and not checked_by_torch():
        flat = host.view(-1)
        finish_host = _exchange_and_reduce(flat, flat, flat if in_place and direct else None, group, op)
    else:
        finish_host = _whole_all_reduce(host, group, op, in_place and direct)

    def finish() -> Tensor:
        reduced = finish_host().view(x.shape)
        if in_place:
            return x if direct else x.copy_(reduced)
        return reduced.to(x.device, non_blocking=True) if x.is_cuda else reduced

    return finish


def _whole_all_reduce(host: Tensor, group: Group, op: str, in_place: bool) -> Finish:
    """Start gloo's own all-reduce; half precision travels as float32."""
    half = host.dtype in _HALF
    buffer = host.float() if half else (host if in_place else host.clone())
    gloo_op = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
    work: Any = dist.all_reduce(buffer, op=gloo_op, group=group.process_group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        if op == "avg":
            buffer.div_(group.size)
        if not half:
            return buffer
        return host.copy_(buffer) if in_place else buffer.to(host.dtype)

    return finish


def all_gather(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None, out: Tensor | None) -> Finish:
    """Start gathering along `dim`, or along dimension 0 if rank r has `sizes[r]` rows; into `out` if it is given.

    x may be this rank's part of `out`.
    """
    if sizes is not None:
        everyone = x.expand(group.size, *x.shape).flatten(0, 1)
        return all_to_all(everyone, group, sizes, [len(x)] * group.size)
    shape = (group.size, *x.shape)
    given = None if out is None else out.view(shape)
    host = to_host(x).contiguous()
    parts = host_buffer(x, shape) if given is None or x.is_cuda else given
    if group.size == 2 and not checked_by_torch():
        works = _exchange(host.view(-1), parts[1 - group.rank].view(-1), group)
        if parts[group.rank].data_ptr() != host.data_ptr():
            parts[group.rank].copy_(host)
    else:
        works = [gather_into(parts.view(-1), host.view(-1), group=group.process_group, async_op=True)]

    def finish() -> Tensor:
        for work in works:
            work.wait()
        if given is not None and x.is_cuda:
            given.copy_(parts, non_blocking=True)
        if out is not None:
            return out
        return join(parts.to(x.device, non_blocking=True) if x.is_cuda else parts, dim)

    return finish


def reduce_scatter(
    x: Tensor, group: Group, dim: int, op: str, sizes: Sequence[int] | None, out: Tensor | None
) -> Finish:
    """Start reducing x so that rank r keeps part r of `dim`, or `sizes[r]` rows; in `out` if it is given.

    `out` may be part r of x itself.
    """
    if sizes is not None:
        own = sizes[group.rank]
        finish_rows = all_to_all(x, group, [own] * group.size, sizes)
        return lambda: _reduced_in_order(finish_rows().unflatten(0, (group.size, own)), op)
    parts = x.unflatten(0, (group.size, -1)) if dim == 0 else torch.stack(x.chunk(group.size, dim))
    shape, host = parts.shape[1:], to_host(parts).contiguous()
    if group.size == 2 and not checked_by_torch():
        target = None if out is None or x.is_cuda else out.view(-1)
        theirs, mine = host[1 - group.rank].reshape(-1), host[group.rank].reshape(-1)
        finish_host = _exchange_and_reduce(theirs, mine, target, group, op)
    else:
        finish_host = _reduce_after_all_to_all(host, group, op)

    def finish() -> Tensor:
        own = finish_host().view(shape)
        if out is not None:
            kept = out.view(shape)
            return kept if kept.data_ptr() == own.data_ptr() else kept.copy_(own, non_blocking=True)
        return own.to(x.device, non_blocking=True) if x.is_cuda else own

    return finish


def _reduce_after_all_to_all(parts: Tensor, group: Group, op: str) -> Finish:
    """Send part r to rank r, and reduce what comes."""
    came = torch.empty_like(parts)
    work: Any = dist.all_to_all_single(came, parts, group=group.process_group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return _reduced_in_order(came, op)

    return finish


def _reduced_in_order(parts: Tensor, op: str) -> Tensor:
    """Reduce the parts of all ranks in the order of ranks: (size, ...) -> (...). May overwrite them."""
    total = parts[0].float() if parts.dtype in _HALF else parts[0]
    for part in parts[1:]:
        total = torch.maximum(total, part, out=total) if op == "max" else total.add_(part)
    if op == "avg":
        total.div_(len(parts))
    return total.to(parts.dtype)


def all_to_all(
    x: Tensor, group: Group, output_splits: Sequence[int] | None, input_splits: Sequence[int] | None
) -> Finish:
    """Start sending rows of x: split i (equal ones if None) goes to rank i; the parts arrive ordered by rank."""
    rows = x.shape[0] if output_splits is None else sum(output_splits)
    host, result = to_host(x).contiguous(), host_buffer(x, (rows, *x.shape[1:]))
    splits: Any = (output_splits, input_splits)
    work: Any = dist.all_to_all_single(result, host, *splits, group=group.process_group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return result.to(x.device, non_blocking=True) if x.is_cuda else result

    return finish


def broadcast(x: Tensor, group: Group, src: int) -> Finish:
    """Start overwriting x with the tensor of the rank at position `src` of the group."""
    direct = not x.is_cuda and x.is_contiguous()
    host = x if direct else to_host(x).contiguous()
    return arriving(x, host, dist.broadcast(host, group=group.process_group, group_src=src, async_op=True))


# ---- messages ----


def send(x: Tensor, group: Group, dst: int) -> Finish:
    """Start sending x to global rank `dst`."""
    host = to_host(x).contiguous()
    check_message("send", host, group.process_group, dst)
    work = group.process_group.send([host], group.ranks.index(dst), 0)
    return lambda: (work.wait(), x, host)[1]  # the closure keeps the copy alive until the send ends


def recv(x: Tensor, group: Group, src: int) -> Finish:
    """Start receiving into x from global rank `src`."""
    direct = not x.is_cuda and x.is_contiguous()
    host = x if direct else host_buffer(x, x.shape)
    check_message("recv", host, group.process_group, src)
    return arriving(x, host, group.process_group.recv([host], group.ranks.index(src), 0))
