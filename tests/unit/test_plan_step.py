"""The predicted step: its parts, its pipeline, its bound, and what must never make it faster."""

import dataclasses
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.config import RunConfig
from labkit.plan.machine import load_machine
from labkit.plan.step_time import predict_step, step_lower_bound
from labkit.plan.terms import KINDS
from labkit.plan.workload import Workload

A100, H100 = load_machine("a100"), load_machine("h100")
MODEL = {"model.layers": 16, "model.hidden": 2048, "model.heads": 16, "model.vocab_size": 51200,
         "model.seq_length": 1024, "optim.precision": "bf16"}  # fmt: skip


def work(world: int, batch: int = 64, *, fsdp: bool = False, software: str = "megatron_core", **fields) -> Workload:
    changes = {name.replace("__", "."): value for name, value in fields.items()}
    config = RunConfig().replaced(MODEL | {"train.global_batch_size": batch} | changes)
    return Workload(config, world, fsdp=fsdp, software=software)


LAYOUTS = [
    work(1),
    work(8, parallel__tp=8, parallel__sequence_parallel=True),
    work(16, parallel__tp=2, parallel__pp=4, optim__distributed_optimizer=True),
    work(16, parallel__pp=4, parallel__vpp=2, schedule__overlap_p2p_comm=True),
    work(8, parallel__pp=4, schedule__name="zero_bubble_h1"),
    work(8, parallel__pp=4, schedule__name="zbv", model__layers=24),
    work(8, parallel__pp=4, schedule__name="dualpipe_v", batch=128),
    work(64, fsdp=True, model__recompute_granularity="full"),
    work(16, parallel__cp=4, model__seq_length=8192, model__position="rope"),
    work(16, parallel__ep=8, moe__num_experts=16, moe__top_k=2, moe__ffn_hidden=1024),
    work(16, parallel__ep=8, moe__num_experts=16, moe__top_k=2, moe__ffn_hidden=1024, moe__dispatcher="allgather"),
    work(8, optim__fp8="hybrid", optim__fp8_recipe="current"),
    work(8, parallel__pp=2, graph__cuda_graph_impl="local", model__recompute_granularity="selective"),
]


@pytest.mark.parametrize("workload", LAYOUTS, ids=range(len(LAYOUTS)))
def test_the_parts_add_up_and_every_term_is_printed(workload):
    found = predict_step(workload, H100)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert set(found.parts) <= set(KINDS) and min(found.parts.values()) > -1e-9
    assert found.low < found.seconds < found.high
    text = found.explain(0)
    for timed in (found.stages[0].forward, found.stages[0].input_grad, found.stages[0].weight_grad):
        assert timed.seconds == pytest.approx(sum(count * term.seconds for count, term in timed.terms()))
        for _, term in timed.terms():
            assert f"{term.name}: " in text and term.formula in text
    assert "80 % interval" in str(found)


@pytest.mark.parametrize("workload", LAYOUTS, ids=range(len(LAYOUTS)))
def test_the_bound_is_below_the_simulation(workload):
    found = predict_step(workload, H100).seconds
    assert 0.5 * found < step_lower_bound(workload, H100) <= found * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    pp=st.sampled_from([1, 2, 4, 8]), chunks=st.sampled_from([1, 2]), batches=st.integers(1, 6),
    tp=st.sampled_from([1, 2]),
    name=st.sampled_from(["auto", "gpipe", "zero_bubble_h1", "zbv"]), granularity=st.sampled_from(["none", "full"]),
    hidden=st.sampled_from([256, 1024]), overlap=st.booleans(),
)  # fmt: skip
def test_no_layout_is_faster_than_its_bound(pp, chunks, batches, tp, name, granularity, hidden, overlap):
    chunks = chunks if name == "auto" and pp > 1 else 1
    workload = work(
        pp * tp * 2, batch=2 * pp * batches, parallel__pp=pp, parallel__vpp=chunks, parallel__tp=tp,
        schedule__name=name, model__recompute_granularity=granularity, model__hidden=hidden, model__layers=16,
        schedule__overlap_p2p_comm=overlap and chunks > 1,
    )  # fmt: skip
    assert step_lower_bound(workload, A100) <= predict_step(workload, A100).seconds * (1 + 1e-9)


def test_the_bubble_is_that_of_the_schedule():
    """Equal stages of 1F1B: the bubble is (p - 1)/m of a rank's work. First and last stage have more to do."""
    workload = work(4, batch=32, parallel__pp=4, model__vocab_size=128, model__layers=32)
    found = predict_step(workload, A100)
    work_of_rank = found.timeline.busy.mean()
    assert found.timeline.makespan / work_of_rank - 1 == pytest.approx(3 / 32, rel=0.1)
    zero = predict_step(work(4, batch=32, parallel__pp=4, model__layers=32, schedule__name="zbv"), A100)
    usual = predict_step(work(4, batch=32, parallel__pp=4, model__layers=32), A100)
    assert zero.parts["bubble"] < 0.6 * usual.parts["bubble"]


def test_faster_hardware_is_never_slower():
    for workload in LAYOUTS:
        base = predict_step(workload, H100).seconds
        levels = tuple(dataclasses.replace(level, bandwidth=2 * level.bandwidth) for level in H100.levels)
        for better in (
            dataclasses.replace(H100, levels=levels),
            dataclasses.replace(H100, memory_bandwidth=2 * H100.memory_bandwidth),
            dataclasses.replace(H100, peak_flops={name: 2 * peak for name, peak in H100.peak_flops.items()}),
        ):
            assert predict_step(workload, better).seconds <= base * (1 + 1e-9)


def test_recomputation_costs_what_it_repeats():
    none, selective, full = (
        predict_step(
            work(1, model__recompute_granularity=name, model__attention_backend="unfused", software="megatron_2022"),
            A100,
        )
        for name in ("none", "selective", "full")
    )
    assert none.seconds < selective.seconds < full.seconds
    forward = full.stages[0].forward
    layers = sum(count * sum(term.seconds for term in terms) for count, terms in forward.counted[:1])
    again = sum(count * sum(term.seconds for term in terms) for count, terms in full.stages[0].recompute.counted[:1])
    assert again == pytest.approx(layers)


def test_kept_microbatches_are_not_computed_again():
    fields = {"parallel__pp": 2, "model__recompute_granularity": "full"}
    key = "model__num_microbatches_with_partial_activation_checkpoints"
    times = [predict_step(work(2, **fields, **{key: kept}), A100).seconds for kept in (None, 1, 2)]
    assert times[0] > times[1] > times[2]
    keeps_all = predict_step(work(2, **fields, **{key: 2}), A100)
    assert "recompute" not in keeps_all.parts or keeps_all.parts["recompute"] == pytest.approx(0.0)


def test_tensor_parallelism_beyond_a_node_is_slow():
    inside = predict_step(work(16, parallel__tp=8), H100)
    beyond = predict_step(work(16, parallel__tp=16), H100)
    assert beyond.parts["tp"] > 2 * inside.parts["tp"]


def test_only_sequence_parallelism_overlaps_with_gemms():
    """Transformer Engine splits all-gathers and reduce-scatters beside a GEMM; an all-reduce stays whole."""
    plain, sharded = (
        [
            predict_step(
                work(8, parallel__tp=8, parallel__sequence_parallel=sp, model__hidden=8192, software=name), H100
            ).parts["tp"]
            for name in ("megatron_core", "megatron_tp_overlap")
        ]
        for sp in (False, True)
    )
    assert plain[1] >= plain[0] and sharded[1] < 0.7 * sharded[0]


def test_overlap_hides_the_reduction_of_gradients():
    late = predict_step(work(64, batch=256, optim__overlap_grad_reduce=False), H100)
    early = predict_step(work(64, batch=256), H100)
    assert early.parts["dp"] < late.parts["dp"] and early.seconds < late.seconds


def test_skewed_routing_is_slower():
    even = LAYOUTS[9]
    skewed = dataclasses.replace(even, expert_load=1.5)
    assert predict_step(skewed, H100).seconds > predict_step(even, H100).seconds


def test_graphs_leave_out_the_host():
    small = {"model__hidden": 128, "model__heads": 4, "model__seq_length": 64}
    eager = predict_step(work(1, **small), H100)
    graphed = predict_step(work(1, graph__cuda_graph_impl="full_iteration", **small), H100)
    assert eager.parts["host"] > 10 * graphed.parts["host"]


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (work(7, parallel__tp=2), "7 ranks cannot be shared by tp x cp x pp = 2"),
        (work(1, model__family="bert"), "model.family is bert; times are known for gpt"),
        (work(256, batch=64), "no whole microbatch"),
        (work(1, software="nobody"), "software is 'nobody'; choose one of"),
        (work(1, optim__precision="fp64"), "has no peak for fp64"),
    ],
)
def test_what_has_no_times(workload, words):
    with pytest.raises(ValueError, match=words):
        predict_step(workload, H100)


def test_a_search_can_afford_it():
    """A new layout of 8 stages and 64 microbatches takes 3 ms of processor time here; the limit leaves slack."""
    layouts = [
        work(64, batch=64 * 4 * micro, parallel__pp=8, parallel__tp=tp, train__micro_batch_size=micro)
        for tp in (1, 2)
        for micro in (1, 2, 4)
    ]
    layouts = [layout for layout in layouts if layout.microbatches >= 32]
    spent = []
    for layout in layouts:
        start = time.process_time()
        predict_step(layout, H100)
        spent.append(time.process_time() - start)
    assert len(layouts) >= 3 and sorted(spent)[len(spent) // 2] < 0.02
