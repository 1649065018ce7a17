"""RankGenerator: values printed by the literature, properties of any layout, refusals, very large worlds."""

import re
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.comm.mixed_radix import MAX_LISTED_RANKS, decompose, prefix_product
from labkit.comm.rank_generator import (
    AXES,
    RankGenerator,
    generate_masked_orthogonal_groups,
    generate_masked_orthogonal_rank_groups,
    rank_generators,
)

ORDER = st.permutations(AXES).map("-".join)
SIZE = st.integers(1, 4)


@st.composite
def generators(draw: st.DrawFn) -> RankGenerator:
    """Any order, any sizes, with the axis that the other kind of layer uses at 1."""
    sizes = {axis: draw(SIZE) for axis in AXES}
    sizes[draw(st.sampled_from(["cp", "ep"]))] = 1
    return RankGenerator(**sizes, order=draw(ORDER), rank_offset=draw(st.sampled_from([0, 5])))


TOKEN = st.lists(st.sampled_from(AXES), min_size=1, unique=True).map("-".join)


# Values of megatron-core's own docstrings and of the two 16-GPU examples.
@pytest.mark.parametrize(
    ("sizes", "token", "expected"),
    [
        ({"tp": 2, "pp": 4, "dp": 2}, "dp", [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]),
        ({"tp": 2, "pp": 4, "dp": 2}, "tp-pp", [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]),
        ({"tp": 2, "pp": 4, "dp": 2}, "tp", [[r, r + 1] for r in range(0, 16, 2)]),
        ({"tp": 2, "pp": 4, "dp": 2}, "pp", [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]),
        ({"tp": 4, "pp": 2, "dp": 2}, "tp", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
        ({"tp": 4, "pp": 2, "dp": 2}, "dp", [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]),
        ({"tp": 4, "pp": 2, "dp": 2}, "pp", [[r, r + 8] for r in range(8)]),
        ({"tp": 1, "pp": 2, "ep": 4, "dp": 2}, "ep", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
        (
            {"tp": 1, "pp": 2, "ep": 4, "dp": 2},
            "dp",
            [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
        ),
        ({"tp": 2, "cp": 2, "dp": 2, "pp": 2}, "cp", [[r, r + 2] for r in (0, 1, 4, 5, 8, 9, 12, 13)]),
        ({"tp": 2, "cp": 2, "dp": 2, "pp": 2}, "dp-cp", [[b, b + 2, b + 4, b + 6] for b in (0, 1, 8, 9)]),
        ({"tp": 2, "cp": 2, "dp": 2, "pp": 2}, "tp-pp", [[b, b + 1, b + 8, b + 9] for b in (0, 2, 4, 6)]),
        ({"tp": 2, "ep": 2, "dp": 2, "pp": 2}, "ep", [[r, r + 2] for r in (0, 1, 4, 5, 8, 9, 12, 13)]),
        ({"tp": 1, "ep": 8, "pp": 2}, "ep", [list(range(8)), list(range(8, 16))]),
        ({"tp": 1, "ep": 8, "pp": 2}, "dp", [[r] for r in range(16)]),
    ],
)
def test_printed_groups_of_16_ranks(sizes: dict[str, int], token: str, expected: list[list[int]]) -> None:
    assert RankGenerator(**sizes).get_ranks(token) == expected


def test_paper_512_ranks_data_group_takes_every_eighth_gpu() -> None:
    # arXiv 1909.08053, figure 8, counts GPUs from 1: 8-way model parallel, data group 1, 9, ..., 505.
    groups = RankGenerator(tp=8, dp=64).get_ranks("dp")
    assert len(groups) == 8
    assert [rank + 1 for rank in groups[0]] == list(range(1, 506, 8))


@given(generators(), TOKEN)
def test_groups_partition_the_world_and_follow_the_digits(generator: RankGenerator, token: str) -> None:
    groups = generator.rank_array(token)
    first = generator.rank_offset
    assert sorted(groups.ravel().tolist()) == list(range(first, first + generator.world_size))
    inside = token.split("-")
    for group in groups.tolist():
        coordinates = [generator.coordinates(rank) for rank in group]
        fixed = {tuple(c[axis] for axis in generator.axes if axis not in inside) for c in coordinates}
        assert len(fixed) == 1, "members differ only along the token's axes"
        digits = [tuple(c[axis] for axis in reversed(generator.axes) if axis in inside) for c in coordinates]
        assert digits == sorted(digits), "members are counted with the fastest axis first"
    assert groups[:, 0].tolist() == sorted(groups[:, 0].tolist()), "groups are counted with the fastest axis first"


@given(generators(), TOKEN, st.data())
def test_one_ranks_group_needs_no_enumeration(generator: RankGenerator, token: str, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, generator.world_size - 1)) + generator.rank_offset
    expected = next(group for group in generator.get_ranks(token) if rank in group)
    assert generator.group_of(token, rank).tolist() == expected
    members = generator.members_of(token, rank)
    assert list(members) == [*members[:2], *members[2:]] == expected and members[-1] == expected[-1]
    first, count = generator.rank_offset, generator.world_size
    assert [r for r in range(first - count, first + 2 * count) if r in members] == sorted(expected)


@given(generators(), TOKEN, st.randoms())
def test_order_of_a_token_does_not_matter(generator: RankGenerator, token: str, random) -> None:
    shuffled = token.split("-")
    random.shuffle(shuffled)
    assert generator.get_ranks("-".join(shuffled)) == generator.get_ranks(token)
    assert generator.get_ranks("_".join(shuffled)) == generator.get_ranks(token)


@given(st.lists(SIZE, min_size=1, max_size=5), st.data())
def test_decompose_inverts_the_inner_product_with_the_strides(shape: list[int], data: st.DataObject) -> None:
    digits = [data.draw(st.integers(0, size - 1)) for size in shape]
    index = sum(digit * stride for digit, stride in zip(digits, prefix_product(shape)))
    assert decompose(index, shape) == digits


def test_prefix_product_and_an_index_that_does_not_fit() -> None:
    assert prefix_product([2, 3, 4]) == [1, 2, 6, 24]
    with pytest.raises(ValueError, match=r"index 6 does not fit into the shape \[2, 3\]"):
        decompose(6, [2, 3])


def test_both_names_of_the_masked_function_are_one() -> None:
    assert generate_masked_orthogonal_groups is generate_masked_orthogonal_rank_groups
    assert generate_masked_orthogonal_rank_groups(8, [2, 2, 2], [False, False, True]) == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3, 7],
    ]


@given(
    world=st.integers(1, 64), tp=SIZE, pp=SIZE, cp=SIZE, ep=SIZE, etp=st.none() | SIZE, order=ORDER,
)  # fmt: skip
def test_generators_agree_on_pipelines_exactly_where_their_lists_do(
    world: int, tp: int, pp: int, cp: int, ep: int, etp: int | None, order: str
) -> None:
    shard = tp if etp is None else etp
    factors = world % (tp * cp * pp) == 0 and world % (shard * ep * pp) == 0
    if not factors:
        with pytest.raises(ValueError, match=f"world size {world} is not a multiple"):
            rank_generators(world_size=world, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, order=order)
        return
    dense = RankGenerator(tp=tp, cp=cp, pp=pp, dp=world // (tp * cp * pp), order=order)
    expert = RankGenerator(tp=shard, ep=ep, pp=pp, dp=world // (shard * ep * pp), order=order)
    if dense.get_ranks("pp") == expert.get_ranks("pp"):
        decoder, expert_decoder = rank_generators(world_size=world, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, order=order)
        assert (decoder.sizes, expert_decoder.sizes) == (dense.sizes, expert.sizes)
    else:
        with pytest.raises(ValueError, match="disagree on the pipelines"):
            rank_generators(world_size=world, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, order=order)


def test_context_and_expert_parallelism_fold_onto_the_same_ranks() -> None:
    decoder, expert = rank_generators(world_size=8, cp=8, ep=8, etp=1)
    assert decoder.get_ranks("cp") == expert.get_ranks("ep") == [list(range(8))]
    assert (decoder.sizes["dp"], expert.sizes["dp"]) == (1, 1)


def test_disagreement_names_both_lists() -> None:
    with pytest.raises(ValueError, match=r"dense layers is \[0, 2\], that of the experts \[0, 1\]"):
        rank_generators(world_size=8, tp=2, pp=2, ep=2, etp=1, order="tp-pp-cp-ep-dp")
    # edp 1 against dp 2: sizes differ, pipelines do not.
    decoder, expert = rank_generators(world_size=8, tp=2, pp=2, ep=4, etp=1, order="pp-dp-tp-cp-ep")
    assert (decoder.sizes["dp"], expert.sizes["dp"]) == (2, 1)


PART = RankGenerator(tp=2, dp=2, rank_offset=4)
REFUSALS: dict[str, Callable[[], object]] = {
    "ep is 2 and cp is 4": lambda: RankGenerator(ep=2, cp=4),
    "tp is 0; it must be at least 1": lambda: RankGenerator(tp=0),
    "tp is '8', which is not an integer": lambda: RankGenerator(tp="8"),  # pyright: ignore[reportArgumentType]
    "tp is True, which is not an integer": lambda: RankGenerator(tp=True),
    "rank_offset is -1; it must be at least 0": lambda: RankGenerator(rank_offset=-1),
    "order 'dp-pp' leaves out tp, whose size is 2": lambda: RankGenerator(tp=2, order="dp-pp"),
    "order 'tp-xp' names 'xp', which is not an axis": lambda: RankGenerator(order="tp-xp"),
    "order 'tp-dp-tp' names 'tp' 2 times": lambda: RankGenerator(order="tp-dp-tp"),
    "order is None; give a string": lambda: RankGenerator(order=None),  # pyright: ignore[reportArgumentType]
    "token 'tp-zp' names 'zp'": lambda: PART.get_ranks("tp-zp"),
    "token 'tp-tp' names 'tp' 2 times": lambda: PART.get_ranks("tp-tp"),
    "rank 3 is not in this layout, whose ranks are 4 to 7": lambda: PART.group_of("tp", 3),
    "make 6 ranks, but world_size is 8": lambda: generate_masked_orthogonal_rank_groups(8, [2, 3], [True, False]),
    "2 axes and mask has 1": lambda: generate_masked_orthogonal_rank_groups(6, [2, 3], [True]),
    "world_size is 0; it must be at least 1": lambda: rank_generators(world_size=0),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_refusals_name_what_was_given(message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        REFUSALS[message]()


@pytest.mark.parametrize("world_size", [1, 7919, 102_400])
def test_worlds_of_one_a_prime_and_many_ranks(world_size: int) -> None:
    decoder, expert = rank_generators(world_size=world_size)
    assert decoder.rank_array("dp").shape == expert.rank_array("dp").shape == (1, world_size)
    assert decoder.rank_array("tp").shape == (world_size, 1)


def test_a_million_ranks_stay_within_200_megabytes_a_token() -> None:
    decoder, _ = rank_generators(world_size=2**20, tp=8, pp=16)
    tracemalloc.start()
    try:
        groups = decoder.get_ranks("tp")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(groups) == 2**17
    assert groups[-1] == list(range(2**20 - 8, 2**20))
    assert peak <= 200e6


@pytest.mark.parametrize("token", ["tp", "dp", "tp-cp"])
def test_every_group_of_one_token_of_131072_ranks_takes_under_a_tenth_of_a_second(token: str) -> None:
    decoder, _ = rank_generators(world_size=131_072, tp=8, cp=2, pp=16)
    seconds = []
    for _ in range(3):  # the least of three, in processor time, which other processes cannot lengthen
        started = time.process_time()
        decoder.get_ranks(token)
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.1


def test_two_to_the_31_ranks_are_refused_or_answered_before_allocation() -> None:
    tracemalloc.start()
    try:
        decoder, _ = rank_generators(world_size=2**31, tp=8, pp=64)
        with pytest.raises(ValueError, match=f"list {2**31} ranks, and at most {MAX_LISTED_RANKS}"):
            decoder.get_ranks("tp")
        with pytest.raises(ValueError, match=f"would list {2**31} ranks.*ask members_of_rank, which lists none"):
            RankGenerator(dp=2**31).group_of("dp", 0)
        everybody = RankGenerator(dp=2**31).members_of("dp", 5)
        assert (len(everybody), everybody[5], everybody[-1]) == (2**31, 5, 2**31 - 1)
        assert 2**31 - 1 in everybody and 2**31 not in everybody and np.int64(7) in everybody
        last = 2**31 - 1
        assert decoder.group_of("tp", last).tolist() == list(range(last - 7, last + 1))
        assert np.diff(decoder.group_of("pp", last)).tolist() == [2**25] * 63
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1e6


def test_rank_generator_does_not_import_torch() -> None:
    code = "import sys; from labkit.parallel import RankGenerator, all_groups; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
