"""What happens to gradients between the last backward and the optimizer: complete them, measure them, clip them.

All functions take the rank's model chunks, whose parameters carry a `main_grad` (the data-parallel wrapper makes it),
and read the attributes listed in `weights.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from labkit.parallel import collectives
from labkit.parallel.groups import Group, ParallelGroups
from labkit.parallel.ledger import comm_scope


def _parameters(chunks: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Each trainable parameter once, also where two chunks of a rank share it."""
    seen: set[int] = set()
    for chunk in chunks:
        for parameter in chunk.parameters():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def _main_grad(parameter: nn.Parameter) -> Tensor:
    grad = getattr(parameter, "main_grad", None)
    assert grad is not None, f"{getattr(parameter, 'full_name', 'a parameter')} has no main_grad: wrap the model first"
    return grad


def finalize_model_grads(
    chunks: Sequence[nn.Module],
    groups: ParallelGroups,
    *,
    num_tokens: Tensor | None = None,
    last_stage: int | None = None,
) -> None:
    """Make every `main_grad` the gradient of the whole global batch. Called by all ranks, in Megatron's order:

    1. data parallel: each chunk's `finish_grad_sync`;
    2. parameters that saw only a part of the sequence (`sequence_parallel`): SUM over tp;
    3. the two copies of a tied word embedding (`shared_embedding`): SUM over embd. Where first and last stage are on
       one rank (a V), there is one weight, which took both gradients already;
    4. with a loss summed over tokens: divide by their number in the global batch.

    Args:
        chunks: the rank's model chunks.
        groups: of this rank.
        num_tokens: None where the loss is a mean already. Else this rank's count of loss tokens over all its
            microbatches, one element; only the last stage's is read, the others give any tensor of that shape.
        last_stage: pipeline rank of the last stage; None is the last rank (a V has it on rank 0).
    """
    for chunk in chunks:
        finish = getattr(chunk, "finish_grad_sync", None)
        if finish is not None:
            finish()
    with comm_scope(layer="finalize", phase="gradients"):
        _sum_sequence_parallel(chunks, groups.tp)
        _sum_tied_embedding(chunks, groups.embd)
        if num_tokens is not None:
            _divide_by_tokens(chunks, groups, num_tokens, groups.pp.size - 1 if last_stage is None else last_stage)


def _sum_sequence_parallel(chunks: Sequence[nn.Module], tp: Group) -> None:
    """One all-reduce of all flagged gradients together: they are many and small."""
    grads = [_main_grad(p) for p in _parameters(chunks) if getattr(p, "sequence_parallel", False)]
    if not grads or tp.size == 1:
        return
    total = collectives.all_reduce(torch.cat([grad.reshape(-1) for grad in grads]), tp)
    for grad, part in zip(grads, total.split([grad.numel() for grad in grads])):
        grad.copy_(part.view_as(grad))


def _sum_tied_embedding(chunks: Sequence[nn.Module], embd: Group) -> None:
    """Both copies take the sum of the embedding's and the output layer's gradient, so they stay equal for ever."""
    if embd.size > 1:
        for parameter in _parameters(chunks):
            if getattr(parameter, "shared_embedding", False):
                collectives.all_reduce(_main_grad(parameter), embd)


def _divide_by_tokens(chunks: Sequence[nn.Module], groups: ParallelGroups, num_tokens: Tensor, last_stage: int) -> None:
    count = num_tokens.detach().clone()
    collectives.broadcast(count, groups.pp, src=last_stage)
    collectives.all_reduce(count, groups.dp_cp)
    scale = 1.0 / count.clamp(min=1)  # stays on its device: no synchronisation with the host
    for parameter in _parameters(chunks):
        _main_grad(parameter).mul_(scale.to(_main_grad(parameter).dtype))


def _counted(chunks: Sequence[nn.Module], groups: ParallelGroups) -> list[Tensor]:
    """Gradients such that every element of the whole model occurs once in the ranks of `groups.mp` together."""
    return [
        _main_grad(parameter)
        for parameter in _parameters(chunks)
        if not getattr(parameter, "shared", False)
        and (getattr(parameter, "tensor_model_parallel", False) or groups.tp.rank == 0)
    ]


def global_grad_norm(chunks: Sequence[nn.Module], groups: ParallelGroups) -> float:
    """L2 norm of the gradient of the whole model, bit-identical on every rank.

    Tied copies (`shared`) count once, and so do parameters that all ranks of tp hold alike. Data-parallel replicas
    hold the same gradients after `finalize_model_grads`, so the sum runs over tp x pp only. Squares are added in
    float64 in the order of ranks. One collective and one synchronisation with the host.
    """
    grads = _counted(chunks, groups)
    device = next((p.device for p in _parameters(chunks)), torch.device("cpu"))
    total = torch.zeros(1, dtype=torch.float64, device=device)
    if grads:
        norms = torch._foreach_norm(grads, 2)  # pyright: ignore[reportPrivateImportUsage]
        total += torch.stack([norm.double() for norm in norms]).square().sum()
    with comm_scope(layer="norm", phase="gradients"):
        return math.sqrt(sum(collectives.all_gather(total, groups.mp).tolist()))


def clip_grad_norm(chunks: Sequence[nn.Module], groups: ParallelGroups, max_norm: float) -> float:
    """Scale all gradients by max_norm / (norm + 1e-6) if that is below 1; returns the norm before.

    A norm that is not finite leaves the gradients alone: the caller skips the step.

    Raises:
        ValueError: max_norm is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}; leave clipping out instead of clipping to zero")
    norm = global_grad_norm(chunks, groups)
    factor = max_norm / (norm + 1e-6)
    if factor < 1.0 and math.isfinite(norm):
        grads = [_main_grad(p) for p in _parameters(chunks)]
        torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]
    return norm
