"""Plans of static inputs: the numbers of the sources, first in first out, properties, a checker that can say no."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.graphs import PlanError, check_plan, plan_buffers, plan_from, read_order, sample_index
from labkit.schedules import (
    convert_schedule_table_to_order,
    get_overlap_moe_expert_parallel_comm_order,
    get_pp_rank_microbatches,
    get_schedule_table,
    gpipe,
)


def _order(pp, chunks, group_size, microbatches, rank):
    warmup = get_pp_rank_microbatches(microbatches, chunks, group_size, pp_size=pp, pp_rank=rank)[2]
    return convert_schedule_table_to_order(warmup, chunks, get_schedule_table(microbatches, chunks, group_size))


@st.composite
def layouts(draw):
    """(order, warm-up, chunks, microbatches) of one rank of a random pipeline."""
    pp, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    chunks = chunks if pp > 1 else 1
    group_size = draw(st.integers(pp, pp + 3))
    microbatches = group_size * draw(st.integers(1, 3))
    rank = draw(st.integers(0, pp - 1))
    warmup = get_pp_rank_microbatches(microbatches, chunks, group_size, pp_size=pp, pp_rank=rank)[2]
    return _order(pp, chunks, group_size, microbatches, rank), warmup, chunks, microbatches


@st.composite
def orders(draw):
    """Any order that runs: chunks, microbatches, weight gradients or none, in any sequence that is allowed."""
    chunks, microbatches, kinds = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.sampled_from(["FB", "FBW"]))
    done = dict.fromkeys(((kind, chunk) for chunk in range(1, chunks + 1) for kind in kinds), 0)
    order = []
    while len(order) < len(done) * microbatches:
        allowed = [
            (kind, chunk)
            for kind, chunk in done
            if done[kind, chunk] < (microbatches if kind == "F" else done["FBW"["FBW".index(kind) - 1], chunk])
        ]
        kind, chunk = draw(st.sampled_from(allowed))
        done[kind, chunk] += 1
        order.append({"F": chunk, "B": -chunk, "W": -chunk - 0.5}[kind])
    return order, chunks


@pytest.mark.parametrize(
    ("pp", "chunks", "group_size", "microbatches", "layers", "buffers"),
    [
        (4, 2, 4, 8, 1, [11, 9, 7, 5]),
        (4, 2, 4, 16, 1, [11, 9, 7, 5]),
        (4, 2, 4, 8, 2, [22, 18, 14, 10]),
        (4, 2, 4, 8, [1, 3], [19, 17, 13, 7]),
        (4, 1, 4, 8, 1, [4, 3, 2, 1]),
        (2, 2, 3, 5, 1, [6, 4]),
    ],
)
def test_numbers_of_the_sources(pp, chunks, group_size, microbatches, layers, buffers):
    ranks = [_order(pp, chunks, group_size, microbatches, rank) for rank in range(pp)]
    assert [plan_buffers(order, layers).num_buffers for order in ranks] == buffers


def test_steps_of_a_small_plan():
    plan = plan_buffers([1, 1, -1, 1, -1, -1], 1)
    assert plan.assignment == {(0, 0, 0): 0, (0, 0, 1): 1, (0, 0, 2): 0}
    assert plan.acquired_at == {(0, 0, 0): 0, (0, 0, 1): 1, (0, 0, 2): 3}
    assert plan.freed_at == {(0, 0, 0): 2, (0, 0, 1): 4, (0, 0, 2): 5}
    assert [plan.held_at(step) for step in range(6)] == [1, 2, 1, 2, 1, 0]
    assert plan.lives(0) == [(0, 0, 0), (0, 0, 2)]


def test_one_microbatch_after_the_other_shares_one_buffer_and_all_forwards_first_share_none():
    assert plan_buffers([1, -1] * 4, 3).num_buffers == 3
    assert plan_buffers([1] * 4 + [-1] * 4, 3).num_buffers == 12
    assert plan_buffers(gpipe(2, 6).order(0), 1).num_buffers == 6


@given(layouts(), st.integers(1, 4))
def test_layers_times_warmup_and_one(layout, layers):
    order, warmup, chunks, microbatches = layout
    plan = plan_buffers(order, layers)
    check_plan(plan, order)
    assert plan.num_buffers == layers * min(warmup + 1, microbatches * chunks)


@given(orders(), st.lists(st.integers(0, 3), min_size=3, max_size=3), st.booleans())
def test_no_more_buffers_than_are_held_at_once(drawn, layers, keep):
    order, chunks = drawn
    plan = plan_buffers(order, layers[:chunks], keep_for_weight_gradients=keep)
    check_plan(plan, order, keep_for_weight_gradients=keep)
    held, most, ends = 0, 0, any(entry % 1 for entry in order) and keep
    for entry in order:
        count = layers[int(abs(-(-entry // 1))) - 1]
        held += count if entry > 0 else -count * (bool(entry % 1) == ends)
        most = max(most, held)
    assert plan.num_buffers == most


@given(orders(), st.integers(1, 3), st.integers(1, 3))
def test_an_early_release_is_always_refused(drawn, layers, early):
    order, _ = drawn
    whole = [entry for entry in order if entry % 1 == 0]
    plan = plan_buffers(whole, layers, early_release=early)
    with pytest.raises(PlanError, match=r"buffer \d+ (has two lives|from step)"):
        check_plan(plan, whole)


def test_the_buffer_free_longest_is_taken_first():
    plan = plan_buffers([1, 1, -1, -1, 1, 1, -1, -1], 1)
    assert [plan.assignment[0, 0, m] for m in range(4)] == [0, 1, 0, 1]


def test_signatures_are_pools_of_their_own():
    order = [1, 2, -2, -1] * 3
    apart = plan_buffers(order, [1, 1], signatures=["bf16", "fp32"])
    assert apart.assignment == {(0, 0, m): 0 for m in range(3)} | {(1, 0, m): 1 for m in range(3)}
    assert apart.buffers_by_signature == {"bf16": 1, "fp32": 1}
    crossed = [1, -1, 2, -2]
    assert plan_buffers(crossed, 1).num_buffers == 1
    assert plan_buffers(crossed, 1, signatures=["a", "b"]).num_buffers == 2


def test_signatures_of_sample_arguments():
    order, layers, microbatches = [1, 1, 2, -2, -1, 2, -2, -1], [1, 2], 2
    signatures = ["x"] * 6
    signatures[sample_index(layers, microbatches, 1, 1, 0)] = "y"
    plan = plan_buffers(order, layers, signatures)
    assert plan.signature[plan.assignment[1, 1, 0]] == "y"
    assert plan.buffers_by_signature["y"] == 1
    check_plan(plan, order)


def test_sample_arguments_are_laid_out_chunk_by_chunk():
    layers, microbatches = [1, 3], 2
    places = [
        sample_index(layers, microbatches, chunk, layer, microbatch)
        for chunk in range(2) for microbatch in range(2) for layer in range(layers[chunk])
    ]  # fmt: skip
    assert places == list(range(8))


def test_weight_gradients_hold_an_input_only_where_asked():
    order = get_overlap_moe_expert_parallel_comm_order([1, 2, -2, 1, -1, 2, -2, -1], [1, 3], True)
    te, kept = plan_buffers(order, 1), plan_buffers(order, 1, keep_for_weight_gradients=True)
    check_plan(te, order)
    assert te.num_buffers <= kept.num_buffers
    assert all(order[step] % 1 == 0.5 for step in kept.freed_at.values())
    taken = [1, -1, 1, -1.5, -1, -1.5]  # the second forward runs between the first backward and its weight gradients
    with pytest.raises(PlanError, match="two lives"):
        check_plan(plan_buffers(taken, 1), taken, keep_for_weight_gradients=True)


def test_a_plan_one_step_early_shows_the_two_lives():
    order = _order(4, 1, 4, 8, 2)
    with pytest.raises(PlanError) as error:
        check_plan(plan_buffers(order, 1, early_release=1), order)
    assert str(error.value) == (
        "buffer 0 has two lives at once: chunk 0 layer 0 microbatch 1 takes it at step 1, but the backward of chunk 0 "
        "layer 0 microbatch 0 reads it at step 2\n"
        "  step                           0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15\n"
        "  order                          1  1 -1  1 -1  1 -1  1 -1  1 -1  1 -1  1 -1 -1\n"
        "  chunk 0 layer 0 microbatch 0   F  =  B  .  .  .  .  .  .  .  .  .  .  .  .  .\n"
        "  chunk 0 layer 0 microbatch 1   .  F  =  =  B  .  .  .  .  .  .  .  .  .  .  .\n"
        "  held twice                        !  !"
    )


@pytest.mark.parametrize(
    ("wrong", "order", "says"),
    [
        ({"assignment": {(0, 0, 0): 0, (0, 0, 1): 0}}, [1, 1, -1, -1], "two lives at once"),
        ({"freed_at": {(0, 0, 0): 2, (0, 0, 1): 1}}, [1, 1, -1, -1], r"gives it back at step 1\. Its forward runs at"),
        ({"assignment": {(0, 0, 0): 0}}, [1, 1, -1, -1], "chunk 0 layer 0 microbatch 1 has no buffer"),
        ({}, [1, -1], "is not in the order"),
    ],
)
def test_the_checker_reads_the_plan_and_not_its_maker(wrong, order, says):
    with pytest.raises(PlanError, match=says):
        check_plan(replace(plan_buffers([1, 1, -1, -1], 1), **wrong), order)


def test_later_lives_of_a_buffer_are_checked_too():
    """Right for the first three microbatches, and then the fourth takes what the third holds."""
    order = [1, -1, 1, -1, 1, 1, -1, -1]
    plan = plan_buffers(order, 1)
    with pytest.raises(PlanError, match=r"microbatch 3 takes it at step 5, but the backward of .* microbatch 2 reads"):
        check_plan(replace(plan, assignment=dict.fromkeys(plan.assignment, 0)), order)


def test_a_plan_from_numbers_is_theirs_and_may_be_unsafe():
    order = [1, 1, -1, 1, -1, -1]
    assert plan_from(order, [7, 3, 7], layers_per_chunk=2).assignment == plan_buffers(order, 2).assignment
    two = [1, 2, 1, -2, -1, 2, -2, -1]
    assert plan_from(two, [0, 1, 2, 1]).assignment == plan_buffers(two, 1).assignment
    wasteful = plan_from(order, [0, 1, 2])
    check_plan(wasteful, order)
    assert wasteful.num_buffers == 3
    with pytest.raises(PlanError, match=r"buffer 1 has two lives at once: .* microbatch 2 takes it at step 3"):
        check_plan(plan_from(order, [0, 1, 1]), order)
    with pytest.raises(ValueError, match="2 buffers for 3 forwards: give one for each forward"):
        plan_from(order, [0, 1])


def test_orders_of_schedules_are_read():
    assert [(one.kind, one.chunk, one.microbatch) for one in read_order([1, 2, -2, -2.5, -1, -1.5])] == [
        ("F", 0, 0), ("F", 1, 0), ("B", 1, 0), ("W", 1, 0), ("B", 0, 0), ("W", 0, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("order", "layers", "options", "says"),
    [
        ([], 1, {}, "the order is empty"),
        ([0, 1], 1, {}, r"order\[0\] is 0: write c for a forward"),
        ([1, -1, 0.5], 1, {}, r"order\[2\] is 0.5"),
        ([1, -1.25], 1, {}, r"order\[1\] is -1.25"),
        ([-1, 1], 1, {}, "a forward must come first"),
        ([1, -1.5, -1], 1, {}, "a backward must come first"),
        ([1, 1, -1], 1, {}, r"\[2\] forwards and \[1\] backwards"),
        ([1, -1, 3, -3], 1, {}, r"\[1, 0, 1\] forwards"),
        ([1, 1, 2, -2, -1, -1], 1, {}, r"\[2, 1\] forwards"),
        ([1, 1, -1, -1, -1.5], 1, {}, "every chunk runs every microbatch"),
        ([1, 2, -2, -1], [1], {}, "the order has chunks 1 to 2"),
        ([1, -1], 2, {"signatures": [1, 2, 3]}, "3 signatures for 2 layers and 1 microbatches"),
        ([1, -1], 1, {"early_release": -1}, "early_release is -1"),
    ],
)
def test_orders_and_sizes_that_cannot_be_planned_are_refused(order, layers, options, says):
    with pytest.raises(ValueError, match=says):
        plan_buffers(order, layers, **options)
