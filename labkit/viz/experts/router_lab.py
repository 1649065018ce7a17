"""The router lab: one recording of logits, routed again by any policy, and the policies side by side.

A recording holds the logits of N microbatches on R ranks, [N, R, T, E]. A policy is a few fields of `MoEConfig`. The
router of training applies the policy, so the lab shows the choices, drops and messages of this policy. The lab rejects
load-balancing losses, because they act on the *weights* over a training run, and a recording cannot show their effect.
But an expert bias acts within a recording, because it moves after each microbatch by the load of all ranks.

Next to the balance are its costs: choices that are not among the token's own best, and dropped weight. Pictures are in
`policy_bars`:

    replayed = replay_policies(logits_NRTE, standard_policies(experts=8, top_k=2, groups=4))
    compare_policies(replayed, hidden=1024)
    load_over_training({each.name: each.load_by_microbatch for each in replayed})     # how a bias finds its way

There are N microbatches, R ranks of ep, T tokens per rank, E experts; H is the hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.comm.groups import single_process_groups
from labkit.config import ModelConfig, MoEConfig, RunConfig
from labkit.config.errors import nearest
from labkit.moe.replay import decode
from labkit.moe.router import TopKRouter, finish_router_step
from labkit.moe.routing import get_capacity, sinkhorn_routing, top_k_map, topk_routing
from labkit.plan.traffic import all_to_all_bytes, send_matrix_without_copies

REPLAYED = (
    "top_k",
    "score_function",
    "pre_softmax",
    "num_groups",
    "group_topk",
    "topk_scaling_factor",
    "load_balancing",
    "expert_bias",
    "expert_bias_update_rate",
    "capacity_factor",
    "drop_policy",
    "pad_to_capacity",
)
"""Fields of `MoEConfig` that a policy may set."""

Policy = Mapping[str, Any]


def standard_policies(
    experts: int, top_k: int = 2, *, groups: int = 4, bias_rate: float = 0.01, capacity_factor: float = 1.25
) -> dict[str, Policy]:
    """Return name -> policy: the ways to balance, and the ways to limit, with these sizes.

    groups: groups of the group-limited policy, which takes two of a token's experts from each chosen group, if it can;
        with a group per rank of ep, it halves the ranks that a token goes to. It is left out if no equal share of top_k
        fits.
    bias_rate: how far the bias moves after each microbatch.
    capacity_factor: factor of the policies that drop.

    With one expert per token, weights are those of a softmax over all experts, because over the chosen one it is 1.
    """
    fitting = [n for n in range(1, experts // groups + 1) if top_k % n == 0 and top_k // n <= groups]
    per_group = 2 if 2 in fitting else min(fitting, default=1)
    softmax: Policy = {"pre_softmax": True} if top_k == 1 else {}
    limit: Policy = {**softmax, "capacity_factor": capacity_factor}
    policies: dict[str, Policy] = {
        "top-k softmax": softmax,
        "group-limited": {**softmax, "num_groups": groups, "group_topk": top_k // per_group},
        "sigmoid + bias": {"score_function": "sigmoid", "expert_bias": True, "expert_bias_update_rate": bias_rate},
        "sinkhorn": {"load_balancing": "sinkhorn"},
        "drop by weight": {**limit, "drop_policy": "probs"},
        "drop by position": {**limit, "drop_policy": "position"},
        "drop and pad": {**limit, "pad_to_capacity": True},
    }
    if not fitting:
        del policies["group-limited"]
    return {name: {"top_k": top_k, **policy} for name, policy in policies.items()}


@dataclass(frozen=True)
class Replayed:
    """Result of one policy on a recording; all fields but `load_by_microbatch` describe the last microbatch."""

    name: str
    """Name of the policy."""
    load: np.ndarray
    """Choices of each expert from each rank by microbatch, before any capacity: int64 [N, R, E]."""
    rows: np.ndarray
    """Rows that each rank sends to each expert, after capacity and with padding: int64 [R, E]."""
    maps: np.ndarray
    """Experts of each token, the same rows one by one: bool [R, T, E]."""
    dropped: float
    """Share of the choices that exceed a capacity."""
    weight_dropped: float
    """Share of the weights that these choices had."""
    own_choice: float
    """Share of the choices, before capacity, that are among the token's top_k logits."""
    capacity: int | None
    """Tokens of a rank that an expert takes; None means no limit."""

    @property
    def load_by_microbatch(self) -> np.ndarray:
        """Choices of each expert over all ranks, int64 [N, E]."""
        return self.load.sum(axis=1)

    @property
    def fullest_expert(self) -> float:
        """Choices of the fullest expert over the mean expert's, before any capacity."""
        return _over_mean(self.load_by_microbatch[-1])

    @property
    def rows_by_rank(self) -> np.ndarray:
        """Rows that each rank computes, int64 [R]."""
        ranks, experts = self.rows.shape
        return self.rows.sum(axis=0).reshape(ranks, experts // ranks).sum(axis=1)

    @property
    def fullest_rank(self) -> float:
        """Rows of the fullest rank over the mean: the time of the experts' step relative to an even load."""
        return _over_mean(self.rows_by_rank)

    def sent_bytes(self, hidden: int, element_size: int = 2) -> int:
        """Return the bytes that leave ranks in one forward, to the experts and back, each row by itself."""
        return int(all_to_all_bytes(self.rows, len(self.rows), hidden, element_size).forward.sum())

    def sent_once_bytes(self, hidden: int, element_size: int = 2) -> int:
        """Return the same bytes if a token travelled only once to each rank with experts for it, and back once."""
        matrix = send_matrix_without_copies(self.maps, len(self.maps))
        return int(2 * (matrix.sum() - np.trace(matrix)) * hidden * element_size)


def replay(logits_NRTE: Tensor, policy: Policy, *, name: str = "policy") -> Replayed:
    """Route a recording by one policy.

    Args:
        logits_NRTE: [N, R, T, E], or [R, T, E] for one microbatch. Expert e lives on rank e // (E / R).
        policy: fields of `MoEConfig` among REPLAYED; all others have their defaults.
        name: name of the policy, for pictures.

    Raises:
        ValueError: another shape, experts that the ranks do not divide, or a policy that a configuration would reject.
    """
    logits = logits_NRTE if logits_NRTE.dim() == 4 else logits_NRTE[None]
    if logits.dim() != 4 or not logits.numel() or logits.shape[3] % logits.shape[1]:
        raise ValueError(
            f"the logits have shape {tuple(logits_NRTE.shape)}; give [microbatches, ranks, tokens, experts], where the "
            "ranks divide the experts"
        )
    moe = _config(policy, logits.shape[3], name)
    router = TopKRouter("lab", ModelConfig(hidden=1), moe, single_process_groups(), dtype=torch.float64)
    load, routed = [], []
    with torch.enable_grad(), _one_thread():
        for logits_RTE in logits.detach():
            routed = [_route(router, logits_TE) for logits_TE in logits_RTE]
            load.append([chosen_TE.sum(0).tolist() for _, _, chosen_TE in routed])
            finish_router_step([router], router.groups)
        return _summed(name, moe, np.array(load, dtype=np.int64), logits[-1], routed)


def replay_policies(logits_NRTE: Tensor, policies: Mapping[str, Policy]) -> list[Replayed]:
    """Return `replay` for each policy, in their order."""
    if not policies:
        raise ValueError("there is no policy to replay; give a mapping from names to fields of MoEConfig")
    return [replay(logits_NRTE, policy, name=name) for name, policy in policies.items()]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread while the block runs: for small tables a second thread costs more than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


_Routed = tuple[Tensor, Tensor, Tensor]
"""Weights and choice after the capacity, and choice before it, all [T, E]."""


def _route(router: TopKRouter, logits_TE: Tensor) -> _Routed:
    router.record = []
    probs_TE, kept_TE = router.routing(logits_TE, len(logits_TE))
    (code_SBE,) = router.record
    return probs_TE, kept_TE, decode(code_SBE)[0]


def _config(policy: Policy, experts: int, name: str) -> MoEConfig:
    known = {field.name for field in fields(MoEConfig)}
    for field in policy:
        if field in REPLAYED:
            continue
        why = "does not change what a recording routes" if field in known else f"is unknown{nearest(field, REPLAYED)}"
        raise ValueError(f"policy {name!r}: {field} {why}; a policy sets {', '.join(REPLAYED)}")
    if (kind := policy.get("load_balancing", "none")) not in ("none", "sinkhorn"):
        raise ValueError(f"policy {name!r}: {kind} acts on the weights over a training run; replay none or sinkhorn")
    given = {"num_experts": experts, "load_balancing": "none", **policy}
    config = RunConfig().override({f"moe.{field}": value for field, value in given.items()})
    if problems := config.problems():
        raise ValueError(f"policy {name!r}: {'; '.join(problems)}")
    return config.moe


def _summed(name: str, moe: MoEConfig, load: np.ndarray, logits_RTE: Tensor, routed: Sequence[_Routed]) -> Replayed:
    kept = torch.stack([kept_TE for _, kept_TE, _ in routed])
    chosen = torch.stack([chosen_TE for _, _, chosen_TE in routed])
    best = torch.stack([top_k_map(logits_TE, moe.top_k) for logits_TE in logits_RTE])
    whole = sum(_weights(moe, logits_TE, c).sum().item() for logits_TE, c in zip(logits_RTE, chosen))
    left = sum(probs_TE.sum().item() for probs_TE, _, _ in routed)
    choices = chosen.sum().item()
    limit = None
    if moe.capacity_factor is not None:
        limit = get_capacity(
            num_tokens=logits_RTE.shape[1],
            top_k=moe.top_k,
            num_experts=moe.num_experts,
            capacity_factor=moe.capacity_factor,
        )
    return Replayed(
        name=name,
        load=load,
        rows=kept.sum(dim=1).numpy(),
        maps=kept.numpy(),
        dropped=(chosen & ~kept).sum().item() / choices,
        weight_dropped=max(0.0, 1 - left / whole) if whole else 0.0,
        own_choice=(chosen & best).sum().item() / choices,
        capacity=limit,
    )


def _weights(moe: MoEConfig, logits_TE: Tensor, chosen_TE: Tensor) -> Tensor:
    """Return the weight of each choice without a capacity."""
    if moe.load_balancing == "sinkhorn":
        return sinkhorn_routing(logits_TE, moe.top_k, map_TE=chosen_TE)[0]
    return topk_routing(
        logits_TE,
        moe.top_k,
        score_function=moe.score_function,
        pre_softmax=moe.pre_softmax,
        scaling_factor=moe.topk_scaling_factor,
        map_TE=chosen_TE,
    )[0]


def _over_mean(counts: np.ndarray) -> float:
    return float(counts.max() / counts.mean()) if counts.any() else 1.0
