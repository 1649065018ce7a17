"""The zigzag cut: parts, positions and batches of a rank."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.comm.groups import Group
from labkit.parallel.context.ring_plan import LAYOUTS
from labkit.parallel.context.zigzag import (
    get_batch_on_this_cp_rank,
    join_sequence,
    sequence_positions,
    split_sequence,
    zigzag_positions,
    zigzag_split,
)


@given(st.integers(1, 6), st.integers(1, 3), st.sampled_from(LAYOUTS), st.integers(0, 2))
def test_joining_the_parts_gives_the_whole_and_positions_say_where_they_were(cp, chunk, layout, dim):
    shape = [2, 2, 2]
    shape[dim] = 2 * cp * chunk
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = [split_sequence(whole, cp, rank, dim, layout) for rank in range(cp)]
    assert torch.equal(join_sequence(parts, dim, layout), whole)
    for rank, part in enumerate(parts):
        assert torch.equal(whole.index_select(dim, sequence_positions(shape[dim], cp, rank, layout)), part)


def test_megatrons_example():
    """With two ranks chunks 0 and 3 are the first's, 1 and 2 the second's (megatron/core/utils.py)."""
    whole = torch.arange(8)
    assert zigzag_split(whole, 2, 0, 0).tolist() == [0, 1, 6, 7]
    assert zigzag_split(whole, 2, 1, 0).tolist() == [2, 3, 4, 5]
    assert split_sequence(whole, 2, 1, 0, "contiguous").tolist() == [4, 5, 6, 7]
    assert join_sequence([zigzag_split(whole, 2, rank, 0) for rank in range(2)], 0, "zigzag").tolist() == whole.tolist()


def test_a_batch_is_cut_along_its_positions_and_an_attention_mask_by_its_queries():
    batch = {"tokens": torch.arange(16).view(2, 8), "attention_mask": torch.ones(2, 1, 8, 8).tril(), "nothing": None}
    part = get_batch_on_this_cp_rank(batch, Group("cp", (0, 1), 1))
    assert part["tokens"].tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert part["attention_mask"].shape == (2, 1, 4, 8)
    assert part["attention_mask"][0, 0].sum(-1).tolist() == [3, 4, 5, 6]
    assert part["nothing"] is None
    alone = get_batch_on_this_cp_rank(batch, Group("cp", (0,), 0))
    assert alone["tokens"] is batch["tokens"]


def test_a_length_that_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match="10 positions cannot be cut into 2 x cp = 4 chunks; choose a multiple of 4"):
        zigzag_positions(10, 2, 0)
