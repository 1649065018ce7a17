"""`labkit calibrate`: its stopwatch on a fake clock, its file there and back, its overhead, bad input."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import plan_on_cpu
import pytest

from labkit.cli import main
from labkit.config.errors import ConfigError
from labkit.plan.collectives import Group, collective_seconds
from labkit.plan.kernels import gemm, memory_bound
from labkit.plan.machine import Machine, load_machine
from labkit.plan.measured import Product, Transfer, product_efficiency, ring_seconds, transfer_seconds
from labkit.plan.step_time import predict_step
from labkit.plan.workload import Workload
from labkit.train.calibration import calibrating
from labkit.train.calibration.calibrating import Calibration
from labkit.train.calibration.machine_values import Host, machine_values
from labkit.train.calibration.rank import Samples, Types, of_all_ranks
from labkit.train.calibration.rounds import best_round
from labkit.train.calibration.small_steps import middle_config, overhead, small_config
from labkit.train.calibration.timing import LEAST, Sample, Stopwatch, joined, spread_of

HOST = Host("here", "a CPU of 2026", 1, 8 << 30, "cpu", 2, "gloo")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
RATES = {"copy": 8e9, "residual": 7e9, "norm": 3e9, "norm, backward": 4e9, "activation": 2e9, "optimizer": 5e9}


class FakeClock:
    """A clock that only calls move on."""

    def __init__(self, *seconds: float) -> None:
        self.now, self.seconds, self.calls, self.waits = 0.0, itertools.cycle(seconds), 0, 0

    def __call__(self) -> float:
        return self.now

    def work(self) -> None:
        self.now, self.calls = self.now + next(self.seconds), self.calls + 1

    def wait(self) -> None:
        self.waits += 1


def test_a_stopwatch_times_batches_of_short_calls_and_single_long_ones() -> None:
    short = FakeClock(1e-5)
    sample = Stopwatch(short, short.wait, budget=0.02, batch=0.001).sample(short.work)
    assert sample.value == pytest.approx(1e-5) and sample.spread == pytest.approx(0.0, abs=1e-9)
    assert short.calls > 2 + 100 * LEAST and short.waits == 2 * round((short.calls - 2) / 100) + 2
    long = FakeClock(1.0)
    assert Stopwatch(long, budget=0.02).sample(long.work).value == 1.0 and long.calls == 2 + LEAST


def test_a_sample_is_the_lower_quartile_and_its_spread_half_of_what_lies_between_the_quartiles() -> None:
    assert spread_of([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 0.5)
    assert spread_of([2.0]) == (2.0, 0.0)
    assert joined([Sample(1.0, 0.1), Sample(3.0, 0.2)]) == (2.0, 0.5)
    assert joined([Sample(2.0, 0.1), Sample(2.0, 0.3)]) == (2.0, 0.3)


def samples() -> Samples:
    found: Samples = {("memory", kind): Sample(rate, 0.04) for kind, rate in RATES.items()}
    for shape in itertools.product((32, 512), repeat=3):
        found["products", "fp32", *shape] = Sample(1e10 * min(shape) / 32, 0.02)
        found["products", "bf16", *shape] = Sample(2e10 * min(shape) / 32, 0.02)
    found["weight gradient",] = Sample(0.9, 0.05)
    found |= {("attention", way): Sample(4e10, 0.03) for way in ("forward", "backward")}
    for kind, (size, seconds) in itertools.product(KINDS, ((4096, 1e-4), (1 << 20, 1e-3))):
        found["transfers", kind, size] = Sample(seconds, 0.2)
    return found


def machine(**changes: Any) -> Machine:
    return replace(Calibration(machine_values(HOST, samples(), "measured"), [], 0.0).machine, **changes)


def test_a_machine_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    made = Calibration(machine_values(HOST, samples(), "measured here"), ["a CPU of 2026", "load 0.1"], 1.0)
    made.write(path)
    back = load_machine(str(path))
    assert path.read_text().startswith("# a CPU of 2026\n# load 0.1\nname: here\n")
    assert vars(back) == {**vars(made.machine), "levels": back.levels}
    assert vars(back.levels[0]) == vars(made.machine.levels[0])
    assert back.products["fp32"][0] == Product(32, 32, 32, 1 / 16) and back.peak_flops["fp32"] == 1.6e11
    assert back.memory_rates["norm"] == 0.375 and back.weight_gradient_efficiency == 0.9
    assert back.levels[0].measured["p2p"] == (Transfer(4096, 1e-4), Transfer(1 << 20, 1e-3))
    assert back.spreads["memory_bandwidth"] == 0.04 and back.spreads["products.fp32.0.efficiency"] == 0.02
    assert back.spreads["levels.0.measured.p2p.0.seconds"] == 0.2
    assert back.interval["default"] == pytest.approx((0.1**2 + ((0.02 + 0.04 + 0.2) / 3) ** 2) ** 0.5, rel=1e-3)


def test_a_quick_machine_has_what_its_ranks_measured() -> None:
    class TwoRanks:
        def run(self, *arguments: Any) -> list[Samples]:
            self.asked = arguments
            return [samples(), samples() | {("memory", "copy"): Sample(9e9, 0.04)}]

    ranks: Any = TwoRanks()
    found = calibrating.quick_machine(ranks, "cpu", most=128)
    assert ranks.asked[1:3] == (Types(("fp32",)), 128)
    assert found.memory_bandwidth == 9e9 and found.peak_flops["fp32"] == 1.6e11 and found.kernel_launch == 0
    assert collective_seconds(found, "all_reduce", 4096, Group(2)) == 1e-4


def test_a_measured_machine_gives_its_own_rates() -> None:
    found = machine()
    term = gemm(found, "fc1", (32, 32, 512), precision="fp32", software="labkit_cpu")
    assert term.seconds == pytest.approx(2 * 32 * 32 * 512 / 1e10) and "measured efficiency" in term.formula
    slower = gemm(found, "fc1", (32, 32, 512), precision="fp32", software="labkit_cpu", weight_gradient=True)
    assert slower.seconds == pytest.approx(term.seconds / 0.9)
    assert memory_bound(found, "attention norm", 1e6, 8).seconds == pytest.approx(8e6 / 3e9)
    assert memory_bound(found, "final norm, backward", 1e6, 24).seconds == pytest.approx(24e6 / 4e9)
    assert memory_bound(found, "rotary positions", 1e6, 8).seconds == pytest.approx(8e6 / 8e9)
    assert collective_seconds(found, "all_reduce", 4096, Group(2)) == 1e-4
    assert collective_seconds(found, "p2p", 2 << 20, Group(2)) == pytest.approx(2e-3)


def test_between_measured_shapes_is_a_mean_and_at_them_the_measurement() -> None:
    table = (Product(64, 64, 64, 0.2), Product(1024, 64, 64, 0.8))
    assert product_efficiency(table, 1024, 64, 64) == 0.8
    assert product_efficiency(table, 256, 64, 64) == pytest.approx(0.4)  # half way, in logarithms
    assert 0.2 < product_efficiency(table, 128, 64, 64) < 0.4
    assert 0.2 <= product_efficiency(table, 1, 1, 1) < 0.3 < product_efficiency(table, 1 << 20, 64, 64) <= 0.8


def test_between_measured_sizes_is_a_line_and_beyond_them_their_ends() -> None:
    table = (Transfer(1e3, 1e-4), Transfer(1e5, 1e-2))
    assert [transfer_seconds(table, size) for size in (1, 1e3, 1e5)] == [1e-4, 1e-4, pytest.approx(1e-2)]
    assert transfer_seconds(table, 1e4) == pytest.approx(1e-3) and transfer_seconds(table, 1e6) == pytest.approx(0.1)
    assert ring_seconds(table, 1e4, 2) == transfer_seconds(table, 1e4)
    assert ring_seconds(table, 1e4, 4) == 3 * transfer_seconds(table, 5e3)


@pytest.mark.parametrize(("kernel", "step"), [(3e-6, 2e-3), (0.0, 0.0)])
def test_overhead_is_what_the_small_steps_take_beyond_their_arithmetic(kernel: float, step: float) -> None:
    true = machine(kernel_launch=kernel)
    true = replace(true, software={**true.software, "default host": step})
    steps = [
        Sample(predict_step(Workload(small_config(layers, "fp32"), 1, software="labkit_cpu"), true).seconds, 0.1)
        for layers in (2, 8)
    ]
    found = overhead(machine(), "fp32", steps, hides_arithmetic=False)
    assert found.kernel.value == pytest.approx(kernel, abs=1e-12) and found.step.value == pytest.approx(step, abs=1e-9)
    assert found.kernel.spread == 0.1


def test_of_two_ranks_the_faster_rate_counts_and_the_longer_transfer() -> None:
    one, two = samples(), samples()
    two["memory", "copy"], two["transfers", "p2p", 4096] = Sample(4e9, 0.04), Sample(3e-4, 0.1)
    found = of_all_ranks([one, two])
    assert found["memory", "copy"].value == 8e9 and found["transfers", "p2p", 4096] == Sample(3e-4, 0.1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("products: 3\n", "products is not a mapping"),
        ("products: {fp32: {source: s}}\n", "products.fp32 has no rows; give {source: ..., rows: [{m, n, k"),
        ("products: {fp32: {source: s, rows: [{m: 1, n: 1, k: 1}]}}\n", "products.fp32.0.efficiency is missing"),
        (
            "products: {fp32: {source: s, rows: [{m: 1, n: 1, k: 1, efficiency: 0}]}}\n",
            "products.fp32.0.efficiency is 0",
        ),
        ("products: {fp32: {rows: [{m: 1, n: 1, k: 1, efficiency: 1}]}}\n", "products.fp32.0.m has no source"),
        ("memory_rates: {norm: {value: -1, source: s}}\n", "memory_rates.norm is -1; give a number above 0"),
        ("sms: {value: 1, source: s, spread: -1}\n", "sms has the spread -1; give its relative half width"),
        ("default_software: labkit\n", "default_software is 'labkit'; choose one of megatron_2019"),
    ],
)
def test_bad_tables_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: h100\n{text}")
    with pytest.raises(ConfigError) as raised:
        load_machine(str(path))
    assert words in str(raised.value)


# ---- the command ----


def calibrated(
    monkeypatch: pytest.MonkeyPatch,
    load: float = 0.1,
    error: type[BaseException] | None = None,
    found: Samples | None = None,
) -> None:
    """Let the ranks return the samples above, the small steps take 5 and 11 ms, and the middle one a second."""

    def run(*_: Any, **__: Any) -> list[Samples]:
        if error is not None:
            raise error
        return [found or samples()] * 2

    monkeypatch.setattr(calibrating, "run", run)
    monkeypatch.setattr(calibrating, "host_of", lambda device: HOST)
    monkeypatch.setattr(calibrating, "usable_cores", lambda: 2)
    monkeypatch.setattr(calibrating, "measured_steps", lambda *_: [Sample(5e-3, 0.1), Sample(11e-3, 0.1)])
    monkeypatch.setattr(calibrating, "middle_step", lambda *_: Sample(1.0, 0.1))
    monkeypatch.setattr(calibrating.os, "getloadavg", lambda: (load, load, load))


def test_the_command_writes_a_machine_that_the_plan_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrated(monkeypatch)
    path = tmp_path / "mine.yaml"
    assert main(["calibrate", "--out", str(path), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert f"plan for it with --machine {path}" in out and "busy" not in out and "+- 13%" in out
    found = load_machine(str(path))
    assert found.kernel_launch > 0 and found.default_software == "labkit_cpu" and "busy" not in path.read_text()
    middle = predict_step(Workload(middle_config("fp32"), 1, software="labkit_cpu"), found)
    assert middle.seconds == pytest.approx(1.0, rel=0.01) and 0 < found.software["default"] < 1
    assert main(["calibrate", "--out", str(path)]) == 2
    assert "exists; --overwrite replaces it" in capsys.readouterr().err
    assert main(["calibrate", "--out", str(path), "--overwrite", "--device", "cpu"]) == 0


def test_one_rank_is_a_machine_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrated(monkeypatch, found={key: sample for key, sample in samples().items() if key[0] != "transfers"})
    path = tmp_path / "mine.yaml"
    assert main(["calibrate", "--out", str(path), "--device", "cpu"]) == 0
    assert "between ranks              not measured, since there is one rank" in capsys.readouterr().out
    assert load_machine(str(path)).levels[0].measured == {}


def test_a_busy_machine_is_named_in_the_file_and_on_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrated(monkeypatch, load=2.5)
    path = tmp_path / "mine.yaml"
    assert main(["calibrate", "--out", str(path), "--device", "cpu"]) == 0
    words = "busy: the load average was 2.5 on 2 cores before it began"
    assert f"# {words}\n" in path.read_text() and "on a busy machine" in path.read_text()
    assert f"{words}; the constants are too slow, so calibrate again on a quiet machine" in capsys.readouterr().out


def test_an_interrupted_calibration_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrated(monkeypatch, error=KeyboardInterrupt)
    path = tmp_path / "mine.yaml"
    assert main(["calibrate", "--out", str(path), "--device", "cpu"]) == 130
    assert capsys.readouterr().err == f"interrupted; {path} was not written\n" and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "{}/mine.txt"], "its name ends with .yaml or .yml"),
        (["--out", "{}"], "is a folder; name a file in it"),
        (["--out", "/proc/mine.yaml"], "its folder cannot be written"),
        (["--device", "gpu"], "--device 'gpu': choose one of auto, cpu, cuda"),
    ],
)
def test_bad_input_is_missed_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    calibrated(monkeypatch, error=AssertionError)
    assert main(["calibrate", *(word.format(tmp_path) for word in words)]) == 2
    assert message in capsys.readouterr().err


# ---- the benchmark that compares the plan with this machine ----


def test_every_layout_of_the_benchmark_can_run_and_be_planned() -> None:
    assert len(plan_on_cpu.LAYOUTS) >= 12
    for model, world, changes in plan_on_cpu.LAYOUTS:
        work = plan_on_cpu.workload(model, world, changes, machine())
        work.config.validate(world)
        assert predict_step(work, machine()).seconds > 0
    pipelines = plan_on_cpu.sleepers()
    assert len({each.name for each in pipelines}) == len(pipelines) >= 24
    for each in pipelines:
        each.config.validate(each.pp)
        assert predict_step(Workload(each.config, each.pp, software="labkit_cpu"), machine()).timeline.makespan > 0


def test_kendall_tau_counts_pairs_in_the_same_order() -> None:
    assert plan_on_cpu.kendall_tau([(1, 10), (2, 20), (3, 30)]) == 1.0
    assert plan_on_cpu.kendall_tau([(1, 30), (2, 20), (3, 10)]) == -1.0
    assert plan_on_cpu.kendall_tau([(1, 10), (2, 30), (3, 20)]) == pytest.approx(1 / 3)


def test_the_best_round_counts_no_late_start_and_waits_for_the_last_rank() -> None:
    early, late = [[0.0, 2.0, 5.0], [10.0, 11.0, 19.0]], [[1.5, 3.0, 5.5], [10.0, 12.0, 19.5]]
    assert best_round([early, late]) == [2.0, 2.5], "2 s on the slower rank; then from 3.0 to 5.5"
