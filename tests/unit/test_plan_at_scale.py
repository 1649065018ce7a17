"""What a choice costs at scale: each number is that of the step and the rank that a plan predicts for the layout."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf

import pytest

from labkit import plan
from labkit.config import ConfigError, RunConfig, presets
from labkit.plan.choice_table import Point
from labkit.plan.fitting import fullest
from labkit.plan.layouts import in_words, matching, parse_words, workload_of
from labkit.plan.machine import load_machine
from labkit.plan.search import Search
from labkit.plan.step_time import predict_step, schedule_of
from labkit.plan.workload import Workload

H100 = load_machine("h100")
RUN = RunConfig().replaced(
    {"model.layers": 8, "model.hidden": 4096, "model.heads": 32, "model.vocab_size": 32000, "model.seq_length": 4096}
    | {"model.position": "rope", "train.global_batch_size": 64, "train.steps": 1000, "optim.precision": "bf16"}
)


def same(point: Point, config: RunConfig, layout: str) -> None:
    """Assert that a point has the numbers of this configuration under this layout."""
    search = Search(Workload(config, point.gpus), H100)
    (row,) = [row for row in search.rows[matching(search.rows, parse_words(layout))] if in_words(row) == layout]
    workload = workload_of(search.base, row)
    step, need = (
        predict_step(workload, H100),
        fullest(workload, H100, schedule_of(workload.config, workload.microbatches)),
    )
    assert (point.layout, point.seconds, point.bytes) == (layout, step.seconds, need.bytes)
    assert point.gpu_hours == pytest.approx(step.seconds * 1000 * point.gpus / 3600)
    assert point.fits == (need.bytes <= search.available)


def test_the_same_rest_differs_by_the_choice_alone() -> None:
    found = plan.at_scale(RUN, {"sequence_parallel": [False, True]}, gpus=(8, 16), layout="tp=8")
    for gpus in (8, 16):
        off, on = found.on(gpus)
        assert on.layout.split(",").count("sp") == 1
        assert [part for part in on.layout.split(",") if part != "sp"] == off.layout.split(",")
        same(off, RUN, off.layout)
        same(on, RUN, on.layout)
        assert on.bytes < off.bytes and on.link == "8 tp ranks over NVLink 4, NVSwitch"
        fastest = plan.at_scale(
            RUN, {"sequence_parallel": [False, True]}, gpus=[gpus], layout="tp=8", rest="best"
        ).points
        assert min(point.seconds for point in fastest) == min(off.seconds, on.seconds)


def test_the_best_of_each_value_is_the_plans() -> None:
    found = plan.at_scale(RUN, {"parallel.cp": [1, 4, 16]}, gpus=[8], rest="best")
    search = Search(Workload(RUN, 8), H100)
    for point, cp in zip(found.points[:2], (1, 4), strict=True):
        (best,) = search.best(1, matching(search.rows, {"cp": cp}))
        assert (point.layout, point.seconds) == (in_words(best.row), best.prediction.seconds)
    assert found.points[2].layout == "" and not found.points[2].fits, "8 GPUs have no 16 ranks of cp"
    assert "no legal layout" in repr(found)


def test_a_field_outside_of_the_layout_changes_the_run() -> None:
    experts = RUN.replaced({"moe.num_experts": 8, "moe.top_k": 2, "moe.ffn_hidden": 4096})
    found = plan.at_scale(experts, {"moe.dispatcher": ["alltoall", "allgather"]}, gpus=[16], layout="tp=1,pp=1,ep=8")
    for point, name in zip(found.points, ("alltoall", "allgather"), strict=True):
        same(point, experts.replaced({"moe.dispatcher": name}), point.layout)
    assert found.points[0].link_seconds < found.points[1].link_seconds, "8 copies of a token cost more than 2 rows"


def test_what_does_not_fit_says_so_and_what_it_would_take() -> None:
    found = plan.at_scale("gpt3_175b", {"model.recompute_granularity": ["none", "full"]}, gpus=[8], layout="tp=8,pp=1")
    assert [point.fits for point in found.points] == [False, False]
    assert re.search(r"none +\([\d,]+\) +does not fit: [\d,]+\.\d of 77\.9 ", repr(found))
    assert "if there were room" in repr(found) and "exposed" not in repr(found), "recomputation sends nothing"


def test_groups_beyond_a_node_use_the_network() -> None:
    found = plan.at_scale(RUN, {"parallel.tp": [8, 16]}, gpus=[16], layout="pp=1,cp=1")
    assert [point.link for point in found.points] == [
        "8 tp ranks over NVLink 4, NVSwitch",
        "16 tp ranks over InfiniBand NDR",
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"], ids=["in the actions", "behind them"])
def test_exposed_is_what_a_network_that_takes_no_time_saves(schedule: str) -> None:
    choice = {"schedule.name": [schedule], "parallel.vpp": [1 if schedule == "1f1b" else 2]}
    (point,) = plan.at_scale(RUN, choice, gpus=[4], layout="pp=4,micro_batch=1").points
    search = Search(Workload(RUN, 4), H100)
    (row,) = [
        row for row in search.rows[matching(search.rows, parse_words(point.layout))] if in_words(row) == point.layout
    ]
    workload = workload_of(search.base, row)
    no_time = {"bandwidth": inf, "all_reduce_bandwidth": inf, "latency": 0.0, "hop": 0.0}
    free = replace(H100, levels=tuple(replace(level, **no_time) for level in H100.levels))
    saved = predict_step(workload, H100).seconds - predict_step(workload, free).seconds
    assert point.link_seconds == pytest.approx(saved, rel=1e-9) and saved > 1e-4


def test_text_and_html_have_the_same_cells() -> None:
    choice = {"parallel.vpp": [1, 2], "schedule.name": ["1f1b", "interleaved"]}
    found = plan.at_scale(RUN, choice, gpus=(8, 16), layout="pp=4")
    text, page = repr(found), found._repr_html_()
    cells = re.findall(r"<td[^>]*>([^<]+)</td>", page)
    assert len(cells) > 20 and all(cell in text for cell in cells)
    assert "color" not in page and "background" not in page, "readable on a dark theme"
    slow, fast = found.on(8)
    change = f"{(fast.seconds - slow.seconds) * 1e3:+,.0f} ({fast.seconds / slow.seconds - 1:+.1%})"
    assert change in text and "vpp 2, schedule interleaved" in text


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (("nothing", {"parallel.cp": [1]}), {}, "no preset 'nothing'"),
        ((RUN, {}), {}, "the choice is empty; give lists of one length"),
        ((RUN, {"parallel.cp": 4}), {}, "parallel.cp: 4; give lists of one length"),
        ((RUN, {"parallel.cp": [1, 2], "parallel.vpp": [1]}), {}, "give lists of one length"),
        ((RUN, {"parallel.cq": [1]}), {}, 'unknown field; did you mean "cp"?'),
        ((RUN, {"parallel.cp": [0]}), {}, "must be at least 1"),
        ((RUN, {"parallel.order": ["tp-cp-ep-pp-dp"]}), {}, "the search decides it"),
        ((RUN, {"cp": [1]}), {"layout": "cp=2"}, "is in the choice and in the layout"),
        ((RUN, {"cp": [1]}), {"gpus": (0,)}, "gpus is (0,); give whole numbers from 1"),
        ((RUN, {"cp": [1]}), {"rest": "any"}, "rest is 'any'; choose one of same, best"),
        ((RUN, {"cp": [1]}), {"machine": "tpu"}, "no machine is called 'tpu'"),
        ((RUN, {"cp": [1]}), {"layout": "tp=16", "gpus": (8,)}, "no legal layout on 8 GPUs has tp 16"),
        (
            (RUN, {"vpp": [1, 2]}),
            {"layout": "pp=4", "gpus": (8,)},
            "no layout is legal with every value; give rest='best'",
        ),
        ((presets.bert_tiny(), {"cp": [1]}), {}, "times are known for gpt"),
    ],
)
def test_what_cannot_be_is_one_error(arguments, options, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        plan.at_scale(*arguments, **options)
