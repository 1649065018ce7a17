"""Rank groups against megatron-core 0.16.1's RankGenerator and function, for any sizes, orders and tokens."""

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.comm.rank_generator import AXES, RankGenerator, generate_masked_orthogonal_rank_groups

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    parallel_state = pytest.importorskip("megatron.core.parallel_state", reason="needs megatron-core")

pytestmark = pytest.mark.oracle
SIZE = st.integers(1, 5)


@st.composite
def layouts(draw: st.DrawFn) -> dict:
    """Sizes, an order of all or some axes (those left out have size 1), and an offset."""
    sizes = {axis: draw(SIZE) for axis in AXES}
    sizes[draw(st.sampled_from(["cp", "ep"]))] = 1
    named = draw(st.permutations(AXES))[: draw(st.integers(1, len(AXES)))]
    sizes = {axis: size if axis in named else 1 for axis, size in sizes.items()}
    return {**sizes, "order": "-".join(named), "rank_offset": draw(st.sampled_from([0, 3]))}


@given(layouts(), st.lists(st.sampled_from(AXES), min_size=1, unique=True).map("-".join))
def test_groups_equal_megatron_cores(layout: dict, token: str) -> None:
    ours, theirs = RankGenerator(**layout), parallel_state.RankGenerator(**layout)
    assert ours.get_ranks(token) == theirs.get_ranks(token)
    assert ours.world_size == theirs.world_size
    # Which axes of size 1 fill up the end of the order is free; the named ones must come as given.
    assert ours.order.startswith(layout["order"]) and theirs.order.startswith(layout["order"])


@given(st.lists(st.tuples(SIZE, st.booleans()), min_size=1, max_size=5))
def test_masked_function_equals_megatron_cores(axes: list[tuple[int, bool]]) -> None:
    sizes, mask = [size for size, _ in axes], [masked for _, masked in axes]
    world_size = 1
    for size in sizes:
        world_size *= size
    expected = parallel_state.generate_masked_orthogonal_rank_groups(world_size, sizes, mask)
    assert generate_masked_orthogonal_rank_groups(world_size, sizes, mask) == expected


def test_both_refuse_ep_with_cp_and_an_order_that_misses_an_axis() -> None:
    with pytest.raises(AssertionError):
        parallel_state.RankGenerator(tp=1, ep=2, dp=1, pp=1, cp=2, order="tp-cp-ep-dp-pp")
    with pytest.raises(ValueError, match="ep is 2 and cp is 2"):
        RankGenerator(ep=2, cp=2)
    with pytest.raises(RuntimeError):
        parallel_state.RankGenerator(tp=2, ep=1, dp=1, pp=1, cp=1, order="dp-pp")
    with pytest.raises(ValueError, match="leaves out tp"):
        RankGenerator(tp=2, order="dp-pp")
