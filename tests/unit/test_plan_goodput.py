"""Goodput on a cluster that fails: closed forms, a run played event by event, published numbers, and the errors."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from labkit.cli import main
from labkit.config import ConfigError, presets
from labkit.plan import model_parameters
from labkit.plan.checkpoint_intervals import daly_interval, daly_seconds, young_interval
from labkit.plan.cluster import CAUSES, Checkpoint, Cluster, checkpoint_of, parse_cluster
from labkit.plan.goodput import (
    ClusterRun,
    best_goodput,
    goodput_by_size,
    interval_curve,
    simulate_goodput,
    suggested_interval,
)
from labkit.plan.published_rows import read_published
from labkit.plan.slowest_rank import jitter_factor, largest_normal_quantiles, straggler_chance
from labkit.plan.workload import Workload
from labkit.viz import explore_goodput

FAILURES_ONLY = Cluster(straggler_share=0, jitter=0, days=365)
PUBLISHED = Path(__file__).parents[2] / "labkit" / "plan" / "tables" / "published.csv"
TINY = ["plan", "--machine", "h100", "--gpus", "8", "--preset", "tiny", "--precision", "bf16"]


def every(seconds: float, gpus: int = 1024, **others: Any) -> Cluster:
    """Return a cluster on which a run on `gpus` fails every `seconds`, without stragglers and jitter."""
    return replace(FAILURES_ONLY, gpu_mtbf_hours=seconds * gpus / 3600, **others)


def test_llama_3_failed_every_three_hours():
    assert sum(CAUSES.values()) == 419
    assert Cluster().mtbf(16384) == pytest.approx(54 * 86400 / 419)
    assert Cluster().mtbf(8) == pytest.approx(2048 * Cluster().mtbf(16384))


# ----------------------------------------------------------------------------------------------- intervals


@pytest.mark.parametrize(("mtbf", "minutes"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_dalys_own_examples(mtbf: float, minutes: float):
    """Figures 3 to 5 of Daly 2006: checkpoints of 5 min."""
    assert daly_interval(5, mtbf) == pytest.approx(minutes, abs=0.5 if minutes > 10 else 0.05)


def test_daly_is_near_the_minimum_of_his_exact_time_and_young_is_not_for_large_checkpoints():
    for checkpoint, worst in ((1, 0.001), (60, 0.002), (900, 0.005)):
        times = [daly_seconds(1e6, interval, checkpoint, 0, 3600) for interval in range(10, 7200)]
        exact = 10 + int(np.argmin(times))
        assert daly_interval(checkpoint, 3600) == pytest.approx(exact, rel=0.02, abs=1)
        assert daly_seconds(1e6, daly_interval(checkpoint, 3600), checkpoint, 0, 3600) <= (1 + worst) * min(times)
    assert young_interval(900, 3600) > 1.25 * exact
    assert daly_interval(7200, 3600) == 3600


@pytest.mark.parametrize("checkpoint", [5, 30, 120])
def test_the_simulated_best_interval_is_dalys_and_for_small_checkpoints_youngs(checkpoint: float):
    run = ClusterRun(16384, Checkpoint(checkpoint), FAILURES_ONLY)
    best = best_goodput(run)
    assert best.interval == pytest.approx(daly_interval(checkpoint, run.mtbf), rel=0.03)
    assert best.interval == pytest.approx(young_interval(checkpoint, run.mtbf), rel=0.08)
    for factor in (0.5, 2):
        assert simulate_goodput(run, factor * best.interval).goodput < best.goodput


# ----------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("interval", [300, 900, 4000])
@pytest.mark.parametrize("restart", [0, 600, 3000])
def test_goodput_is_dalys_exact_time(interval: float, restart: float):
    run = ClusterRun(1024, Checkpoint(30), every(7200, restart_seconds=restart))
    expected = 1 / daly_seconds(1, interval, 30, restart, 7200)
    assert simulate_goodput(run, interval).goodput == pytest.approx(expected, rel=0.01)


def test_an_asynchronous_checkpoint_counts_once_it_is_written():
    """A cycle of training and copy is kept only if its write ends before the failure, so the exact time has R + W."""
    run = ClusterRun(1024, Checkpoint(2, background=300, load=400), every(7200, restart_seconds=200))
    expected = 1 / daly_seconds(1, 900, 2, 600 + 300, 7200)
    assert simulate_goodput(run, 900).goodput == pytest.approx(expected, rel=0.01)


def played(ranks: int, mtbf: float, interval: float, blocking: float, restart: float, end: float,
           random: np.random.Generator) -> tuple[float, int]:  # fmt: skip
    """Play one run event by event, each rank with failures of its own; return the useful seconds and the failures."""
    failures = np.sort(np.concatenate([
        np.cumsum(random.exponential(mtbf, 60 + int(3 * end / mtbf))) for _ in range(ranks)
    ]))  # fmt: skip
    failures = failures[failures < end].tolist()
    clock = saved = 0.0
    for failure in [*failures, end]:
        done = saved
        while clock < failure:
            trained = min(interval, failure - clock)
            clock, done = clock + trained, done + trained
            if clock + blocking > failure:
                clock = failure
            else:
                clock, saved = clock + blocking, done
        if failure == end:
            return done if clock >= end else saved, len(failures)
        clock = failure + restart
        if clock >= end:
            return saved, len(failures)
    raise AssertionError


def test_a_run_played_rank_by_rank_has_the_same_goodput():
    """Short runs, so that the end counts; the least of 64 failure times, and failures during restarts, are played."""
    ranks, mtbf, interval, blocking, restart, end = 64, 64 * 5000.0, 700.0, 60.0, 900.0, 86400.0
    random = np.random.default_rng(1)
    runs = [played(ranks, mtbf, interval, blocking, restart, end, random) for _ in range(400)]
    useful, failures = np.mean(runs, axis=0)
    cluster = every(5000, 64, restart_seconds=restart, days=1)
    found = simulate_goodput(ClusterRun(64, Checkpoint(blocking), cluster), interval)
    assert found.goodput == pytest.approx(useful / end, rel=0.01)
    assert found.failures == pytest.approx(failures, rel=0.05)
    low, high = np.quantile([each / end for each, _ in runs], (0.1, 0.9))
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.02)


@pytest.mark.parametrize("gpus", [8, 1024, 131072])
@pytest.mark.parametrize("checkpoint", [Checkpoint(30, load=30), Checkpoint(1, background=100)])
def test_every_second_has_one_use_and_a_seed_repeats(gpus: int, checkpoint: Checkpoint):
    run = ClusterRun(gpus, checkpoint, Cluster(), 0.2)
    for interval in (150, 40_000):
        found = simulate_goodput(run, interval, seed=3)
        assert sum(found.shares.values()) == pytest.approx(1) and min(found.shares.values()) >= 0
        assert found.failures == pytest.approx(14 * 86400 / run.mtbf, rel=0.1)
        assert found == simulate_goodput(run, interval, seed=3)


def test_a_run_with_very_many_failures_is_cut_short_and_counts_all_of_them():
    run = ClusterRun(1024, Checkpoint(0.1), every(20, restart_seconds=1))
    found = simulate_goodput(run, 2)
    assert found.failures == pytest.approx(365 * 86400 / 20, rel=0.01)
    assert found.goodput == pytest.approx(1 / daly_seconds(1, 2, 0.1, 1, 20), rel=0.01)


def test_goodput_falls_with_scale():
    run = ClusterRun(8, Checkpoint(30), Cluster(), 0.1)
    found = [each.goodput for each in goodput_by_size(run, [8, 64, 512, 4096, 16384, 131072])]
    assert all(larger < smaller for smaller, larger in itertools.pairwise(found))
    assert [each.gpus for each in goodput_by_size(run, [8, 50_000_000])] == [8]


# ----------------------------------------------------------------------------------------------- the slowest rank


@pytest.mark.parametrize(
    ("ranks", "mean"),
    [(1, 0.0), (2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi)), (10, 1.53875), (100, 2.50759),
     (1000, 3.24144)],
)  # fmt: skip
def test_the_largest_of_n_normals(ranks: int, mean: float):
    """Closed forms for 2 and 3, and Harter's table (Biometrika 48, 1961) for more."""
    assert largest_normal_quantiles(ranks).mean() == pytest.approx(mean, abs=1e-3)


def test_jitter_of_two_ranks_and_of_many():
    for spread in (0.05, 0.5):
        assert jitter_factor(2, spread) == pytest.approx(2 * NormalDist().cdf(spread / math.sqrt(2)), rel=1e-3)
    drawn = np.exp(0.2 * np.random.default_rng(0).standard_normal((500, 4096)) - 0.02).max(axis=1)
    assert jitter_factor(4096, 0.2) == pytest.approx(drawn.mean(), rel=0.01)
    assert jitter_factor(1, 0.5) == 1 and jitter_factor(4096, 0) == 1


def test_stragglers_slow_the_computing_share_of_a_step():
    slow = np.random.default_rng(0).random((4000, 1000)) < 1e-3
    assert straggler_chance(1000, 1e-3) == pytest.approx(slow.any(axis=1).mean(), abs=0.02)
    assert straggler_chance(5, 1) == 1 and straggler_chance(5, 0) == 0
    run = ClusterRun(8, Checkpoint(1), Cluster(straggler_share=1, straggler_factor=1.5, jitter=0.3), 0.25)
    found = simulate_goodput(run, 3600)
    assert found.shares["stragglers"] / found.goodput == pytest.approx(0.5 * 0.75)
    some = simulate_goodput(ClusterRun(1000, Checkpoint(1), every(7200, 1000, straggler_share=1e-3)), 600)
    slow_lives = straggler_chance(1000, 1e-3)  # 63 %, each of which takes 1.05 times as long for a step
    assert some.shares["stragglers"] / some.effective_time == pytest.approx(slow_lives * 0.05 / 1.05, rel=0.02)
    assert found.shares["jitter"] / found.goodput == pytest.approx(0.25 * (jitter_factor(8, 0.3) - 1))


# ----------------------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_has_twelve_bytes_for_each_parameter_and_asynchronous_ones_block_for_the_copy():
    config = presets.get("gpt2_124m").replaced({"optim.precision": "bf16", "parallel.pp": 2})
    parameters = model_parameters(config.model)
    cluster = Cluster(storage_gb_s=0.5, copy_gb_s=10)
    found = checkpoint_of(Workload(config, 8), cluster)
    tied = config.model.vocab_size * config.model.hidden  # both ends of the pipeline keep the word embedding
    assert 12 * parameters <= found.bytes <= 12 * (parameters + 1.01 * tied)
    assert found.load == pytest.approx(found.bytes / 0.5e9)
    behind = checkpoint_of(Workload(config, 8), replace(cluster, asynchronous=True))
    assert found.blocking == pytest.approx(behind.blocking + behind.background)
    # the copy is that of one rank: an eighth of the whole, or a little more at the end of the pipeline that is larger
    assert found.bytes / 8 <= 10e9 * behind.blocking < 1.2 * found.bytes / 8


def test_llama_3_trained_more_than_90_percent_of_the_time():
    rows = [row.workload for row in read_published(PUBLISHED) if "2407.21783" in row.source]
    workload = max(filter(None, rows), key=lambda workload: workload.world_size)
    assert workload.world_size == 16384
    checkpoint = checkpoint_of(workload, Cluster())
    assert checkpoint.bytes == pytest.approx(12 * 405e9, rel=0.01)
    found = best_goodput(ClusterRun(16384, checkpoint, replace(Cluster(), days=54)))
    assert found.failures == pytest.approx(419, rel=0.02) and 0.90 < found.effective_time < 0.96


# ----------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("gpu_mtbf_hours=-3", "gpu_mtbf_hours = -3: give a number above 0"),
        ("interval_minutes=0", "interval_minutes = 0: give a number above 0"),
        ("straggler_share=2", "straggler_share = 2: give a number at least 0 and at most 1"),
        ("straggler_factor=0.5", "straggler_factor = 0.5: give a number at least 1"),
        ("jitter=nan", "jitter = nan: give a number at least 0"),
        ("days=400", "days = 400: give a number above 0 and at most 365"),
        ("mtbf=3", "'mtbf' is unknown; give one of gpu_mtbf_hours, "),
        ("restart_seconds=long", "restart_seconds=long: give a number, as in restart_seconds=10"),
        ("asynchronous=maybe", "asynchronous=maybe: give true or false"),
    ],
)
def test_impossible_words(words: str, error: str):
    with pytest.raises(ConfigError) as raised:
        parse_cluster(words)
    assert len(raised.value.problems) == 1 and error in raised.value.problems[0]


def test_words_of_a_cluster():
    assert parse_cluster("") == Cluster()
    assert parse_cluster("asynchronous, days=7") == Cluster(asynchronous=True, days=7)


def test_runs_without_progress():
    for checkpoint, cluster, words in (
        (Checkpoint(1000), every(900), "a checkpoint takes 16.7 min, and 1,024 GPUs fail every 15 min, so the run"),
        (Checkpoint(1, background=1000), every(900), "a checkpoint takes 16.7 min"),
        (Checkpoint(1), every(100), "a restart takes 10 min, and 1,024 GPUs fail every 100 s, so the run makes no"),
        (Checkpoint(0), every(900), "a checkpoint blocks training for 0 s; give a time above 0"),
        (Checkpoint(1, load=-1), every(900), "loaded in less than 0 s; give 0 or more"),
    ):
        with pytest.raises(ConfigError) as raised:
            ClusterRun(1024, checkpoint, cluster)
        assert len(raised.value.problems) == 1 and words in str(raised.value)
    with pytest.raises(ConfigError, match="2 problems") as raised:
        ClusterRun(0, Checkpoint(1), Cluster(), communication=3)
    assert "0 GPUs: give at least 1" in str(raised.value) and "give a share from 0 to 1" in str(raised.value)


def test_intervals_that_cannot_be():
    run = ClusterRun(1024, Checkpoint(10, background=600), every(7200))
    for interval, words in (
        (0, "an interval of 0 s: give a time above 0"),
        (math.nan, "an interval of nan s"),
        (60, "writing a checkpoint takes 10 min; give at least that"),
    ):
        with pytest.raises(ConfigError, match=words):
            simulate_goodput(run, interval)
    assert suggested_interval(run) == run.least_interval == min(each.interval for each in interval_curve(run))


# ----------------------------------------------------------------------------------------------- command and widget


def run_command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main([*TINY, *words])
    out = capsys.readouterr()
    return code, out.err if code else out.out


def test_the_plan_of_a_layout_ends_with_its_goodput(capsys: pytest.CaptureFixture[str]):
    code, text = run_command(capsys, "--cluster", "interval_minutes=30")
    assert code == 0 and "goodput of 14 days on 8 GPUs" in text
    assert all(words in text for words in ("given", "simulated best", "Young (1974)", "Daly (2006)", "16,384"))
    code, text = run_command(capsys, "--why", "tp=2,pp=2", "--goodput")
    assert code == 0 and "tp=2,pp=2: legal, and fits" in text and "goodput of 14 days on 8 GPUs, tp=2,pp=2" in text
    code, text = run_command(capsys, "--why", "tp=3", "--goodput")
    assert code == 0 and "forbidden" in text and "goodput" not in text


def test_goodput_as_json(capsys: pytest.CaptureFixture[str]):
    found = json.loads(run_command(capsys, "--goodput", "--json")[1])
    goodput = found["goodput"]
    assert goodput["mtbf_seconds"] == pytest.approx(Cluster().mtbf(8))
    parts = found["best"][0]["parts"]
    communication = sum(parts.get(name, 0) for name in ("tp", "cp", "ep", "dp", "pp"))
    assert goodput["communication"] == pytest.approx(communication / found["best"][0]["seconds"])
    assert [each["gpus"] for each in goodput["sizes"]] == [8, 64, 512, 2048, 8192, 16384]
    assert "goodput" not in json.loads(run_command(capsys, "--json")[1])


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("gpu_mtbf_hours=-1,interval_minutes=0", "2 problems"),
        ("storage_gb_s=1e-12", "so the run makes no progress; take fewer GPUs, faster storage"),
    ],
)
def test_a_bad_cluster_is_one_error(capsys: pytest.CaptureFixture[str], words: str, error: str):
    code, text = run_command(capsys, "--cluster", words)
    assert code == 2 and error in " ".join(text.split()) and "Traceback" not in text


def test_a_table_of_runs_has_no_goodput(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--rows", "published.csv", "--goodput", "--cluster", "days=3"]) == 2
    text = capsys.readouterr().err
    assert "--goodput: a row" in text and "--cluster: a row" in text


def test_the_explorer_draws_a_figure_and_when_live_shows_why_a_setting_cannot_be(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    figure = explore_goodput(gpus=16384, gpu_mtbf_hours=50_000, checkpoint_seconds=30, interval_minutes=60)
    assert figure.sentence.startswith("16,384 GPUs fail every 3.05 h: with a checkpoint of 30 s every 60 min")
    assert "Young (1974) 13.5 min" in figure.sentence
    with pytest.raises(ConfigError, match="makes no progress"):
        explore_goodput(gpus=131072, gpu_mtbf_hours=5000, checkpoint_seconds=300)
    monkeypatch.setenv("JPY_SESSION_NAME", "chapter.ipynb")
    *sliders, picture, words = explore_goodput(interval_minutes=60).children
    inputs = {slider.description: slider for slider in sliders}
    assert set(inputs) == {"gpus", "gpu_mtbf_hours", "checkpoint_seconds", "interval_minutes"}
    before = picture.value
    inputs["gpus"].value = 1024
    assert picture.value != before and "1,024 GPUs fail every 48.8 h" in words.value
    inputs["gpu_mtbf_hours"].value, inputs["gpus"].value = 5000, 131072
    kept = picture.value
    inputs["checkpoint_seconds"].value = 300
    assert "makes no progress" in words.value and picture.value == kept
    inputs["gpus"].value = 8
    assert "makes no progress" not in words.value and words.value.count("8 GPUs fail every") == 1
