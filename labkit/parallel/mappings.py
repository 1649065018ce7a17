"""The conjugate operators through which activations enter and leave a parallel region (arXiv 1909.08053, section 3).

In a parallel region each rank computes its part of a layer. An operator and its conjugate are each other's transpose:
the forward of one is the backward of the other.

| function                                     | forward              | backward             |
|----------------------------------------------|----------------------|----------------------|
| copy_to_tensor_model_parallel_region   (f)   | identity             | all-reduce           |
| reduce_from_tensor_model_parallel_region (g) | all-reduce           | identity             |
| scatter_to_tensor_model_parallel_region      | split last dim       | all-gather last dim  |
| gather_from_tensor_model_parallel_region     | all-gather last dim  | split last dim       |
| scatter_to_sequence_parallel_region          | split first dim      | all-gather first dim |
| gather_from_sequence_parallel_region         | all-gather first dim | reduce-scatter, or split |
| reduce_scatter_to_sequence_parallel_region   | reduce-scatter first | all-gather first dim |
| all_to_all                                   | all-to-all           | all-to-all, splits swapped |

The sequence-parallel operators are those of arXiv 2205.05198; there g is the gather and g-bar the reduce-scatter.
`layers.py` calls both of them f and g, by their place in a layer. Ranks may hold parts of unequal sizes.
`comm/in_flight.py` starts an all-to-all early. A group of size 1 needs none of these.

Shapes: S sequence, B batch, H hidden; t = size of the group; x_r is rank r's tensor; L the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from labkit.comm import collectives
from labkit.comm.groups import Group
from labkit.comm.ledger import backward_scope, forward_scope, remember_scope


def _split(x: Tensor, group: Group, dim: int) -> Tensor:
    if x.shape[dim] % group.size:
        raise ValueError(
            f"dimension {dim} of {tuple(x.shape)} cannot be split over the {group.size} ranks of {group.name}: "
            f"{x.shape[dim]} must be a multiple of {group.size}"
        )
    return x.chunk(group.size, dim=dim)[group.rank].contiguous()


# ---- f and g ----


class _CopyTo(Function):
    """f: hands the same x to every rank's part of a layer, so the gradient of x is the sum of all ranks' gradients.

    forward   y_r = x               [any] -> [any]
    backward  dL/dx = sum_r dL/dy_r [any] -> [any]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        remember_scope(ctx, group)
        return x.view_as(x)  # a new tensor over the same memory

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with backward_scope(ctx):
            return collectives.all_reduce(grads[0], ctx.group, in_place=False), None


class _ReduceFrom(Function):
    """g: adds the partial results of all ranks, so each part receives the gradient of the sum unchanged.

    forward   y = sum_r x_r         [any] -> [any]
    backward  dL/dx_r = dL/dy       [any] -> [any]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        with forward_scope(ctx, group):
            return collectives.all_reduce(x, group, in_place=False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def copy_to_tensor_model_parallel_region(x: Tensor, group: Group) -> Tensor:
    """f of the paper: identity forward, all-reduce of the gradient backward. x is the same on every rank."""
    return x if group.size == 1 else _CopyTo.apply(x, group)  # type: ignore[no-any-return]


def reduce_from_tensor_model_parallel_region(x: Tensor, group: Group) -> Tensor:
    """g of the paper: all-reduce forward, identity backward. x is this rank's partial sum."""
    return x if group.size == 1 else _ReduceFrom.apply(x, group)  # type: ignore[no-any-return]


# ---- split and gather along one dimension ----


class _Scatter(Function):
    """Keeps this rank's part of a tensor that every rank has in full.

    forward   y_r = part r of x along dim       [.., n, ..] -> [.., n/t, ..]
    backward  dL/dx = all-gather of dL/dy_r     [.., n/t, ..] -> [.., n, ..]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        remember_scope(ctx, group)
        ctx.dim = dim
        return _split(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with backward_scope(ctx):
            return collectives.all_gather(grads[0], ctx.group, ctx.dim), None, None


class _Gather(Function):
    """Joins the ranks' parts for layers that every rank computes alike, so each gradient is already complete.

    forward   y = all-gather of x_r along dim   [.., n/t, ..] -> [.., n, ..]
    backward  dL/dx_r = part r of dL/dy         [.., n, ..] -> [.., n/t, ..]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.dim = dim
        with forward_scope(ctx, group):
            return collectives.all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _split(grads[0], ctx.group, ctx.dim), None, None


class _GatherForPartial(Function):
    """Joins the ranks' parts for a layer of which each rank computes a part, so the gradients are partial sums.

    forward   y = all-gather of x_r along dim            [.., n_r, ..] -> [.., sum n, ..]
    backward  dL/dx_r = part r of sum_q dL/dy_q          [.., sum n, ..] -> [.., n_r, ..]

    `sizes` are the n_r, if they differ.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None) -> Tensor:
        ctx.dim, ctx.sizes = dim, sizes
        with forward_scope(ctx, group):
            return collectives.all_gather(x, group, dim, sizes=sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with backward_scope(ctx):
            return collectives.reduce_scatter(grads[0], ctx.group, ctx.dim, sizes=ctx.sizes), None, None, None


class _ReduceScatter(Function):
    """Adds the partial results of all ranks and keeps this rank's part of the sum.

    forward   y_r = part r of sum_q x_q along dim        [.., sum n, ..] -> [.., n_r, ..]
    backward  dL/dx_q = all-gather of dL/dy_r            [.., n_r, ..] -> [.., sum n, ..]

    `sizes` are the n_r, if they differ.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None) -> Tensor:
        ctx.dim, ctx.sizes = dim, sizes
        with forward_scope(ctx, group):
            return collectives.reduce_scatter(x, group, dim, sizes=sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with backward_scope(ctx):
            return collectives.all_gather(grads[0], ctx.group, ctx.dim, sizes=ctx.sizes), None, None, None


def scatter_to_tensor_model_parallel_region(x: Tensor, group: Group) -> Tensor:
    """Split the last dimension, [S, B, H] -> [S, B, H/t]; backward gathers. ValueError if t does not divide it."""
    return x if group.size == 1 else _Scatter.apply(x, group, x.dim() - 1)  # type: ignore[no-any-return]


def gather_from_tensor_model_parallel_region(x: Tensor, group: Group) -> Tensor:
    """Gather along the last dimension, [S, B, H/t] -> [S, B, H]; backward splits."""
    return x if group.size == 1 else _Gather.apply(x, group, x.dim() - 1)  # type: ignore[no-any-return]


def scatter_to_sequence_parallel_region(x: Tensor, group: Group) -> Tensor:
    """Split the first dimension, [S, B, H] -> [S/t, B, H]; backward gathers. ValueError if t does not divide it."""
    return x if group.size == 1 else _Scatter.apply(x, group, 0)  # type: ignore[no-any-return]


def gather_from_sequence_parallel_region(
    x: Tensor,
    group: Group,
    *,
    tensor_parallel_output_grad: bool = True,
    output_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Gather along the first dimension, [S/t, B, H] -> [S, B, H].

    Args:
        x: this rank's part of the sequence.
        group: the tensor-parallel group.
        tensor_parallel_output_grad: True if a tensor-parallel layer follows: its gradients are partial sums, so
            backward reduce-scatters them. False if every rank computes the same, so that backward splits. A wrong
            True multiplies the gradient by t; a wrong False loses the other ranks' share.
        output_split_sizes: rows of each rank's part, if they differ (tokens of tensor-parallel experts).
    """
    if group.size == 1:
        return x
    if tensor_parallel_output_grad:
        return _GatherForPartial.apply(x, group, 0, output_split_sizes)  # type: ignore[no-any-return]
    assert output_split_sizes is None, "unequal parts are gathered for tensor-parallel layers only"
    return _Gather.apply(x, group, 0)  # type: ignore[no-any-return]


def reduce_scatter_to_sequence_parallel_region(
    x: Tensor, group: Group, *, input_split_sizes: Sequence[int] | None = None
) -> Tensor:
    """Sum partial results and split the first dimension, [S, B, H] -> [S/t, B, H]; backward gathers.

    `input_split_sizes` are the rows of each rank's part, if they differ.
    """
    if group.size == 1:
        return x
    return _ReduceScatter.apply(x, group, 0, input_split_sizes)  # type: ignore[no-any-return]


# ---- all-to-all: its own conjugate ----


class _AllToAll(Function):
    """Sends rows to the ranks that work on them; gradients travel the same way back.

    forward   y_r = rows that the ranks sent to r    [sum in, ..] -> [sum out, ..]
    backward  the same with in and out exchanged     [sum out, ..] -> [sum in, ..]
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, output_splits: Sequence[int] | None, input_splits: Sequence[int] | None
    ) -> Tensor:
        ctx.splits = (output_splits, input_splits)
        with forward_scope(ctx, group):
            return collectives.all_to_all(x, group, output_splits, input_splits)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        output_splits, input_splits = ctx.splits
        with backward_scope(ctx):
            return collectives.all_to_all(grads[0], ctx.group, input_splits, output_splits), None, None, None


def all_to_all(
    x: Tensor,
    group: Group,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
) -> Tensor:
    """Send rows of x, cut by `input_splits`, to the group's ranks: the differentiable `collectives.all_to_all`."""
    if group.size == 1:
        return x
    return _AllToAll.apply(x, group, output_splits, input_splits)  # type: ignore[no-any-return]
