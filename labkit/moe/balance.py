"""Losses on the router that keep the experts' load even, their way into the backward, and a bias without a loss.

n_e tokens chose expert e, P_e is the sum of its normalised scores, and each of T tokens goes to k experts:

    switch loss  L = coefficient E / (k T^2) sum_e P_e n_e     equal to coefficient at even load (arXiv 2101.03961, 2.2)
    z loss       L = coefficient mean_t (log sum_e exp logit_te)^2                       (arXiv 2202.08906, 3.3)

P_e has a gradient, n_e has none. T and n_e count the whole scope, which is all ranks that hold pieces of it, but P_e
sums only over this rank's tokens. So each rank has a part of L, and the parts add up to L.

The losses never appear in the model's loss. `AuxLossAutoScaler` returns a tensor unchanged; in backward it starts the
gradient of L. `aux_loss_scale` computes the start, which depends on the later sums and means over gradients.

Shapes: T tokens of this rank, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def switch_load_balancing_loss_func(
    scores_TE: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int,
    *,
    top_k: int,
    num_experts: int,
    coefficient: float,
) -> Tensor:
    """Return this rank's part of the switch loss above, a scalar.

    Args:
        scores_TE: normalised scores of this rank's tokens. Scores [S, B x E], one column for each sequence and expert,
            give the sum of the losses of B sequences.
        tokens_per_expert: n_e over the whole scope, one for each column of the scores.
        total_num_tokens: T of the whole scope; without a token the loss is 0.
        top_k: k.
        num_experts: E.
        coefficient: weight of the loss.
    """
    scale = num_experts * coefficient / (top_k * max(total_num_tokens, 1) ** 2)
    return (scores_TE.sum(dim=0) * tokens_per_expert).sum() * scale


def z_loss_func(logits_TE: Tensor, coefficient: float) -> Tensor:
    """Return the z loss above over this rank's tokens, a scalar; 0 without tokens.

    For this rank's part of the loss of n ranks, give coefficient / n.
    """
    squares_T = logits_TE.logsumexp(dim=-1).square()
    return (squares_T.mean() if len(squares_T) else squares_T.sum()) * coefficient


class AuxLossScale:
    """The number from which the gradients of attached losses start, one for all routers of a model chunk.

    The number is a tensor at a fixed address, so a replay of recorded work reads the value of its own step.
    """

    def __init__(self, value: float = 1.0, *, device: torch.device | str | None = None) -> None:
        self.value = torch.tensor(value, dtype=torch.float64, device=device)

    def set(self, value: float | Tensor) -> None:
        """Set the number, before the forwards of a step and whenever loss scale or number of microbatches change."""
        if isinstance(value, Tensor):
            self.value.copy_(value)
        else:
            self.value.fill_(value)


def aux_loss_scale(
    loss_scale: float, *, cp: int, num_microbatches: int, tokens_per_microbatch: int | None = None
) -> float:
    """Return the value of `AuxLossScale` that makes attached losses a mean over the microbatches of the global batch.

    The result is loss_scale x cp / microbatches. Parts of L lie on tp x cp ranks. The ranks sum gradients over tp
    (`sequence_parallel` parameters) and average them over dp x cp. The factor cp undoes the average over cp.

    For a loss summed over tokens (`tokens_per_microbatch` = B x S, of the whole sequence) the result is
    loss_scale x tokens_per_microbatch. The ranks then sum gradients over dp x cp, and at the end divide them by the
    tokens of the global batch.
    """
    if tokens_per_microbatch is not None:
        return loss_scale * tokens_per_microbatch
    return loss_scale * cp / num_microbatches


class AuxLossAutoScaler(Function):
    """Attaches a loss to a tensor on the way to the model's loss.

    forward   y = x                              [any] -> [any]
    backward  dL/dx = dL/dy,  daux = scale       [any] -> [any], [] -> []
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, aux_loss: Tensor, scale: AuxLossScale) -> Tensor:
        ctx.scale, ctx.dtype = scale, aux_loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], ctx.scale.value.to(ctx.dtype), None


def updated_expert_bias(tokens_per_expert: Tensor, expert_bias: Tensor, update_rate: float) -> Tensor:
    """Return bias + rate x sign(mean load - load), in the bias's type: loss-free balancing (arXiv 2408.15664, alg. 1).

    Both tensors are [.., E]. The load is that of the global batch, summed over all ranks.
    """
    load = tokens_per_expert.double()
    return expert_bias + update_rate * (load.mean(dim=-1, keepdim=True) - load).sign().to(expert_bias.dtype)
