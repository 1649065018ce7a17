"""Cross-entropy of logits that are cut along the vocabulary, alone or fused with the output layer.

Fused with the output layer, the loss communicates a few numbers per token instead of V' logits (arXiv 1909.08053,
section 3). They are the MAX of the logits, then the SUMs of exp(logit - max) and of the label's logit, which travel
together.

Logits keep their padding columns, since a GEMM whose rows are 50,257 elements apart reads them unaligned and is slow.
Padding takes no part in maximum, sums or gradients: there exponentials are exact zeros, and so are gradients.

Shapes: S sequence, B batch, N tokens (S x B), H hidden, V this rank's columns with padding; t = size of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from labkit.comm import collectives
from labkit.comm.groups import Group
from labkit.comm.ledger import forward_scope
from labkit.comm.pending import Pending
from labkit.events import span
from labkit.parallel.layers import LinearPlan
from labkit.parallel.parameters.parameter_record import record_of, weight_gradient
from labkit.parallel.vocab.token_ids import check_token_ids
from labkit.parallel.weight_grad_store import deferred


@dataclass(frozen=True)
class ChunkSizes:
    """How many logits one chunk of tokens has. Sums are taken by chunks, so another size rounds in another order."""

    given: int
    """Logits of a chunk where they are given and only read."""
    forward: int
    """Logits of a chunk where a GEMM makes them. It reads the weight again for each chunk."""
    gradient: int
    """Logits of a chunk where backward makes their gradients. It adds to the whole weight gradient for each chunk."""


CHUNKS = {
    # Measured. Given logits stay in a core's cache between passes; 2^22 gradients bound the second copy of the logits.
    "cpu": ChunkSizes(given=1 << 18, forward=1 << 24, gradient=1 << 22),
    # Unmeasured (benchmarks/gpu_loss.py). 2^27 logits in bf16 are 256 MiB; their gradients, in float32 and bf16 at
    # once, 768 MiB. A vocabulary of 50,304 gives chunks of 2,668 tokens: enough for a GEMM, and 16,384 tokens then add
    # 7 times to a weight gradient of V x H, not 64 times. Given logits are worked on in place: one chunk, no temporary.
    "cuda": ChunkSizes(given=1 << 62, forward=1 << 27, gradient=1 << 27),
}
"""Type of device -> its chunks; a device that is not here takes those of the CPU."""


@dataclass(frozen=True)
class _Shard:
    """This rank's columns of the vocabulary and where the labels fall among them."""

    group: Group
    vocab_size: int
    columns: int
    """Real (unpadded) columns on this rank: the first ones of its shard."""
    labels_N: Tensor
    """Label as a local column, 0 where it is another rank's."""
    own_N: Tensor
    """True for a label that is one of this rank's columns."""
    smoothing: float
    """s of the loss (1-s) nll - s mean(log p): alpha K/(K-1), with K the whole vocabulary."""


def _shard(
    width: int,
    labels: Tensor,
    group: Group,
    vocab_size: int,
    padded_vocab_size: int | None,
    label_smoothing: float,
    check_ids: bool = True,
) -> _Shard:
    if padded_vocab_size is not None and width * group.size != padded_vocab_size:
        raise ValueError(
            f"{width} columns on each of {group.size} ranks are not the padded vocabulary's {padded_vocab_size}; give "
            "each rank its own columns"
        )
    if width * group.size < vocab_size:
        raise ValueError(
            f"{width} columns on each of {group.size} ranks are fewer than the vocabulary's {vocab_size}: "
            f"vocab_size is the whole vocabulary before padding"
        )
    if group.size > 1 and width >= vocab_size and padded_vocab_size is None:
        raise ValueError(
            f"each of the {group.size} ranks of {group.name} has {width} columns, all of the {vocab_size} tokens; "
            f"this loss takes each rank's own columns, not gathered logits (where a rank's own part is this wide, say "
            f"so: padded_vocab_size={width * group.size})"
        )
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
    if check_ids:
        labels = check_token_ids(labels, vocab_size, "label")
    first = group.rank * width
    columns = min(max(vocab_size - first, 0), width)
    local = labels.reshape(-1) - first
    own = (local >= 0) & (local < columns)
    smoothing = label_smoothing * vocab_size / (vocab_size - 1) if label_smoothing else 0.0
    return _Shard(group, vocab_size, columns, local.masked_fill(~own, 0), own, smoothing)


def _local_statistics(logits_NV: Tensor, shard: _Shard, rows: slice, into: Tensor) -> None:
    """Replace logits by exp(logit - local max), with zeros in the padding, whatever it held. Write [max, sum of exp,
    label's logit, sum of logits] to `into`."""
    if not shard.columns:
        into.zero_()
        into[0] = torch.finfo(into.dtype).min
        logits_NV.zero_()
        return
    real = logits_NV[:, : shard.columns]
    torch.amax(real, dim=1, out=into[0])
    into[2] = real.gather(1, shard.labels_N[rows, None]).squeeze(1) * shard.own_N[rows]
    if shard.smoothing:
        torch.sum(real, dim=1, out=into[3])
    logits_NV.sub_(into[0].unsqueeze(1)).exp_()  # whole rows, which are contiguous
    logits_NV[:, shard.columns :].zero_()
    torch.sum(real, dim=1, out=into[1])


def _combine(statistics_4N: Tensor, shard: _Shard) -> tuple[Tensor, Tensor]:
    """Return the loss per token, and the factor that turns exp(logit - local max) into the whole softmax."""
    local_max, sums = statistics_4N[0], statistics_4N[1:]
    maximum, rescale = local_max, 1.0
    if shard.group.size > 1:
        maximum = collectives.all_reduce(local_max, shard.group, "max", in_place=False)
        rescale = (local_max - maximum).exp()
        sums[0] *= rescale
        sums = collectives.all_reduce(sums if shard.smoothing else sums[:2], shard.group)
    log_sum = sums[0].log() + maximum
    loss = log_sum - sums[1]
    if shard.smoothing:
        mean_log_probability = sums[2] / shard.vocab_size - log_sum
        loss = (1.0 - shard.smoothing) * loss - shard.smoothing * mean_log_probability
    return loss, rescale / sums[0]


Pick = Callable[[Tensor], Tensor]
"""Chooses some tokens of a tensor whose first dimension is N."""


def _logit_gradient(exp_NV: Tensor, scale_N: Tensor, grad_N: Tensor, shard: _Shard, pick: Pick) -> Tensor:
    """Return grad x (softmax - (1-s) onehot - s/K) of the tokens that `pick` chooses, as a new tensor [chosen, V]."""
    grad = pick(exp_NV) * (pick(scale_N) * pick(grad_N)).unsqueeze(-1)
    if shard.smoothing:
        grad[..., : shard.columns].sub_((pick(grad_N) * (shard.smoothing / shard.vocab_size)).unsqueeze(-1))
    hit = pick(grad_N) * pick(shard.own_N) * (1.0 - shard.smoothing)
    grad.scatter_add_(-1, pick(shard.labels_N).unsqueeze(-1), -hit.unsqueeze(-1))
    return grad.flatten(0, -2)


def chunk_sizes(device: torch.device) -> ChunkSizes:
    """Return the chunk sizes of `CHUNKS` for this device."""
    return CHUNKS.get(device.type, CHUNKS["cpu"])


def _chunks(tokens: int, columns: int, elements: int, at_least: int) -> list[slice]:
    step = max(at_least, elements // columns)
    return [slice(i, min(i + step, tokens)) for i in range(0, tokens, step)]


def _working_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class _CrossEntropy(Function):
    """Loss of logits that are cut along the vocabulary.

    forward   L = log sum_v exp(l_v) - l_label      [N, V] -> [N]; MAX of [N], then SUM of [2, N]
    backward  dl_v = dL (softmax_v - [v = label])   [N] -> [N, V]; no communication

    With label smoothing L = (1-s) L - s mean_v log softmax_v, and the second sum carries [3, N].
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, shard: _Shard) -> Tensor:
        dtype = _working_dtype(logits_NV.dtype)
        tokens, width = logits_NV.shape
        exp_NV = logits_NV.new_empty((tokens, width), dtype=dtype)
        statistics = exp_NV.new_zeros((4, tokens))
        for rows in _chunks(tokens, width, chunk_sizes(logits_NV.device).given, 16):
            _local_statistics(exp_NV[rows].copy_(logits_NV[rows]), shard, rows, statistics[:, rows])
        with forward_scope(ctx, shard.group):
            loss_N, scale_N = _combine(statistics, shard)
        ctx.save_for_backward(exp_NV, scale_N)
        ctx.shard, ctx.dtype = shard, logits_NV.dtype
        return loss_N

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        exp_NV, scale_N = ctx.saved_tensors
        return _logit_gradient(exp_NV, scale_N, grads[0].reshape(-1), ctx.shard, lambda x: x).to(ctx.dtype), None


def vocab_parallel_cross_entropy(
    logits_SBV: Tensor,
    labels_SB: Tensor,
    group: Group,
    *,
    vocab_size: int,
    padded_vocab_size: int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross-entropy per token of logits cut along the vocabulary; half precision is computed in float32.

    Args:
        logits_SBV: this rank's columns, padding included. Gathered logits are rejected.
        labels_SB: global token ids.
        group: tensor-parallel group.
        vocab_size: whole vocabulary before padding.
        padded_vocab_size: the same with padding. Needed where one rank's columns are as many as `vocab_size`, so that
            the last ranks own padding alone: without this number such columns are taken for gathered logits.
        label_smoothing: alpha of Megatron: the target gets 1 - alpha, every other token alpha/(K-1), K = vocab_size.
            (torch's `label_smoothing` is alpha K/(K-1).)

    Returns:
        loss_SB, the same on every rank.

    Raises:
        TokenIdError: a label outside the vocabulary. ValueError: logits that are not a shard of it.
    """
    shard = _shard(logits_SBV.shape[-1], labels_SB, group, vocab_size, padded_vocab_size, label_smoothing)
    loss_N: Tensor = _CrossEntropy.apply(logits_SBV.flatten(0, -2), shard)  # type: ignore[assignment]
    return loss_N.view(labels_SB.shape)


class _LinearCrossEntropy(Function):
    """The output layer and its loss in one: logits appear chunk by chunk, and only their exponentials are kept.

    forward   l = h W^T + b, L = log sum_v exp(l_v) - l_label    [N, H] x [V, H] -> [N]; MAX of [N], SUM of [2, N]
    dgrad     dl = dL (softmax - onehot), dh = sum_r dl W_r  [N, V] x [V, H] -> [N, H], all-reduce started (f)
    wgrad     dW_r = dl^T h, db_r = sum dl                   [V, N] x [N, H] -> [V, H], while it runs

    Under sequence parallelism h is gathered from [N/t, H] in forward and again for wgrad, and dh is reduce-scattered. A
    chunk then takes the same tokens of every rank's part, so that each of its sums is a chunk too.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, shard: _Shard, plan: LinearPlan
    ) -> Tensor:
        whole_NH = collectives.all_gather(hidden_NH, shard.group) if plan.sequence_parallel else hidden_NH
        tokens, width, dtype = whole_NH.shape[0], weight_VH.shape[0], _working_dtype(hidden_NH.dtype)
        keeps = any(ctx.needs_input_grad[:3])
        exp_NV = hidden_NH.new_empty((tokens if keeps else 0, width), dtype=dtype)
        statistics = exp_NV.new_zeros((4, tokens))
        for rows in _chunks(tokens, width, chunk_sizes(hidden_NH.device).forward, 64):
            if keeps and dtype == hidden_NH.dtype:
                logits = torch.mm(whole_NH[rows], weight_VH.t(), out=exp_NV[rows])
            elif keeps:
                logits = exp_NV[rows].copy_(whole_NH[rows] @ weight_VH.t())
            else:
                logits = (whole_NH[rows] @ weight_VH.t()).to(dtype)
            if bias_V is not None:
                logits += bias_V
            _local_statistics(logits, shard, rows, statistics[:, rows])
            del logits  # before the next chunk takes its memory
        loss_N, scale_N = _combine(statistics, shard)
        ctx.save_for_backward(hidden_NH, weight_VH, exp_NV, scale_N)
        ctx.shard, ctx.plan, ctx.parameters = shard, plan, (weight_VH, bias_V)
        return loss_N

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden_NH, weight_VH, exp_NV, scale_N = ctx.saved_tensors
        shard, plan, (weight, bias), grad_N = ctx.shard, ctx.plan, ctx.parameters, grads[0].reshape(-1)
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        weight, bias = weight if wants_weight else None, bias if wants_bias else None
        parts = shard.group.size if plan.sequence_parallel else 1
        elements = chunk_sizes(hidden_NH.device).gradient
        chunks = _chunks(exp_NV.shape[0] // parts, parts * exp_NV.shape[1], elements, -(-256 // parts))

        def dlogits(rows: slice) -> Tensor:
            return _logit_gradient(exp_NV, scale_N, grad_N, shard, _rows_of_parts(rows, parts)).to(hidden_NH.dtype)

        def wgrad(rows: slice, dlogits_NV: Tensor, whole_NH: Tensor, into: _Accumulators) -> None:
            with span(f"{plan.name} weight_grad", "weight_grad"):
                if into.weight is not None:
                    chosen_NH = _rows_of_parts(rows, parts)(whole_NH).flatten(0, -2)
                    weight_gradient(dlogits_NV, chosen_NH, into.weight)
                if into.bias is not None:
                    into.bias.add_(dlogits_NV.sum(0))

        def gathering() -> Pending | None:
            return collectives.all_gather_async(hidden_NH, shard.group) if plan.sequence_parallel else None

        def all_wgrad() -> tuple[Tensor | None, Tensor | None]:
            """Compute the postponed wgrad. It makes the logit gradients again from the exponentials, without a GEMM."""
            regathering, into = gathering(), _accumulators(weight, bias, plan)
            for rows in chunks:
                wgrad(rows, dlogits(rows), hidden_NH if regathering is None else regathering.wait(), into)
            return into.returned

        with plan.booked("backward"):
            trains = weight is not None or bias is not None
            into = _accumulators(weight, bias, plan) if trains and not deferred((weight, bias), all_wgrad) else None
            regathering = gathering() if into is not None else None
            dgrad = _InputGradient(hidden_NH, weight_VH, plan) if wants_hidden else None
            for rows in chunks:
                dlogits_NV = dlogits(rows)
                if dgrad is not None:
                    dgrad.start(rows, dlogits_NV)
                if into is not None:
                    wgrad(rows, dlogits_NV, hidden_NH if regathering is None else regathering.wait(), into)
                del dlogits_NV  # before the next chunk takes its memory
            returned = (None, None) if into is None else into.returned
            return None if dgrad is None else dgrad.wait(), *returned, None, None


def _rows_of_parts(rows: slice, parts: int) -> Pick:
    """Pick `rows` of each of `parts` equal parts of N tokens, as [parts, rows, ..]."""
    return lambda x: x.unflatten(0, (parts, x.shape[0] // parts))[:, rows]


class _InputGradient:
    """dh of the output layer, chunk by chunk: a GEMM, then the sum over ranks, which overlaps with what follows."""

    def __init__(self, hidden_NH: Tensor, weight_VH: Tensor, plan: LinearPlan) -> None:
        self._grad_NH, self._weight_VH, self._plan = torch.empty_like(hidden_NH), weight_VH, plan
        self._pending: list[tuple[slice, Pending]] = []

    def start(self, rows: slice, dlogits_NV: Tensor) -> None:
        """Compute the gradient of the chunk `rows` and start its sum."""
        group, scatters = self._plan.group, self._plan.sequence_parallel
        with span(f"{self._plan.name} input_grad", "input_grad"):
            partial_NH = torch.mm(dlogits_NV, self._weight_VH, out=None if scatters else self._grad_NH[rows])
        start = collectives.reduce_scatter_async if scatters else collectives.all_reduce_async
        self._pending.append((rows, start(partial_NH, group)))

    def wait(self) -> Tensor:
        """Wait for all sums and return the whole gradient, in the shape of the hidden states."""
        for rows, transfer in self._pending:
            part_NH = transfer.wait()
            if self._plan.sequence_parallel:  # an all-reduce has worked in place
                self._grad_NH[rows] = part_NH
        return self._grad_NH


class _Accumulators(NamedTuple):
    """Tensors that add up the gradients of weight and bias; None for one that needs no gradient."""

    weight: Tensor | None
    bias: Tensor | None
    returned: tuple[Tensor | None, Tensor | None]
    """Both gradients for autograd: None for a weight whose gradient is in `main_grad`."""


def _accumulators(weight: Tensor | None, bias: Tensor | None, plan: LinearPlan) -> _Accumulators:
    bias_grad = None if bias is None else torch.zeros_like(bias)
    if weight is None:
        return _Accumulators(None, bias_grad, (None, bias_grad))
    main_grad: Tensor | None = getattr(weight, "main_grad", None) if plan.accumulate else None
    if main_grad is not None:
        record = record_of(weight)
        if not record.has_gradient:
            main_grad.zero_()
            record.has_gradient = True
        return _Accumulators(main_grad, bias_grad, (None, bias_grad))
    zeros = torch.zeros_like(weight)
    return _Accumulators(zeros, bias_grad, (zeros, bias_grad))


def linear_cross_entropy(
    hidden_SBH: Tensor,
    weight_VH: Tensor,
    labels_SB: Tensor,
    group: Group,
    *,
    vocab_size: int,
    padded_vocab_size: int | None = None,
    bias_V: Tensor | None = None,
    label_smoothing: float = 0.0,
    gradient_accumulation_fusion: bool = False,
    sequence_parallel: bool = False,
    check_ids: bool = True,
    name: str = "output",
) -> Tensor:
    """Return the cross-entropy per token of `hidden @ weight.T + bias`, without gathering logits or keeping them twice.

    The operator f is included, as in `ColumnParallelLinear`: `hidden` is whole and equal on every rank, and its
    gradient is complete. With `sequence_parallel` it is this rank's part of the sequence, [S/t, B, H], while labels and
    loss cover all of it. The arguments are those of `vocab_parallel_cross_entropy` and of `ColumnParallelLinear`;
    `check_ids` is False where the caller has compared the labels with the vocabulary (`check_token_ids`). The padding
    rows of `weight_VH` must be finite, since dgrad multiplies them by zeros; labkit's tables start them at zero.

    Returns:
        loss_SB, the same on every rank.
    """
    shard = _shard(weight_VH.shape[0], labels_SB, group, vocab_size, padded_vocab_size, label_smoothing, check_ids)
    plan = LinearPlan(name, group, sequence_parallel and group.size > 1, gradient_accumulation_fusion)
    with plan.booked() if group.size > 1 else nullcontext():
        loss_N: Tensor = _LinearCrossEntropy.apply(hidden_SBH.flatten(0, -2), weight_VH, bias_V, shard, plan)  # type: ignore
    return loss_N.view(labels_SB.shape)
