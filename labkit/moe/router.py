"""The router of one MoE layer: logits, choice, weights, and the losses that keep the load even.

    logits = x W^T  ->  z loss  ->  choice and weights  ->  capacity  ->  load-balancing loss attached to the weights

Unless `moe.router_dtype` is `model`, logits and scores are computed in float32 or wider, also from bf16 activations,
because between close logits bf16 would decide by rounding. Under sequence parallelism a rank routes the S/(cp tp)
positions that it holds. So the gradient of W is a part of a sum over tp (`sequence_parallel`), like that of a norm.

A forward counts for losses, statistics and the expert bias only in training with gradients enabled. Recomputation too
counts a microbatch once, since its first forward runs without gradients. The global loss is an exception: it counts in
the first forward. Its mean is over the microbatches so far, and the schedule decides on the time of second forwards.

Shapes: S sequence and B batch of this rank, T = S x B tokens (token s B + b), H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from labkit.comm.collectives import all_reduce
from labkit.comm.groups import ParallelGroups
from labkit.comm.ledger import comm_scope, current_scope
from labkit.config import ModelConfig, MoEConfig
from labkit.moe.balance import (
    AuxLossAutoScaler,
    AuxLossScale,
    aux_loss_scale,
    switch_load_balancing_loss_func,
    updated_expert_bias,
    z_loss_func,
)
from labkit.moe.replay import RoutingReplay, encode, is_second_forward
from labkit.moe.routing import apply_capacity, normalized_scores, sinkhorn_routing, top_k_map, topk_routing
from labkit.moe.statistics import RouterStatistics
from labkit.parallel.parameters.parameter_record import record_of
from labkit.parallel.parameters.weights import Seed, make_parameter
from labkit.parallel.random import RngTracker
from labkit.parallel.recompute import once, will_run_again

ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class _GatingLinear(Function):
    """A linear layer computed in a wider type than its tensors.

        forward   y = x W^T              [T, H] x [H, E] -> [T, E], in the wide type
        dgrad     dx = dy W              [T, E] x [E, H] -> [T, H], rounded to x's type
        wgrad     dW = dy^T x            [E, T] x [T, H] -> [E, H], rounded to W's type

    Backward keeps only the narrow tensors.
    """

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EH: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x_TH, weight_EH)
        return x_TH.to(dtype) @ weight_EH.to(dtype).t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x_TH, weight_EH = ctx.saved_tensors
        grad_TE = grads[0]
        dx_TH = (grad_TE @ weight_EH.to(grad_TE.dtype)).to(x_TH.dtype) if ctx.needs_input_grad[0] else None
        dw_EH = (grad_TE.t() @ x_TH.to(grad_TE.dtype)).to(weight_EH.dtype) if ctx.needs_input_grad[1] else None
        return dx_TH, dw_EH, None


class TopKRouter(nn.Module):
    """Sends each token to top_k experts.

    Args:
        name: name in the whole model, such as `layers.3.mlp.router`.
        model: shape of the model.
        moe: options of routing.
        groups: groups of this rank.
        sequence_parallel: the ranks of tp hold different positions.
        seed: seed of the weight.
        dtype, device: dtype and device of the weight; None is the host.
        aux_scale: start of the gradients of losses, shared by the routers of a model chunk; None makes one of value 1.
        statistics: counts the layer's load; None makes one.
        rng: random states for `input_jitter`; None draws from torch's generator.

    Attributes:
        weight: [E, H].
        expert_bias: buffer [E], float32; None without `moe.expert_bias`.
        replay: a `RoutingReplay` with the choices; None makes choices.
        record: a list that gets the record (`replay.py`) of every forward, or None.

    Raises:
        ValueError: tp > 1 without sequence parallelism.
    """

    weight: nn.Parameter
    expert_bias: Tensor | None
    local_tokens_per_expert: Tensor | None
    """[E], tokens of each expert in this step so far, for the bias."""
    global_counts: Tensor | None
    """[E + 1], for the global loss: counts of this step's forwards, and the number of these forwards."""

    def __init__(
        self,
        name: str,
        model: ModelConfig,
        moe: MoEConfig,
        groups: ParallelGroups,
        *,
        sequence_parallel: bool = False,
        seed: Seed = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        aux_scale: AuxLossScale | None = None,
        statistics: RouterStatistics | None = None,
        rng: RngTracker | None = None,
    ) -> None:
        super().__init__()
        if groups.tp.size > 1 and not sequence_parallel:
            raise ValueError(
                f"{name}: with tp = {groups.tp.size} every rank of tp would route all tokens; MoE layers need "
                "sequence parallelism there (parallel.sequence_parallel: true)"
            )
        self.name, self.moe, self.groups, self.rng = name, moe, groups, rng
        shape = (moe.num_experts, model.hidden)
        self.weight = make_parameter(f"{name}.weight", shape, seed=seed, std=model.init_std, dtype=dtype, device=device)
        record_of(self.weight).sequence_parallel = sequence_parallel and groups.tp.size > 1
        self.aux_scale = aux_scale or AuxLossScale(device=device)
        self.statistics = statistics or RouterStatistics(moe.num_experts, device=device)
        self.replay: RoutingReplay | None = None
        self.record: list[Tensor] | None = None
        self._make_buffers(device)

    def _make_buffers(self, device: torch.device | str | None) -> None:
        zeros = torch.zeros(self.moe.num_experts, device=device)
        with_bias, is_global = self.moe.expert_bias, self.moe.load_balancing == "global_aux_loss"
        self.register_buffer("expert_bias", zeros if with_bias else None)
        self.register_buffer("local_tokens_per_expert", zeros.to(torch.int64) if with_bias else None, persistent=False)
        global_counts = zeros.new_zeros(self.moe.num_experts + 1, dtype=torch.float64)
        self.register_buffer("global_counts", global_counts if is_global else None, persistent=False)

    def forward(self, x_SBH: Tensor) -> tuple[Tensor, Tensor]:
        """[S, B, H] -> weights [T, E], 0 where not chosen, and the choice [T, E], bool."""
        with comm_scope(layer=self.name, phase=current_scope().phase or "forward"):
            return self.routing(self.gating(self.jittered(x_SBH)), x_SBH.shape[0])

    def jittered(self, x_SBH: Tensor) -> Tensor:
        """Return the input times random numbers from 1 - jitter to 1 + jitter, different on each rank of tp."""
        jitter = self.moe.input_jitter
        if not jitter or not self.training:
            return x_SBH
        own = self.rng is not None and self.groups.tp.size > 1
        with self.rng.fork() if own and self.rng is not None else nullcontext():
            return x_SBH * torch.empty_like(x_SBH).uniform_(1 - jitter, 1 + jitter)

    def gating(self, x_SBH: Tensor) -> Tensor:
        """Return logits [T, E], in the wider of `router_dtype` and the input's type."""
        dtype = torch.promote_types(x_SBH.dtype, ROUTER_DTYPES.get(self.moe.router_dtype, x_SBH.dtype))
        return _GatingLinear.apply(x_SBH.flatten(0, 1), self.weight, dtype)  # type: ignore[no-any-return]

    def routing(self, logits_TE: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
        """Return weights and choice from logits of `sequence` positions. If it counts, add to losses and load."""
        moe, counts = self.moe, self.training and torch.is_grad_enabled()
        shape_SBE = (sequence, logits_TE.shape[0] // sequence, moe.num_experts)
        replayed, replayed_counted = self.replay.take(shape_SBE) if self.replay is not None else (None, None)
        if counts and moe.z_loss_coeff:
            logits_TE = self._with_z_loss(logits_TE)
        probs_TE, map_TE = self._choose(logits_TE, replayed)
        has_loss = self.training and moe.load_balancing.endswith("aux_loss") and moe.aux_loss_coeff > 0
        with_loss = has_loss and counts
        with_mean = has_loss and moe.load_balancing == "global_aux_loss" and (counts or will_run_again())
        counted_TE = map_TE if replayed_counted is None else replayed_counted
        if self._chooses_by_more and replayed is None and (with_loss or with_mean or self.record is not None):
            counted_TE = top_k_map(logits_TE, moe.top_k)
        mean_E = once(lambda: self._mean_counts(counted_TE)) if with_mean else None
        if self.record is not None and not is_second_forward():
            self.record.append(encode(map_TE, counted_TE, sequence))
        probs_TE, kept_TE = self._limit(probs_TE, map_TE)
        if counts:
            self._count(map_TE, kept_TE)
        if with_loss:
            scores_TE = normalized_scores(logits_TE, moe.score_function)
            probs_TE = self._with_balance_loss(probs_TE, scores_TE, counted_TE, sequence, mean_E)
        return probs_TE, kept_TE

    @property
    def _chooses_by_more(self) -> bool:
        """True if bias or groups also decide on the choice; the load-balancing loss must ignore both."""
        return self.moe.expert_bias or self.moe.num_groups is not None

    def _choose(self, logits_TE: Tensor, replayed: Tensor | None) -> tuple[Tensor, Tensor]:
        moe = self.moe
        if moe.load_balancing == "sinkhorn":
            return sinkhorn_routing(logits_TE, moe.top_k, balanced=self.training, map_TE=replayed)
        return topk_routing(
            logits_TE,
            moe.top_k,
            score_function=moe.score_function,
            pre_softmax=moe.pre_softmax,
            num_groups=moe.num_groups,
            group_topk=moe.group_topk,
            scaling_factor=moe.topk_scaling_factor,
            expert_bias=self.expert_bias,
            map_TE=replayed,
        )

    def _limit(self, probs_TE: Tensor, map_TE: Tensor) -> tuple[Tensor, Tensor]:
        if self.moe.capacity_factor is None:
            return probs_TE, map_TE
        return apply_capacity(
            probs_TE,
            map_TE,
            top_k=self.moe.top_k,
            capacity_factor=self.moe.capacity_factor,
            drop_policy=self.moe.drop_policy,
            pad_to_capacity=self.moe.pad_to_capacity,
        )

    def _count(self, map_TE: Tensor, kept_TE: Tensor) -> None:
        """Count the load before any capacity. A bias fed by clipped loads would not see the excess of an expert, and a
        bias fed by padded loads would see equal loads."""
        load_E = map_TE.sum(dim=0)
        dropped = None if self.moe.capacity_factor is None else (map_TE & ~kept_TE).sum()
        self.statistics.add_routing(load_E, dropped)
        if self.local_tokens_per_expert is not None:
            self.local_tokens_per_expert += load_E

    # ---- losses ----

    def _with_z_loss(self, logits_TE: Tensor) -> Tensor:
        part = z_loss_func(logits_TE, 1.0 / self.groups.tp_cp.size)
        self.statistics.add_loss("z_loss", part)
        return AuxLossAutoScaler.apply(logits_TE, part * self.moe.z_loss_coeff, self.aux_scale)  # type: ignore[no-any-return]

    def _with_balance_loss(
        self, probs_TE: Tensor, scores_TE: Tensor, counted_TE: Tensor, sequence: int, mean_E: Tensor | None
    ) -> Tensor:
        """Attach the loss over the micro batch, over each sequence, or over the global batch so far (`mean_E`)."""
        kind, batch, scope = self.moe.load_balancing, 1, self.groups.tp_cp
        if kind == "seq_aux_loss":  # a column for each sequence and expert, then the mean over sequences
            batch = counted_TE.shape[0] // sequence
            scores_TE, counted_TE = scores_TE.reshape(sequence, -1), counted_TE.reshape(sequence, -1)
        if mean_E is not None:
            scope = self.groups.tp_dp_cp
        counts = all_reduce(counted_TE.sum(dim=0), scope) if mean_E is None else mean_E
        part = switch_load_balancing_loss_func(
            scores_TE,
            counts.to(scores_TE.dtype),
            scores_TE.shape[0] * scope.size,
            top_k=self.moe.top_k,
            num_experts=self.moe.num_experts,
            coefficient=1.0 / max(batch, 1),
        )
        if mean_E is not None:
            # Its parts are on the ranks of dp too. Gradients are averaged over dp, and this factor undoes that.
            part = part * self.groups.dp.size
        self.statistics.add_loss("load_balancing_loss", part)
        return AuxLossAutoScaler.apply(probs_TE, part * self.moe.aux_loss_coeff, self.aux_scale)  # type: ignore[no-any-return]

    def _mean_counts(self, counted_TE: Tensor) -> Tensor:
        """Return the mean counts of this step's forwards so far (arXiv 2501.11873, section 3: a buffer over them)."""
        assert self.global_counts is not None
        self.global_counts[:-1] += all_reduce(counted_TE.sum(dim=0), self.groups.tp_dp_cp)
        self.global_counts[-1] += 1
        return self.global_counts[:-1] / self.global_counts[-1]

    def set_aux_loss_scale(
        self, loss_scale: float | Tensor, *, num_microbatches: int, tokens_per_microbatch: int | None = None
    ) -> None:
        """Set the start of the losses' gradients (`aux_loss_scale`), before the forwards of a step."""
        cp, tokens = self.groups.cp.size, tokens_per_microbatch
        mean = aux_loss_scale(1.0, cp=cp, num_microbatches=num_microbatches, tokens_per_microbatch=tokens)
        self.aux_scale.set(loss_scale * mean)

    def reset_global_aux_loss_tracker(self) -> None:
        """Set the counts of the global loss to zero, at the end of a step."""
        if self.global_counts is not None:
            self.global_counts.zero_()


# ---- the end of a step ----


def routers_of(chunks: Iterable[nn.Module]) -> Iterator[TopKRouter]:
    """Yield all routers of a rank's model chunks, in order of layers within each chunk."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                yield module


def finish_router_step(chunks: Iterable[nn.Module], groups: ParallelGroups, *, move_biases: bool = True) -> None:
    """Move the expert biases by the load of the global batch, and set the step's counts to zero.

    All ranks call it once per optimizer step, after gradients are final. It makes one all-reduce over tp x dp x cp for
    all layers of the rank.

    move_biases: False keeps the biases, for a step that is skipped.
    """
    routers = list(routers_of(chunks))
    loads = [router.local_tokens_per_expert for router in routers if router.local_tokens_per_expert is not None]
    biases = [(router.expert_bias, router.moe) for router in routers if router.expert_bias is not None]
    if loads and move_biases:
        with comm_scope(layer="finalize", phase="expert bias"):
            total_LE = all_reduce(torch.stack(loads), groups.tp_dp_cp)
        for (bias_E, moe), total_E in zip(biases, total_LE, strict=True):
            bias_E.copy_(updated_expert_bias(total_E, bias_E, moe.expert_bias_update_rate))
    for load_E in loads:
        load_E.zero_()
    for router in routers:
        router.reset_global_aux_loss_tracker()
