"""The order in which the graphs of merged pairs are captured, and what it refuses."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from labkit.config import GraphConfig, ModelConfig, MoEConfig, presets
from labkit.graphs import CudaGraphHelper, check_plan, plan_buffers
from labkit.graphs.order_table import merged_capture_order, read_order
from labkit.models.gpt import GPTModel
from labkit.parallel import single_process_groups
from labkit.schedules import (
    convert_schedule_table_to_order,
    get_overlap_moe_expert_parallel_comm_order,
    get_schedule_table,
    merged_dualpipe_v,
    merged_interleaved,
    merged_one_f_one_b,
    one_f_one_b,
)
from labkit.schedules.merging import DENSE_PARTS, MOE_PARTS, pair_order
from labkit.train.run_schedule import check_schedule

SIZES = [(1, 1, 4), (2, 1, 6), (3, 1, 7), (2, 2, 4), (3, 2, 6), (2, 3, 8)]


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize(("pp", "vpp", "microbatches"), SIZES)
def test_captures_come_in_megatrons_order(pp, vpp, microbatches, delay):
    """As `TECudaGraphHelper` makes it, from the row before its layers are lined up and the warm-up of plain pairs."""
    schedule, layers = merged_interleaved(pp, vpp, microbatches), [2, 1, 3][:vpp]
    table = get_schedule_table(microbatches, vpp, pp)
    for rank in range(pp):
        warmup = min(2 * (pp - 1 - rank) + (vpp - 1) * pp, microbatches * vpp)
        row = convert_schedule_table_to_order(warmup, vpp, table)
        wanted = get_overlap_moe_expert_parallel_comm_order(row, layers, delay)
        captured = [[True] * count for count in layers]
        assert wanted == merged_capture_order(schedule, rank, captured, weight_gradients=True, delay_wgrad=delay)


def replays(schedule, rank, layers, *, delay):
    """What a rank replays: the attention of each layer, in the order in which the parts of its row run."""
    stages, found = schedule.stages_of(rank), []
    for cell in schedule.cells(rank):
        sides = {action.kind: stages.index(action.stage) for action in cell}
        ahead = layers[sides["F"]] if "F" in sides else ()
        chunk = next((chunk for kind, chunk in sides.items() if kind != "F"), None)
        back = () if chunk is None else layers[chunk]
        if "W" in sides:
            found += [("W", chunk, layer) for layer in reversed(range(len(back)))]
            continue
        runs = pair_order(ahead, back, delay_wgrad=delay and "B" in sides)
        found += [
            (run.side, sides["F"] if run.side == "F" else chunk, run.layer) for run in runs if run.part == "attention"
        ]
    return found


CAPTURED = [[[True, False], [False, True]], [[True, True], [False, False]], [[False, True], [True, True]]]


@pytest.mark.parametrize("captured", CAPTURED, ids=str)
@pytest.mark.parametrize("kinds", [(MOE_PARTS, DENSE_PARTS), (DENSE_PARTS, MOE_PARTS), (MOE_PARTS, MOE_PARTS)])
@pytest.mark.parametrize("schedule", [merged_interleaved(2, 2, 4), merged_dualpipe_v(2, 6)], ids=lambda s: s.name)
def test_layers_replay_in_the_order_of_their_captures(schedule, kinds, captured):
    for rank in range(2):
        order = merged_capture_order(schedule, rank, captured, weight_gradients=True, delay_wgrad=True)
        numbers = [place for place in itertools.product(range(2), range(2)) if captured[place[0]][place[1]]]
        ran = [run for run in replays(schedule, rank, [kinds, kinds], delay=True) if run[1:] in numbers]
        assert [(one.kind, *numbers[one.chunk]) for one in read_order(order)] == ran
        plan = plan_buffers(order, 1, keep_for_weight_gradients=True)
        check_plan(plan, order, keep_for_weight_gradients=True)


def test_layers_that_stay_eager_are_left_out_after_the_sides_are_lined_up():
    """The first two of four layers have graphs: in a pair both forwards come before both backwards."""
    schedule, captured = merged_one_f_one_b(1, 2), [[True, True, False, False]]
    order = merged_capture_order(schedule, 0, captured, weight_gradients=True, delay_wgrad=False)
    assert order == [1, 2, 1, 2, -2, -1, -2, -1]
    assert order != get_overlap_moe_expert_parallel_comm_order([1, -1, 1, -1], [2], False)


@pytest.mark.parametrize("rank", range(2))
def test_backwards_that_are_partly_split_need_the_others_split(rank):
    schedule, captured = merged_dualpipe_v(2, 6), [[True], [True]]
    with pytest.raises(ValueError, match=r"merges others whole, .* set schedule\.delay_wgrad_compute"):
        merged_capture_order(schedule, rank, captured, weight_gradients=True, delay_wgrad=False)
    without = merged_capture_order(schedule, rank, captured, weight_gradients=False, delay_wgrad=False)
    assert {one.kind for one in read_order(without)} == {"F", "B"}
    both = merged_capture_order(schedule, rank, captured, weight_gradients=True, delay_wgrad=True)
    kinds = [one.kind for one in read_order(both)]
    assert kinds.count("F") == kinds.count("B") == kinds.count("W") == 12


# ---- the helper ----

MODEL = ModelConfig(layers=2, hidden=16, heads=2, seq_length=16, vocab_size=64)
MOE = MoEConfig(num_experts=4, layer_freq=(0, 1), ffn_hidden=16)
GROUPS = single_process_groups()


def helper_of(*modules, moe=MOE, layers=range(2), impl="emulated", delay=False):
    chunk = GPTModel(MODEL, GROUPS, layers=layers, moe=moe, seed=1)
    graph = GraphConfig(cuda_graph_impl=impl, cuda_graph_modules=modules)
    schedule = merged_one_f_one_b(1, 3)
    return CudaGraphHelper([chunk], graph, 16, 1, schedule=schedule, delay_wgrad_compute=delay)


def test_a_graph_without_linear_layers_has_no_weight_gradients_apart(monkeypatch):
    """Norm and router compute theirs in the backward; shared experts can leave them out."""
    shared = replace(MOE, shared_expert_ffn_hidden=16)
    assert helper_of("moe_router", delay=True).order == [1, -1] * 3
    assert helper_of("moe_router", moe=shared, delay=True).order == [1, -1, -1.5] * 3
    assert helper_of("attn", delay=True).order.count(-2.5) == 3 and -2.5 not in helper_of("attn").order
    monkeypatch.setattr("labkit.graphs.cuda_graph_helper.choose_impl", lambda *_: None)
    with pytest.raises(ValueError, match=r"captures have no weight gradients apart: leave schedule\.delay"):
        helper_of("attn", impl="transformer_engine", delay=True)


def test_a_rank_without_captured_layers_captures_nothing():
    helper = helper_of("moe_router", layers=range(1))
    helper.create_cudagraphs()
    assert helper.graphs_created() and helper.layers == [] and helper.memory().graphs == 0


def test_every_layer_gets_its_own_graphs_and_memory_counts_them_all():
    helper = helper_of("attn", delay=True)
    helper.create_cudagraphs()
    assert helper.memory().graphs == len(helper.order) == 2 * 3 * 3
    for number, layer in enumerate(helper.layers):
        assert [one.name for one in layer.cuda_graphs] == [f"chunk {number} layer 0 microbatch {m}" for m in range(3)]
        assert all(one.function is layer.layer for one in layer.cuda_graphs)
    helper.recapture(schedule=one_f_one_b(2, 3))
    assert helper.order == [1, 1, -1, 1, -1, -1] and helper.captured_chunks == helper.callables_per_chunk


def test_a_table_of_ones_own_is_refused_where_graphs_cannot_follow_it():
    changes = {"layers": 4, "ep": 2, "pp": 2, "global_batch_size": 12, "overlap_moe_expert_parallel_comm": True}
    graph = {"cuda_graph_impl": "emulated", "cuda_graph_modules": ("attn",), "micro_batch_size": 1}
    config = presets.tiny_moe().override(changes | graph)
    check_schedule(merged_one_f_one_b(2, 6), config, 4)
    with pytest.raises(ValueError, match=r"set schedule\.delay_wgrad_compute, so that merged backwards are split"):
        check_schedule(merged_dualpipe_v(2, 6), config, 4)
    check_schedule(merged_dualpipe_v(2, 6), config.override({"delay_wgrad_compute": True}), 4)
