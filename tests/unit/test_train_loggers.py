"""`train.tensorboard_dir`: TensorBoard's own reader finds the numbers of scalars.jsonl; what cannot be is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from labkit.cli import main
from labkit.config import RunConfig, presets
from labkit.launch import forkserver
from labkit.launch import rank_pool as pool
from labkit.train import pretrain
from labkit.train.preflight import problems
from labkit.train.reporting.tensorboard_writer import TensorBoard

SMALL = {"layers": 1, "hidden": 16, "heads": 2, "seq_length": 8, "global_batch_size": 2}


def config(folder: Path, **changes: object) -> RunConfig:
    return presets.tiny().override({**SMALL, "steps": 3, "tensorboard_dir": str(folder), **changes})


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """As TensorBoard shows them: without those that a later start replaced."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_the_numbers_of_scalars_jsonl_at_their_steps(tmp_path: Path) -> None:
    pretrain(config(tmp_path / "board", eval_steps=1, output_dir=str(tmp_path / "run")))
    written = [json.loads(line) for line in (tmp_path / "run" / "scalars.jsonl").read_text().splitlines()]
    found = scalars(tmp_path / "board")
    assert {"loss", "grad_norm", "learning_rate", "validation_loss", "timers/step/max"} <= set(found)
    expected: dict[str, list[tuple[int, float]]] = {}
    for line in written:
        expected.setdefault(line["tag"], []).append((line["step"], pytest.approx(line["value"], rel=1e-6)))
    assert found == expected, "TensorBoard has single precision"


def test_a_run_that_resumes_hides_the_steps_that_it_takes_again(tmp_path: Path) -> None:
    for first, last, value in ((1, 5, 1.0), (3, 4, 2.0)):
        board = TensorBoard(str(tmp_path))
        for step in range(first, last + 1):
            board.begin(step)
            board.write([{"step": step, "tag": "loss", "value": value}])
        board.close()
    assert scalars(tmp_path) == {"loss": [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]}


def test_a_run_without_steps_leaves_nothing(tmp_path: Path) -> None:
    TensorBoard(str(tmp_path / "board")).close()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_told_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec

    def without_tensorboard(name: str, package: str | None = None) -> object:
        return None if name == "tensorboard" else find_spec(name, package)

    def started(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(importlib.util, "find_spec", without_tensorboard)
    monkeypatch.setattr(forkserver, "ensure_running", started)
    monkeypatch.setattr(pool.LaunchFolder, "__init__", started)
    assert main(["train", "--preset", "tiny", "--nproc", "2", "--tensorboard-dir", str(tmp_path / "board")]) == 2
    err = capsys.readouterr().err
    assert f"--tensorboard-dir '{tmp_path / 'board'}': the package tensorboard is not installed; pip" in err
    assert problems(presets.tiny(), 1, "cpu") == [], "nobody else needs it"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (problem,) = problems(config(tmp_path / "file" / "board"), 1, "cpu")
    assert problem.startswith("train.tensorboard_dir = ") and "cannot be written (Not a directory)" in problem
    assert problems(config(tmp_path / "board"), 1, "cpu") == [] and not (tmp_path / "board").exists()
