"""Plans of a whole world and of one rank: the same groups, embeddings included."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.comm.group_plan import GROUP_KINDS, all_groups, embedding_columns, groups_of_rank
from labkit.config import ParallelConfig

LAYOUTS = st.sampled_from(
    [
        {"world_size": 16, "tp": 2, "pp": 4},
        {"world_size": 16, "tp": 4, "pp": 2, "ep": 4, "etp": 1},
        {"world_size": 24, "tp": 2, "cp": 3, "pp": 2, "ep": 3, "etp": 1},
        {"world_size": 16, "pp": 4, "order": "pp-tp-cp-ep-dp", "split_rank": 2},
        {"world_size": 12, "tp": 3, "pp": 2, "rank_offset": 4},
        {"world_size": 1},
    ]
)


@given(LAYOUTS, st.data())
def test_one_ranks_plan_is_its_part_of_the_worlds_plan(layout: dict, data: st.DataObject) -> None:
    sizes, world_size = {k: v for k, v in layout.items() if k != "world_size"}, layout["world_size"]
    first = sizes.get("rank_offset", 0)
    rank = data.draw(st.integers(first, first + world_size - 1))
    world, mine = all_groups(sizes, world_size), groups_of_rank(rank, sizes, world_size)
    assert set(world) == set(mine) == set(GROUP_KINDS)
    for kind in GROUP_KINDS:
        expected = [group for group in world[kind].tolist() if rank in group]
        assert mine[kind].tolist() == (expected[0] if expected else []), kind
        assert len(expected) <= 1, kind


def test_a_config_and_its_sizes_give_the_same_plan() -> None:
    config = ParallelConfig(tp=2, pp=2, cp=2, ep=2, etp=1, split_rank=1)
    sizes = {"tp": 2, "pp": 2, "cp": 2, "ep": 2, "etp": 1, "split_rank": 1}
    left, right = all_groups(config, 16), all_groups(sizes, 16)
    assert {k: v.tolist() for k, v in left.items()} == {k: v.tolist() for k, v in right.items()}


def test_embedding_groups_of_the_16_gpu_example() -> None:
    plan = all_groups({"tp": 2, "pp": 4}, 16)
    assert plan["embd"].tolist() == [[0, 12], [1, 13], [2, 14], [3, 15]]
    assert plan["pos_embd"].tolist() == [[0], [1], [2], [3]]
    assert all_groups({}, 4)["embd"].tolist() == [[0], [1], [2], [3]], "one stage is first and last"


# As in Megatron-LM's initialize_model_parallel: the decoder's first stage joins, once.
@pytest.mark.parametrize(
    ("pp", "split_rank", "word", "position"),
    [
        (1, None, [0], [0]),
        (4, None, [0, 3], [0]),
        (4, 2, [0, 2, 3], [0, 2]),
        (4, 3, [0, 3], [0, 3]),
        (2, 1, [0, 1], [0, 1]),
    ],
)
def test_embedding_columns(pp: int, split_rank: int | None, word: list[int], position: list[int]) -> None:
    assert embedding_columns(pp, split_rank) == (word, position)


def test_embedding_columns_follow_the_first_and_last_stage() -> None:
    assert embedding_columns(4, ends=(0, 0)) == ([0], [0]), "a V has both on one rank"
    assert embedding_columns(4, ends=(2, 1)) == ([1, 2], [2])
    for ends in ((0, 4), (-1, 0)):
        with pytest.raises(ValueError, match="pp is 4"):
            embedding_columns(4, ends=ends)


@pytest.mark.parametrize(("pp", "split_rank"), [(4, 0), (4, 4), (1, 1)])
def test_split_outside_the_pipeline_names_both_values(pp: int, split_rank: int) -> None:
    with pytest.raises(ValueError, match=f"is {split_rank} and pp is {pp}"):
        embedding_columns(pp, split_rank)


def test_expert_kinds_come_from_the_expert_generator() -> None:
    plan = all_groups({"tp": 2, "pp": 2, "ep": 2}, 16)  # etp = tp = 2, edp 2
    assert plan["ep"].tolist()[:3] == [[0, 2], [1, 3], [4, 6]]
    assert plan["edp"].tolist()[:2] == [[0, 4], [1, 5]]
    assert plan["etp"].tolist()[:2] == [[0, 1], [2, 3]]
    assert plan["tp_ep"].tolist()[0] == [0, 1, 2, 3]
    assert plan["tp_ep_pp"].tolist()[0] == [0, 1, 2, 3, 8, 9, 10, 11]


def test_unknown_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown sizes dp"):
        all_groups({"dp": 2}, 4)


def test_own_groups_of_2_to_the_31_ranks_cost_their_sizes() -> None:
    sizes = {"tp": 8, "pp": 2**20, "ep": 8, "etp": 1}
    tracemalloc.start()
    try:
        mine = groups_of_rank(2**31 - 1, sizes, 2**31)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert {kind: len(mine[kind]) for kind in ("tp", "dp", "edp", "embd")} == {
        "tp": 8,
        "dp": 256,
        "edp": 256,
        "embd": 2,
    }
    assert peak < 400e6
