"""The router of one process: losses against their formulas, what counts and when, replay, statistics, bias."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inputs import random
from torch import Tensor, nn

from labkit.config import ModelConfig, MoEConfig
from labkit.moe.balance import (
    AuxLossAutoScaler,
    AuxLossScale,
    aux_loss_scale,
    switch_load_balancing_loss_func,
    updated_expert_bias,
    z_loss_func,
)
from labkit.moe.replay import RoutingReplay, decode
from labkit.moe.router import TopKRouter, finish_router_step, routers_of
from labkit.moe.routing import normalized_scores, top_k_map
from labkit.moe.statistics import RouterSummary, summarize
from labkit.parallel import checkpoint, single_process_groups
from labkit.parallel.parameters.parameter_record import record_of

S, B, H, E, K = 6, 2, 8, 4, 2
GROUPS = single_process_groups()


def router_of(scale: float = 1.0, dtype: torch.dtype = torch.float64, **moe: Any) -> TopKRouter:
    model, config = ModelConfig(hidden=H, init_std=0.5), MoEConfig(num_experts=E, **{"top_k": K, **moe})
    return TopKRouter("layers.0.mlp.router", model, config, GROUPS, dtype=dtype, aux_scale=AuxLossScale(scale))


def gradient(router: TopKRouter, loss: Tensor) -> Tensor:
    [found] = torch.autograd.grad(loss, [router.weight])
    return found


def attached(router: TopKRouter, x_SBH: Tensor) -> Tensor:
    """The weight's gradient where the model's loss has none."""
    return gradient(router, (router(x_SBH)[0] * 0).sum())


# ---- losses ----


def test_even_load_and_scores_give_the_coefficient() -> None:
    scores_TE, counts_E = torch.full((12, E), 1 / E), torch.full((E,), 12 * K / E)
    loss = switch_load_balancing_loss_func(scores_TE, counts_E, 12, top_k=K, num_experts=E, coefficient=0.3)
    assert loss.item() == pytest.approx(0.3)
    one = torch.zeros(12, E).index_fill(1, torch.tensor([0]), 1.0)
    alone = switch_load_balancing_loss_func(one, 12 * one[0], 12, top_k=1, num_experts=E, coefficient=0.3)
    assert alone.item() == pytest.approx(0.3 * E)  # all on one expert: E times as much


def test_z_loss_by_hand() -> None:
    logits_TE = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0]], dtype=torch.float64)
    assert z_loss_func(logits_TE, 2.0).item() == pytest.approx(math.log(2.0) ** 2 + math.log(4.0) ** 2)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_attached_gradients_equal_those_of_the_formula_written_out(kind: str, score_function: str) -> None:
    router = router_of(7.0, load_balancing=kind, aux_loss_coeff=0.1, score_function=score_function)
    x_SBH = random(S, B, H)
    found = attached(router, x_SBH)
    scores = normalized_scores(x_SBH @ router.weight.t(), score_function)
    counted = top_k_map(scores.flatten(0, 1), K).view(S, B, E).double()
    dims = 0 if kind == "seq_aux_loss" else (0, 1)
    tokens = S if kind == "seq_aux_loss" else S * B
    loss = E / (K * tokens**2) * (scores.sum(dims) * counted.sum(dims)).sum()
    torch.testing.assert_close(found, gradient(router, 7.0 * 0.1 * loss / (B if kind == "seq_aux_loss" else 1)))
    summary = summarize([router.statistics], GROUPS)[0]
    assert summary.load_balancing_loss == pytest.approx(loss.item() / (B if kind == "seq_aux_loss" else 1))


def test_the_losses_add_up_and_leave_the_output_as_it_is() -> None:
    plain, both = router_of(), router_of(aux_loss_coeff=0.1, z_loss_coeff=0.2)
    x_SBH = random(S, B, H)
    assert torch.equal(plain(x_SBH)[0], both(x_SBH)[0])
    parts = [attached(router_of(**part), x_SBH) for part in ({"aux_loss_coeff": 0.1}, {"z_loss_coeff": 0.2})]
    torch.testing.assert_close(attached(both, x_SBH), parts[0] + parts[1])
    z = gradient(both, z_loss_func((x_SBH @ both.weight.t()).flatten(0, 1), 0.2))
    torch.testing.assert_close(parts[1], z)


def test_the_global_loss_uses_the_mean_counts_of_the_step_so_far() -> None:
    fresh, router = (router_of(load_balancing="global_aux_loss", aux_loss_coeff=1.0) for _ in range(2))
    batches = [random(S, B, H, seed=seed) for seed in (1, 2)]
    attached(router, batches[0])
    second = attached(router, batches[1])
    logits = [(x @ router.weight.t()).flatten(0, 1) for x in batches]
    counts_E = sum(top_k_map(x, K).sum(0) for x in logits) / 2
    tokens = S * B
    loss = switch_load_balancing_loss_func(
        logits[1].softmax(-1), counts_E, tokens, top_k=K, num_experts=E, coefficient=1.0
    )
    torch.testing.assert_close(second, gradient(router, loss))
    finish_router_step([router], GROUPS)
    assert torch.equal(attached(router, batches[1]), attached(fresh, batches[1]))


def test_bias_groups_and_scaling_do_not_reach_the_loss() -> None:
    common: dict[str, Any] = {"aux_loss_coeff": 0.1, "score_function": "sigmoid"}
    plain = router_of(**common)
    other = router_of(**common, expert_bias=True, num_groups=2, group_topk=1, topk_scaling_factor=3.0)
    assert other.expert_bias is not None
    other.expert_bias.copy_(torch.tensor([5.0, 0, 0, -5]))
    x_SBH = random(S, B, H)
    assert not torch.equal(plain(x_SBH)[1], other(x_SBH)[1])
    assert torch.equal(attached(plain, x_SBH), attached(other, x_SBH))


def test_the_scale_is_read_in_backward() -> None:
    scale, x = AuxLossScale(1.0), torch.ones(3, requires_grad=True)
    y = AuxLossAutoScaler.apply(x, (x**2).sum(), scale)
    scale.set(torch.tensor(5.0))
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [11.0] * 3
    third = aux_loss_scale(1.0, cp=1, num_microbatches=3)
    assert AuxLossScale(third).value.item() == 1 / 3  # float64, for runs that are
    assert aux_loss_scale(8.0, cp=2, num_microbatches=4) == 4.0
    assert aux_loss_scale(8.0, cp=2, num_microbatches=4, tokens_per_microbatch=32) == 256.0


# ---- types and layout ----


@pytest.mark.parametrize(
    ("router_dtype", "dtype", "expected"),
    [
        ("fp32", torch.bfloat16, torch.float32),
        ("fp32", torch.float64, torch.float64),
        ("fp64", torch.float32, torch.float64),
        ("model", torch.bfloat16, torch.bfloat16),
    ],
)
def test_logits_are_as_wide_as_asked_and_gradients_as_the_tensors(router_dtype, dtype, expected) -> None:
    router, x_SBH = router_of(dtype=dtype, router_dtype=router_dtype), random(S, B, H).to(dtype).requires_grad_()
    probs_TE, map_TE = router(x_SBH)
    assert probs_TE.dtype == expected and map_TE.dtype == torch.bool and probs_TE.shape == (S * B, E)
    (probs_TE * random(S * B, E).to(expected)).sum().backward()
    assert x_SBH.grad is not None and x_SBH.grad.dtype == router.weight.grad.dtype == dtype
    wide = router_of(dtype=torch.float64, router_dtype="fp64")
    wide.weight.data.copy_(router.weight)
    wide_x = x_SBH.detach().double().requires_grad_()
    (wide(wide_x)[0] * random(S * B, E)).sum().backward()
    if router_dtype != "model":
        error = (router.weight.grad.double() - wide.weight.grad).norm() / wide.weight.grad.norm()
        assert error < (4e-3 if dtype == torch.bfloat16 else 1e-5)


def test_the_wide_product_has_the_gradients_of_the_product() -> None:
    router = router_of()
    x_SBH = random(S, B, H).requires_grad_()
    assert torch.autograd.gradcheck(router.gating, x_SBH)
    target = random(S * B, E)
    found = gradient(router, (router.gating(x_SBH) * target).sum())
    torch.testing.assert_close(found, target.t() @ x_SBH.detach().flatten(0, 1))


def test_the_weight_is_named_and_drawn_as_any_other() -> None:
    weight, again = router_of().weight, router_of().weight
    assert (weight.full_name, record_of(weight).full_shape) == ("layers.0.mlp.router.weight", (E, H))  # type: ignore[attr-defined]
    assert torch.equal(weight, again) and not record_of(weight).sequence_parallel
    assert list(router_of(expert_bias=True, score_function="sigmoid").state_dict()) == ["weight", "expert_bias"]
    assert list(router_of(load_balancing="global_aux_loss").state_dict()) == ["weight"]


# ---- what counts ----


def attached_to(router: TopKRouter, probs_TE: Tensor, target: Tensor) -> Tensor:
    """The weight's gradient of one microbatch, by `backward`, as a recomputed part wants it."""
    router.weight.grad = None
    (probs_TE * target).sum().backward()
    assert router.weight.grad is not None
    return router.weight.grad.clone()


def counted(router: TopKRouter) -> tuple[list[float], list[int]]:
    assert router.local_tokens_per_expert is not None
    return router.statistics.totals.tolist(), router.local_tokens_per_expert.tolist()


COUNTING: dict[str, Any] = {"score_function": "sigmoid", "expert_bias": True, "aux_loss_coeff": 0.1}


def test_evaluation_and_forwards_without_a_graph_do_not_count() -> None:
    router, x_SBH = router_of(**COUNTING), random(S, B, H)
    before = counted(router)
    with torch.no_grad():
        router(x_SBH)
    router.eval()
    router(x_SBH)[0].sum().backward()
    assert counted(router) == before


@pytest.mark.parametrize("kind", ["aux_loss", "global_aux_loss"])
def test_recomputation_counts_once_and_changes_no_bit(kind: str) -> None:
    x_SBH, target = random(S, B, H), random(S * B, E)
    gradients, counts = [], []
    for run in (lambda router, x: router(x), lambda router, x: checkpoint(router, x)):
        router = router_of(**{**COUNTING, "load_balancing": kind, "z_loss_coeff": 0.1})
        for number in range(2):
            x = (x_SBH + number).requires_grad_()
            (run(router, x)[0] * target).sum().backward()
        gradients.append(router.weight.grad)
        counts.append(counted(router))
    assert torch.equal(gradients[0], gradients[1]) and counts[0] == counts[1]
    assert sum(counts[0][1]) == 2 * S * B * K


KEPT_WHOLE = [(True, False, False), (False, True, False), (False, False, True)]
"""Of three microbatches one recomputes nothing."""


@pytest.mark.parametrize("kept_whole", [(False, False, False), *KEPT_WHOLE])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_the_global_loss_means_over_forwards_in_their_order(order, kept_whole) -> None:
    """Whichever microbatches are recomputed, and in whatever order backwards come."""
    x_MSBH, target = random(3, S, B, H).requires_grad_(), random(S * B, E)

    def trained(kept_whole: tuple[bool, ...], order: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        router = router_of(**{**COUNTING, "load_balancing": "global_aux_loss"})
        with torch.no_grad():
            router(x_MSBH[0])  # evaluation in between counts nothing
        runs = [router(x)[0] if kept else checkpoint(router, x)[0] for x, kept in zip(x_MSBH, kept_whole)]
        gradients = {m: attached_to(router, runs[m], target) for m in order}
        assert router.global_counts is not None
        return torch.stack([gradients[m] for m in range(3)]), router.global_counts, router.statistics.totals

    found, expected = trained(kept_whole, order), trained((True, True, True), (0, 1, 2))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert torch.allclose(found[2], expected[2], rtol=1e-6)
    assert found[1][-1] == 3 and found[1][:-1].sum() == 3 * S * B * K


def test_the_load_is_counted_before_the_capacity() -> None:
    router = router_of(**COUNTING, capacity_factor=0.5, pad_to_capacity=True)
    _, map_TE = router(random(S, B, H))
    summary = summarize([router.statistics], GROUPS)[0]
    assert sum(summary.tokens_per_expert) == S * B * K
    capacity = 3  # ceil(12 x 2 / 4 x 0.5)
    assert map_TE.sum(0).tolist() == [capacity] * E
    assert summary.dropped == sum(max(0, load - capacity) for load in summary.tokens_per_expert) > 0


# ---- replay ----


class Layers(nn.Module):
    """Two routers, the second fed by the first, so that a flipped choice would reach it."""

    def __init__(self, **moe: Any) -> None:
        super().__init__()
        self.routers = nn.ModuleList([router_of(dtype=torch.float32, **moe) for _ in range(2)])

    def forward(self, x_SBH: Tensor) -> Tensor:
        probs_TE, _ = self.routers[0](x_SBH)
        probs_TE, _ = self.routers[1](x_SBH + probs_TE.view(*x_SBH.shape[:2], E).repeat(1, 1, H // E))
        return probs_TE


@pytest.mark.parametrize("recompute", [False, True])
def test_a_replay_takes_every_choice_from_the_record(recompute: bool) -> None:
    """Recorded from one weight, replayed with another: choices of the first, scores of the second; in recomputation
    the same choices once more."""
    options: dict[str, Any] = {"aux_loss_coeff": 0.1, "score_function": "sigmoid", "expert_bias": True}
    recorded, replayed = Layers(**options), Layers(**options)
    x_MSBH = random(2, S, B, H).float()
    for router in recorded.routers:
        router.record = []
        router.weight.data.add_(1.0 * random(E, H, seed=9))
    for x_SBH in x_MSBH:
        run = checkpoint(recorded, x_SBH.requires_grad_()) if recompute else recorded(x_SBH)
        run.sum().backward()
    assert [len(router.record) for router in recorded.routers] == [2, 2]
    for router, source in zip(replayed.routers, recorded.routers):
        router.replay, router.record = RoutingReplay(source.record), []
    for x_SBH in x_MSBH:
        run = checkpoint(replayed, x_SBH.requires_grad_()) if recompute else replayed(x_SBH)
        run.sum().backward()
    for router, source in zip(replayed.routers, recorded.routers):
        assert all(torch.equal(a, b) for a, b in zip(router.record, source.record, strict=True))
        assert torch.equal(router.statistics.tokens_per_expert, source.statistics.tokens_per_expert)
    free = Layers(**options)
    assert not torch.equal(free.routers[0](x_MSBH[0])[1], decode(recorded.routers[0].record[0])[0])


@pytest.mark.parametrize("kept_whole", KEPT_WHOLE)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_a_recomputed_microbatch_gets_its_own_record_again(order, kept_whole) -> None:
    """Evaluation before it takes a record of its own, which no second forward asks for."""
    x_MSBH = random(4, S, B, H).requires_grad_()
    choices = [
        torch.zeros(S, B, E, dtype=torch.uint8).index_fill(2, torch.tensor([m, (m + 1) % E]), 3) for m in range(4)
    ]
    router = router_of()
    router.replay = RoutingReplay(choices)
    with torch.no_grad():
        checkpoint(router, x_MSBH[3])
    runs = [router(x)[0] if kept else checkpoint(router, x)[0] for x, kept in zip(x_MSBH, kept_whole)]
    for m in order:
        found = attached_to(router, runs[m], random(S * B, E))
        alone = router_of()
        alone.replay = RoutingReplay([choices[m + 1]])
        assert torch.equal(found, attached_to(alone, alone(x_MSBH[m])[0], random(S * B, E)))


def test_a_record_is_laid_out_as_the_tokens_are() -> None:
    router, x_SBH = router_of(**COUNTING, num_groups=2, group_topk=1), random(S, B, H)
    assert router.expert_bias is not None
    router.expert_bias.copy_(torch.tensor([5.0, 0, 0, 0]))
    router.record = []
    _, map_TE = router(x_SBH)
    [record] = router.record
    assert record.shape == (S, B, E) and record.dtype == torch.uint8
    chosen_TE, counted_TE = decode(record)
    assert torch.equal(chosen_TE, map_TE)
    assert torch.equal(counted_TE, top_k_map((x_SBH @ router.weight.t()).flatten(0, 1), K))
    half = router_of(**COUNTING)
    half.replay = RoutingReplay([record[2:4, 1:]])
    assert torch.equal(half(x_SBH[2:4, 1:])[1], map_TE.view(S, B, E)[2:4, 1:].flatten(0, 1))


def test_a_replay_that_does_not_fit_is_refused() -> None:
    router = router_of()
    router.replay = RoutingReplay([torch.zeros(S, B, E, dtype=torch.uint8)])
    with pytest.raises(ValueError, match=r"recorded routing 0 has shape \(6, 2, 4\), this forward \(3, 2, 4\)"):
        router(random(3, B, H))
    router.replay = RoutingReplay([])
    with pytest.raises(ValueError, match="all 0 recorded routings are used"):
        router(random(S, B, H))


# ---- bias and statistics ----


@given(loads=st.lists(st.integers(0, 50), min_size=2, max_size=8), rate=st.sampled_from([1e-3, 0.5]))
def test_the_bias_moves_by_the_rate_towards_the_mean(loads, rate) -> None:
    bias = updated_expert_bias(torch.tensor(loads), torch.zeros(len(loads)), rate)
    mean = sum(loads) / len(loads)
    expected = [rate * ((load < mean) - (load > mean)) for load in loads]
    assert bias.dtype == torch.float32 and bias.tolist() == pytest.approx(expected)


def test_the_bias_evens_a_skewed_load() -> None:
    """Expert 0 is everybody's first choice; after some steps it has no more than its share."""
    router = router_of(score_function="sigmoid", expert_bias=True, expert_bias_update_rate=0.02, top_k=1)
    logits_TE = random(64, E)
    logits_TE[:, 0] += 2.0
    loads = []
    for _ in range(60):
        router.statistics.reset()
        router.routing(logits_TE.clone().requires_grad_(), 64)
        loads.append(summarize([router.statistics], GROUPS)[0].max_over_mean)
        finish_router_step([router], GROUPS)
    assert loads[0] > 3 and loads[-1] < 1.3


def test_routers_are_found_in_order_and_only_where_they_are() -> None:
    layers = Layers()
    assert list(routers_of([nn.Linear(2, 2), layers])) == list(layers.routers)
    finish_router_step([nn.Linear(2, 2)], GROUPS)
    assert summarize([], GROUPS) == []


@pytest.mark.parametrize(
    ("load", "over", "entropy"),
    [([5, 5, 5, 5], 1.0, 1.0), ([20, 0, 0, 0], 4.0, 0.0), ([0, 0, 0, 0], 1.0, 0.0), ([7], 1.0, 1.0)],
)
def test_a_summary_by_hand(load: list[int], over: float, entropy: float) -> None:
    summary = RouterSummary.of([*load, 3, 4.0, 6.0, 8], parts=4)  # 8 forwards of 4 parts each: 2 microbatches
    assert summary.tokens_per_expert == tuple(load) and summary.dropped == 3
    assert (summary.max_over_mean, summary.load_entropy) == pytest.approx((over, entropy))
    assert (summary.load_balancing_loss, summary.z_loss) == (2.0, 3.0)


def test_statistics_add_up_over_microbatches_until_reset() -> None:
    router = router_of(aux_loss_coeff=0.5, z_loss_coeff=0.5)
    each = []
    for seed in (1, 2):
        alone = router_of(aux_loss_coeff=0.5, z_loss_coeff=0.5)
        for one in (router, alone):
            one(random(S, B, H, seed=seed))
        each.append(summarize([alone.statistics], GROUPS)[0])
    [total] = summarize([router.statistics], GROUPS)
    assert total.tokens_per_expert == tuple(map(sum, zip(*(one.tokens_per_expert for one in each))))
    assert total.load_balancing_loss == pytest.approx(sum(one.load_balancing_loss for one in each) / 2)
    assert total.z_loss == pytest.approx(sum(one.z_loss for one in each) / 2)
    router.statistics.reset()
    assert not router.statistics.totals.any()
