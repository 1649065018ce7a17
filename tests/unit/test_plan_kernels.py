"""Times of kernels and collectives against closed forms: operations, bytes, rooflines, rings."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.config import ModelConfig, MoEConfig, RunConfig
from labkit.plan.action_times import loss_passes
from labkit.plan.collectives import Beside, Group, collective, collective_seconds
from labkit.plan.flops import forward_flops
from labkit.plan.kernels import fused_attention, gemm, gemm_shape_efficiency, memory_bound
from labkit.plan.layer_times import layer_passes
from labkit.plan.layout import Layout, layout_of
from labkit.plan.machine import Machine, load_machine
from labkit.plan.terms import Term
from labkit.plan.workload import Workload

A100 = load_machine("a100")
DENSE = {"model.layers": 4, "model.hidden": 1024, "model.heads": 16, "model.vocab_size": 51200, "model.seq_length": 512}
EXPERTS = {"moe.num_experts": 8, "moe.top_k": 2, "moe.ffn_hidden": 2048, "moe.shared_expert_ffn_hidden": 1024}


def layout(world: int, **fields) -> tuple[ModelConfig, MoEConfig, Layout]:
    changes = {name.replace("__", "."): value for name, value in fields.items()}
    config = RunConfig().replaced(DENSE | {"optim.precision": "bf16", "train.micro_batch_size": 2} | changes)
    return config.model, config.moe, layout_of(Workload(config, world))


def operations(terms: tuple[Term, ...]) -> float:
    """Operations of the products among these terms, from their own inputs."""
    shapes = [dict(term.inputs) for term in terms if term.kind == "gemm"]
    return sum(2 * shape["g"] * shape["m"] * shape["n"] * shape["k"] for shape in shapes)


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
def test_a_layer_has_the_operations_of_the_plan(tp, activation):
    model, _, view = layout(8, parallel__tp=tp, model__activation=activation, parallel__sequence_parallel=tp > 1)
    passes = layer_passes(model, None, view, A100)
    expected = forward_flops(model, samples=2, layers=1, logits=False).linear
    assert tp * operations(passes.forward) == expected
    assert tp * operations(passes.input_grad) == expected
    assert tp * operations(passes.weight_grad) == expected


def test_grouped_queries_and_logits_have_the_operations_of_the_plan():
    model, _, view = layout(2, parallel__tp=2, model__kv_heads=4)
    expected = forward_flops(model, samples=2, layers=1)
    assert 2 * operations(layer_passes(model, None, view, A100).forward) == expected.linear
    assert 2 * operations(loss_passes(model, view, A100).forward) == expected.logits


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (4, 1), (2, 2)])
def test_experts_have_the_operations_of_the_plan(ep, etp):
    fields = {name.replace(".", "__"): value for name, value in EXPERTS.items()}
    model, moe, view = layout(8, parallel__ep=ep, parallel__etp=etp, **fields)
    passes = layer_passes(model, moe, view, A100)
    expected = forward_flops(model, samples=2, layers=1, logits=False, moe=moe)
    router = 2 * 2 * model.seq_length * model.hidden * moe.num_experts  # counted as bytes: its product is tiny
    assert operations(passes.forward) == expected.total - expected.attention - router


def test_fused_attention_has_the_operations_of_the_plan():
    model, _, view = layout(1)
    term = next(term for term in layer_passes(model, None, view, A100).forward if term.name == "attention")
    expected = forward_flops(model, samples=2, layers=1, causal=True).attention
    inputs = dict(term.inputs)
    assert 4 * inputs["pairs"] * inputs["width"] == expected
    assert term.seconds == pytest.approx(expected / (312e12 * inputs["efficiency"]))


def test_unfused_attention_computes_every_pair():
    model, _, view = layout(1, model__attention_backend="unfused", model__attention_dropout=0.1)
    terms = layer_passes(model, None, view, A100).forward
    products = [term for term in terms if term.name in ("q k^T", "probabilities x v")]
    shapes = [dict(term.inputs) for term in products]
    found = sum(2 * s["g"] * s["m"] * s["n"] * s["k"] for s in shapes)
    assert found == forward_flops(model, samples=2, layers=1, causal=False).attention
    softmax = next(term for term in terms if term.name == "softmax")
    scores = 2 * model.heads * model.seq_length**2
    assert softmax.seconds == pytest.approx(scores * 4 / (2.0e12 * 0.9))


def test_a_gemm_is_a_roofline():
    large = gemm(A100, "", (8192, 8192, 8192), precision="bf16", software="none")
    inputs = dict(large.inputs)
    assert large.seconds == pytest.approx(2 * 8192**3 / (312e12 * inputs["efficiency"]))
    thin = gemm(A100, "", (8192, 8192, 64), precision="bf16", software="none", weight_gradient=True)
    assert thin.seconds == pytest.approx((8 * 8192**2 + 2 * 2 * 8192 * 64) / (2.0e12 * 0.9))


@given(m=st.integers(1, 9000), n=st.integers(1, 9000), k=st.integers(64, 20000), groups=st.integers(1, 64))
def test_the_efficiency_of_a_shape_is_a_share_and_grows_with_depth(m, n, k, groups):
    found = gemm_shape_efficiency(m, n, k, 108, 200, groups)
    assert 0 < found < 1
    assert gemm_shape_efficiency(m, n, 2 * k, 108, 200, groups) >= 0.99 * found


def test_full_waves_beat_a_wave_with_one_tile():
    full, spilled = (gemm_shape_efficiency(256, 128 * tiles, 4096, 108, 0) for tiles in (108, 109))
    assert full == 1.0 and 0.5 <= spilled < 0.85


def test_few_blocks_of_queries_leave_sms_idle():
    times = [
        fused_attention(A100, "", pairs=1e6, width=128, blocks=blocks, backward=False, rate=1.0).seconds
        for blocks in (27, 54, 108, 216)
    ]
    assert times[0] == pytest.approx(2 * times[1]) and times[1] == pytest.approx(2 * times[2]) and times[2] == times[3]


def test_bytes_over_the_memory_rate():
    assert memory_bound(A100, "", 1e9, 4).seconds == pytest.approx(4e9 / 1.8e12)


# ---- collectives ----


def bare(**changes: float) -> Machine:
    """An A100 without latencies."""
    levels = tuple(dataclasses.replace(level, latency=0.0, hop=0.0, **changes) for level in A100.levels)
    return dataclasses.replace(A100, levels=levels)


def test_the_all_gather_dispatcher_moves_every_token_to_every_rank():
    fields = EXPERTS | {"moe.dispatcher": "allgather", "moe.shared_expert_ffn_hidden": None}
    model, moe, view = layout(8, parallel__ep=4, parallel__etp=2, **fields)
    passes = layer_passes(model, moe, view, A100)
    for terms in (passes.forward, passes.input_grad):
        sent = {term.name: dict(term.inputs) for term in terms if term.kind == "ep"}
        assert list(sent) == ["dispatch of all tokens", "combine of all tokens"]
        # 8 ranks bring their tokens of two samples, in 16 bits
        assert {each["bytes"] for each in sent.values()} == {8 * 2 * model.seq_length * model.hidden * 2}
        assert {each["n"] for each in sent.values()} == {8}


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_ring_inside_a_node(size):
    share = (size - 1) / size * 1e9 / 232e9
    assert collective_seconds(bare(), "all_gather", 1e9, Group(size)) == pytest.approx(share)
    assert collective_seconds(bare(), "reduce_scatter", 1e9, Group(size)) == pytest.approx(share)
    assert collective_seconds(bare(), "all_reduce", 1e9, Group(size)) == pytest.approx(2 * share)


def test_one_adapter_per_rank_of_the_group_in_a_node():
    """16 ranks over two whole nodes have eight adapters each; 16 ranks with stride 8 have one in each of 16 nodes."""
    moved = 15 / 16 * 1e9
    assert collective_seconds(bare(), "all_gather", 1e9, Group(16)) == pytest.approx(moved / (8 * 24e9))
    assert collective_seconds(bare(), "all_gather", 1e9, Group(16, 8)) == pytest.approx(moved / 24e9)
    assert Group(16, 8).nodes(A100) == 16 and Group(16, 4).per_node(A100) == 2


def test_hops_are_added_up():
    node, outer = A100.levels
    small = collective_seconds(A100, "all_gather", 1e-9, Group(8))
    assert small == pytest.approx(node.latency + 7 * node.hop)
    ring = collective_seconds(A100, "all_gather", 1e-9, Group(16))
    assert ring == pytest.approx(outer.latency + 2 * outer.hop + 14 * node.hop)
    tree = collective_seconds(A100, "all_reduce", 1e-9, Group(4096))
    assert tree == pytest.approx(outer.latency + 2 * (math.log2(512) * outer.hop + 7 * node.hop))


def test_an_all_to_all_uses_link_and_adapter_at_once():
    inside = collective_seconds(bare(), "all_to_all", 1e9, Group(8))
    assert inside == pytest.approx(7 / 8 * 1e9 / 232e9)
    beyond = collective_seconds(bare(), "all_to_all", 1e9, Group(32))
    assert beyond == pytest.approx(24 / 32 * 1e9 / 24e9)


def test_leaving_the_node_costs_most_for_small_messages():
    """B200 with EFA (stas00/ml-engineering): 87 against 36 ms at 16 GiB, 380 against 48 us at 256 KiB."""
    b200 = load_machine("b200")

    def ratio(size: int) -> float:
        inside, beyond = (collective_seconds(b200, "all_reduce", size, Group(ranks)) for ranks in (8, 32))
        return beyond / inside

    assert ratio(2**34) == pytest.approx(87.18 / 35.55, rel=0.1)
    assert ratio(2**18) == pytest.approx(381.9 / 48.1, rel=0.25)


def test_a_collective_beside_computation_is_exposed_in_part():
    whole = collective(A100, "", "dp", "all_reduce", 1e9, Group(8)).seconds
    hidden = collective(A100, "", "dp", "all_reduce", 1e9, Group(8), beside=Beside(10.0, 0.25), count=3).seconds
    assert hidden == pytest.approx(3 * 0.25 * whole)
    half = collective(A100, "", "dp", "all_reduce", 1e9, Group(8), beside=Beside(whole / 2)).seconds
    assert half == pytest.approx(whole / 2)
    assert collective(A100, "", "dp", "all_reduce", 1e9, Group(1)).seconds == 0


@given(
    size=st.floats(1, 1e12), more=st.floats(1, 4), ranks=st.sampled_from([2, 4, 8, 16, 64, 512]),
    stride=st.sampled_from([1, 2, 8]), kind=st.sampled_from(["all_reduce", "all_gather", "all_to_all", "p2p"]),
)  # fmt: skip
def test_more_bytes_never_take_less_time(size, more, ranks, stride, kind):
    group = Group(ranks, stride)
    assert collective_seconds(A100, kind, more * size, group) >= collective_seconds(A100, kind, size, group) > 0
