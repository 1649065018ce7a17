"""The algorithm of each collective on gloo and on NCCL; `collectives.py` and its neighbours call them.

Every function starts the transfer and returns a function that finishes it: this one waits, reduces locally if it must,
and returns the result. In between, gloo's own threads (or NCCL's stream) move the data.

Another algorithm replaces gloo's own if gloo's is slow (measured on two cores, torch 2.13):

- All-reduce of two ranks up to 1 MiB: exchange and add, up to 2 times faster on an idle machine. Beyond, gloo's own is
  equal or faster. Both ranks get the same bits, because IEEE addition commutes.
- Reduce-scatter: gloo emulates it by an all-reduce of everything. Two ranks exchange halves; more ranks do an
  all-to-all. Each rank then adds the parts in the order of ranks, so the result does not depend on timing.
- All-gather of two ranks: exchange.

Sums of bfloat16 and float16 are taken in float32 and rounded once, for any number of ranks. gloo by itself would round
after every addition. NCCL rounds as NCCL does. CUDA tensors on gloo pass through pinned host memory.

Under `TORCH_DISTRIBUTED_DEBUG=DETAIL` the plain torch collectives run instead. torch checks these, and only these, for
calls that do not fit each other. `handshake.py` checks messages.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import DebugLevel, get_debug_level

from labkit.comm.capturing import refuse_host_sync
from labkit.comm.groups import Group
from labkit.comm.handshake import check_message

Finish = Callable[[], Tensor]

EXCHANGE_TAG = 7391
"""Keeps the messages of exchanges apart from point-to-point messages (tag 0) of the same two ranks."""

EXCHANGE_LIMIT = 1 << 20
"""Two ranks exchange up to this many bytes by a message each way, which starts fastest. Beyond, gloo's own collectives
use less of the processor: the calling thread does not copy, so it does not compete with the other rank's copy."""

_NCCL_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}
_HALF = (torch.bfloat16, torch.float16)

# torch 2.13 gave both a new name, and every rank that calls the old name prints a warning
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def on_gloo(x: Tensor, group: Group) -> bool:
    """True if this tensor travels by gloo: host tensors always, CUDA tensors if the group has nothing else."""
    return not x.is_cuda or dist.get_backend(group.process_group) == "gloo"


def to_host(x: Tensor) -> Tensor:
    """The tensor itself if it lies in host memory, else a copy in pinned host memory. Waits for the copy."""
    if not x.is_cuda:
        return x
    refuse_host_sync("a collective of CUDA tensors over gloo")
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x)


def host_buffer(x: Tensor, shape: tuple[int, ...] | torch.Size | None = None) -> Tensor:
    """An empty host tensor of x's type, pinned if x is on a GPU."""
    return torch.empty(x.shape if shape is None else shape, dtype=x.dtype, pin_memory=x.is_cuda)


_LAZY = os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0")
"""gloo connects with the first message instead of where a group is made."""


def start_may_block(x: Tensor) -> bool:
    """True if the start of a transfer of x can wait for another rank.

    Staging waits for a GPU, NCCL connects lazily, and torch's debug mode first compares calls. Every other start
    returns at once.
    """
    return x.is_cuda or host_start_may_block()


def host_start_may_block() -> bool:
    """`start_may_block` for every tensor in host memory; a constant of the process."""
    return _LAZY or _checked_by_torch()


@cache
def _checked_by_torch() -> bool:
    """True in torch's debug mode, which is fixed when a group is made. Cached, because torch's answer is slow."""
    return get_debug_level() == DebugLevel.DETAIL


def _reduce_into(total: Tensor, part: Tensor, op: str) -> Tensor:
    return torch.maximum(total, part, out=total) if op == "max" else total.add_(part)


def _start_exchange(send: Tensor, received: Tensor, group: Group) -> list[Any]:
    """Send a flat tensor to the other rank of two, and receive its counterpart. Returns the works to wait for."""
    peer, handle = 1 - group.rank, process_group_of(group)
    if send.nbytes > EXCHANGE_LIMIT:
        splits = [0, 0]
        splits[peer] = send.numel()
        return [dist.all_to_all_single(received, send, splits, splits, group=handle, async_op=True)]
    return [handle.send([send], peer, EXCHANGE_TAG), handle.recv([received], peer, EXCHANGE_TAG)]


def _exchange_and_reduce(send: Tensor, mine: Tensor, out: Tensor | None, group: Group, op: str) -> Finish:
    """Reduce `mine` with the flat tensor of the other rank, into `out` (may be `mine`) or into a new tensor."""
    received = torch.empty_like(mine)
    works = _start_exchange(send, received, group)
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


def all_reduce(x: Tensor, group: Group, op: str, in_place: bool) -> Finish:
    """Start the reduction of x over the group; the result replaces x or is a new tensor."""
    if not on_gloo(x, group):
        result = x if in_place and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
        work: Any = dist.all_reduce(result, op=_NCCL_OPS[op], group=group.process_group, async_op=True)

        def finish_nccl() -> Tensor:
            work.wait()
            return x.copy_(result) if in_place and result is not x else result

        return finish_nccl

    direct = not x.is_cuda and x.is_contiguous()
    host = x if direct else to_host(x).contiguous()
    small = host.numel() * host.element_size() <= EXCHANGE_LIMIT
    if group.size == 2 and small and not _checked_by_torch():
        flat = host.view(-1)
        finish = _exchange_and_reduce(flat, flat, flat if in_place and direct else None, group, op)
    else:
        finish = _gloo_all_reduce(host, group, op, in_place and direct)

    def finish_gloo() -> Tensor:
        reduced = finish().view(x.shape)
        if in_place:
            return x if direct else x.copy_(reduced)
        return reduced.to(x.device, non_blocking=True) if x.is_cuda else reduced

    return finish_gloo


def _gloo_all_reduce(host: Tensor, group: Group, op: str, in_place: bool) -> Finish:
    """gloo's ring; half precision travels as float32."""
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


def all_gather(x: Tensor, group: Group, out: Tensor | None = None) -> Finish:
    """Start gathering equal tensors; the result is (size, *x.shape), ordered by rank.

    `out`, if given, takes the result: contiguous, with as many elements. x may be this rank's part of `out`.
    """
    shape = (group.size, *x.shape)
    handle = group.process_group
    given = None if out is None else out.view(shape)
    if not on_gloo(x, group):
        gathered = x.new_empty(shape) if given is None else given
        work: Any = _gather_into(gathered, x.contiguous(), group=handle, async_op=True)
        return lambda: (work.wait(), gathered)[1]
    host = to_host(x).contiguous()
    gathered = host_buffer(x, shape) if given is None or x.is_cuda else given
    if group.size == 2 and not _checked_by_torch():
        works = _start_exchange(host.view(-1), gathered[1 - group.rank].view(-1), group)
        if gathered[group.rank].data_ptr() != host.data_ptr():
            gathered[group.rank].copy_(host)
    else:
        works = [_gather_into(gathered.view(-1), host.view(-1), group=handle, async_op=True)]

    def finish() -> Tensor:
        for work in works:
            work.wait()  # type: ignore[union-attr]
        if not x.is_cuda:
            return gathered
        return gathered.to(x.device, non_blocking=True) if given is None else given.copy_(gathered, non_blocking=True)

    return finish


def reduce_scatter(x: Tensor, group: Group, op: str, out: Tensor | None = None) -> Finish:
    """Start reducing x, whose first dimension is the group's size, so that rank r keeps row r.

    `out`, if given, takes the row: contiguous, maybe row r of x itself.
    """
    handle = group.process_group
    if not on_gloo(x, group):
        row = x.new_empty(x.shape[1:]) if out is None else out.view(x.shape[1:])
        work: Any = _reduce_scatter_into(
            row,
            x.contiguous().flatten(0, 1) if x.dim() > 1 else x.contiguous(),
            op=_NCCL_OPS[op],
            group=handle,
            async_op=True,
        )
        return lambda: (work.wait(), row)[1]
    host = to_host(x).contiguous()
    target = None if out is None or x.is_cuda else out.view(-1)
    if group.size == 2 and not _checked_by_torch():
        finish = _reduce_pair(host, group, op, target)
    else:
        finish = _reduce_many(host, group, op)

    def finish_gloo() -> Tensor:
        row = finish().view(x.shape[1:])
        if out is not None:
            kept = out.view(x.shape[1:])
            return kept if kept.data_ptr() == row.data_ptr() else kept.copy_(row, non_blocking=True)
        return row.to(x.device, non_blocking=True) if x.is_cuda else row

    return finish_gloo


def _reduce_pair(host: Tensor, group: Group, op: str, out: Tensor | None) -> Finish:
    return _exchange_and_reduce(host[1 - group.rank].reshape(-1), host[group.rank].reshape(-1), out, group, op)


def _reduce_many(host: Tensor, group: Group, op: str) -> Finish:
    parts = torch.empty_like(host)
    work: Any = dist.all_to_all_single(parts, host, group=group.process_group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        total = parts[0].float() if host.dtype in _HALF else parts[0]
        for part in parts[1:]:
            total = _reduce_into(total, part, op)
        if op == "avg":
            total.div_(group.size)
        return total.to(host.dtype)

    return finish


def all_to_all(x: Tensor, group: Group, output_splits: list[int] | None, input_splits: list[int] | None) -> Finish:
    """Start sending rows of x: split i (equal ones if None) goes to rank i; the parts arrive ordered by rank."""
    rows = x.shape[0] if output_splits is None else sum(output_splits)
    staged = x.is_cuda and on_gloo(x, group)
    source = to_host(x).contiguous() if staged else x.contiguous()
    shape = (rows, *x.shape[1:])
    result = host_buffer(x, shape) if staged else x.new_empty(shape)
    work: Any = dist.all_to_all_single(
        result, source, output_splits, input_splits, group=group.process_group, async_op=True
    )

    def finish() -> Tensor:
        work.wait()
        return result.to(x.device, non_blocking=True) if staged else result

    return finish


def broadcast(x: Tensor, group: Group, src: int) -> Finish:
    """Start overwriting x with the tensor of the rank at position `src` of the group."""
    staged = x.is_cuda and on_gloo(x, group)
    direct = not staged and x.is_contiguous()
    buffer = x if direct else (to_host(x) if staged else x).contiguous()
    work: Any = dist.broadcast(buffer, group=group.process_group, group_src=src, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return x if direct else x.copy_(buffer)

    return finish


def process_group_of(group: Group) -> dist.ProcessGroup:
    """The group's process group. A send through it skips the checks of `dist.isend`, 40 us after a rank has slept."""
    assert group.process_group is not None, f"{group.name} has no process group"
    return group.process_group


def send(x: Tensor, group: Group, dst: int) -> Finish:
    """Start sending x to global rank `dst`."""
    source = (to_host(x) if x.is_cuda and on_gloo(x, group) else x).contiguous()
    if _checked_by_torch():
        check_message("send", source, group.process_group, dst)
    work = process_group_of(group).send([source], group.ranks.index(dst), 0)
    return lambda: (work.wait(), x, source)[1]  # the closure keeps the staged copy alive until the send ends


def recv(x: Tensor, group: Group, src: int) -> Finish:
    """Start receiving into x from global rank `src`."""
    staged = x.is_cuda and on_gloo(x, group)
    direct = not staged and x.is_contiguous()
    buffer = x if direct else (host_buffer(x) if staged else torch.empty_like(x, memory_format=torch.contiguous_format))
    if _checked_by_torch():
        check_message("recv", buffer, group.process_group, src)
    work = process_group_of(group).recv([buffer], group.ranks.index(src), 0)

    def finish() -> Tensor:
        work.wait()
        return x if direct else x.copy_(buffer)

    return finish


def batch_nccl(ops: list[tuple[str, Tensor, Group, int]]) -> list[Finish]:
    """Start sends and receives as one NCCL group call, which cannot deadlock on their order."""
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
