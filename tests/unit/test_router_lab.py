"""The router lab against routing by hand, against the library's router over steps, and its refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.config import ModelConfig, MoEConfig
from labkit.moe.router import TopKRouter
from labkit.parallel import single_process_groups
from labkit.viz import compare_policies, explore_policies, replay, replay_policies
from labkit.viz.experts.router_lab import Replayed, standard_policies

# Two ranks of three tokens, four experts, one expert a token: rank 0 chooses 0, 0, 3, rank 1 chooses 0, 1, 0.
HAND = torch.tensor(
    [
        [[3.0, 0, 0, 0], [5.0, 0, 0, 0], [0, 0, 0, 1.0]],
        [[1.0, 0, 0, 0], [0, 2.0, 0, 0], [2.0, 0, 0, 0]],
    ],
    dtype=torch.float64,
)
TOP_1 = {"top_k": 1, "pre_softmax": True}


def skewed_logits(
    *, microbatches: int = 1, ranks: int = 4, tokens: int = 128, experts: int = 8, skew: float = 1.0, seed: int = 0
) -> torch.Tensor:
    """Return an artificial recording: normal logits [N, R, T, E], float64, in which all tokens prefer some experts.

    The expert at place i of a random order gets -skew log(1 + i) added. Under softmax alone the popularity of experts
    would follow Zipf's law with this exponent. The same seed gives the same noise at every skew.
    """
    random = torch.Generator().manual_seed(seed)
    noise = torch.randn(microbatches, ranks, tokens, experts, generator=random, dtype=torch.float64)
    place = torch.randperm(experts, generator=random)
    return noise - skew * torch.log1p(place.double())


def weight(logit: float) -> float:
    """Softmax of one logit beside three zeros."""
    return math.exp(logit) / (math.exp(logit) + 3)


def test_loads_rows_and_bytes_by_hand() -> None:
    found = replay(HAND, TOP_1)
    assert found.load.tolist() == [[[2, 0, 0, 1], [2, 1, 0, 0]]]
    assert found.rows.tolist() == [[2, 0, 0, 1], [2, 1, 0, 0]]
    assert found.fullest_expert == 4 / 1.5
    assert found.rows_by_rank.tolist() == [5, 1] and found.fullest_rank == 5 / 3
    assert (found.dropped, found.weight_dropped, found.own_choice, found.capacity) == (0, 0, 1, None)
    # rank 0 sends 1 row to rank 1, rank 1 sends 3 to rank 0; 10 values of 2 bytes, there and back
    assert found.sent_bytes(hidden=10) == 2 * 4 * 10 * 2 == found.sent_once_bytes(hidden=10)


@pytest.mark.parametrize(
    ("policy", "lost", "kept"),
    [("probs", (3.0, 1.0), [[1, 0, 0, 1], [1, 1, 0, 0]]), ("position", (5.0, 2.0), [[1, 0, 0, 1], [1, 1, 0, 0]])],
)
def test_both_drop_policies_drop_as_many_and_the_better_one_less_weight(policy, lost, kept) -> None:
    # capacity ceil(3 x 1 / 4 x 1) = 1: expert 0 keeps one of two on each rank, the best or the first
    found = replay(HAND, {**TOP_1, "capacity_factor": 1.0, "drop_policy": policy})
    assert found.capacity == 1 and found.rows.tolist() == kept
    assert found.dropped == 2 / 6
    whole = sum(map(weight, (3, 5, 1, 1, 2, 2)))
    assert found.weight_dropped == pytest.approx(sum(map(weight, lost)) / whole, rel=1e-12)
    assert found.load.tolist() == replay(HAND, TOP_1).load.tolist()


def test_padding_fills_every_expert_on_every_rank() -> None:
    found = replay(HAND, {**TOP_1, "capacity_factor": 1.0, "pad_to_capacity": True})
    assert found.rows.tolist() == [[1] * 4] * 2 and found.fullest_rank == 1
    assert found.dropped == 2 / 6
    # each rank sends two padded or real rows to the other, there and back
    assert found.sent_bytes(hidden=1, element_size=1) == 2 * 4


def test_a_token_with_two_experts_on_a_rank_travels_once() -> None:
    # one token on each of two ranks, experts 2 and 3 chosen by both: rank 0 sends two rows to rank 1, or one
    logits = torch.tensor([[[0, 0, 1.0, 2.0]], [[0, 0, 1.0, 2.0]]])
    found = replay(logits, {"top_k": 2})
    assert found.sent_bytes(hidden=1, element_size=1) == 4
    assert found.sent_once_bytes(hidden=1, element_size=1) == 2


def test_group_limit_keeps_a_token_on_one_rank() -> None:
    logits = skewed_logits(ranks=4, tokens=32, experts=8, skew=0.5)
    policies = standard_policies(8, 2, groups=4)
    free, limited = (replay(logits, policies[name]) for name in ("top-k softmax", "group-limited"))
    assert limited.maps.reshape(4, 32, 4, 2).any(axis=3).sum(axis=2).max() == 1
    assert limited.sent_once_bytes(16) == limited.sent_bytes(16) // 2 < free.sent_once_bytes(16)
    assert limited.own_choice < free.own_choice == 1


def test_bias_and_assignment_even_the_load_and_give_up_own_choices() -> None:
    logits = skewed_logits(microbatches=40, ranks=2, tokens=64, experts=8)
    policies = standard_policies(8, 2, groups=2, bias_rate=0.02)
    plain, biased, assigned = replay_policies(
        logits, {name: policies[name] for name in ("top-k softmax", "sigmoid + bias", "sinkhorn")}
    )
    # a bias of 0 chooses by the logits' order, as softmax does; each later microbatch knows the load of those before
    assert biased.load[0].tolist() == plain.load[0].tolist() != biased.load[-1].tolist()
    assert biased.fullest_expert < 0.6 * plain.fullest_expert
    assert assigned.fullest_expert < 1.2 < plain.fullest_expert
    assert max(biased.own_choice, assigned.own_choice) < plain.own_choice == 1


def test_the_lab_moves_the_bias_as_algorithm_1_says() -> None:
    logits = skewed_logits(microbatches=5, ranks=2, tokens=16, experts=4, seed=3)
    rate = 0.05
    found = replay(logits, {"score_function": "sigmoid", "expert_bias": True, "expert_bias_update_rate": rate})
    bias = np.zeros(4)
    for batch, load in zip(logits.numpy(), found.load):
        biased = 1 / (1 + np.exp(-batch)) + bias
        chosen = np.argsort(-biased, axis=-1)[..., :2]
        counts = np.array([np.bincount(rank.ravel(), minlength=4) for rank in chosen])
        assert counts.tolist() == load.tolist()
        bias += rate * np.sign(counts.sum(0).mean() - counts.sum(0))
    assert len({tuple(load.ravel()) for load in found.load}) > 1


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.sampled_from([1, 2, 4]),
    tokens=st.integers(1, 9),
    top_k=st.integers(1, 4),
    factor=st.sampled_from([None, 0.5, 1.0, 2.0]),
    drop=st.sampled_from(["probs", "position"]),
    seed=st.integers(0, 99),
)
def test_counts_add_up_and_capacities_hold(ranks, tokens, top_k, factor, drop, seed) -> None:
    logits = skewed_logits(microbatches=2, ranks=ranks, tokens=tokens, experts=8, seed=seed)
    limit = {} if factor is None else {"capacity_factor": factor, "drop_policy": drop}
    found = replay(logits, {"top_k": top_k, "pre_softmax": True, **limit})
    assert (found.load.sum(axis=2) == tokens * top_k).all()
    assert (found.rows <= found.load[-1]).all()
    assert found.dropped == pytest.approx(1 - found.rows.sum() / found.load[-1].sum())
    assert found.capacity is None or found.rows.max() <= found.capacity
    assert found.rows_by_rank.sum() == found.rows.sum() == found.maps.sum()
    assert 0 <= found.weight_dropped <= 1 and found.own_choice == 1


@pytest.mark.parametrize(
    ("experts", "top_k", "groups"), [(8, 1, 4), (8, 2, 4), (4, 2, 4), (16, 3, 4), (64, 8, 8), (12, 5, 3), (8, 3, 2)]
)
def test_standard_policies_are_ones_that_a_configuration_takes(experts, top_k, groups) -> None:
    logits = skewed_logits(ranks=2, tokens=16, experts=experts)
    replayed = replay_policies(logits, standard_policies(experts, top_k, groups=groups))
    unequal = experts == 12  # five experts are no equal share of one, two or three groups of four
    assert ("group-limited" in {each.name for each in replayed}) is not unequal
    assert len(replayed) == 7 - unequal and all((each.load.sum(axis=2) == 16 * top_k).all() for each in replayed)


def test_same_recording_same_replay_and_the_reader_keeps_his_threads() -> None:
    threads, logits = torch.get_num_threads(), skewed_logits()
    for policy in standard_policies(8).values():
        first, second = replay(logits, policy), replay(logits, policy)
        assert first.maps.tobytes() == second.maps.tobytes() and first.weight_dropped == second.weight_dropped
    assert torch.get_num_threads() == threads


def test_a_replay_makes_the_choice_of_the_router_itself() -> None:
    moe = MoEConfig(num_experts=8, top_k=2)
    router = TopKRouter("layers.0.mlp.router", ModelConfig(hidden=16), moe, single_process_groups())
    x_SBH = torch.randn(4, 3, 16)
    _, map_TE = router(x_SBH)
    assert replay(router.gating(x_SBH).detach()[None, None], {"top_k": 2}).maps[0].tolist() == map_TE.tolist()


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"topk": 2}, r"policy 'policy': topk is unknown; did you mean \"top_k\"\?"),
        ({"dispatcher": "local"}, "dispatcher does not change what a recording routes"),
        ({"load_balancing": "aux_loss"}, "aux_loss acts on the weights over a training run"),
        ({"top_k": 9}, "policy 'policy': moe.top_k = 9: must be at most moe.num_experts = 4"),
        ({"load_balancing": "sinkhorn", "capacity_factor": 1.0}, "has no effect with moe.load_balancing = sinkhorn"),
        ({"expert_bias": True}, "moves sigmoid scores"),
    ],
)
def test_policies_that_cannot_be_replayed_are_refused(policy, words) -> None:
    with pytest.raises(ValueError, match=words):
        replay(HAND, policy)


def test_recordings_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(3, 2, 4\)"):
        replay(torch.zeros(3, 2, 4), {})
    with pytest.raises(ValueError, match="no policy to replay"):
        replay_policies(HAND, {})
    with pytest.raises(ValueError, match="at least one"):
        compare_policies([], hidden=1)


# ---- pictures ----


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", "chapter.ipynb")


def by_hand() -> list[Replayed]:
    return replay_policies(HAND, {"plain": TOP_1, "limited": {**TOP_1, "capacity_factor": 1.0}})


def test_sentences_say_what_was_counted_by_hand() -> None:
    share = sum(map(weight, (3, 1))) / sum(map(weight, (3, 5, 1, 1, 2, 2)))
    # 4 rows of 500,000 bytes travel plain, there and back; of 4 rows under the limit 1 -> 3 and 4, 1 -> 0 and 1: 3
    assert compare_policies(by_hand(), hidden=250_000).sentence == (
        "2 ranks of 3 tokens, 4 experts; fullest expert against the mean: plain 2.67; dropped: limited 33.3% "
        f"({share:.1%} of the weight); sent 3 MB (limited) to 4 MB (plain)."
    )


def test_policies_that_send_the_same_are_said_to() -> None:
    """4 rows of 3 values of 2 bytes, there and back."""
    replayed = replay_policies(HAND, {"plain": TOP_1, "wide": {**TOP_1, "capacity_factor": 4.0}})
    assert compare_policies(replayed, hidden=3).sentence.endswith("plain 2.67; every policy sends 48 bytes.")


def test_bars_have_the_values() -> None:
    figure = compare_policies(by_hand(), hidden=250_000)
    balance, dropped, own, sent = ([bar.get_width() for bar in axes.patches] for axes in figure.fig.axes)
    assert balance == pytest.approx([8 / 3, 8 / 3, 5 / 3, 3 / 2])
    assert dropped[:2] == [0, 1 / 3] and own == [1, 1]
    assert sent == [4, 3, 4, 3]
    assert figure.png.startswith(b"\x89PNG")


def test_controls_set_their_field_where_a_policy_has_it(monkeypatch) -> None:
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    policies = {"plain": TOP_1, "limited": {**TOP_1, "capacity_factor": 1.0}}
    alone = explore_policies(HAND, policies, hidden=8)
    monkeypatch.setenv("JPY_SESSION_NAME", "chapter.ipynb")
    *controls, picture, words = explore_policies(HAND, policies, hidden=8).children
    inputs = {control.description: control for control in controls}
    assert sorted(inputs) == ["capacity_factor", "top_k"] and picture.value == alone.png
    inputs["capacity_factor"].value = 4.0
    assert "dropped" not in words.value and picture.value != alone.png
    inputs["top_k"].value = 4
    assert "plain 1.00" in words.value


@pytest.mark.usefixtures("live")
def test_a_policy_that_cannot_be_is_left_out_and_said_to_be() -> None:
    policies = {"plain": {"top_k": 2}, "limited": {"top_k": 2, "num_groups": 2, "group_topk": 1}}
    top_k, picture, words = explore_policies(HAND, policies, hidden=8).children
    top_k.value = 3
    assert words.value.startswith("<b>left out: policy &#x27;limited&#x27;: moe.group_topk = 1: this many groups of 2 ")
    assert "mean: plain 1.33;" in words.value  # six tokens, 18 choices over 4 experts: expert 0 takes all 6
    before = picture.value
    top_k.value = 2
    assert "limited" in words.value and "left out" not in words.value and picture.value != before


@pytest.mark.usefixtures("live")
def test_the_last_picture_stays_where_no_policy_can_be() -> None:
    limited = {"limited": {"top_k": 2, "num_groups": 2, "group_topk": 1}}
    top_k, picture, words = explore_policies(HAND, limited, hidden=8).children
    before = picture.value, words.value
    top_k.value = 3
    assert words.value.startswith("<b>left out: ") and "the last settings that fit" in words.value
    assert picture.value == before[0]
    top_k.value = 2
    assert (picture.value, words.value) == before
