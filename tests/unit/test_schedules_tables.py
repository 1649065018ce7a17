"""Schedule tables, warm-up, orders: hand-made examples of the sources, properties, refusals. Megatron is the oracle
elsewhere."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.schedules import (
    convert_schedule_table_to_order,
    get_model_chunk_id,
    get_overlap_moe_expert_parallel_comm_order,
    get_pp_rank_microbatches,
    get_schedule_table,
    is_first_microbatch_for_model_chunk,
    is_last_microbatch_for_model_chunk,
)

PP2_N3_M5_V2 = list(zip([0, 1, 2, 0, 1, 2, 3, 4, 3, 4], [0, 0, 0, 1, 1, 1, 0, 0, 1, 1], strict=True))
"""The example of Megatron's own comments."""

SIZES = {"microbatches": st.integers(1, 20), "chunks": st.integers(1, 5), "group_size": st.integers(1, 22)}


def _order(pp, rank, microbatches, chunks, group_size):
    warmup = get_pp_rank_microbatches(microbatches, chunks, group_size, pp_size=pp, pp_rank=rank)[2]
    return convert_schedule_table_to_order(warmup, chunks, get_schedule_table(microbatches, chunks, group_size))


def _numbers(text):
    return [float(word) if "." in word else int(word) for word in text.replace("|", "").split()]


def test_the_table_of_the_sources():
    assert get_schedule_table(5, 2, 3) == PP2_N3_M5_V2


@given(**SIZES)
def test_a_table_passes_each_group_through_every_chunk(microbatches, chunks, group_size):
    table = get_schedule_table(microbatches, chunks, group_size)
    first_column = [range(start, min(start + group_size, microbatches)) for start in range(0, microbatches, group_size)]
    assert table == [(m, chunk) for group in first_column for chunk in range(chunks) for m in group]
    assert all(type(number) is int for pair in table for number in pair)


@pytest.mark.parametrize(
    ("sizes", "rank", "order"),
    [
        ({"pp": 2, "microbatches": 5, "chunks": 2, "group_size": 3}, 0,
         "1 1 1 2 2 2 -2 1 -2 1 -2 2 -1 2 -1 -1 -2 -2 -1 -1"),
        ({"pp": 2, "microbatches": 4, "chunks": 2, "group_size": 2}, 0, "1 1 2 2 1 -2 1 -2 2 -1 2 -1 -2 -2 -1 -1"),
        ({"pp": 2, "microbatches": 4, "chunks": 2, "group_size": 2}, 1, "1 1 2 -2 2 -2 1 -1 1 -1 2 -2 2 -2 -1 -1"),
        ({"pp": 4, "microbatches": 8, "chunks": 2, "group_size": 4}, 0,
         "1 1 1 1 2 2 2 2 1 1 | 1 -2 1 -2 2 -2 2 -2 2 -1 2 -1 | -1 -1 -2 -2 -2 -2 -1 -1 -1 -1"),
    ],
)  # fmt: skip
def test_orders_of_the_sources(sizes, rank, order):
    assert _order(rank=rank, **sizes) == _numbers(order)


def test_warm_up_of_the_sources():
    interleaved = [get_pp_rank_microbatches(8, 2, 4, pp_size=4, pp_rank=rank) for rank in range(4)]
    assert interleaved == [(16, False, 10, 6), (16, False, 8, 8), (16, False, 6, 10), (16, False, 4, 12)]
    assert get_pp_rank_microbatches(5, 2, 3, pp_size=2, pp_rank=0)[2] == 5
    assert [get_pp_rank_microbatches(2, 1, pp_size=4, pp_rank=rank)[2] for rank in range(4)] == [2, 2, 1, 0]
    assert get_pp_rank_microbatches(4, 2, 4, pp_size=4, pp_rank=0) == (8, True, 8, 0)
    # The overlap of expert communication needs a forward that does not depend on the backward beside it.
    assert get_pp_rank_microbatches(8, 2, pp_size=4, pp_rank=3, overlap_moe_expert_parallel_comm=True)[2] == 5
    assert get_pp_rank_microbatches(8, 2, 4, True, pp_size=4, pp_rank=3) == (16, True, 16, 0)
    assert get_pp_rank_microbatches(8, 1, pp_size=1, pp_rank=0) == (8, False, 0, 8)


@given(warmup=st.integers(0, 100), **SIZES)
def test_what_every_order_has(warmup, microbatches, chunks, group_size):
    table = get_schedule_table(microbatches, chunks, group_size)
    order = convert_schedule_table_to_order(min(warmup, len(table)), chunks, table)
    assert len(order) == 2 * microbatches * chunks and sum(order) == 0
    assert Counter(order) == {sign * chunk: microbatches for chunk in range(1, chunks + 1) for sign in (1, -1)}


@given(**SIZES)
def test_first_last_and_chunk_of_a_virtual_microbatch(microbatches, chunks, group_size):
    table = get_schedule_table(microbatches, chunks, group_size)
    total = len(table)
    for k, (microbatch, chunk) in enumerate(table):
        assert get_model_chunk_id(k, True, table) == get_model_chunk_id(k + total, True, table) == chunk
        assert get_model_chunk_id(k, False, table) == chunks - 1 - chunk
        assert is_first_microbatch_for_model_chunk(k, table) == (microbatch == 0)
        assert is_last_microbatch_for_model_chunk(k, table) == (microbatch == microbatches - 1)
    assert not is_first_microbatch_for_model_chunk(total, table)
    assert not is_last_microbatch_for_model_chunk(2 * total - 1, table)


def test_layers_of_overlapped_expert_communication():
    order = [1, 2, -2, 1, -1, -1]
    with_weights = get_overlap_moe_expert_parallel_comm_order(order, [1, 2], True)
    assert with_weights == _numbers("1 2 3 1 -3 -3.5 -2 -2.5 -1 -1.5 -1 -1.5")
    assert get_overlap_moe_expert_parallel_comm_order(order, [1, 2], False) == [1, 2, 3, 1, -3, -2, -1, -1]
    # Steady part -3 2: two layers back beside three ahead; the last weight gradient closes the pair.
    pair = get_overlap_moe_expert_parallel_comm_order([1, 2, -2, 1, -1, 2, -2, -1], [3, 2], True)
    assert pair[5:13] == _numbers("1 -5 -5.5 2 -4 3 -4.5 4")
    assert get_overlap_moe_expert_parallel_comm_order([1, 1, -1, -1], [2], False) == [1, 2, 1, 2, -2, -1, -2, -1]


@pytest.mark.parametrize(
    ("call", "needle"),
    [
        (lambda: get_schedule_table(0, 2, 2), "num_microbatches is 0: give a whole number of at least 1"),
        (lambda: get_schedule_table(4, 2, 2.5), "group_size is 2.5"),
        (lambda: get_pp_rank_microbatches(4, 2, 2, pp_size=2, pp_rank=2), "pp_rank is 2: with pp_size 2 it is 0 to 1"),
        (
            lambda: get_pp_rank_microbatches(3, 2, pp_size=4, pp_rank=0),
            "3 microbatches on 4 .* at least 4; raise microb",
        ),
        (lambda: get_pp_rank_microbatches(8, 2, 3, pp_size=4, pp_rank=0), "group size is 3; .* choose one of 4, 8$"),
        (lambda: get_pp_rank_microbatches(8, 2, 9, pp_size=4, pp_rank=0), "group size is 9; .* choose one of 4, 8$"),
        (
            lambda: get_pp_rank_microbatches(8, 2, 5, pp_size=4, pp_rank=0),
            "size is 5; it leaves .* of 3 .*shorter",
        ),
        (
            lambda: get_pp_rank_microbatches(9, 2, pp_size=4, pp_rank=0),
            "leaves a last group of 1.* choose one of 5, 9, or take 12 microbatches$",
        ),
        (lambda: convert_schedule_table_to_order(11, 2, PP2_N3_M5_V2), "is 11: the table has 10 virtual microbatches"),
        (lambda: convert_schedule_table_to_order(5, 3, PP2_N3_M5_V2), r"is 3, but the table has chunks \[0, 1\]"),
        (lambda: get_overlap_moe_expert_parallel_comm_order([1, 2, -2, -1], [1], True), r"is \[1\]: .* chunks 1 to 2"),
        (lambda: get_overlap_moe_expert_parallel_comm_order([1, -1, -1, 1], [1], True), "must take turns until the"),
    ],
)
def test_refusals_say_what_is_allowed(call, needle):
    with pytest.raises(ValueError, match=needle):
        call()
