"""The layout of gradient buffers: megatron-core's numbers, and what holds for any sizes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.parallel.data_parallel.bucket_layout import (
    BANDWIDTH_ALIGNMENT,
    ParameterSpec,
    default_bucket_size,
    plan_buckets,
)


def specs(sizes: list[int], shared: int | None = None) -> list[ParameterSpec]:
    return [ParameterSpec(f"p{i}", size, i == shared) for i, size in enumerate(sizes)]


def test_one_bucket_with_the_distributed_optimizer():
    plan = plan_buckets(specs([100, 300, 50]), dp=4, distributed_optimizer=True)
    assert plan.ranges == {"p2": (0, 50), "p1": (64, 364), "p0": (384, 484)}
    assert plan.buckets == ((0, 512, 484, ("p2", "p1", "p0")),)
    assert (plan.numel, plan.padding) == (512, 62)


def test_a_bucket_is_closed_when_it_holds_the_limit():
    plan = plan_buckets(specs([100, 300, 50]), dp=4, bucket_size=256, distributed_optimizer=True)
    assert [(bucket.start, bucket.end) for bucket in plan.buckets] == [(0, 384), (384, 512)]
    assert [bucket.names for bucket in plan.buckets] == [("p2", "p1"), ("p0",)]


def test_a_shared_embedding_has_a_bucket_of_its_own():
    plan = plan_buckets(specs([1000, 100, 300, 50], shared=0), dp=6, bucket_size=256, distributed_optimizer=True)
    assert [(bucket.start, bucket.end) for bucket in plan.buckets] == [(0, 384), (384, 768), (768, 1920)]
    assert plan.buckets[-1].names == ("p0",)


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_the_bucket_of_a_shared_embedding_depends_on_nothing_else(shared):
    """First and last stage cut it alike, whatever stands around it."""
    sizes = [70, 70, 70]
    sizes[shared] = 1000
    plan = plan_buckets(specs(sizes, shared), dp=4, distributed_optimizer=True)
    own = next(bucket for bucket in plan.buckets if f"p{shared}" in bucket.names)
    assert own.names == (f"p{shared}",) and own.numel == 1024


def test_without_the_distributed_optimizer_nothing_is_padded_and_sharing_changes_nothing():
    for shared in (None, 0, 1):
        plan = plan_buckets(specs([100, 300, 50], shared), dp=4)
        assert plan.ranges == {"p2": (0, 50), "p1": (50, 350), "p0": (350, 450)}
        assert plan.buckets == ((0, 450, 450, ("p2", "p1", "p0")),)


def test_no_parameters_make_no_bucket():
    plan = plan_buckets([], dp=8, bucket_size=10, distributed_optimizer=True)
    assert (plan.buckets, plan.numel, plan.padding) == ((), 0, 0)


def test_default_size_grows_with_the_number_of_ranks():
    assert [default_bucket_size(dp) for dp in (1, 40, 41, 512)] == [40_000_000, 40_000_000, 41_000_000, 512_000_000]


@given(
    sizes=st.lists(st.integers(0, 500), max_size=12),
    shared=st.integers(0, 20),
    dp=st.integers(1, 12),
    limit=st.none() | st.integers(1, 600),
    distributed_optimizer=st.booleans(),
    pad=st.sampled_from([1, 1, BANDWIDTH_ALIGNMENT]),
)
def test_any_layout(sizes, shared, dp, limit, distributed_optimizer, pad):
    """Nothing overlaps or is lost, buckets tile the buffer, alignment holds, a bucket closes no sooner than it may."""
    given_specs = specs(sizes, shared)
    plan = plan_buckets(given_specs, dp=dp, bucket_size=limit, distributed_optimizer=distributed_optimizer, pad=pad)
    assert list(plan.ranges) == [spec.name for spec in reversed(given_specs)]
    assert {name: end - start for name, (start, end) in plan.ranges.items()} == {s.name: s.numel for s in given_specs}
    position = 0
    for start, end in plan.ranges.values():
        assert start >= position
        position = end
    assert [b.start for b in plan.buckets] == [0, *(b.end for b in plan.buckets[:-1])][: len(plan.buckets)]
    assert [name for bucket in plan.buckets for name in bucket.names] == list(plan.ranges)
    divisor = math.lcm(dp, 128, pad) if distributed_optimizer else 1
    for bucket in plan.buckets:
        ranges = [plan.ranges[name] for name in bucket.names]
        assert bucket.start <= ranges[0][0] and ranges[-1][1] == bucket.unpadded_end <= bucket.end
        assert bucket.end % divisor == 0 and bucket.end - bucket.unpadded_end < divisor
        assert not distributed_optimizer or all(start % 64 == 0 for start, _ in ranges)
        assert limit is None or all(end - bucket.start < limit for _, end in ranges[:-1])  # closed at the first chance
    assert distributed_optimizer or plan.padding == 0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dp": 0}, "dp is 0"),
        ({"bucket_size": 0}, "bucket_size is 0"),
        ({"pad": -1}, "pad is -1"),
        ({"parameters": specs([-1])}, "p0 has -1 elements"),
        ({"parameters": [ParameterSpec("w", 1), ParameterSpec("w", 2)]}, "several parameters are named w"),
    ],
)
def test_bad_input_is_refused(change, sentence):
    arguments = {"parameters": specs([3]), "dp": 2} | change
    with pytest.raises(ValueError, match=sentence):
        plan_buckets(arguments.pop("parameters"), **arguments)
