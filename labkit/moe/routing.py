"""The experts that each token goes to, and their weights: pure functions of the router's logits.

Routing is two decisions. The *choice* is a boolean map [T, E] with top_k entries in each row; it has no gradient. The
*weights* are a function of logits and map, so a recorded map can be replayed with weights from new logits:

| scores              | choice: top-k of          | weight of a chosen expert                                     |
|---------------------|---------------------------|---------------------------------------------------------------|
| softmax (default)   | logits                    | softmax over the chosen (arXiv 2401.04088)                    |
| softmax, pre        | softmax over all          | its softmax over all; the weights add up to less than 1       |
| sigmoid             | sigmoid, plus expert bias | its sigmoid over the sum of the chosen; k = 1: its sigmoid    |
| sinkhorn (training) | balanced assignment       | its softmax over all; k = 1: its sigmoid                      |

`scaling_factor` multiplies all weights but sinkhorn's. The bias moves only the choice. Group-limited choice first takes
the `group_topk` best groups of experts (device-limited routing, arXiv 2405.04434, 2.2.2). The score of a group is the
sum of its best top_k / group_topk experts.

A capacity then limits the tokens of a rank that an expert takes (arXiv 2006.16668). A dropped token loses that expert's
weight; its other weights are not rescaled.

Shapes: T tokens of this rank, E experts, K top_k, G groups, C capacity.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SCORE_FUNCTIONS = ("softmax", "sigmoid")
DROP_POLICIES = ("probs", "position")
SIGMOID_EPS = 1e-20
"""Avoids 0/0 where all chosen sigmoids underflow."""


def topk_routing(
    logits_TE: Tensor,
    top_k: int,
    *,
    score_function: str = "softmax",
    pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    expert_bias: Tensor | None = None,
    map_TE: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return weights and choice of the table above.

    Args:
        logits_TE: logits of the router; half precision is scored in float32 and rounded.
        top_k: number of experts of a token.
        score_function: `softmax` or `sigmoid`.
        pre_softmax: softmax before the choice.
        num_groups: groups of neighbouring experts for a group-limited choice, or None.
        group_topk: groups that a token may choose from.
        scaling_factor: multiplies the weights; None is 1.
        expert_bias: [E], added to the sigmoids for the choice; None is 0.
        map_TE: a choice to replay; None makes one.

    Returns:
        Weights [T, E] in the logits' type, 0 where not chosen, and the choice [T, E], bool.

    Raises:
        ValueError: an unknown score function, or numbers that do not fit together.
    """
    if map_TE is None:
        map_TE = choose(
            logits_TE,
            top_k,
            score_function=score_function,
            pre_softmax=pre_softmax,
            num_groups=num_groups,
            group_topk=group_topk,
            expert_bias=expert_bias,
        )
    probs_TE = combine_weights(logits_TE, map_TE, top_k, score_function=score_function, pre_softmax=pre_softmax)
    return (probs_TE * scaling_factor if scaling_factor else probs_TE), map_TE


@torch.no_grad()
def choose(
    logits_TE: Tensor,
    top_k: int,
    *,
    score_function: str = "softmax",
    pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    expert_bias: Tensor | None = None,
) -> Tensor:
    """Return the choice of `topk_routing`: bool [T, E] with top_k entries in each row."""
    _check_choice(top_k, score_function, num_groups, group_topk, expert_bias)
    if expert_bias is None and num_groups is None:
        # Scores order the experts of a token as logits do, but may round two logits to one number.
        return top_k_map(logits_TE, top_k)
    scores_TE = _at_least_fp32(logits_TE)
    if score_function == "sigmoid":
        scores_TE = scores_TE.sigmoid()
    elif pre_softmax:
        scores_TE = scores_TE.softmax(dim=-1)
    if expert_bias is not None:
        scores_TE = scores_TE + expert_bias
    if num_groups is None or group_topk is None:
        return _map_of(scores_TE.topk(top_k, dim=-1).indices, logits_TE)
    _, chosen_TK = group_limited_topk(scores_TE, top_k, num_groups=num_groups, group_topk=group_topk)
    return _map_of(chosen_TK, logits_TE)


def combine_weights(
    logits_TE: Tensor, map_TE: Tensor, top_k: int, *, score_function: str = "softmax", pre_softmax: bool = False
) -> Tensor:
    """Return weights [T, E] of a choice, without scaling factor; differentiable in the logits, 0 where not chosen."""
    wide_TE = _at_least_fp32(logits_TE)
    if score_function == "sigmoid":
        scores_TE = wide_TE.sigmoid() * map_TE
        probs_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + SIGMOID_EPS) if top_k > 1 else scores_TE
    elif pre_softmax:
        probs_TE = wide_TE.softmax(-1) * map_TE
    else:
        probs_TE = wide_TE.masked_fill(~map_TE, -math.inf).softmax(-1)
    return probs_TE.to(logits_TE.dtype)


def group_limited_topk(scores_TE: Tensor, top_k: int, *, num_groups: int, group_topk: int) -> tuple[Tensor, Tensor]:
    """Return the top_k experts among the group_topk best groups: scores and indices, both [T, K], best first.

    With one group for each EP rank (or node), a token is sent to at most group_topk of them.
    """
    tokens, experts = scores_TE.shape
    grouped_TGE = scores_TE.view(tokens, num_groups, experts // num_groups)
    group_scores_TG = grouped_TGE.topk(top_k // group_topk, dim=-1).values.sum(-1)
    best = group_scores_TG.topk(group_topk, dim=-1).indices
    open_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool).scatter_(1, best, True)
    limited_TE = grouped_TGE.masked_fill(~open_TG[..., None], -math.inf).view(tokens, experts)
    values, indices = limited_TE.topk(top_k, dim=-1)
    return values, indices


def normalized_scores(logits_TE: Tensor, score_function: str = "softmax") -> Tensor:
    """Return the scores of load-balancing losses, which add up to 1 over each token's experts, in float32 at least.

    Bias, groups and scaling must not reach the loss, so the scores ignore them.
    """
    wide_TE = _at_least_fp32(logits_TE)
    if score_function == "softmax":
        return wide_TE.softmax(-1)
    scores_TE = wide_TE.sigmoid()
    return scores_TE / (scores_TE.sum(-1, keepdim=True) + SIGMOID_EPS)


# ---- sinkhorn ----


def sinkhorn_routing(
    logits_TE: Tensor, top_k: int, *, balanced: bool = True, map_TE: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose by balanced assignment (S-BASE, arXiv 2202.01169), and weight by the scores alone.

    Args:
        logits_TE: logits of the router.
        top_k: number of experts of a token.
        balanced: False chooses by the scores, as in evaluation, where a token must not depend on its neighbours.
        map_TE: a choice to replay.

    Returns:
        Weights [T, E], 0 where not chosen, and the choice [T, E], bool.
    """
    wide_TE = _at_least_fp32(logits_TE)
    scores_TE = wide_TE.sigmoid() if top_k == 1 else wide_TE.softmax(-1)
    if map_TE is None:
        with torch.no_grad():
            ranking_TE = sinkhorn(wide_TE) if balanced else scores_TE
            map_TE = _map_of(ranking_TE.topk(top_k, dim=-1).indices, logits_TE)
    return (scores_TE * map_TE).to(logits_TE.dtype), map_TE


@torch.no_grad()
def sinkhorn(cost_TE: Tensor, tol: float = 1e-4, max_iterations: int = 1000) -> Tensor:
    """Scale rows and columns of exp(cost) in turn until every token has mass 1/T and every expert 1/E; [T, E].

    The loop ends when the column factors change by at most `tol` in the mean, or after `max_iterations`. Each look at
    the change makes the host wait for the device. The function balances the tokens of this rank and microbatch, so the
    choice depends on the layout. Subtracting a row's largest cost keeps exp finite; the row factor makes up for it.
    """
    eps = 1e-8
    mass_TE = (cost_TE - cost_TE.amax(dim=1, keepdim=True)).exp()
    tokens, experts = mass_TE.shape
    columns_E = mass_TE.new_ones(experts)
    rows_T = mass_TE.new_ones(tokens)
    for _ in range(max_iterations):
        before_E = columns_E
        rows_T = 1 / (tokens * (mass_TE @ columns_E + eps))
        columns_E = 1 / (experts * (rows_T @ mass_TE + eps))
        if (before_E - columns_E).abs().mean() <= tol:
            break
    return columns_E * mass_TE * rows_T[:, None]


# ---- capacity ----


def get_capacity(*, num_tokens: int, top_k: int, num_experts: int, capacity_factor: float) -> int:
    """Return C = ceil(T k / E x capacity_factor), at most T, since no expert can get more than the rank's tokens.

    The product is Megatron's, in double precision with its rounding: 10 tokens for each expert times 1.1 give 12.
    """
    return min(math.ceil(num_tokens * top_k / num_experts * capacity_factor), num_tokens)


def apply_capacity(
    probs_TE: Tensor,
    map_TE: Tensor,
    *,
    top_k: int,
    capacity_factor: float,
    drop_policy: str = "probs",
    pad_to_capacity: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return weights and choice after every expert has dropped the tokens over its capacity.

    Args:
        probs_TE: weights, 0 where not chosen.
        map_TE: the choice.
        top_k: experts of a token before dropping.
        capacity_factor: see `get_capacity`.
        drop_policy: a full expert keeps the tokens with the largest weights (`probs`), the first among equals, or the
            tokens that come first (`position`).
        pad_to_capacity: every expert gets exactly C tokens. Tokens that did not choose the expert fill free places with
            weight 0, so that all shapes are known before the routing is.

    Returns:
        Weights and choice, both [T, E]. A column of the choice holds at most C entries, with padding exactly C.

    Raises:
        ValueError: an unknown drop policy.
    """
    if drop_policy not in DROP_POLICIES:
        raise ValueError(f"drop_policy is {drop_policy!r}; choose {' or '.join(DROP_POLICIES)}")
    tokens, experts = map_TE.shape
    capacity = get_capacity(num_tokens=tokens, top_k=top_k, num_experts=experts, capacity_factor=capacity_factor)
    if capacity == tokens and not pad_to_capacity:
        return probs_TE, map_TE
    # The order in which each expert takes tokens: tokens that chose it, by drop_policy, then all others.
    wish_TE = probs_TE.detach() if drop_policy == "probs" else torch.zeros_like(probs_TE)
    wish_ET = wish_TE.masked_fill(~map_TE, -math.inf).t().contiguous()  # sorting neighbours in memory is faster
    queue_ET = wish_ET.argsort(dim=1, descending=True, stable=True)
    taken_TE = torch.zeros_like(map_TE).t().scatter_(1, queue_ET[:, :capacity], True).t()
    kept_TE = taken_TE if pad_to_capacity else taken_TE & map_TE
    return probs_TE * kept_TE, kept_TE


# ---- shared ----


def top_k_map(logits_TE: Tensor, top_k: int) -> Tensor:
    """Return bool [T, E], True for the top_k largest logits of every row: the choice without bias and groups."""
    return _map_of(logits_TE.detach().topk(top_k, dim=-1).indices, logits_TE)


def _map_of(chosen_TK: Tensor, like_TE: Tensor) -> Tensor:
    return torch.zeros_like(like_TE, dtype=torch.bool).scatter_(1, chosen_TK, True)


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check_choice(
    top_k: int, score_function: str, num_groups: int | None, group_topk: int | None, expert_bias: Tensor | None
) -> None:
    """Reject what would silently give a wrong choice; torch rejects other numbers that do not fit."""
    if score_function not in SCORE_FUNCTIONS:
        raise ValueError(f"score_function is {score_function!r}; choose {' or '.join(SCORE_FUNCTIONS)}")
    if expert_bias is not None and score_function != "sigmoid":
        raise ValueError("expert_bias moves sigmoid scores; set score_function to sigmoid, or leave the bias out")
    if (num_groups is None) != (group_topk is None):
        raise ValueError(f"num_groups = {num_groups} and group_topk = {group_topk} must be given together")
    if group_topk is not None and top_k % group_topk:
        raise ValueError(f"top_k = {top_k} must be a multiple of group_topk = {group_topk}: groups give equal numbers")
