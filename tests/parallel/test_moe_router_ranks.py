"""The router over tp (with sequence parallelism), cp and dp against one process: gradients, losses, bias, statistics.

Shapes: M microbatches of B samples of S positions of the whole batch, H hidden, E experts.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import random
from torch import Tensor

from labkit.config import ModelConfig, MoEConfig, ParallelConfig
from labkit.moe.balance import AuxLossScale, aux_loss_scale
from labkit.moe.router import TopKRouter, finish_router_step
from labkit.moe.statistics import summarize
from labkit.parallel import (
    CommLedger,
    NaiveDataParallel,
    ParallelGroups,
    finalize_model_grads,
    initialize_model_parallel,
    single_process_groups,
)
from labkit.parallel.random import model_parallel_seed

S, SAMPLES, H, E, K = 8, 4, 6, 8, 2
NAME = "layers.0.mlp.router"
LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
    "dp2": {"dp": 2},
    "tp2 cp2": {"tp": 2, "cp": 2},
    "tp2 dp2": {"tp": 2, "dp": 2},
    "cp2 dp2": {"cp": 2, "dp": 2},
    "tp4": {"tp": 4},
    "dp4": {"dp": 4},
}


def groups_of(layout: dict[str, int]) -> ParallelGroups:
    tp, cp = layout.get("tp", 1), layout.get("cp", 1)
    return initialize_model_parallel(ParallelConfig(tp=tp, cp=cp, etp=1, sequence_parallel=tp > 1))


def world_of(layout: dict[str, int]) -> int:
    return layout.get("tp", 1) * layout.get("cp", 1) * layout.get("dp", 1)


def router_of(groups: ParallelGroups, moe: dict[str, Any], scale: float) -> TopKRouter:
    router = TopKRouter(
        NAME,
        ModelConfig(hidden=H, init_std=0.5),
        MoEConfig(num_experts=E, top_k=K, **moe),
        groups,
        sequence_parallel=groups.tp.size > 1,
        dtype=torch.float64,
        aux_scale=AuxLossScale(scale),
    )
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.linspace(-0.2, 0.2, E))
    return router


def one_step(groups: ParallelGroups, moe: dict[str, Any], batch: int, main: float, per_token: bool) -> dict[str, Any]:
    """What a step of the whole global batch gives on this rank, through the real wrapper and finalisation.

    The loss is `main` times a mean over positions of a random linear function of the weights; the runtime's
    normalisation is written out: 1/M and cp against the mean over dp x cp, or a sum divided by the tokens at the end.
    """
    cp, dp = groups.cp.size, groups.dp.size
    microbatches = SAMPLES // (batch * dp)
    scale = aux_loss_scale(
        1.0, cp=cp, num_microbatches=microbatches, tokens_per_microbatch=S * batch if per_token else None
    )
    router = router_of(groups, moe, scale)
    wrapped = NaiveDataParallel(router, groups.dp_cp, average=not per_token)
    x_SBH, weight_SBE = random(S, SAMPLES, H, seed=1), random(S, SAMPLES, E, seed=2)
    parts, part = groups.tp_cp.size, groups.cp.rank * groups.tp.size + groups.tp.rank
    inputs = []
    for number in range(microbatches):
        first = (groups.dp.rank * microbatches + number) * batch
        own = slice(part * S // parts, (part + 1) * S // parts), slice(first, first + batch)
        inputs.append(x_SBH[own].clone().requires_grad_())
        probs_TE, _ = wrapped(inputs[-1])
        total = main * (probs_TE * weight_SBE[own].flatten(0, 1)).sum()
        (total if per_token else total * cp / (S * batch * microbatches)).backward()
    tokens = torch.tensor(S * batch * microbatches // cp) if per_token else None
    finalize_model_grads([wrapped], groups, num_tokens=tokens)
    summary = asdict(summarize([router.statistics], groups)[0])
    finish_router_step([wrapped], groups)
    replicas = S * SAMPLES if per_token else cp * dp
    return {
        "weight": router.weight.main_grad.clone(),
        "inputs": torch.cat([x.grad for x in inputs], dim=1) / replicas,
        "own": (part, parts, groups.dp.rank),
        "bias": router.expert_bias,
        "load": summary.pop("tokens_per_expert"),
        "summary": summary,
    }


def on_layout(layout: dict[str, int], *args: Any) -> dict[str, Any]:
    return one_step(groups_of(layout), *args)


def close(found: Tensor, expected: Tensor) -> None:
    assert expected.norm() > 1e-6
    assert (found - expected).norm() / expected.norm() < 1e-12


def assert_same(on_ranks: Any, layout: dict[str, int], moe: dict[str, Any], *args: Any, whole: Any = None) -> None:
    """Weight and input gradients, biases and statistics on every rank equal those of one process."""
    whole = whole or one_step(single_process_groups(), moe, *args)
    for found in on_ranks(on_layout, world_of(layout), layout, moe, *args):
        close(found["weight"], whole["weight"])
        part, parts, replica = found["own"]
        own = whole["inputs"].chunk(parts)[part].chunk(layout.get("dp", 1), dim=1)[replica]
        close(found["inputs"], own)
        assert found["load"] == whole["load"]
        assert found["summary"] == pytest.approx(whole["summary"], rel=1e-12)
        assert (found["bias"] is None) == (whole["bias"] is None)
        assert found["bias"] is None or torch.equal(found["bias"], whole["bias"])


AUX = {"aux_loss_coeff": 0.3}
GLOBAL = {**AUX, "load_balancing": "global_aux_loss"}
KINDS: dict[str, dict[str, Any]] = {
    "aux": {**AUX, "load_balancing": "aux_loss"},
    "sequence": {**AUX, "load_balancing": "seq_aux_loss"},
    "z": {"load_balancing": "none", "z_loss_coeff": 0.2},
    "sigmoid": {**AUX, "load_balancing": "seq_aux_loss", "z_loss_coeff": 0.1, "score_function": "sigmoid"},
}


def everyday(layout: str, kind: str, per_token: bool) -> bool:
    """Sums over tokens, and four ranks of one axis, with the loss per sequence alone; the rest is a sweep."""
    return kind == "sequence" or not (per_token or layout in ("tp4", "dp4"))


@pytest.mark.parametrize(
    ("layout", "kind", "per_token"),
    [
        pytest.param(
            *case,
            id=f"{case[0]}-{case[1]}-{'per token' if case[2] else 'mean'}",
            marks=() if everyday(*case) else pytest.mark.sweep,
        )
        for case in product(LAYOUTS, KINDS, (False, True))
    ],
)
def test_gradients_of_the_losses_do_not_depend_on_the_layout(on_ranks, layout, kind, per_token) -> None:
    """At equal micro batch; `main` = 0 leaves nothing but the attached losses."""
    assert_same(on_ranks, LAYOUTS[layout], KINDS[kind], 1, 0.0, per_token)


@pytest.mark.parametrize("kind", [*KINDS, "global"])
def test_a_loss_summed_over_tokens_leaves_the_attached_losses_a_mean(kind) -> None:
    moe = GLOBAL if kind == "global" else KINDS[kind]
    mean, per_token = (one_step(single_process_groups(), moe, 2, 0.0, normal) for normal in (False, True))
    close(per_token["weight"], mean["weight"])


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.sweep if name in ("tp4", "dp4") else ()) for name in LAYOUTS],
)
def test_the_whole_router_equals_one_process(on_ranks, layout) -> None:
    """Groups, bias, scaling and both losses under the gradient of the model's loss, two microbatches of two if dp
    leaves them."""
    moe = {
        **AUX,
        "load_balancing": "seq_aux_loss",
        "z_loss_coeff": 0.1,
        "score_function": "sigmoid",
        "expert_bias": True,
        "num_groups": 4,
        "group_topk": 2,
        "topk_scaling_factor": 2.5,
    }
    assert_same(on_ranks, LAYOUTS[layout], moe, 1 if "dp4" in layout else 2, 1.0, False)


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("layout", ["tp2", "cp2", "tp2 cp2"])
def test_the_sequence_loss_does_not_depend_on_accumulation(on_ranks, layout, batch) -> None:
    whole = one_step(single_process_groups(), KINDS["sequence"], 4, 0.0, False)
    assert_same(on_ranks, LAYOUTS[layout], KINDS["sequence"], batch, 0.0, False, whole=whole)


def test_the_batch_loss_does_depend_on_accumulation() -> None:
    """It is not linear in the tokens: what the test above would say if it could not tell."""
    by_batch = [one_step(single_process_groups(), KINDS["aux"], batch, 0.0, False)["weight"] for batch in (1, 4)]
    assert (by_batch[0] - by_batch[1]).norm() / by_batch[1].norm() > 1e-2


@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per token"])
@pytest.mark.parametrize(("layout", "batch"), [("tp2", 1), ("cp2", 2), ("tp2 cp2", 1), ("tp4", 2)])
def test_the_global_loss_does_not_depend_on_tp_and_cp(on_ranks, layout, batch, per_token) -> None:
    assert_same(on_ranks, LAYOUTS[layout], GLOBAL, batch, 0.0, per_token)


@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per token"])
@pytest.mark.parametrize(("layout", "batch"), [("dp2", 2), ("dp4", 1), ("cp2 dp2", 2), ("tp2 dp2", 2)])
def test_the_global_loss_sees_all_replicas_as_one_batch(on_ranks, layout, batch, per_token) -> None:
    """dp micro batches at once are one micro batch dp times as large, with the same gradient, not 1/dp of it."""
    whole = one_step(single_process_groups(), GLOBAL, SAMPLES, 0.0, per_token)
    assert_same(on_ranks, LAYOUTS[layout], GLOBAL, batch, 0.0, per_token, whole=whole)


def twice(layout: dict[str, int], moe: dict[str, Any]) -> bool:
    first, second = (on_layout(layout, moe, 1, 1.0, False) for _ in range(2))
    same = [torch.equal(first[key], second[key]) for key in ("weight", "inputs", "bias")]
    return all(same) and first["summary"] == second["summary"]


def test_a_step_repeats_bit_by_bit(on_ranks) -> None:
    moe = {**AUX, "z_loss_coeff": 0.1, "score_function": "sigmoid", "expert_bias": True, "capacity_factor": 1.0}
    assert all(on_ranks(twice, 4, LAYOUTS["tp2 cp2"], moe))


def load_and_bias(layout: dict[str, int], logits_TE: Tensor) -> tuple[Tensor, Tensor]:
    groups = groups_of(layout)
    router = router_of(groups, {"score_function": "sigmoid", "expert_bias": True}, 1.0)
    part = logits_TE.chunk(groups.tp_dp_cp.size)[groups.tp_dp_cp.rank]
    router.routing(part.clone().requires_grad_(), part.shape[0])
    before = router.expert_bias.clone()
    summary = summarize([router.statistics], groups)[0]
    finish_router_step([router], groups)
    assert not router.local_tokens_per_expert.any()
    return torch.tensor(summary.tokens_per_expert), router.expert_bias - before


@settings(max_examples=8)
@given(
    tokens=st.integers(1, 5),
    layout=st.sampled_from(["tp2", "cp2", "dp2"]),
    skew=st.floats(0, 8),
    seed=st.integers(0, 99),
)
def test_biases_move_against_the_load_of_all_ranks(on_ranks, tokens, layout, skew, seed) -> None:
    """Counts add up to tokens x top_k over all ranks, every rank makes the same move, and it is the load's sign."""
    logits_TE = random(2 * tokens, E, seed=seed)
    logits_TE[:, 0] += skew
    results = on_ranks(load_and_bias, 2, LAYOUTS[layout], logits_TE)
    load_E, moved_E = results[0]
    assert all(torch.equal(load_E, load) and torch.equal(moved_E, moved) for load, moved in results)
    assert load_E.sum() == 2 * tokens * K
    expected_E = 1e-3 * torch.sign(load_E.sum() / E - load_E)
    torch.testing.assert_close(moved_E, expected_E, atol=1e-7, rtol=0)


def traffic(layout: dict[str, int], moe: dict[str, Any], layers: int) -> list[tuple[str, str, str | None, str | None]]:
    groups = groups_of(layout)
    routers = torch.nn.ModuleList([router_of(groups, moe, 1.0) for _ in range(layers)])
    x_SBH = random(S, 2, H, seed=3).requires_grad_()
    with CommLedger() as ledger:
        for router in routers:
            router(x_SBH)[0].sum().backward()
        finish_router_step(routers, groups)
    return [(record.operation, record.group, record.layer, record.phase) for record in ledger.records]


def test_a_forward_reduces_the_counts_once_and_a_step_the_loads_of_all_layers(on_ranks) -> None:
    moe = {**AUX, "score_function": "sigmoid", "expert_bias": True, "z_loss_coeff": 0.1}
    for records in on_ranks(traffic, 2, {"tp": 2}, moe, 3):
        in_forward = ("all_reduce", "tp_cp", NAME, "forward")
        assert records == [in_forward] * 3 + [("all_reduce", "tp_dp_cp", "finalize", "expert bias")]
    for records in on_ranks(traffic, 2, {"dp": 2}, {**moe, "expert_bias": False}, 3):
        assert records == []  # a micro batch is one rank's alone


def jittered(layout: dict[str, int]) -> tuple[Tensor, Tensor]:
    groups = groups_of(layout)
    rng = model_parallel_seed(1, groups)
    moe = MoEConfig(num_experts=E, top_k=K, input_jitter=0.1)
    parallel = groups.tp.size > 1
    router = TopKRouter(NAME, ModelConfig(hidden=H), moe, groups, sequence_parallel=parallel, rng=rng)
    ones_SBH = torch.ones(4, 2, H)
    return router.jittered(ones_SBH), router.eval().jittered(ones_SBH)


def test_ranks_with_other_tokens_jitter_them_by_other_numbers(on_ranks) -> None:
    (first, still), (second, _) = on_ranks(jittered, 2, {"tp": 2})
    assert not torch.equal(first, second)
    assert (first - 1).abs().max() <= 0.1 + 1e-6 and (first - 1).abs().mean() > 0.03
    assert torch.equal(still, torch.ones(4, 2, H))


def without_sequence_parallelism() -> None:
    groups = initialize_model_parallel(ParallelConfig(tp=2))
    TopKRouter(NAME, ModelConfig(), MoEConfig(num_experts=E), groups)


def test_tensor_parallelism_without_sequence_parallelism_is_refused(on_ranks) -> None:
    with pytest.raises(Exception, match=r"every rank of tp would route all tokens.*sequence_parallel: true"):
        on_ranks(without_sequence_parallelism, 2)
