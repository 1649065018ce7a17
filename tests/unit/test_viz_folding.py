"""Folding drawn: readings against the library's groups, sentences counted by hand, refusals, controls."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.patches import Arc

from labkit.parallel import GROUP_TOKENS, RankGenerator, all_groups
from labkit.viz import explore_folding, fold_arcs, fold_grid
from labkit.viz.layout.folding import readings

AXES = {"dense": ("tp", "cp", "dp", "pp"), "expert": ("etp", "ep", "edp", "pp")}
SMALL = st.sampled_from([1, 2, 3, 4])


def as_sets(groups: Any) -> set[tuple[int, ...]]:
    return {tuple(sorted(map(int, group))) for group in groups}


@settings(max_examples=40, deadline=None)
@given(tp=SMALL, cp=SMALL, pp=SMALL, etp=SMALL, ep=SMALL, times=st.sampled_from([1, 2]))
def test_readings_give_the_groups_of_the_library(tp, cp, pp, etp, ep, times) -> None:
    sizes = {"tp": tp, "cp": cp, "pp": pp, "etp": etp, "ep": ep}
    world = times * pp * int(np.lcm(tp * cp, etp * ep))
    plan = all_groups(sizes, world)
    dense, expert = readings(sizes, world)
    for kind in (*AXES["dense"], "dp_cp", "tp_cp"):
        axes = GROUP_TOKENS[kind][1].split("-")
        assert as_sets(dense.groups(*axes)) == as_sets(plan[kind]), kind
    for kind in AXES["expert"]:
        assert as_sets(expert.groups(kind)) == as_sets(plan[kind]), kind
    assert as_sets(expert.groups("etp", "ep")) == as_sets(plan["tp_ep"])


def test_without_folding_ep_is_cut_out_of_dp_and_copies_lie_along_cp() -> None:
    # 16 ranks, tp 2, cp 2, dp 4: dp has stride 4. ep 2 takes neighbours along dp; the copies are cp and the rest of dp.
    _, expert = readings({"tp": 2, "cp": 2, "ep": 2}, 16, folded=False)
    assert expert.groups("ep")[:3] == [[0, 4], [1, 5], [2, 6]]
    assert expert.groups("edp") == [[0, 2, 8, 10], [1, 3, 9, 11], [4, 6, 12, 14], [5, 7, 13, 15]]
    assert as_sets(expert.groups("etp")) == as_sets(RankGenerator(tp=2, dp=8).get_ranks("tp"))


def test_sentences_of_the_question() -> None:
    both = {"cp": 8, "ep": 8}
    assert fold_grid(both, world_size=8).sentence == (
        "8 ranks on 1 node of 8: attention cp 8, experts ep 8; "
        "cp groups all inside a node; ep groups all inside a node."
    )
    # unfolded: cp has stride 1, ep stride 8, which is a node
    assert fold_grid(both, world_size=64, folded=False).sentence == (
        "64 ranks on 8 nodes of 8, not folded: attention cp 8 dp 8, experts ep 8 edp 8; "
        "cp groups all inside a node; ep groups all across nodes."
    )
    # nodes of 3: the ep pairs (0 1) (2 3) (4 5): only the middle one crosses
    assert fold_grid({"ep": 2}, world_size=6, gpus_per_node=3).sentence == (
        "6 ranks on 2 nodes of 3: attention dp 6, experts ep 2 edp 3; ep groups 1 of 3 across nodes."
    )


def test_one_colour_is_one_job_and_every_cell_names_its_digits() -> None:
    """16 ranks, tp 2 cp 2 dp 2 pp 2 against ep 4 edp 2 pp 2: rank 13 is t1 c0 d1 p1, and e1 d1 p1."""
    figure = fold_grid({"tp": 2, "cp": 2, "pp": 2, "etp": 1, "ep": 4}, world_size=16)
    attention, experts = figure.fig.axes
    for axes, job_size, text in ((attention, 4, "13\nt1c0\nd1p1"), (experts, 4, "13\ne1d1\np1")):
        fills = [cell.get_facecolor() for cell in axes.patches]
        assert len(fills) == 16 and len(set(fills)) == job_size
        assert fills[5] == fills[13] == fills[1] != fills[0]
        assert [label.get_text() for label in axes.texts][13] == text


def test_arcs_join_every_two_ranks_of_a_group_and_name_both_jobs() -> None:
    figure = fold_arcs(
        {
            "naive": {"world_size": 4, "cp": 2, "ep": 2, "folded": False},
            "folded": {"world_size": 4, "cp": 2, "ep": 4},
        }
    )
    assert figure.sentence == ("naive: cp [0, 1] [2, 3], ep [0, 2] [1, 3]; folded: cp [0, 1] [2, 3], ep [0, 1, 2, 3].")
    for axes, arcs, experts in zip(
        figure.fig.axes, (2 + 2, 2 + 6), (["e0d0", "e0d1", "e1d0", "e1d1"], ["e0", "e1", "e2", "e3"])
    ):
        assert sum(isinstance(patch, Arc) for patch in axes.patches) == arcs
        texts = [text.get_text() for text in axes.texts]
        assert set(experts) | {"c0d0", "c1d0", "c0d1", "c1d1", "attention", "arcs: ep"} <= set(texts)


def test_controls_follow_the_sizes_and_hide_the_picture_where_a_layout_cannot_be(monkeypatch) -> None:
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    start = {"world_size": 8, "tp": 1, "cp": 4, "pp": 1, "ep": 2, "etp": 1}
    alone = explore_folding(**start)
    assert alone.sentence.startswith("8 ranks on 1 node of 8: attention cp 4 dp 2, experts ep 2 edp 4")
    monkeypatch.setenv("JPY_SESSION_NAME", "chapter.ipynb")
    *rows, picture, words = explore_folding(**start).children
    inputs = {control.description: control for row in rows for control in row.children}
    assert picture.value == alone.png
    inputs["ep"].value = 8
    assert "experts ep 8;" in words.value and picture.value != alone.png
    kept = picture.value
    inputs["folded"].value = False
    assert words.value.startswith("<b>without folding ep is cut out of dp: ep 8 does not divide dp 2")
    assert picture.value == kept and "last settings that fit" in words.value
    inputs["ep"].value = 2
    assert "not folded" in words.value and picture.value != kept and "last settings that fit" not in words.value
