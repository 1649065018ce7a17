"""Attention over sequences that are spread over the ranks of `cp`: the ring, and the all-gather form.

| form                     | forward          | backward                                | KV in buffers |
|--------------------------|------------------|-----------------------------------------|---------------|
| `ring_attention`         | cp - 1 steps     | cp - 1 steps that pass KV, and after    | 2/cp of all   |
|   (arXiv 2310.01889)     | that pass KV     | them cp - 1 that pass sums of dK and dV |               |
| `all_gather_attention`   | all-gather of KV | all-gather of KV,                       | all           |
|   (arXiv 2407.21783)     |                  | reduce-scatter of dK and dV             |               |

Both compute the rectangles of `ring_plan.py` and join them by their log-sum-exps (`attention_block.py`). Both overlap
transfers with computation: step i of the ring computes while the keys of step i + 1 arrive, and the all-gather runs
while the rank computes its own block. Two transfers have no work to overlap with. One is the ring's last hop, which
brings the sums of dK and dV home. The other is the reduce-scatter of the all-gather form.

Each rank saves its q, k, v, output and one number per row for backward, and fetches the KV of other ranks again. So the
ring has 3/cp of all keys and values in memory, forward and backward. These are the rank's own keys and values, the ones
that it works on, and the ones that arrive. Backward also holds up to four sums of dK and dV, in the type of sums. Two
of them travel; the others are the rank's next share, and the share of its own keys.

KV travel as one tensor [2, 1, m, L, D], so a step is one message each way.

Shapes: n query heads and m key/value heads, both times the batch (models/attention.py). S whole sequence, L = S / cp
rows of this rank, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from labkit.comm import collectives
from labkit.comm.collectives import Message
from labkit.comm.groups import Group
from labkit.comm.pending import Pending
from labkit.parallel.context.attention_block import accumulator_dtype, attend, attend_backward, merge_
from labkit.parallel.context.ring_plan import BOTH, Block, Layout, gathered_plan, ring_plan
from labkit.parallel.context.zigzag import join_sequence, split_sequence
from labkit.parallel.mappings import backward_scope, forward_scope


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    *,
    causal: bool = True,
    layout: Layout = "zigzag",
    fused: bool = True,
) -> Tensor:
    """Compute softmax(q k^T / sqrt(D)) v over the whole sequence by passing KV round the ring of `group`.

    Args:
        q: this rank's queries, [1, n, L, D].
        k: its keys, [1, m, L, D], n a multiple of m.
        v: its values, shaped like k.
        group: context-parallel ranks; every one of them calls this.
        causal: hide later positions from each position.
        layout: positions of the rows (`ring_plan.py`).
        fused: run torch's kernels, else one operation after the other.

    Returns:
        This rank's rows of the output, [1, n, L, D].

    Raises:
        ValueError: shapes that do not fit each other.
    """
    return _attention(_RingAttention, q, k, v, group, causal, layout, fused)


def all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    *,
    causal: bool = True,
    layout: Layout = "zigzag",
    fused: bool = True,
) -> Tensor:
    """Like `ring_attention`, but with KV of the whole sequence on every rank; arguments and result are the same."""
    return _attention(_AllGatherAttention, q, k, v, group, causal, layout, fused)


def _attention(form: Any, q: Tensor, k: Tensor, v: Tensor, group: Group, *how: Any) -> Tensor:
    if q.dim() != 4 or k.shape != v.shape or k.dim() != 4 or q.shape[2:] != k.shape[2:] or q.shape[1] % k.shape[1]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"q [1, n, L, D], k and v [1, m, L, D] with n a multiple of m are needed; got {shapes}")
    if q.shape[2] % 2:
        raise ValueError(f"a rank holds two chunks of the sequence, but {q.shape[2]} rows cannot be two equal chunks")
    return form.apply(q, k, v, group, *how)


class _Rows:
    """The output of this rank's queries, block by block, in the type of sums."""

    def __init__(self, q: Tensor, fused: bool) -> None:
        wide = accumulator_dtype(q.dtype)
        self.q, self.fused, self.chunk = q, fused, q.shape[2] // 2
        # The sequence comes first in memory. The next projection reads the output so, and both keep the same tensor.
        self.out = torch.zeros(q.transpose(1, 2).shape, dtype=wide, device=q.device).transpose(1, 2)
        self.lse = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)

    def add(self, block: Block | None, k: Tensor, v: Tensor) -> None:
        """Attend to a block of the keys k; with None there is nothing to do."""
        if block is None:
            return
        rows, columns = block.rows(self.chunk), block.columns(self.chunk)
        part = attend(self.q[:, :, rows], k[:, :, columns], v[:, :, columns], causal=block.causal, fused=self.fused)
        merge_(self.out[:, :, rows], self.lse[:, :, rows], *part)


class _Gradients:
    """dq of this rank, block by block, and the shares of dk and dv of each block."""

    def __init__(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, fused: bool) -> None:
        self.grad, self.q, self.out, self.lse, self.fused = grad, q, out, lse, fused
        self.chunk = q.shape[2] // 2
        self.dq = torch.zeros(q.shape, dtype=accumulator_dtype(q.dtype), device=q.device)

    def add(self, block: Block | None, kv: Tensor, dkv: Tensor) -> None:
        """Add the block's share to dq, and to the rows of `dkv` that belong to its keys."""
        if block is None:
            return
        rows, columns = block.rows(self.chunk), block.columns(self.chunk)
        q, out, lse = (x[:, :, rows] for x in (self.q, self.out, self.lse))
        k, v = kv[0][:, :, columns], kv[1][:, :, columns]
        dq, dk, dv = attend_backward(self.grad[:, :, rows], q, k, v, out, lse, causal=block.causal, fused=self.fused)
        self.dq[:, :, rows] += dq
        dkv[0][:, :, columns] += dk
        dkv[1][:, :, columns] += dv


class _Ring:
    """Sends a tensor to the next rank while the caller works on it; two buffers in all."""

    def __init__(self, own: Tensor, group: Group) -> None:
        self.held, self._spare, self._group = own, torch.empty_like(own), group
        self._next, self._previous = (group.ranks[(group.rank + way) % group.size] for way in (1, -1))
        self._underway: list[Pending] = []

    def start(self) -> None:
        """Start sending the held tensor, and receiving the next one."""
        self._underway = collectives.batch(
            [
                Message("send", self.held, self._group, self._next),
                Message("recv", self._spare, self._group, self._previous),
            ]
        )

    def finish(self) -> None:
        """Wait, and hold the received tensor. The sent tensor's buffer is free for the next."""
        for pending in self._underway:
            pending.wait()
        if self._underway:
            self.held, self._spare = self._spare, self.held
        self._underway = []


def ring_steps(own: Tensor, group: Group) -> Iterator[Tensor]:
    """Yield `own` of every rank in turn: at step i the tensor of rank (r - i) mod cp.

    While the caller works on a tensor, the next is on its way. The next step waits for it and reuses the buffer of the
    tensor before. So a tensor is valid only until the next step.
    """
    ring = _Ring(own, group)
    for step in range(group.size):
        moves_on = step + 1 < group.size
        if moves_on:
            ring.start()
        yield ring.held
        if moves_on:
            ring.finish()


class _RingAttention(Function):
    """Attention of the whole sequence from this rank's queries and everybody's keys and values.

    forward   out_r = softmax(q_r K^T / sqrt(D)) V                [1, n, L, D]
    backward  dq_r, dk_r, dv_r as in attention_block.py, summed   [1, n, L, D], [1, m, L, D] twice
              over all ranks' queries

    At step i rank r works on the KV of rank s = r - i. In forward, KV moves on cp - 1 times. In backward, KV moves
    again, and the sums of s's gradients follow. Rank s + 1 starts these sums at step 1. Each rank adds its share and
    passes them on. After the last step they arrive at s, which adds the share of step 0. No block is left to hide this
    last hop, but every other message travels while a block is computed. Sums of half precision travel in float32 (twice
    the bytes), so the rounding error does not grow with cp.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Group, causal: bool, layout: Layout, fused: bool
    ) -> Tensor:
        ctx.plan, ctx.fused = ring_plan(group.size, group.rank, causal=causal, layout=layout), fused
        rows = _Rows(q, fused)
        with forward_scope(ctx, group):
            for block, kv in zip(ctx.plan, ring_steps(torch.stack([k, v]), group), strict=True):
                rows.add(block, kv[0], kv[1])
        out = rows.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, rows.lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        group: Group = ctx.group
        gradients = _Gradients(grads[0], q, out, lse, ctx.fused)
        with backward_scope(ctx):
            own = torch.zeros((2, *k.shape), dtype=gradients.dq.dtype, device=q.device)
            sums = _Ring(torch.zeros_like(own), group)
            for step, kv in enumerate(ring_steps(torch.stack([k, v]), group)):
                if step == 0:
                    gradients.add(ctx.plan[0], kv, own)
                else:
                    _add_and_pass_on(gradients, ctx.plan[step], kv, sums, first=step == 1)
            sums.finish()
            own += sums.held
        dk, dv = own.to(k.dtype).unbind(0)
        return gradients.dq.to(q.dtype), dk, dv, None, None, None, None


def _add_and_pass_on(gradients: _Gradients, block: Block | None, kv: Tensor, sums: _Ring, *, first: bool) -> None:
    """Add this rank's share of dK and dV to the sums of the ranks before it, and send the sums on.

    The rank computes its share before it waits for the sums, so the sums travel during the computation. The sums of the
    last step have no computation to overlap with.
    """
    share = sums.held if first else torch.zeros_like(sums.held)
    gradients.add(block, kv, share)
    if not first:
        sums.finish()
        sums.held.add_(share)
    sums.start()


class _AllGatherAttention(Function):
    """Attention after an all-gather of keys and values; a reduce-scatter sums dK and dV.

    forward   KV = all-gather of kv_r; out_r = softmax(q_r K^T / sqrt(D)) V     [2, 1, m, S, D]; [1, n, L, D]
    backward  KV = all-gather of kv_r; dKV_r = share of q_r in all dKV;         [2, 1, m, S, D] twice
              dkv_r = part r of sum_q dKV_q (reduce-scatter)                    [2, 1, m, L, D]
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Group, causal: bool, layout: Layout, fused: bool
    ) -> Tensor:
        ctx.causal, ctx.layout, ctx.fused = causal, layout, fused
        rows = _Rows(q, fused)
        with forward_scope(ctx, group):
            gathered = collectives.all_gather_async(torch.stack([k, v]), group, dim=3)
            if causal:
                rows.add(Block(BOTH, BOTH, causal=True), k, v)
            whole = _in_sequence(gathered.wait(), group, layout)
        for block in gathered_plan(group.size, group.rank, causal=causal, layout=layout):
            rows.add(block, whole[0], whole[1])
        out = rows.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, rows.lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        group: Group = ctx.group
        gradients = _Gradients(grads[0], q, out, lse, ctx.fused)
        own = torch.stack([k, v])
        dkv = torch.zeros(own.shape, dtype=gradients.dq.dtype, device=q.device)
        with backward_scope(ctx):
            gathered = collectives.all_gather_async(own, group, dim=3)
            if ctx.causal:
                gradients.add(Block(BOTH, BOTH, causal=True), own, dkv)
            whole = _in_sequence(gathered.wait(), group, ctx.layout)
            everybody = torch.zeros(whole.shape, dtype=dkv.dtype, device=q.device)
            for block in gathered_plan(group.size, group.rank, causal=ctx.causal, layout=ctx.layout):
                gradients.add(block, whole, everybody)
            parts = [split_sequence(everybody, group.size, rank, 3, ctx.layout) for rank in range(group.size)]
            dkv += collectives.reduce_scatter(torch.cat(parts, dim=3), group, dim=3)
        dk, dv = dkv.to(k.dtype).unbind(0)
        return gradients.dq.to(q.dtype), dk, dv, None, None, None, None


def _in_sequence(gathered: Tensor, group: Group, layout: Layout) -> Tensor:
    """Bring KV [2, 1, m, S, D] from the order of ranks into the order of the sequence."""
    return join_sequence(gathered.chunk(group.size, dim=3), 3, layout)
