"""All-gather and reduce-scatter of parts whose numbers of rows differ between ranks.

Tensor-parallel experts need them: the ranks that share an expert receive different numbers of tokens. Every rank knows
all the sizes. gloo has no such all-gather, so on gloo both are an all-to-all. The gather then sends the same rows to
everyone, as many bytes as any other gather. NCCL takes lists of unequal tensors. A ledger books the calls as
`all_gather` and `reduce_scatter`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from labkit.comm import backends
from labkit.comm.collectives import recordable
from labkit.comm.groups import Group
from labkit.comm.ledger import backward_scope, forward_scope, is_dropped
from labkit.comm.pending import Pending, start

__all__ = ["all_gather_unequal", "reduce_scatter_unequal"]


def _check(group: Group, sizes: Sequence[int]) -> None:
    if len(sizes) != group.size:
        raise ValueError(f"sizes has {len(sizes)} entries; group {group.name} has {group.size} ranks")


def all_gather_unequal(x: Tensor, group: Group, sizes: Sequence[int]) -> Tensor:
    """Concatenate the rows of all ranks in the order of ranks; rank r has sizes[r] rows, [n_r, ..] -> [sum n, ..].

    Raises:
        ValueError: sizes that do not fit the group or x.
    """
    if group.size == 1:
        return x
    _check(group, sizes)
    if sizes[group.rank] != len(x):
        raise ValueError(f"sizes gives this rank {sizes[group.rank]} rows; x has {len(x)}")
    if is_dropped("all_gather", group.name):
        raise ValueError("an all_gather of unequal parts cannot be dropped: this rank has no tensor of that shape")
    return _gathering(x, group, list(sizes))._complete(wait_event=False)


@recordable
def _gathering(x: Tensor, group: Group, sizes: list[int]) -> Pending:
    return start("all_gather", x, group, lambda: _gather(x, group, sizes))


def _gather(x: Tensor, group: Group, sizes: list[int]) -> Callable[[], Tensor]:
    if backends.on_gloo(x, group):
        everyone = x.expand(group.size, *x.shape).flatten(0, 1)
        return backends.all_to_all(everyone, group, sizes, [len(x)] * group.size)
    gathered = x.new_empty(sum(sizes), *x.shape[1:])
    work: Any = dist.all_gather(list(gathered.split(sizes)), x.contiguous(), group=group.process_group, async_op=True)
    return lambda: (work.wait(), gathered)[1]


def reduce_scatter_unequal(x: Tensor, group: Group, sizes: Sequence[int]) -> Tensor:
    """Sum x over the ranks and return this rank's rows, sizes[r] on rank r: [sum n, ..] -> [n_r, ..].

    On gloo each rank adds the parts in the order of ranks. Half precision is added in float32 and rounded once.

    Raises:
        ValueError: sizes that do not fit the group or x.
    """
    if group.size == 1:
        return x
    _check(group, sizes)
    if sum(sizes) != len(x):
        raise ValueError(f"sizes add up to {sum(sizes)}; x has {len(x)} rows")
    if is_dropped("reduce_scatter", group.name):
        return x.split(list(sizes))[group.rank].clone()
    return _scattering(x, group, list(sizes))._complete(wait_event=False)


@recordable
def _scattering(x: Tensor, group: Group, sizes: list[int]) -> Pending:
    return start("reduce_scatter", x, group, lambda: _scatter(x, group, sizes))


def _scatter(x: Tensor, group: Group, sizes: list[int]) -> Callable[[], Tensor]:
    own = sizes[group.rank]
    if backends.on_gloo(x, group):
        finish = backends.all_to_all(x, group, [own] * group.size, sizes)
        return lambda: _sum_in_order(finish().unflatten(0, (group.size, own)))
    part = x.new_empty(own, *x.shape[1:])
    parts = list(x.contiguous().split(sizes))
    work: Any = dist.reduce_scatter(part, parts, group=group.process_group, async_op=True)
    return lambda: (work.wait(), part)[1]


def _sum_in_order(parts: Tensor) -> Tensor:
    """[ranks, n, ..] -> [n, ..]"""
    half = parts.dtype in (torch.bfloat16, torch.float16)
    total = parts[0].float() if half else parts[0]
    for part in parts[1:]:
        total = total.add_(part)
    return total.to(parts.dtype)


# ---- differentiable ----


class GatherUnequal(Function):
    """Joins parts of unequal size for a tensor-parallel layer, whose gradients are partial sums.

    forward   y = all-gather of x_r                      [n_r, ..] -> [sum n, ..]
    backward  dL/dx_r = part r of sum_q dL/dy_q          [sum n, ..] -> [n_r, ..]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sizes: Sequence[int]) -> Tensor:
        ctx.sizes = sizes
        with forward_scope(ctx, group):
            return all_gather_unequal(x, group, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with backward_scope(ctx):
            return reduce_scatter_unequal(grads[0], ctx.group, ctx.sizes), None, None


class ReduceScatterUnequal(Function):
    """Adds partial results and keeps this rank's part; parts differ in size.

    forward   y_r = part r of sum_q x_q                  [sum n, ..] -> [n_r, ..]
    backward  dL/dx_q = all-gather of dL/dy_r            [n_r, ..] -> [sum n, ..]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sizes: Sequence[int]) -> Tensor:
        ctx.sizes = sizes
        with forward_scope(ctx, group):
            return reduce_scatter_unequal(x, group, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with backward_scope(ctx):
            return all_gather_unequal(grads[0], ctx.group, ctx.sizes), None, None
