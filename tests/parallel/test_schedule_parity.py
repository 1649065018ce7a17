"""GPT under every schedule against one process: loss, gradients, parameters over several optimizer steps.

All schedules x {pp2, pp4} x {tp1, tp2} x {dp1, dp2}, tied and untied, both dtypes, uneven stages and all transfers are
a sweep (`make sweep`; its tables are in docs/parity.md, written by scripts/parity_matrix.py). The subset here has every
schedule, every size of every axis, every kind of stage, and a weight tied across ranks and within one.
"""

import runpy
from pathlib import Path
from typing import Any

import pytest

from labkit.config import RunConfig
from labkit.launch import run
from labkit.plan.stages import configured_schedule
from labkit.train import compare, pretrain
from labkit.train.reporting.measured import follows, pipeline_events

MATRIX = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "parity_matrix.py"))
GPIPE, ONE_F_ONE_B, INTERLEAVED_2, INTERLEAVED_4, ZERO_BUBBLE_H1, ZBV, DUALPIPE_V = MATRIX["SCHEDULES"]
SUBSET = [
    {"pp": 2, **INTERLEAVED_2, "overlap_p2p_comm": True, "microbatch_group_size": 4},
    {"pp": 2, "tp": 2, **ZBV, "variable_seq_lengths": True},
    {"pp": 4, "tp": 2, **ONE_F_ONE_B},
    {"pp": 4, **INTERLEAVED_4},
    {"pp": 4, "world_size": 8, **INTERLEAVED_2, "all_warmup": True},
    {"pp": 4, **ZERO_BUBBLE_H1, "pipeline_layout": "E t*4 | ttt | t*5 | t*4 L"},
    {"pp": 4, **DUALPIPE_V, "pipeline_layout": "E | (tt|)*2 (ttt|)*4 L"},
]
EMPTY_STAGES = [
    {"pp": 4, **ZERO_BUBBLE_H1, "pipeline_layout": "Ett||tt|L"},
    {"pp": 2, "world_size": 4, **INTERLEAVED_2, **MATRIX["MEGATRON"], "pipeline_layout": "Ett||tt|L"},
    {"pp": 2, **ZBV, **MATRIX["FULL"], "pipeline_layout": "Etttt|||L"},
    {"pp": 4, "tp": 2, "sequence_parallel": True, "batch_p2p_comm": True, "pipeline_layout": "Ettt||t|L"},
]
"""One is the only stage of its rank, one a chunk of several, two are all that a rank has."""
REPLICAS = [{"pp": 2, "world_size": 4, **schedule} for schedule in (GPIPE, ZBV)]


def deep(preset: str, dp: int = 1, **changes: Any) -> RunConfig:
    return MATRIX["deep"](preset, dp=dp).override(changes)


def test_every_schedule_gives_the_losses_gradients_and_parameters_of_one_process():
    report = compare(deep("tiny"), SUBSET, steps=2)
    assert report.ok, f"\n{report}"
    assert max(row.largest for row in report.rows) <= 1e-10


def test_a_table_that_starts_with_another_microbatch_and_has_its_first_stage_in_the_middle(tmp_path):
    """The microscope looks at microbatch 0, whenever it comes; tied copies are on pipeline ranks 1 and 2."""
    rows = {1: "0F1,0F0,0B1,0B0", 0: "1F1,1F0,1B1,1B0", 3: "2F1,2F0,2B1,2B0", 2: "3F1,3B1,3F0,3B0"}
    path = tmp_path / "middle.csv"
    path.write_text("".join(f"{rows[rank]}\n" for rank in range(4)))
    config = deep("tiny", layers=4, global_batch_size=2)
    report = compare(config, [{"pp": 4, "schedule.path": str(path)}], steps=2)
    assert report.ok, f"\n{report}"


def test_replicas_and_an_output_layer_of_its_own():
    report = compare(deep("llama_tiny", dp=2, layers=4), REPLICAS, steps=2)
    assert report.ok, f"\n{report}"


def test_empty_stages():
    report = compare(deep("tiny", dp=2, layers=4), EMPTY_STAGES, steps=2)
    assert report.ok, f"\n{report}"
    assert max(row.largest for row in report.rows) <= 1e-10


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.sweep)])
def test_a_rank_of_empty_stages_takes_the_type_of_the_others_and_joins_fp8_and_graphs(precision):
    """It has no parameter to take a type from, no layer to capture and no scale of its own to agree on."""
    changes = {"layers": 4, "steps": 3, "eval_steps": 1, "eval_interval": 1, "precision": precision}
    changes |= {"cuda_graph_impl": "emulated", "cuda_graph_warmup_steps": 1}
    changes |= {"fp8": "hybrid"} if precision == "bf16" else {}
    config = deep("tiny", **changes)
    without = run(pretrain, 3, config.override({"pp": 3, "pipeline_layout": "Ett|tt|L"}))[0]
    for result in run(pretrain, 4, config.override({"pp": 4, "pipeline_layout": "Ett||tt|L"})):
        for name in ("loss", "grad_norm", "validation_loss"):
            assert result.series(name) == without.series(name)


def test_float32():
    """A V whose one tied weight gets its gradients from autograd, not from the layers."""
    layout = {"pp": 2, **DUALPIPE_V, "gradient_accumulation_fusion": False}
    report = compare(deep("tiny"), [layout], steps=2, dtype="float32")
    assert report.ok, f"\n{report}"


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("title", MATRIX["SWEEPS"])
def test_every_row(title):
    config, layouts, dtype = MATRIX["SWEEPS"][title]
    report = compare(config, layouts, steps=MATRIX["schedule_steps"](title), dtype=dtype)
    assert report.ok, f"\n{report}"
    assert len(report.rows) == len(layouts)


@pytest.mark.parametrize("schedule", [INTERLEAVED_2, ZBV], ids=["interleaved", "zbv"])
def test_forward_only_losses_and_the_order_of_actions(schedule):
    """Validation and test run the schedule's forwards alone; on a V the loss is known on the first pipeline rank."""
    config = deep("tiny", layers=4, steps=2, eval_steps=1, eval_interval=1, precision="fp64")
    alone = pretrain(config)
    layout = config.override({"pp": 2, **schedule})
    results = run(pretrain, 2, layout)
    for result in results:
        for name in ("validation_loss", "test_loss", "grad_norm"):
            expected = alone.series(name)
            assert [step for step, _ in result.series(name)] == [step for step, _ in expected]
            assert [value for _, value in result.series(name)] == pytest.approx([v for _, v in expected], rel=1e-12)
    assert follows(pipeline_events([result.events for result in results]), configured_schedule(layout, 2))
