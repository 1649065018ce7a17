"""Who owns what under the distributed optimizer, and what a parameter costs by ZeRO stage."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.parallel.data_parallel.bucket_layout import (
    ParameterSpec,
    Piece,
    pieces_of_rank,
    plan_buckets,
    shard_map,
    shard_range,
)
from labkit.plan.zero_stages import bytes_per_parameter, formula


def planned(sizes: list[int], dp: int, bucket_size: int | None = None, first_shared: bool = False):
    specs = [ParameterSpec(f"p{i}", size, first_shared and i == 0) for i, size in enumerate(sizes)]
    return plan_buckets(specs, dp=dp, bucket_size=bucket_size, distributed_optimizer=True)


def test_megatrons_layout_of_three_parameters_over_four_ranks() -> None:
    """{p2: 0-50, p1: 64-364, p0: 384-484} in a bucket of 512: 128 elements a rank, p1 has three owners."""
    assert shard_map(planned([100, 300, 50], dp=4), 4) == [
        Piece(0, 0, "p2", 0, 50, 0),
        Piece(0, 0, "p1", 64, 128, 0),
        Piece(1, 0, "p1", 128, 256, 64),
        Piece(2, 0, "p1", 256, 364, 192),
        Piece(3, 0, "p0", 384, 484, 0),
    ]


def test_every_bucket_is_cut_by_itself() -> None:
    """With buckets 0-384 and 384-512, rank 1 owns the second quarter of both: 96-192 and 416-448."""
    plan = planned([100, 300, 50], dp=4, bucket_size=256)
    assert [(b.start, b.end) for b in plan.buckets] == [(0, 384), (384, 512)]
    assert pieces_of_rank(plan, 4, 1) == [Piece(1, 0, "p1", 96, 192, 32), Piece(1, 1, "p0", 416, 448, 32)]


def test_first_and_last_stage_cut_the_tied_embedding_alike() -> None:
    """It is registered first on one and last on the other; a bucket of its own gives its elements the same owners."""
    shape = 1000
    first = planned([shape, 100, 300], dp=6, first_shared=True)
    specs = [ParameterSpec("norm", 77), ParameterSpec("p0", shape, True)]
    last = plan_buckets(specs, dp=6, bucket_size=None, distributed_optimizer=True)
    owners = [
        [(piece.rank, piece.offset_in_parameter, piece.numel) for piece in shard_map(plan, 6) if piece.name == "p0"]
        for plan in (first, last)
    ]
    assert owners[0] == owners[1] and len(owners[0]) == 6


@given(
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=12),
    dp=st.integers(1, 17),
    bucket_size=st.none() | st.integers(1, 2000),
    first_shared=st.booleans(),
)
def test_every_element_has_exactly_one_owner(
    sizes: list[int], dp: int, bucket_size: int | None, first_shared: bool
) -> None:
    plan = planned(sizes, dp, bucket_size, first_shared)
    owners: dict[str, list[int]] = {f"p{i}": [0] * size for i, size in enumerate(sizes)}
    everything = shard_map(plan, dp)
    for piece in everything:
        bucket = plan.buckets[piece.bucket]
        low, high = shard_range(bucket.start, bucket.end, dp=dp, rank=piece.rank)
        assert low <= piece.start < piece.end <= high, "a piece lies in its rank's part of its bucket"
        assert piece.start - plan.ranges[piece.name][0] == piece.offset_in_parameter
        for element in range(piece.offset_in_parameter, piece.offset_in_parameter + piece.numel):
            owners[piece.name][element] += 1
    assert all(counts == [1] * len(counts) for counts in owners.values())
    by_rank = [piece for rank in range(dp) for piece in pieces_of_rank(plan, dp, rank)]
    assert sorted(by_rank, key=lambda piece: piece.start) == everything


def test_padding_costs_less_than_one_percent_of_a_real_model() -> None:
    """GPT-2 of 355M parameters, a layer's tensors in the order of registration, over 8 to 1,024 ranks."""
    hidden, layers, vocab, positions = 1024, 24, 50304, 1024
    layer = [hidden, hidden, 3 * hidden * hidden, 3 * hidden, hidden * hidden, hidden, hidden, hidden]
    layer += [4 * hidden * hidden, 4 * hidden, 4 * hidden * hidden, hidden]
    sizes = [vocab * hidden, positions * hidden, *(layer * layers), hidden, hidden]
    for dp in (8, 96, 1024):
        plan = planned(sizes, dp, bucket_size=40_000_000, first_shared=True)
        assert plan.padding <= 0.01 * sum(sizes)
        assert sum(piece.numel for piece in shard_map(plan, dp)) == sum(sizes)


def test_a_bucket_that_the_ranks_do_not_divide_is_refused() -> None:
    plan = plan_buckets([ParameterSpec("p", 10)], dp=4, bucket_size=None, distributed_optimizer=False)
    with pytest.raises(ValueError, match=r"10 elements cannot be cut into 4 equal parts.*distributed_optimizer=True"):
        shard_map(plan, 4)
    with pytest.raises(ValueError, match=r"rank 4 is not among the 4 ranks.*0 .. 3"):
        shard_range(0, 128, dp=4, rank=4)


@pytest.mark.parametrize(
    ("param_dtype", "grad_dtype", "replicated", "sharded"),
    [
        ("bf16", "fp32", "18", "6 + 12/d"),
        ("fp32", "fp32", "16", "8 + 8/d"),
        ("bf16", "bf16", "20", "4 + 16/d"),
        ("fp16", "fp16", "20", "4 + 16/d"),
    ],
)
def test_bytes_per_parameter_are_those_of_megatrons_table(
    param_dtype: str, grad_dtype: str, replicated: str, sharded: str
) -> None:
    types = {"param_dtype": param_dtype, "grad_dtype": grad_dtype}
    assert formula(**types, stage=0) == replicated
    assert formula(**types, stage=1) == sharded


def test_stages_shard_what_the_paper_says() -> None:
    """arXiv 1910.02054, figure 1: 7.5 billion parameters, K = 12, 64 ranks: 120, 31.4, 16.6 and 1.9 GB. The paper's
    gradients are fp16; labkit's fp32 gradient buffer adds 2 bytes where they are whole."""
    gigabytes = []
    for stage in range(4):
        row = bytes_per_parameter(param_dtype="fp16", grad_dtype="fp16", dp=64, stage=stage)
        assert row.total == row.weight + row.gradient + row.optimizer
        gigabytes.append(float(7.5 * (row.total - row.update_gradient)))
    assert gigabytes == pytest.approx([120.0, 31.4, 16.6, 1.9], abs=0.05)


def test_unknown_types_and_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="param_dtype is 'int8'; choose one of fp64, fp32, bf16, fp16"):
        bytes_per_parameter(param_dtype="int8")
    with pytest.raises(ValueError, match="ZeRO has stages 0, 1, 2, 3"):
        bytes_per_parameter(stage=4)
    with pytest.raises(ValueError, match="dp is 0"):
        bytes_per_parameter(dp=0)
    assert bytes_per_parameter(dp=3, stage=1).master == Fraction(4, 3)
