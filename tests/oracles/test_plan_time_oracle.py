"""The model of time against measurements of others, on rows that took no part in its fit.

`scripts/fit_plan_rates.py` splits the rows of `published.csv` by source and model and fits each machine's constants.
The machines hold what it prints. The limits here leave slack to what was reached.
"""

from __future__ import annotations

import csv
import importlib
import math
import statistics
from pathlib import Path

import pytest

from labkit.config import RunConfig
from labkit.plan.collectives import Group, collective_seconds
from labkit.plan.kernels import gemm_shape_efficiency
from labkit.plan.layer_times import layer_passes
from labkit.plan.layout import layout_of
from labkit.plan.machine import load_machine
from labkit.plan.published_rows import RULES, planned, read_published
from labkit.plan.search import DIFFERENCE
from labkit.plan.step_time import predict_step
from labkit.plan.workload import Workload

pytestmark = pytest.mark.oracle

TABLE = Path(__file__).parents[2] / "labkit" / "plan" / "tables" / "published.csv"
ROWS = read_published(TABLE)


def error(row) -> float:
    return predict_step(row.workload, load_machine(row.machine)).seconds / row.measured_seconds - 1


def inside(row) -> bool:
    found = predict_step(row.workload, load_machine(row.machine))
    return found.low <= row.measured_seconds <= found.high


def kept_out(fits, *sources: str, machines: tuple[str, ...]):
    """Rows of these sources and machines that are specified well enough and gave no constant."""
    return [
        row
        for row in ROWS
        if row.workload and row.measured_seconds and row.specified and row.machine in machines
        and row.source.startswith(sources) and not any(fit.covers(row) and fit.fits(row) for fit in fits)
    ]  # fmt: skip


def test_a100_rows_kept_out_of_the_fit(load_script):
    """2104.04473 tables 1 and 2, 2205.05198 table 5, MosaicML from hidden 2560 and sequence 2048 on."""
    fits = load_script("fit_plan_rates").FITS
    sources = ("arXiv 2104.04473", "arXiv 2205.05198", "MosaicML")
    rows = kept_out(fits, *sources, machines=("a100", "a100_40gb"))
    errors = [abs(error(row)) for row in rows]
    assert len(rows) >= 30
    assert statistics.median(errors) < 0.05 and statistics.fmean(errors) < 0.07 and max(errors) < 0.25
    assert statistics.fmean(map(inside, rows)) >= 0.8


@pytest.mark.parametrize(
    ("source", "machine", "least", "mean", "worst"),
    [
        ("MosaicML", "h100", 15, 0.05, 0.10),
        ("torchtitan", "h100_96gb", 8, 0.10, 0.20),
        ("SimuMax", "b200", 10, 0.06, 0.10),
        ("arXiv 2401.10241", "a100", 25, 0.08, 0.15),
        ("arXiv 1909.08053", "v100", 8, 0.10, 0.20),
    ],
)
def test_other_rows_kept_out_of_the_fit(load_script, source, machine, least, mean, worst):
    rows = kept_out(load_script("fit_plan_rates").FITS, source, machines=(machine,))
    errors = [abs(error(row)) for row in rows]
    assert len(rows) >= least
    assert statistics.fmean(errors) < mean and max(errors) < worst


def test_the_fastest_published_layout_is_ranked_first(load_script, monkeypatch):
    """Runs of which several layouts were published: the plan's first is the fastest, and differences are in bounds."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    ranking = importlib.import_module("scale_page.ranking_tables")
    runs = ranking.runs()
    assert len(runs) >= 40 and sum(run.lost < 0.001 for run in runs) >= 0.85 * len(runs)
    assert max(run.lost for run in runs) < 0.06 and ranking.kendall(runs) > 0.8
    assert 0.8 * DIFFERENCE < ranking.share_of(ranking.differences()) < DIFFERENCE


def test_no_constant_belongs_to_a_row(load_script):
    """There are far fewer fitted constants than rows that they predict."""
    fits = load_script("fit_plan_rates").FITS
    constants = sum(len(fit.rates) for fit in fits)
    rows = [row for row in ROWS if any(fit.covers(row) for fit in fits)]
    assert len(rows) > 10 * constants
    for fit in fits:
        for name in fit.machines:
            assert fit.software in load_machine(name).software
            assert fit.software in load_machine(name).interval


@pytest.mark.parametrize(
    ("sequence_parallel", "recompute", "forward", "backward"),
    [
        (False, "none", 7.7, 11.9),
        (True, "none", 7.2, 11.8),
        (False, "full", 7.7, 19.5),
        (False, "selective", 7.7, 13.2),
    ],
)
def test_one_layer_of_table_4(sequence_parallel, recompute, forward, backward):
    """arXiv 2205.05198, table 4: milliseconds of a layer of the 22B model on 8 A100, tp 8, four samples."""
    config = RunConfig().replaced(
        {
            "model.layers": 48, "model.hidden": 6144, "model.heads": 64, "model.seq_length": 2048,
            "model.attention_backend": "unfused", "model.attention_dropout": 0.1, "model.hidden_dropout": 0.1,
            "model.recompute_granularity": recompute, "parallel.tp": 8, "parallel.sequence_parallel": sequence_parallel,
            "train.micro_batch_size": 4, "train.global_batch_size": 4, "optim.precision": "fp16",
        }
    )  # fmt: skip
    layout = layout_of(Workload(config, 8, software="megatron_2022"))
    passes = layer_passes(config.model, None, layout, load_machine("a100"))
    ahead = sum(term.seconds for term in passes.forward)
    back = sum(term.seconds for term in (*passes.input_grad, *passes.weight_grad, *passes.recompute))
    assert ahead * 1e3 == pytest.approx(forward, rel=0.05)
    assert back * 1e3 == pytest.approx(backward, rel=0.05)


CURVES = {  # microseconds of an all-reduce on 8 GPUs, from 1 MiB doubling to 1 GiB; VIA-Research/vTrain@f8dda84
    "a100": (92.79, 93.25, 95.8, 134.3, 232.4, 358.1, 579.9, 1162.0, 2162.3, 4191.5, 8193.0),
    "v100": (79.93, 101.3, 150.9, 237.9, 273.8, 479.3, 911.3, 1777.1, 3527.4, 7004.4, 13969.0),
}


@pytest.mark.parametrize("name", CURVES)
def test_measured_curves_of_an_all_reduce(name):
    machine = load_machine(name)
    found = [collective_seconds(machine, "all_reduce", 2.0 ** (20 + power), Group(8)) for power in range(11)]
    errors = [abs(time * 1e6 / measured - 1) for time, measured in zip(found, CURVES[name], strict=True)]
    assert statistics.fmean(errors) < 0.10 and max(errors) < 0.30


SHAPES = {  # m, n, k, weight gradient, TFLOP/s: every 12th of 183 shapes of an A100 PCIe, every 28th of 432 of a B200,
    # in the order of their rates; MooreThreads/SimuMax@4dcaae5, configs/system
    "a100": [
        (576, 7168, 4096, True, 140.4),
        (4096, 2048, 4096, True, 187.9),
        (4096, 3584, 4096, False, 201.2),
        (7168, 4096, 4096, True, 212.5),
        (4096, 24576, 1536, False, 217.5),
        (8192, 14336, 4096, True, 219.8),
        (4096, 7168, 1536, False, 221.6),
        (102400, 5120, 4096, True, 223.0),
        (4096, 7168, 8192, False, 225.0),
        (4096, 8192, 8192, False, 228.6),
        (4096, 8192, 8192, False, 230.5),
        (4096, 4096, 8192, False, 232.3),
        (4096, 5120, 16384, False, 233.8),
        (4096, 8192, 64128, False, 235.2),
        (4096, 3072, 4096, False, 236.6),
        (4096, 1536, 5120, False, 245.8),
    ],
    "b200": [
        (16384, 5120, 160, False, 355.4),
        (4096, 6144, 5120, False, 874.7),
        (4096, 2048, 16384, False, 973.2),
        (4096, 768, 4096, False, 1004.0),
        (8192, 4096, 2048, True, 1021.9),
        (32768, 16384, 53248, False, 1040.2),
        (2048, 7168, 8192, False, 1064.6),
        (4096, 13312, 16384, False, 1079.5),
        (8192, 14336, 2048, True, 1090.9),
        (8192, 10240, 16384, False, 1105.2),
        (16384, 8192, 32768, True, 1119.8),
        (4096, 7168, 4096, False, 1132.0),
        (4096, 4096, 32128, False, 1150.4),
        (3584, 4096, 4096, True, 1215.0),
        (3072, 4096, 4096, True, 1346.8),
        (4096, 7168, 4096, False, 1434.5),
    ],
}


@pytest.mark.parametrize(("name", "mean"), [("a100", 0.08), ("b200", 0.20)])
def test_measured_rates_of_products(name, mean):
    """One ceiling for all shapes; how they differ comes from tiles, waves and depth alone."""
    machine = load_machine(name)
    shapes = SHAPES[name]
    expected = [
        gemm_shape_efficiency(m, n, k, machine.sms, machine.gemm_depth)
        * (machine.weight_gradient_efficiency if weight else 1.0)
        for m, n, k, weight, _ in shapes
    ]
    ceiling = statistics.median(rate / share for share, (*_, rate) in zip(expected, shapes, strict=True))
    errors = [abs(ceiling * share / rate - 1) for share, (*_, rate) in zip(expected, shapes, strict=True)]
    flat = statistics.median(rate for *_, rate in shapes)
    assert statistics.fmean(errors) < mean
    assert statistics.fmean(errors) < statistics.fmean(abs(flat / rate - 1) for *_, rate in shapes)


# ---- rows as workloads ----


def test_every_row_has_a_workload_or_a_reason():
    assert len(ROWS) == 650
    for row in ROWS:
        assert (row.workload is None) == bool(row.not_expressible)
        assert set(row.filled) <= set(RULES)
    expressible = [row for row in ROWS if row.workload is not None]
    assert len(expressible) > 350
    assert all(math.isfinite(error(row)) for row in expressible if row.measured_seconds is not None)


def table_row(name: str) -> dict[str, str]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return next(row for row in csv.DictReader(file) if row["id"] == name)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tp": ""}, "tp is not stated"),
        ({"gpus": "3071"}, "does not divide 3071 GPUs"),
        ({"gbs": "3073"}, "is not a multiple of micro batch x dp"),
        ({"model": "DeepSeek-V3"}, "labkit has no model like 'DeepSeek-V3'"),
        ({"hardware": "TPU v4"}, "no machine for the hardware 'TPU v4'"),
        ({"source": "a friend"}, "the source is unknown"),
        ({"hidden": ""}, "the column hidden is empty"),
        ({"precision": "NVFP4"}, "products in fp4"),
        ({"schedule": "ZB-2p"}, "labkit builds no ZB-2p"),
        ({"experts": "8"}, "the experts of a token"),
    ],
)
def test_reasons(changes, reason):
    (row,) = planned([table_row("sc21_t1_1T") | changes])
    assert row.workload is None and reason in row.not_expressible


def test_a_row_of_fully_sharded_data_parallelism_needs_no_tp():
    (row,) = planned([table_row("foundry_70b_h100_80gb_2048_256_1")])
    assert row.workload is not None and row.workload.fsdp and row.workload.dp == 256
    assert row.filled.count("one of each axis") == 4


def test_times_that_follow_from_rates():
    """39 TFLOP/s per GPU of a V100 at 100 % of weak scaling (arXiv 1909.08053), recomputation counted."""
    (row,) = planned([table_row("1909_fig5_1.2B_1gpu")])
    operations = 96 * 8 * 1024 * 40 * 1536**2 * (1 + 1024 / (6 * 1536) + 51200 / (16 * 40 * 1536))
    assert row.measured_seconds == pytest.approx(operations / 39e12)
