"""Our router beside megatron-core's, from the same weight and input: weights, choice, gradients, counts, biases.

Where the two differ on purpose, a test says so: which tokens a full expert keeps by position (theirs: some), what the
bias counts under a capacity (theirs: what is left), and the global loss over dp (theirs: 1/dp of it, their issue 3672).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from labkit.config import ModelConfig, MoEConfig, ParallelConfig
from labkit.launch import Ranks
from labkit.moe.balance import AuxLossScale
from labkit.moe.router import TopKRouter, finish_router_step
from labkit.moe.routing import get_capacity
from labkit.parallel import ParallelGroups, initialize_model_parallel

pytestmark = pytest.mark.oracle

S, B, H, E = 12, 2, 16, 8
SCALE = 3.0
THEIRS = {
    "top_k": "moe_router_topk",
    "score_function": "moe_router_score_function",
    "pre_softmax": "moe_router_pre_softmax",
    "num_groups": "moe_router_num_groups",
    "group_topk": "moe_router_group_topk",
    "topk_scaling_factor": "moe_router_topk_scaling_factor",
    "router_dtype": "moe_router_dtype",
    "load_balancing": "moe_router_load_balancing_type",
    "aux_loss_coeff": "moe_aux_loss_coeff",
    "z_loss_coeff": "moe_z_loss_coeff",
    "expert_bias": "moe_router_enable_expert_bias",
    "expert_bias_update_rate": "moe_router_bias_update_rate",
    "capacity_factor": "moe_expert_capacity_factor",
    "drop_policy": "moe_token_drop_policy",
    "pad_to_capacity": "moe_pad_expert_input_to_capacity",
}
GROUPS = {"num_groups": 4, "group_topk": 2}
SIGMOID = {"score_function": "sigmoid"}
CAPACITY = {"capacity_factor": 0.75, "drop_policy": "probs"}
SCORES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax k1": {"top_k": 1, "pre_softmax": True},
    "softmax k all": {"top_k": E},
    "softmax pre": {"pre_softmax": True},
    "softmax pre scaled": {"pre_softmax": True, "topk_scaling_factor": 2.5},
    "softmax groups": {"top_k": 4, **GROUPS},
    "softmax pre groups": {"top_k": 4, "pre_softmax": True, **GROUPS},
    "softmax fp64": {"router_dtype": "fp64"},
    "sigmoid": SIGMOID,
    "sigmoid k1": {"top_k": 1, **SIGMOID},
    "sigmoid bias": {"expert_bias": True, **SIGMOID},
    "sigmoid bias k1 scaled": {"top_k": 1, "expert_bias": True, "topk_scaling_factor": 2.5, **SIGMOID},
    "deepseek": {"top_k": 4, "expert_bias": True, "topk_scaling_factor": 2.5, **GROUPS, **SIGMOID},
    "sinkhorn": {"load_balancing": "sinkhorn"},
    "sinkhorn k1": {"load_balancing": "sinkhorn", "top_k": 1},
    "capacity": CAPACITY,
    "capacity pre": {**CAPACITY, "pre_softmax": True},
    "capacity sigmoid": {**CAPACITY, **SIGMOID},
    "capacity wide": {**CAPACITY, "capacity_factor": 9.0},
    "capacity padded": {**CAPACITY, "pad_to_capacity": True},
}
AUX = {"aux_loss_coeff": 0.3}
LOSSES: dict[str, dict[str, Any]] = {
    "aux": {**AUX, "load_balancing": "aux_loss"},
    "aux sigmoid": {**AUX, "load_balancing": "aux_loss", **SIGMOID},
    "aux bias groups": {**AUX, "load_balancing": "aux_loss", "top_k": 4, "expert_bias": True, **GROUPS, **SIGMOID},
    "aux capacity": {**AUX, "load_balancing": "aux_loss", **CAPACITY},
    "sequence": {**AUX, "load_balancing": "seq_aux_loss"},
    "sequence sigmoid": {**AUX, "load_balancing": "seq_aux_loss", **SIGMOID},
    "global": {**AUX, "load_balancing": "global_aux_loss"},
    "z": {"load_balancing": "none", "z_loss_coeff": 0.2},
    "z sequence": {**AUX, "load_balancing": "seq_aux_loss", "z_loss_coeff": 0.2, "pre_softmax": True},
}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loaded() -> Any:
    """Megatron's router, its utilities and config, with CUDA queries answered for the CPU."""
    import megatron_peer

    mcore = megatron_peer.load()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.transformer.moe import moe_utils, router
    moe_utils.te_general_gemm = None  # its name for Transformer Engine's product, undefined where that is missing
    mcore.moe_utils, mcore.Router = moe_utils, router.TopKRouter
    mcore.MoEAuxLossAutoScaler = moe_utils.MoEAuxLossAutoScaler
    return mcore


def their_router(mcore: Any, groups: ParallelGroups, moe: MoEConfig, layout: dict[str, Any]) -> nn.Module:
    given = {theirs: getattr(moe, ours) for ours, theirs in THEIRS.items()}
    given["moe_z_loss_coeff"] = given["moe_z_loss_coeff"] or None
    config = mcore.TransformerConfig(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=4,
        num_moe_experts=E,
        add_bias_linear=False,
        tensor_model_parallel_size=layout.get("tp", 1),
        context_parallel_size=layout.get("cp", 1),
        sequence_parallel=layout.get("tp", 1) > 1,
        use_cpu_initialization=True,
        moe_token_dispatcher_type="alltoall",
        **given,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mcore.Router(config, mcore.moe_utils.get_default_pg_collection())


def routed(router: nn.Module, x_SBH: Tensor, weights_SBE: list[Tensor], main: float) -> dict[str, Tensor]:
    """Two microbatches through one router, with a backward from the weights."""
    inputs, probs, maps = [], [], []
    for number, weight_SBE in enumerate(weights_SBE):
        inputs.append((x_SBH + number).requires_grad_())
        probs_TE, map_TE = router(inputs[-1])
        (main * probs_TE * weight_SBE.flatten(0, 1)).sum().backward()
        probs.append(probs_TE.detach())
        maps.append(map_TE)
    found = {"probs": torch.stack(probs), "map": torch.stack(maps)}
    if router.weight.grad is not None:
        found |= {"weight": router.weight.grad.clone(), "input": torch.stack([x.grad for x in inputs])}
    if router.expert_bias is not None:
        found["counts"] = router.local_tokens_per_expert.clone()
    return found


def both(layout: dict[str, Any], cases: dict[str, dict[str, Any]], main: float) -> dict[str, Any]:
    """What ours and theirs give on this rank, by case."""
    mcore = loaded()
    tp, cp = layout.get("tp", 1), layout.get("cp", 1)
    groups = initialize_model_parallel(ParallelConfig(tp=tp, cp=cp, sequence_parallel=tp > 1))
    mcore.parallel_state.destroy_model_parallel()
    mcore.parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    mcore.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(SCALE))
    part = slice(groups.rank * S // groups.world_size, (groups.rank + 1) * S // groups.world_size)
    x_SBH, weights = random(S, B, H, seed=1)[part], [random(S, B, E, seed=seed)[part] for seed in (2, 3)]
    results = {}
    for name, options in cases.items():
        moe = MoEConfig(num_experts=E, **options)
        model = ModelConfig(hidden=H, init_std=0.3)
        ours = TopKRouter("router", model, moe, groups, sequence_parallel=tp > 1, seed=4, aux_scale=AuxLossScale(SCALE))
        theirs = their_router(mcore, groups, moe, layout)
        theirs.weight.data.copy_(ours.weight.data)
        if ours.expert_bias is not None:
            ours.expert_bias.copy_(torch.linspace(-0.3, 0.3, E))
            theirs.expert_bias.copy_(ours.expert_bias)
        result = [routed(router, x_SBH.clone(), weights, main) for router in (ours, theirs)]
        if ours.expert_bias is not None:
            finish_router_step([ours], groups)
            rate = moe.expert_bias_update_rate
            moved = mcore.moe_utils.get_updated_expert_bias(theirs.local_tokens_per_expert, theirs.expert_bias, rate)
            theirs.expert_bias.copy_(moved)
            result[0]["bias"], result[1]["bias"] = ours.expert_bias, moved
        ours.eval(), theirs.eval()
        with torch.no_grad():
            for found, router in zip(result, (ours, theirs)):
                found["evaluated"], found["evaluated map"] = router(x_SBH)
        results[name] = result
    return results


def difference(own: Tensor, other: Tensor) -> float:
    """Relative in the 2-norm; exact for maps and counts."""
    if own.dtype == torch.bool or not other.is_floating_point():
        return 0.0 if torch.equal(own, other) else float("inf")
    return ((own.double() - other.double()).norm() / other.double().norm().clamp(min=1e-30)).item()


def assert_equal(own: dict[str, Tensor], other: dict[str, Tensor], *, but: tuple[str, ...] = ()) -> None:
    assert own.keys() == other.keys()
    worst = {key: difference(own[key], other[key]) for key in own.keys() - set(but)}
    assert max(worst.values()) < 1e-5, worst


@pytest.fixture(scope="module")
def on_ranks() -> Iterator[Callable[..., list[Any]]]:
    """`on_ranks(fn, world_size, *args)` on ranks that import megatron-core once."""
    started: dict[int, Ranks] = {}

    def call(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        if world_size not in started:
            started[world_size] = Ranks(world_size, device="cpu", backend="gloo")
        return started[world_size].run(fn, *args, timeout=120)

    yield call
    for ranks in started.values():
        ranks.close()


@pytest.fixture(scope="module")
def scored(on_ranks) -> dict[str, Any]:
    return on_ranks(both, 1, {}, SCORES, 1.0)[0]


@pytest.mark.parametrize("case", [case for case in SCORES if not case.endswith("padded")])
def test_weights_choice_and_gradients_equal_megatron_core(scored, case) -> None:
    own, other = scored[case]
    assert other["probs"].norm() > 0.1 and other["weight"].norm() > 0.1
    assert_equal(own, other)


def test_padding_equals_megatron_core_but_for_which_tokens_fill_up(scored) -> None:
    own, other = scored["capacity padded"]
    assert_equal(own, other, but=("map", "evaluated map"))
    for key, probs in (("map", "probs"), ("evaluated map", "evaluated")):
        assert torch.equal(own[key] & (own[probs] > 0), other[key] & (other[probs] > 0))
        assert torch.equal(own[key].sum(-2), other[key].sum(-2))


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"cp": 2}], ids=["one rank", "tp2", "cp2"])
def test_losses_equal_megatron_core(on_ranks, layout) -> None:
    """Forward, gradients of the parts on every rank, counts and biases; nothing but the losses has a gradient."""
    for results in on_ranks(both, layout.get("tp", 1) * layout.get("cp", 1), layout, LOSSES, 0.0):
        for own, other in results.values():
            assert other["weight"].norm() > 1e-3
            assert_equal(own, other)


def test_the_global_loss_is_megatron_cores_times_dp(on_ranks) -> None:
    for results in on_ranks(both, 2, {}, {"global": LOSSES["global"]}, 0.0):
        own, other = results["global"]
        for key in ("weight", "input"):
            assert difference(own[key], 2 * other[key]) < 1e-5


def test_by_position_megatron_core_keeps_as_many_but_not_always_the_first(on_ranks) -> None:
    cases = {
        name: {**CAPACITY, "drop_policy": "position", "capacity_factor": factor}
        for name, factor in (("tight", 0.5), ("loose", 0.75))
    }
    found = on_ranks(both, 1, {}, {"no limit": {}} | cases, 1.0)[0]
    free = found["no limit"][0]["map"]
    for name, options in cases.items():
        own, other = found[name]
        factor = options["capacity_factor"]
        capacity = get_capacity(num_tokens=S * B, top_k=2, num_experts=E, capacity_factor=factor)
        first = free & (free.cumsum(dim=1) <= capacity)
        assert torch.equal(own["map"], first)
        assert torch.equal(own["map"].sum(1), other["map"].sum(1))
    assert any(not torch.equal(found[name][0]["map"], found[name][1]["map"]) for name in cases)


def test_the_bias_counts_choices_where_megatron_core_counts_what_a_capacity_left(on_ranks) -> None:
    options = {**CAPACITY, **SIGMOID, "expert_bias": True}
    own, other = on_ranks(both, 1, {}, {"": options}, 1.0)[0][""]
    assert own["counts"].sum() == 2 * S * B * 2
    assert torch.equal(other["counts"].long(), other["map"].sum((0, 1)))
    assert own["counts"].sum() > other["counts"].sum()


def helpers() -> list[tuple[str, float, float]]:
    """Functions that both have, on the same arguments."""
    from labkit.moe import balance, routing

    theirs = loaded().moe_utils
    logits_TE = random(24, E, seed=5)
    found = []
    for scale in (1.0, 5.0):
        own, other = routing.sinkhorn(scale * logits_TE), theirs.sinkhorn(scale * logits_TE)
        found.append((f"sinkhorn {scale}", difference(own, other), 1e-5))
    large = 100 * logits_TE  # exp overflows: theirs is not a number
    found.append(("sinkhorn 100", float(not routing.sinkhorn(large).isfinite().all()), 0.5))
    found.append(("sinkhorn 100 of theirs", float(theirs.sinkhorn(large).isfinite().all()), 0.5))
    for tokens, top_k, factor in ((24, 2, 1.0), (10, 8, 1.1), (7, 3, 0.37)):
        own_capacity = routing.get_capacity(num_tokens=tokens, top_k=top_k, num_experts=E, capacity_factor=factor)
        other_capacity = min(tokens, theirs.get_capacity(tokens * top_k, E, factor))
        found.append(("capacity", abs(own_capacity - other_capacity), 0.5))
    own = balance.z_loss_func(logits_TE, 0.3)
    found.append(("z", difference(own, theirs.z_loss_func(logits_TE, 0.3)), 1e-6))
    return found


def test_functions_equal_megatron_cores(on_ranks) -> None:
    for name, off, allowed in on_ranks(helpers, 1)[0]:
        assert off < allowed, (name, off)
