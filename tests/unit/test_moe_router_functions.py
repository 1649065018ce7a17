"""Choice, weights and capacity as functions of logits: worked examples, properties, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inputs import random

from labkit.moe.routing import (
    apply_capacity,
    choose,
    get_capacity,
    group_limited_topk,
    normalized_scores,
    sinkhorn,
    sinkhorn_routing,
    top_k_map,
    topk_routing,
)

LOGITS = torch.tensor(
    [[0.0, math.log(3.0), math.log(2.0), math.log(6.0)]], dtype=torch.float64
)  # softmax: 1 3 2 6 / 12


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 3 / 9, 0, 6 / 9]),
        ({"pre_softmax": True}, [0, 3 / 12, 0, 6 / 12]),
        ({"pre_softmax": True, "scaling_factor": 2.0}, [0, 6 / 12, 0, 1]),
        # sigmoid of log x is x / (1 + x)
        ({"score_function": "sigmoid"}, [0, (3 / 4) / (3 / 4 + 6 / 7), 0, (6 / 7) / (3 / 4 + 6 / 7)]),
        ({"score_function": "sigmoid", "top_k": 1}, [0, 0, 0, 6 / 7]),
        ({"score_function": "sigmoid", "top_k": 1, "expert_bias": torch.tensor([0.5, 0, 0, 0])}, [1 / 2, 0, 0, 0]),
        # groups {0, 1} and {2, 3}: the best single expert is in the second, with both of its experts
        ({"num_groups": 2, "group_topk": 1}, [0, 0, 2 / 8, 6 / 8]),
        ({"top_k": 4}, [1 / 12, 3 / 12, 2 / 12, 6 / 12]),
    ],
)
def test_weights_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    options = {"top_k": 2, **options}
    probs_TE, map_TE = topk_routing(LOGITS, options.pop("top_k"), **options)
    torch.testing.assert_close(probs_TE[0], torch.tensor(expected, dtype=torch.float64))
    assert map_TE[0].tolist() == [value > 0 for value in expected]


def test_a_group_is_judged_by_its_best_experts_not_by_all() -> None:
    """Of each chosen group top_k / group_topk experts count: 5 + 0 beats 3 + 3 for k = 1 a group, not for 2."""
    scores_TE = torch.tensor([[5.0, 0.0, 3.0, 3.0, 1.0, 1.0]])
    one = group_limited_topk(scores_TE, 1, num_groups=3, group_topk=1)[1]
    two = group_limited_topk(scores_TE, 2, num_groups=3, group_topk=1)[1]
    assert one.tolist() == [[0]] and sorted(two[0].tolist()) == [2, 3]


def test_half_precision_is_scored_in_float32() -> None:
    logits_TE = random(50, 8).bfloat16()
    probs_TE, _ = topk_routing(logits_TE, 2)
    expected, _ = topk_routing(logits_TE.float(), 2)
    assert probs_TE.dtype == torch.bfloat16 and torch.equal(probs_TE, expected.bfloat16())


def test_experts_whose_scores_round_to_one_number_are_still_told_apart() -> None:
    """In float32 the sigmoids of 20 and 30 are both 1."""
    logits_TE = torch.tensor([[20.0, 30.0, 25.0, 0.0]])
    assert logits_TE.sigmoid()[0, :3].unique().numel() == 1
    assert choose(logits_TE, 1, score_function="sigmoid").tolist() == [[False, True, False, False]]


@pytest.mark.parametrize("options", [{}, {"pre_softmax": True}, {"score_function": "sigmoid", "scaling_factor": 2.5}])
def test_gradients_equal_finite_differences(options: dict[str, Any]) -> None:
    logits_TE = random(5, 6).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: topk_routing(x, 2, **options)[0], logits_TE)
    assert torch.autograd.gradcheck(lambda x: normalized_scores(x, options.get("score_function", "softmax")), logits_TE)


def test_a_replayed_choice_gives_the_same_bits_and_another_choice_other_weights() -> None:
    logits_TE = random(20, 8, dtype=torch.float32)
    options = {"score_function": "sigmoid", "scaling_factor": 2.0}
    probs_TE, map_TE = topk_routing(logits_TE, 3, expert_bias=torch.linspace(-1, 1, 8), **options)
    again_TE, same = topk_routing(logits_TE, 3, map_TE=map_TE, **options)
    assert torch.equal(again_TE, probs_TE) and same is map_TE
    other_TE, _ = topk_routing(logits_TE, 3, map_TE=map_TE.roll(1, 1), **options)
    assert torch.equal(other_TE > 0, map_TE.roll(1, 1))


@given(
    tokens=st.integers(1, 12),
    groups=st.sampled_from([None, (2, 1), (4, 2), (4, 4)]),
    top_k=st.sampled_from([1, 2, 4, 8]),
    score_function=st.sampled_from(["softmax", "sigmoid"]),
    pre_softmax=st.booleans(),
    seed=st.integers(0, 999),
)
def test_every_token_gets_top_k_experts_from_few_groups_and_weights_that_add_up(
    tokens, groups, top_k, score_function, pre_softmax, seed
) -> None:
    options: dict[str, Any] = {"score_function": score_function, "pre_softmax": pre_softmax}
    if groups is not None:
        if top_k % groups[1] or top_k // groups[1] > 8 // groups[0]:
            return
        options |= {"num_groups": groups[0], "group_topk": groups[1]}
    probs_TE, map_TE = topk_routing(random(tokens, 8, seed=seed), top_k, **options)
    assert (map_TE.sum(1) == top_k).all() and map_TE.sum() == tokens * top_k
    assert torch.equal(probs_TE > 0, map_TE)
    if groups is not None:
        used_TG = map_TE.view(tokens, groups[0], -1).any(-1)
        assert (used_TG.sum(1) <= groups[1]).all()
    sums_T = probs_TE.sum(1)
    if score_function == "softmax" and pre_softmax:
        assert (sums_T <= 1 + 1e-12).all() and (top_k < 8 or torch.allclose(sums_T, torch.ones_like(sums_T)))
    elif score_function == "softmax" or top_k > 1:
        torch.testing.assert_close(sums_T, torch.ones_like(sums_T))


@given(top_k=st.integers(1, 8), seed=st.integers(0, 99))
def test_the_bias_moves_the_choice_only(top_k, seed) -> None:
    logits_TE, bias_E = random(6, 8, seed=seed), random(8, seed=seed + 1)
    probs_TE, map_TE = topk_routing(logits_TE, top_k, score_function="sigmoid", expert_bias=bias_E)
    assert torch.equal(map_TE, top_k_map(logits_TE.sigmoid() + bias_E, top_k))
    scores_TE = logits_TE.sigmoid() * map_TE
    expected = scores_TE / scores_TE.sum(1, keepdim=True) if top_k > 1 else scores_TE
    torch.testing.assert_close(probs_TE, expected)


def test_sigmoids_that_all_underflow_give_zeros_not_nan() -> None:
    logits_TE = torch.full((2, 4), -1e4, requires_grad=True)
    probs_TE, _ = topk_routing(logits_TE, 2, score_function="sigmoid")
    probs_TE.sum().backward()
    assert torch.equal(probs_TE, torch.zeros(2, 4)) and logits_TE.grad is not None and logits_TE.grad.isfinite().all()


# ---- sinkhorn ----


def test_sinkhorn_gives_every_token_and_every_expert_its_mass() -> None:
    plan_TE = sinkhorn(3 * random(32, 4), tol=1e-10)
    torch.testing.assert_close(plan_TE.sum(0), torch.full((4,), 1 / 4, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(plan_TE.sum(1), torch.full((32,), 1 / 32, dtype=torch.float64), atol=1e-6, rtol=0)


def test_sinkhorn_evens_a_skewed_load_in_training_only() -> None:
    logits_TE = random(64, 4)
    logits_TE[:, 0] += 3
    balanced = sinkhorn_routing(logits_TE, 1)[1].sum(0)
    free = sinkhorn_routing(logits_TE, 1, balanced=False)[1].sum(0)
    assert free.max() > 55 and balanced.max() < 24
    probs_TE, map_TE = sinkhorn_routing(logits_TE, 2)
    torch.testing.assert_close(probs_TE, logits_TE.softmax(-1) * map_TE)


def test_sinkhorn_ends_where_it_cannot_settle() -> None:
    assert sinkhorn(random(4, 4) * 1e3, tol=-1.0, max_iterations=3).isfinite().all()


# ---- capacity ----


@pytest.mark.parametrize(
    ("tokens", "top_k", "factor", "expected"), [(16, 2, 1.0, 8), (16, 2, 1.1, 9), (3, 1, 1.0, 1), (16, 2, 9.0, 16)]
)
def test_capacity_by_hand(tokens: int, top_k: int, factor: float, expected: int) -> None:
    assert get_capacity(num_tokens=tokens, top_k=top_k, num_experts=4, capacity_factor=factor) == expected


MAP = torch.tensor([[1, 0], [1, 0], [1, 1], [1, 0]]).bool()
PROBS = torch.tensor([[0.2, 0.0], [0.9, 0.0], [0.5, 0.5], [0.7, 0.0]])


@pytest.mark.parametrize(
    ("policy", "padded", "kept"),
    [
        ("probs", False, [[0, 0], [1, 0], [0, 1], [1, 0]]),
        ("position", False, [[1, 0], [1, 0], [0, 1], [0, 0]]),
        ("probs", True, [[0, 1], [1, 0], [0, 1], [1, 0]]),
        ("position", True, [[1, 1], [1, 0], [0, 1], [0, 0]]),
    ],
)
def test_what_a_full_expert_keeps(policy: str, padded: bool, kept: list[list[int]]) -> None:
    """Two experts, capacity ceil(4 x 1 / 2 x 1) = 2: the first is asked by all four, the second by one."""
    options: dict[str, Any] = {"drop_policy": policy, "pad_to_capacity": padded}
    probs_TE, map_TE = apply_capacity(PROBS, MAP, top_k=1, capacity_factor=1.0, **options)
    assert map_TE.int().tolist() == kept
    assert torch.equal(probs_TE, PROBS * map_TE)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_among_equals_the_first_are_kept(policy: str) -> None:
    """As many as a sort may put in any order: the same tokens on every rank that holds them, whatever sorts there."""
    tokens, experts = 200, 4
    probs_TE = torch.full((tokens, experts), 0.5)
    _, map_TE = apply_capacity(
        probs_TE, probs_TE > 0, top_k=experts, capacity_factor=0.3, drop_policy=policy, pad_to_capacity=True
    )
    assert torch.equal(map_TE, (torch.arange(tokens) < 60)[:, None].expand(-1, experts))


@given(
    tokens=st.integers(1, 16),
    top_k=st.integers(1, 4),
    factor=st.sampled_from([0.1, 0.5, 1.0, 1.25, 4.0]),
    policy=st.sampled_from(["probs", "position"]),
    padded=st.booleans(),
    skew=st.sampled_from([0.0, 9.0]),
    seed=st.integers(0, 999),
)
def test_capacities_are_respected_and_only_overflow_is_dropped(
    tokens, top_k, factor, policy, padded, skew, seed
) -> None:
    logits_TE = random(tokens, 4, seed=seed)
    logits_TE[:, 1] += skew
    probs_TE, map_TE = topk_routing(logits_TE, top_k)
    capacity = get_capacity(num_tokens=tokens, top_k=top_k, num_experts=4, capacity_factor=factor)
    new_probs_TE, new_map_TE = apply_capacity(
        probs_TE, map_TE, top_k=top_k, capacity_factor=factor, drop_policy=policy, pad_to_capacity=padded
    )
    kept_TE = new_map_TE & map_TE
    assert torch.equal(kept_TE.sum(0), map_TE.sum(0).clamp(max=capacity))
    assert torch.equal(new_probs_TE, probs_TE * kept_TE)
    assert (new_map_TE.sum(0) == capacity).all() if padded else torch.equal(new_map_TE, kept_TE)
    for expert in range(4):
        kept, dropped = kept_TE[:, expert], (map_TE & ~kept_TE)[:, expert]
        if dropped.any() and policy == "probs":
            assert probs_TE[kept, expert].min() >= probs_TE[dropped, expert].max()
        elif dropped.any():
            assert kept.nonzero().max() < dropped.nonzero().min()


def test_dropped_and_padded_places_have_no_gradient() -> None:
    logits_TE = random(8, 4).requires_grad_()
    probs_TE, map_TE = topk_routing(logits_TE, 1, pre_softmax=True)
    kept, _ = apply_capacity(probs_TE, map_TE, top_k=1, capacity_factor=0.5, pad_to_capacity=True)
    kept.sum().backward()
    untouched = kept.detach().sum(1) == 0
    assert untouched.any() and not logits_TE.grad[untouched].any() and logits_TE.grad[~untouched].any(1).all()


# ---- refusals ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score_function": "relu"}, "score_function is 'relu'; choose softmax or sigmoid"),
        ({"expert_bias": torch.zeros(8)}, "expert_bias moves sigmoid scores"),
        ({"num_groups": 4}, "must be given together"),
        ({"num_groups": 4, "group_topk": 2, "top_k": 3}, "top_k = 3 must be a multiple of group_topk = 2"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        topk_routing(random(3, 8), options.pop("top_k", 2), **options)


def test_an_unknown_drop_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="drop_policy is 'best'; choose probs or position"):
        apply_capacity(PROBS, MAP, top_k=1, capacity_factor=1.0, drop_policy="best")
