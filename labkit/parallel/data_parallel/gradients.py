"""Complete, measure and clip gradients between the last backward and the optimizer.

All functions take the rank's model chunks. The data-parallel wrapper gave each parameter a `main_grad`, and the
parameter's record says how to reduce and count it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from labkit.comm import collectives
from labkit.comm.groups import Group, ParallelGroups, cut_group, half_of_pipeline
from labkit.comm.ledger import comm_scope
from labkit.parallel.parameters.parameter_record import main_grad_of, record_of

_foreach_norm: Any = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]


def _parameters(chunks: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield each trainable parameter once, also if two chunks of a rank share it."""
    seen: set[int] = set()
    for chunk in chunks:
        for parameter in chunk.parameters():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def finalize_model_grads(
    chunks: Sequence[nn.Module],
    groups: ParallelGroups,
    *,
    num_tokens: Tensor | None = None,
    last_stage: int | None = None,
) -> None:
    """Make every `main_grad` the gradient of the whole global batch. All ranks call this. The order is Megatron's:

    1. data parallel: each chunk's `finish_grad_sync`;
    2. parameters that saw only a part of the sequence (`sequence_parallel`): SUM over tp;
       key/value heads that neighbours of tp hold alike (`replicated`): SUM over these neighbours;
    3. the copies of a word embedding (`shared_embedding`): SUM over embd. Under a V schedule one rank has the first and
       the last stage, and the only weight has both gradients already. Then other copies of an encoder-decoder
       (`copied_over`): positions over pos_embd, relative biases over the ranks of a half;
    4. with a loss summed over tokens: divide by the number of tokens in the global batch.

    Args:
        chunks: the rank's model chunks.
        groups: process groups of this rank.
        num_tokens: None if the loss is a mean already. Else this rank's count of loss tokens over all its microbatches,
            one element. Only the count of the last stage is read; other stages give any tensor of that shape.
        last_stage: pipeline rank of the last stage; None takes the last rank. A V schedule has this stage on rank 0.
    """
    for chunk in chunks:
        finish = getattr(chunk, "finish_grad_sync", None)
        if finish is not None:
            finish()
    with comm_scope(layer="finalize", phase="gradients"):
        _sum_sequence_parallel(chunks, groups.tp)
        _sum_replicated_rows(chunks, groups)
        _sum_tied_embedding(chunks, groups.embd)
        _sum_other_copies(chunks, groups)
        if num_tokens is not None:
            _divide_by_tokens(chunks, groups, num_tokens, groups.pp.size - 1 if last_stage is None else last_stage)


def _sum_sequence_parallel(chunks: Sequence[nn.Module], tp: Group) -> None:
    """Sum all flagged gradients over tp by one all-reduce: they are many and small."""
    _sum_together([main_grad_of(p) for p in _parameters(chunks) if record_of(p).sequence_parallel], tp)


def _sum_replicated_rows(chunks: Sequence[nn.Module], groups: ParallelGroups) -> None:
    """Sum the gradients of the copies of each key/value head over the neighbours in tp that hold them.

    The copies stay equal, because all take the same sum. One all-reduce serves all layers.
    """
    by_ranks: dict[int, list[Tensor]] = {}
    for parameter in _parameters(chunks):
        replicated = record_of(parameter).replicated
        if replicated is not None:
            by_ranks.setdefault(replicated.ranks, []).append(main_grad_of(parameter)[-replicated.rows :])
    for ranks, grads in by_ranks.items():
        neighbours, _ = cut_group(groups, groups.tp, groups.tp.size // ranks)
        _sum_together(grads, neighbours)


def _sum_together(grads: Sequence[Tensor], group: Group) -> None:
    """Sum each gradient over the group, in place, by one all-reduce."""
    if not grads or group.size == 1:
        return
    total = collectives.all_reduce(torch.cat([grad.reshape(-1) for grad in grads]), group)
    for grad, part in zip(grads, total.split([grad.numel() for grad in grads])):
        grad.copy_(part.view_as(grad))


def _sum_tied_embedding(chunks: Sequence[nn.Module], embd: Group) -> None:
    """Give both copies of a tied weight the sum of the embedding's and the output layer's gradient: they stay equal.

    Under the distributed optimizer a rank sums only its own shard (`main_grad_shard`). The two stages cut the weight
    alike, so each of d data-parallel ranks sends a d-th of the weight.
    """
    if embd.size > 1:
        for parameter in _parameters(chunks):
            if record_of(parameter).shared_embedding:
                _sum_copies(parameter, embd)


def _sum_other_copies(chunks: Sequence[nn.Module], groups: ParallelGroups) -> None:
    """Give the copies of positions, then those of relative biases, the sum of their gradients."""
    for kind in ("pos_embd", "pp_half"):
        for parameter in _parameters(chunks):
            if record_of(parameter).copied_over == kind:
                _sum_copies(parameter, groups.pos_embd if kind == "pos_embd" else half_of_pipeline(groups))


def _sum_copies(parameter: nn.Parameter, group: Group) -> None:
    shard = record_of(parameter).main_grad_shard
    collectives.all_reduce(main_grad_of(parameter) if shard is None else shard, group)


def _divide_by_tokens(chunks: Sequence[nn.Module], groups: ParallelGroups, num_tokens: Tensor, last_stage: int) -> None:
    count = num_tokens.detach().clone()
    collectives.broadcast(count, groups.pp, src=last_stage)
    collectives.all_reduce(count, groups.dp_cp)
    # In float64, since 1 / int64 would be float32. The count stays on its device, so the host does not wait.
    scale_gradients(chunks, count.clamp(min=1).double().reciprocal())


def scale_gradients(chunks: Sequence[nn.Module], factor: float | Tensor) -> None:
    """Multiply every gradient of the rank once: whole buffers of a wrapped chunk, else each parameter's gradient."""
    bare = [chunk for chunk in chunks if not hasattr(chunk, "scale_gradients")]
    for chunk in chunks:
        if hasattr(chunk, "scale_gradients"):
            chunk.scale_gradients(factor)  # pyright: ignore[reportCallIssue]
    for parameter in _parameters(bare):
        grad = main_grad_of(parameter)
        grad.mul_(factor.to(grad.dtype) if isinstance(factor, Tensor) else factor)


def is_expert(parameter: nn.Parameter) -> bool:
    """Return True for a parameter of an expert (`allreduce = False`): cut over etp, with replicas on the ranks of
    edp."""
    return not record_of(parameter).allreduce


def counted_elements(parameter: nn.Parameter, groups: ParallelGroups) -> int:
    """Return how many of the parameter's elements, from the first on, this rank counts in the norm.

    The ranks of one replica count every element of the model once. Nobody counts the copy of a tied weight (`shared`).
    If all ranks of tp (of etp, for an expert) hold a parameter alike, only the first one counts it. Neighbours in tp
    may hold the last rows of a part alike (`replicated`); the first neighbour counts them.
    """
    record = record_of(parameter)
    if record.shared:
        return 0
    tensor_parallel = groups.etp if is_expert(parameter) else groups.tp
    if not record.tensor_model_parallel:
        return parameter.numel() if tensor_parallel.rank == 0 else 0
    replicated = record.replicated
    if replicated is None or tensor_parallel.rank % replicated.ranks == 0:
        return parameter.numel()
    return parameter[: -replicated.rows].numel()


def is_first_replica(parameter: nn.Parameter, groups: ParallelGroups) -> bool:
    """Return True on the first of the ranks that hold the same part of the parameter."""
    return (groups.edp if is_expert(parameter) else groups.dp_cp).rank == 0


def split_gradient(gradient: Tensor, counted: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return a gradient's first `counted` elements and the rest, each as a list that is empty if there are none."""
    if counted in (0, gradient.numel()):
        return ([gradient], []) if counted else ([], [gradient])
    flat = gradient.view(-1)
    return [flat[:counted]], [flat[counted:]]


class GradientStatistics(NamedTuple):
    """Norm and finiteness of the gradient of the whole model, and the wish to stop; bit-identical on all ranks."""

    norm: float
    """L2 norm; infinite or NaN if a counted gradient is not finite."""
    finite: bool
    """True if every gradient on every rank is finite, counted or not."""
    stop: bool = False
    """True if a rank was asked to end the run."""


def gradient_statistics(
    counted: Sequence[Tensor],
    uncounted: Sequence[Tensor],
    norm_groups: Sequence[Group],
    device: torch.device,
    *,
    stop: bool = False,
) -> GradientStatistics:
    """Return norm and finiteness of the gradient over all ranks, by one small collective per group.

    Squares are added in float64, over each group of `norm_groups` in the order of its ranks. `uncounted` gradients
    count for `finite` only (see `MegatronOptimizer` in `optimizer.py`). `stop`: this rank was asked to end the run. The
    host waits for the device once.
    """
    asked = torch.full((), float(stop), dtype=torch.float64, device=device)
    total = torch.stack([_sum_of_squares(counted, device), _sum_of_squares(uncounted, device), asked])
    with comm_scope(layer="norm", phase="gradients"):
        for group in norm_groups:
            total = _in_order(collectives.all_gather(total, group).view(-1, 3).unbind(0))
    squares, others, ranks = total.tolist()
    return GradientStatistics(math.sqrt(squares), math.isfinite(squares) and math.isfinite(others), ranks > 0)


def _in_order(rows: Sequence[Tensor]) -> Tensor:
    """Return ((r0 + r1) + r2) + ..: the same bits on every rank and device."""
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def _sum_of_squares(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        by_type.setdefault(torch.promote_types(grad.dtype, torch.float32), []).append(grad)
    # By itself the norm of a bf16 gradient would be bf16.
    norms = [norm for dtype, same in by_type.items() for norm in _foreach_norm(same, 2, dtype=dtype)]
    return torch.stack([norm.double() for norm in norms]).square().sum()


def clip_factor(norm: float, max_norm: float) -> float:
    """Return max_norm / (norm + 1e-6) if that is below 1, else 1; also 1 for a norm that is not finite."""
    factor = max_norm / (norm + 1e-6)
    return factor if factor < 1.0 and math.isfinite(norm) else 1.0
