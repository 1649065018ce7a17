"""Tables and orders against megatron-core, rows of actions against torch.distributed.pipelining."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.schedules import (
    Action,
    Schedule,
    convert_schedule_table_to_order,
    dualpipe_v,
    get_overlap_moe_expert_parallel_comm_order,
    get_pp_rank_microbatches,
    get_schedule_table,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    split_backward,
    zbv,
)

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def megatron() -> Iterator[SimpleNamespace]:
    """The functions of megatron-core, and one that sets the sizes that they read from its globals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.transformer import cuda_graphs

    def place(pp: int | None, rank: int | None, vpp: int | None) -> None:
        parallel_state.set_pipeline_model_parallel_world_size(pp)
        parallel_state.set_pipeline_model_parallel_rank(rank)
        parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp)

    yield SimpleNamespace(
        place=place,
        table=schedules.get_schedule_table,
        microbatches=schedules.get_pp_rank_microbatches,
        order=cuda_graphs.convert_schedule_table_to_order,
        overlap_order=cuda_graphs.get_overlap_moe_expert_parallel_comm_order,
    )
    place(None, None, None)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(pp, vpp, microbatches, group size), pp up to 16, vpp up to 8, up to 64 microbatches, any legal group size."""
    pp, vpp = draw(st.integers(1, 16)), draw(st.integers(1, 8))
    microbatches = draw(st.integers(1 if 1 in (pp, vpp) else pp, 64))
    if microbatches < pp:
        return pp, vpp, microbatches, pp
    legal = [n for n in range(pp, microbatches + 1) if microbatches % n == 0 or microbatches % n >= pp]
    return pp, vpp, microbatches, draw(st.sampled_from(legal))


@given(pipeline=pipelines(), data=st.data(), forward_only=st.booleans(), overlap=st.booleans())
@settings(max_examples=300)
def test_tables_warm_up_and_orders_equal_those_of_megatron(megatron, pipeline, data, forward_only, overlap):
    pp, vpp, count, group = pipeline
    rank = data.draw(st.integers(0, pp - 1))
    megatron.place(pp, rank, vpp if vpp > 1 else None)
    table = get_schedule_table(count, vpp, group)
    assert table == megatron.table(count, vpp, group)
    sizes = get_pp_rank_microbatches(
        count, vpp, group, forward_only, pp_size=pp, pp_rank=rank, overlap_moe_expert_parallel_comm=overlap
    )
    assert sizes == megatron.microbatches(count, vpp, group, forward_only, overlap)
    assert convert_schedule_table_to_order(sizes[2], vpp, table) == megatron.order(sizes[2], vpp, table)


@given(pipeline=pipelines())
@settings(max_examples=60)
def test_interleaved_rows_are_the_orders_of_megatron(megatron, pipeline):
    pp, vpp, count, group = pipeline
    if pp == 1 < vpp:
        return  # refused: nothing to interleave
    schedule, table = interleaved(*pipeline), megatron.table(count, vpp, group)
    for rank in range(pp):
        megatron.place(pp, rank, vpp if vpp > 1 else None)
        warmup = megatron.microbatches(count, vpp, group)[2]
        assert schedule.order(rank) == megatron.order(warmup, vpp, table)
        forwards = [(a.microbatch, a.stage // pp) for a in schedule.actions(rank) if a.kind == "F"]
        backwards = [(a.microbatch, vpp - 1 - a.stage // pp) for a in schedule.actions(rank) if a.kind == "B"]
        assert forwards == backwards == table


@given(pipeline=pipelines(), data=st.data(), weights=st.booleans(), overlap=st.booleans())
@settings(max_examples=100)
def test_overlapped_orders_equal_those_of_megatron(megatron, pipeline, data, weights, overlap):
    pp, vpp, count, group = pipeline
    rank = data.draw(st.integers(0, pp - 1))
    layers = data.draw(st.lists(st.integers(1, 4), min_size=vpp, max_size=vpp))
    table = get_schedule_table(count, vpp, group)
    warmup = get_pp_rank_microbatches(
        count, vpp, group, pp_size=pp, pp_rank=rank, overlap_moe_expert_parallel_comm=overlap
    )[2]
    order = convert_schedule_table_to_order(warmup, vpp, table)
    assert (
        get_overlap_moe_expert_parallel_comm_order(order, layers, weights)
        == (megatron.overlap_order(order, layers, weights)[0])
    )


def _of_torch(name: str, pp: int, count: int, chunks: int | None = None) -> list[list[Action]]:
    """torch's actions per rank, in our words: idle cells and gradient reductions dropped, pairs written one after the
    other, full backwards as I and W.

    One repair: in torch 2.13 the last rank's listing of 1F1B (not its execution) numbers its forwards from 1.
    """
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    rows = [
        [action for cell in row for action in _in_our_words(cell)]
        for row in get_schedule_ops(name, pp, count, num_stages_per_rank=chunks)
    ]
    if name == "1F1B":
        rows[-1] = [Action(a.stage, a.kind, a.microbatch - (a.kind == "F")) for a in rows[-1]]
    return rows


def _in_our_words(cell) -> Iterator[Action]:
    if cell is None or cell.computation_type.name == "REDUCE_GRAD":
        return
    if cell.computation_type.name == "OVERLAP_F_B":
        for part in cell.sub_actions:
            yield from _in_our_words(part)
        return
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "IW", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    for kind in kinds[cell.computation_type.name]:
        yield Action(cell.stage_index, kind, cell.microbatch_index)


def _hold(schedule: Schedule, theirs: list[list[Action]]) -> None:
    """The same rows, and not slower than torch's with F = I = W = 1 and free messages."""
    ours = split_backward(schedule, weight="after")
    listed = Schedule("torch", ours.num_stages, ours.num_microbatches, theirs)
    assert simulate(ours).makespan <= simulate(listed).makespan
    assert [ours.actions(rank) for rank in range(ours.pp)] == theirs


@pytest.mark.parametrize(("name", "builder"), [("GPipe", gpipe), ("1F1B", one_f_one_b)])
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_one_stage_a_rank_equals_torch(name, builder, pp, extra):
    _hold(builder(pp, pp + extra), _of_torch(name, pp, pp + extra))


@pytest.mark.parametrize(("pp", "vpp", "count"), [(2, 2, 4), (2, 4, 8), (3, 2, 8), (4, 2, 8), (4, 3, 10), (4, 2, 15)])
def test_interleaved_equals_torch(pp, vpp, count):
    group = count // (count // pp)  # torch cuts the batch into groups of one length
    _hold(interleaved(pp, vpp, count, group), _of_torch("Interleaved1F1B", pp, count, vpp))


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("count", [1, 2, 5, 9, 16, 21])
def test_zbv_equals_torch(pp, count):
    schedule = zbv(pp, count)
    assert not (schedule.kinds == 1).any()  # nothing to split: the rows themselves are torch's
    _hold(schedule, _of_torch("ZBVZeroBubble", pp, count))


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("extra", [0, 1, 4, 9])
def test_dualpipe_v_equals_torch(pp, extra):
    schedule = dualpipe_v(pp, 2 * pp + extra)
    assert not (schedule.kinds == 1).any()
    _hold(schedule, _of_torch("DualPipeV", pp, 2 * pp + extra))


def test_dualpipe_v_is_refused_where_torch_refuses_it():
    for pp, count in ((2, 3), (4, 7)):
        for build in (lambda: _of_torch("DualPipeV", pp, count), lambda: dualpipe_v(pp, count)):  # noqa: B023
            with pytest.raises(ValueError, match=r"at least"):
                build()
