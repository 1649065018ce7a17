"""The parts of the GPU benchmark, tiny and on the CPU: each yields its rows; and how rows are kept and stored."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu
import gpu_graphs
import gpu_moe
import gpu_plain
import gpu_precision
import gpu_steps
import harness
import pytest
import table
import torch
from fake_device.parent import verdicts_of

from labkit.config import GraphConfig, ModelConfig, MoEConfig, OptimConfig, RunConfig, TrainConfig
from labkit.models.saved_tensors import SavedTensors
from labkit.train.reporting.device_peaks import peak_of
from labkit.train.reporting.report import Throughput

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HOST = torch.device("cpu")
TINY = ModelConfig(layers=2, hidden=32, heads=2, vocab_size=64, seq_length=16, **gpu_steps.PLAIN)
EMULATED = GraphConfig(cuda_graph_impl="emulated", cuda_graph_warmup_steps=1)
SHAPES = {8: (32, 64)}
ON_CPU: dict[str, tuple[Callable[[], Any], int]] = {
    "gemm": (lambda: gpu_steps.gemm(64, device=HOST), 1),
    "stack": (lambda: gpu_plain.stack(TINY, 2, device=HOST), 1),
    "fp8_layer": (lambda: gpu_precision.fp8_layer(((32, 2),), 16, 16, device=HOST), 2),
    "precisions": (lambda: gpu_precision.precisions(TINY, 2, ("labkit, bf16", "labkit, fp32"), device=HOST), 1),
    "recomputation": (lambda: gpu_precision.recomputation(TINY, 2, device=HOST), 1),
    "grouped_gemm": (lambda: gpu_moe.grouped_gemm(SHAPES, 256, device=HOST), 3),
    "graphs": (lambda: gpu_graphs.dense({"tiny": (TINY, 1)}, EMULATED, precision="fp32", device=HOST), 1),
    "partial_graphs": (
        lambda: gpu_graphs.experts_in_part(
            (replace(TINY, activation="swiglu"), MoEConfig(num_experts=4)), EMULATED, precision="fp32", device=HOST
        ),
        1,
    ),
}
"""Tiny versions by name, and how many rows each yields; the other parts have tests of their own."""


@pytest.mark.parametrize("name", ON_CPU)
def test_a_part_yields_its_rows(name: str, one_thread: None) -> None:
    make, expected = ON_CPU[name]
    rows = [one.row() if isinstance(one, harness.Comparison) else one for one in make()]
    assert len(rows) == len({row["case"] for row in rows}) == expected
    json.dumps(rows, allow_nan=False)
    for row in rows:
        repetitions = {name: len(seconds) for name, seconds in row.get("raw_seconds", {}).items()}
        assert all(count >= harness.LEAST for count in repetitions.values()), "else the harness rejects every row"
        assert not str(row.get("rejected", "")).endswith("needed")


@pytest.mark.parametrize("name", gpu.PARTS)
def test_every_part_is_there_and_starts_without_arguments(name: str) -> None:
    module, _, function = gpu.PARTS[name].partition(":")
    made = getattr(importlib.import_module(module), function)
    assert made.__code__.co_flags & 0x20, "a generator function: rows are kept as they come"
    assert made.__code__.co_argcount == len(made.__defaults__ or ())
    assert (made.__kwdefaults__ or {}).get("repetitions", harness.LEAST) >= harness.LEAST


H200 = "NVIDIA H200"


def on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(gpu_steps, "gemm_rate", lambda device: 4e12)


def test_the_peak_is_that_of_the_data_sheet_or_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    found = harness.Comparison("x", {"ours": [0.5] * 15})
    assert math.isnan(gpu_steps.peak_rate(HOST))
    assert "mfu" not in gpu_steps.rates(found, 1e12, HOST).facts
    for name, peak in {"NVIDIA H100 80GB HBM3": 989.5e12, "NVIDIA H100 PCIe": 756.5e12, "Tesla T4": math.nan}.items():
        on_a_gpu(name, monkeypatch)
        assert gpu_steps.peak_rate() == pytest.approx(peak, nan_ok=True)
    assert gpu_steps.rates(found, 1e12, gpu_steps.DEVICE).facts["share_of_gemm_rate"] == {"ours": 0.5}
    monkeypatch.setattr(gpu_steps, "gemm_rate", lambda device: math.nan)
    assert "share_of_gemm_rate" not in gpu_steps.rates(found, 1e12, HOST).facts


@pytest.mark.parametrize("optim", [{}, {"fp8": "hybrid"}, {"fp8": "hybrid", "fp8_recipe": "blockwise"}])
def test_mfu_is_that_of_training(optim: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """For the same model and time; the same name of another share says that it is none."""
    on_a_gpu(H200, monkeypatch)
    chosen = OptimConfig(precision="bf16", **optim)
    train = TrainConfig(micro_batch_size=16, global_batch_size=16)
    config = RunConfig(model=gpu_steps.GPT2, optim=chosen, train=train)
    trained = Throughput(config, 1, peak_of(H200, chosen)).rates(0.1)
    given: dict[str, Any] = {}
    monkeypatch.setattr(gpu_plain, "beside", lambda *_, **named: given.update(named) or iter(()))
    assert list(gpu_plain.gpt2(device=HOST)) == []
    found = harness.Comparison("x", {"ours": [0.1] * 15})
    facts = gpu_steps.rates(found, given["flops"], gpu_steps.DEVICE, optims={"ours": chosen}).facts
    assert facts.get("mfu") == ({"ours": pytest.approx(trained["mfu"], abs=1e-3)} if "mfu" in trained else None)
    assert facts["tflop_per_s"]["ours"] == pytest.approx(trained["tflops_per_rank"], abs=0.1)
    assert "mfu" not in gpu_steps.rates(found, 1e12, gpu_steps.DEVICE, share="share_of_peak").facts


@pytest.mark.parametrize("name", gpu_precision.RECOMPUTATIONS)
def test_activations_are_predicted_as_a_forward_keeps_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved tensors on a CPU, and the input of the first layer, which nobody else holds."""
    config = replace(TINY, **gpu_precision.RECOMPUTATIONS[name])
    layers: list[torch.nn.Module] = []
    build = gpu_precision.our_layers
    monkeypatch.setattr(gpu_precision, "our_layers", lambda *given: layers.extend(build(*given)) or layers)
    side = gpu_precision.recomputed_side(config, 2, HOST)
    assert side.passes is not None
    side.passes[0]()
    with SavedTensors(*layers) as saved:
        side.passes[1]()
        assert saved.bytes == pytest.approx(gpu_precision.predicted_bytes(config, 2, HOST), rel=0.01)


# ---- one part as a process ----

FAKE = """
def rows():
    yield {"case": "first"}
    yield {"case": "second"}
    raise RuntimeError
"""


def ask(*words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{path or ''}:{BENCHMARKS.parent}", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_rows_that_came_before_an_error_without_text_are_kept(tmp_path: Path) -> None:
    (tmp_path / "fake.py").write_text(FAKE)
    done = ask("fake:rows", "--out", str(tmp_path / "rows.jsonl"), path=tmp_path)
    assert done.returncode == 1 and done.stderr.rstrip().endswith("RuntimeError")
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [line["row"]["case"] for line in lines] == ["first", "second"]
    assert lines[0]["part"] == "fake:rows" and lines[0]["machine"]["torch"] == torch.__version__
    assert lines[0]["commit"] == harness.provenance.code(BENCHMARKS.parent)[0]
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"part": "cut o')
    ask("fake:rows", "--out", str(tmp_path / "rows.jsonl"), path=tmp_path)
    assert len(gpu.read_lines([tmp_path / "rows.jsonl"])) == 4, "a writer that was killed spoils its own line alone"


def test_without_a_gpu_it_says_so_and_a_wrong_name_is_refused() -> None:
    done = ask("layer")
    assert done.returncode == gpu.NEEDS_GPU and done.stderr.startswith("needs a GPU: ")
    done = ask()
    assert done.returncode == 2 and "give the NAME of a part" in done.stderr
    done = ask("lyer")
    assert done.returncode == 2 and "no part 'lyer'" in done.stderr
    listed = ask("--list")
    assert listed.returncode == 0 and {line.split()[0] for line in listed.stdout.splitlines()} == set(gpu.PARTS)


# ---- storing ----

MACHINE = {
    "processor": "a",
    "cores": 1,
    "memory_gib": 1,
    "python": "3",
    "torch": "2.11",
    "gpu": "NVIDIA H200",
    "gpus": 1,
}
MACHINE |= {"cuda": "13.0", "driver": "580", "triton": "3.6.0"}


def line(part: str, case: str, day: int = 1, **row: Any) -> str:
    origin = {"part": part, "commit": str(day) * 40, "changed": [], "machine": MACHINE, "date": f"2030-01-0{day}"}
    return json.dumps(origin | {"row": {"case": case, **row}}) + "\n"


def test_rows_are_merged_and_the_document_tells_them_with_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(table, "main", lambda: None)
    noisy = harness.Comparison("G1: layer", {"labkit": [1.0, 2.0, 3.0] * 5}).row()
    (tmp_path / "a").write_text(line("gemm", "GEMM", speed=1) + line("layer", **noisy))
    (tmp_path / "b").write_text(line("shared_reduction", "two ranks", 2) + line("gemm", "GEMM", 2, speed=2))
    gpu.store([tmp_path / "a"])
    path = gpu.store([tmp_path / "b"])
    worse = [line("gemm", "GEMM", 2, rejected="noisy"), line("gemm", "GEMM", 2, speed=3)[:-9] + "\n"]
    (tmp_path / "c").write_text("".join(worse) + line("layer", "another", rejected="noisy"))
    gpu.store([tmp_path / "c"])  # no number in the place of one, and half a line is left out
    stored = json.loads(path.read_text())
    assert [row["case"] for row in stored["rows"]] == ["GEMM", "G1: layer", "another", "two ranks"]
    del stored["rows"][2]
    assert [(row["part"], row.get("speed")) for row in stored["rows"]] == [
        ("gemm", 2), ("layer", None), ("shared_reduction", None),
    ]  # fmt: skip
    assert stored["machine"] == MACHINE and stored["date"] == "2030-01-02" and stored["commit"] == "2" * 40
    assert [row["commit"][0] for row in stored["rows"]] == ["2", "1", "2"], "a row that stays keeps its commit"
    assert stored["rows"][1]["raw_seconds"] == {"labkit": [1.0, 2.0, 3.0] * 5}, "kept where the row is rejected"
    text = table.document(tmp_path / "results")
    assert "| G1: layer | rejected: noisy (labkit median/min 2.00) |  |  |" in text, "nothing is quoted"
    assert "1 x NVIDIA H200 (CUDA 13.0, driver 580, triton 3.6.0); Python 3, torch 2.11" in text
    assert "Measured 2030-01-02 at commit 1111111111, commit 2222222222 on a, 1 cores" in text
    assert "Unmeasured" not in text


def test_rows_that_were_measured_without_git_get_the_commit_that_holds_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known, unknown = harness.provenance.TREE + "a" * 40, harness.provenance.TREE + "b" * 40
    monkeypatch.setattr(gpu.provenance, "commit_of", lambda name: {known: "c" * 40}.get(name, name))
    rows = [line("gemm", case).replace("1" * 40, name) for case, name in (("one", known), ("two", unknown))]
    (tmp_path / "rows").write_text("".join(rows) + line("gemm", "three"))
    assert [one["commit"] for one in gpu.read_lines([tmp_path / "rows"])] == ["c" * 40, unknown, "1" * 40]
    assert capsys.readouterr().err.splitlines() == [
        f"no commit of this repository holds the files that were measured: {unknown}"
    ]


def test_what_cannot_be_stored_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    (tmp_path / "empty").write_text("")
    with pytest.raises(ValueError, match="no row to store"):
        gpu.store([tmp_path / "empty"])
    (tmp_path / "half").write_text(line("gemm", "GEMM")[:-20])
    with pytest.raises(ValueError, match="no row to store"):
        gpu.store([tmp_path / "half"])
    with pytest.raises(ValueError, match=r"give gpu, or gpu_ and a name"):
        gpu.store([tmp_path / "half"], "../x")
    (tmp_path / "two").write_text(line("gemm", "GEMM") + line("gemm", "GEMM").replace("H200", "A100"))
    with pytest.raises(ValueError, match="rows of two machines"):
        gpu.store([tmp_path / "two"])


# ---- at real sizes, on a device that computes nothing ----

LEFT_OUT = ("shared_tensor_parallel", "shared_pipeline", "shared_reduction")
"""Their ranks are processes that exchange numbers through the host, and a fake tensor has none. On the CPU
tests/parallel/test_benchmark_gpu_shared.py runs them."""
EXCUSES = {
    "Transformer Engine is not installed": "as on most machines",
    "DynamicOutputShapeException": "a peer asks how many tokens an expert got, and nobody has counted",
}
"""In the error of a peer -> why it cannot run on a fake device; ours run."""
WAITS_OF_LABKIT = {
    "means": "the loss, once a step",
    "gradient_statistics": "the norm, once a step",
    "wait": "the rows of each expert, once a layer with experts",
    "warming_up": "once ahead of captures",
    "before_captures": "once ahead of captures",
    "capturing": "once a capture",
    "_beside_the_allocator": "twice around captures",
}
"""Function -> why the host waits for the device there."""


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name in gpu.PARTS if name not in LEFT_OUT])
def test_a_part_of_the_gpu_benchmark_at_its_real_size(name: str) -> None:
    found = verdicts_of("parts", name)[name]
    assert found["error"] is None, found["error"]
    assert found["rows"]
    useless = [row for row in found["rows"] if any(key in row for key in gpu.USELESS)]
    assert [row for row in useless if not any(reason in row.get("could_not_run", "") for reason in EXCUSES)] == []
    assert {place for place in found["waits"] if of_labkit(place) not in (None, *WAITS_OF_LABKIT)} == set()
    assert {place for place in found["gemms"] if of_labkit(place) is not None} == set()


def of_labkit(place: str) -> str | None:
    """The function of labkit in which something happened; None where the innermost line is none of labkit."""
    line = place.partition(" at ")[2].partition(" < ")[0]
    return line.split()[-1] if line.startswith("labkit/") else None
