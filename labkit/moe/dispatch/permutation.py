"""Bring rows of tokens into the order of their experts, and back.

`permute` copies each token once for every expert that it goes to. All rows of expert 0 come first, then those of expert
1; the rows of an expert keep the order of the tokens. `unpermute` adds up the rows of a token. Each is the transpose of
the other, and so the other's backward. The pair needs two operations on rows and no others.

With a given number of rows nothing here waits for the GPU, because `nonzero_static` finds positions and returns a
result of given size.

Shapes: T tokens of this rank, E experts, H hidden, N rows after permutation (one for each token and expert).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from labkit.comm.capturing import host_would_wait

__all__ = ["permute", "sort_chunks_by_idxs", "unpermute"]


def _sum_rows(rows_NH: Tensor, index_N: Tensor, num_tokens: int) -> Tensor:
    """Sum rows by index: row t of the result is the sum, in order, of the rows whose index is t. [N, H] -> [T, H].

    Half precision is summed in float32 and rounded once. On a GPU `index_add_` would round after every row and add in
    the order in which threads come. There `embedding_bag` sums the rows of a token in one thread, in float32. So the
    bits repeat on a GPU too.
    """
    if rows_NH.is_cuda and rows_NH.numel() and num_tokens:
        tokens_N, order_N = index_N.sort(stable=True)
        starts_T = torch.searchsorted(tokens_N, torch.arange(num_tokens, device=tokens_N.device))
        return F.embedding_bag(order_N, rows_NH, starts_T, mode="sum")
    return rows_NH.new_zeros(num_tokens, rows_NH.shape[1]).index_add_(0, index_N, rows_NH)


class _Permute(Function):
    """Copies tokens to rows.

    forward   y[n] = x[index[n]]                          [T, H] -> [N, H]
    backward  dL/dx[t] = sum of dL/dy[n], index[n] = t    [N, H] -> [T, H]
    """

    @staticmethod
    def forward(ctx: Any, tokens_TH: Tensor, index_N: Tensor) -> Tensor:
        ctx.save_for_backward(index_N)
        ctx.num_tokens = tokens_TH.shape[0]
        return tokens_TH.index_select(0, index_N)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _sum_rows(grads[0], ctx.saved_tensors[0], ctx.num_tokens), None


class _Unpermute(Function):
    """Adds up the rows of each token.

    forward   y[t] = sum of x[n], index[n] = t            [N, H] -> [T, H]
    backward  dL/dx[n] = dL/dy[index[n]]                  [T, H] -> [N, H]
    """

    @staticmethod
    def forward(ctx: Any, rows_NH: Tensor, index_N: Tensor, num_tokens: int) -> Tensor:
        ctx.save_for_backward(index_N)
        return _sum_rows(rows_NH, index_N, num_tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


def _positions(chosen: Tensor, size: int | None) -> Tensor:
    """Return the positions of the true entries of a flat bool tensor. A given size is checked only if nobody waits."""
    if size is not None and host_would_wait(chosen):
        return torch.nonzero_static(chosen, size=size).squeeze(1)
    positions = chosen.nonzero().squeeze(1)
    assert size is None or size == positions.numel(), f"the map has {positions.numel()} entries, {size} were announced"
    return positions


def permute(
    tokens_TH: Tensor, map_TE: Tensor, *, probs_TE: Tensor | None = None, num_out_tokens: int | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Copy each token once for every expert that it goes to, in the order of experts.

    Args:
        tokens_TH: the tokens.
        map_TE: bool, true for the experts of each token.
        probs_TE: weights of the experts; only entries of the map are read.
        num_out_tokens: true entries of the map, N; None counts them, which makes the host wait for a GPU.

    Returns:
        Rows [N, H], their weights [N] (None without probs_TE), and the token of each row, int64 [N].
    """
    num_tokens, experts = map_TE.shape
    positions = _positions(map_TE.t().reshape(-1), num_out_tokens)  # expert x T + token
    index_N = positions % max(num_tokens, 1)
    probs_N = None
    if probs_TE is not None:
        # Not through the transpose, because its gradient would be sorted by expert in memory. Sums over it would round
        # in another order than sums over a gradient by token, as between router and permutation.
        weight_N = index_N * experts + positions.div(max(num_tokens, 1), rounding_mode="floor")
        probs_N = probs_TE.reshape(-1).index_select(0, weight_N)  # each weight is read once
    rows_NH: Tensor = _Permute.apply(tokens_TH, index_N)  # type: ignore[assignment]
    return rows_NH, probs_N, index_N


def unpermute(rows_NH: Tensor, index_N: Tensor, num_tokens: int) -> Tensor:
    """Add up the rows of each token, [N, H] -> [T, H]; a token without rows gets zeros.

    `index_N` is the last result of `permute`; `num_tokens` is T.
    """
    return _Unpermute.apply(rows_NH, index_N, num_tokens)  # type: ignore[no-any-return]


class _SortChunks(Function):
    """Puts chunks of rows into another order.

        forward   y = chunk order[0] of x, chunk order[1] of x, ...        [N, ..] -> [N, ..]
        backward  dL/dx = the same with the inverse of order               [N, ..] -> [N, ..]

    Each chunk keeps the order of its rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, split_sizes: Sequence[int], order: Sequence[int]) -> Tensor:
        ctx.split_sizes, ctx.order = split_sizes, order
        return _reorder(x, split_sizes, order)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        inverse = sorted(range(len(ctx.order)), key=ctx.order.__getitem__)
        return _reorder(grads[0], [ctx.split_sizes[i] for i in ctx.order], inverse), None, None


def _reorder(x: Tensor, split_sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    chunks = x.split(list(split_sizes))
    return torch.cat([chunks[i] for i in order])


def sort_chunks_by_idxs(x: Tensor, split_sizes: Sequence[int], sorted_idxs: Sequence[int]) -> Tensor:
    """Cut x along its first dimension into chunks of `split_sizes` rows and put them into the order `sorted_idxs`.

    If the chunks have that order already, the result is x itself.
    """
    if list(sorted_idxs) == list(range(len(sorted_idxs))):
        return x
    return _SortChunks.apply(x, split_sizes, sorted_idxs)  # type: ignore[no-any-return]
