"""`train.loggers`: each library's own files have the numbers of scalars.jsonl; a resumed run goes on in its own run."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from labkit.cli import main
from labkit.config import RunConfig, presets
from labkit.launch import forkserver
from labkit.launch import rank_pool as pool
from labkit.train import pretrain
from labkit.train.preflight import problems
from labkit.train.reporting.loggers import Loggers

SMALL = {"layers": 1, "hidden": 16, "heads": 2, "seq_length": 8, "global_batch_size": 2, "steps": 3}
Curves = dict[str, list[tuple[int, float]]]


def config(**changes: object) -> RunConfig:
    return presets.tiny().override(
        {**SMALL, **{name: str(v) if isinstance(v, Path) else v for name, v in changes.items()}}
    )


def expected(folder: Path) -> Curves:
    """The numbers of scalars.jsonl in `folder`; loggers keep single precision at least."""
    found: Curves = {}
    for line in map(json.loads, (folder / "scalars.jsonl").read_text().splitlines()):
        found.setdefault(line["tag"], []).append((line["step"], pytest.approx(line["value"], rel=1e-6)))
    assert {"loss", "grad_norm", "learning_rate", "validation_loss", "timers/step/max"} <= set(found)
    return found


def on_the_board(folder: Path) -> Curves:
    """As TensorBoard shows them: without those that a later start replaced."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


# ---- TensorBoard ----


@pytest.mark.parametrize("field", ["loggers", "tensorboard_dir"])
def test_tensorboard_reads_the_numbers_of_scalars_jsonl_at_their_steps(tmp_path: Path, field: str) -> None:
    board = tmp_path / ("tensorboard" if field == "loggers" else "elsewhere")
    value = ["tensorboard"] if field == "loggers" else board
    pretrain(config(eval_steps=1, output_dir=tmp_path, **{field: value}))
    assert on_the_board(board) == expected(tmp_path)


def test_a_run_that_resumes_hides_the_steps_that_it_takes_again(tmp_path: Path) -> None:
    for first, last, value in ((1, 5, 1.0), (3, 4, 2.0)):
        loggers = Loggers(config(tensorboard_dir=tmp_path), first - 1, continues=first > 1)
        if first > 1:  # an evaluation that the earlier process had not come to
            loggers.write([{"step": first - 1, "tag": "validation_loss", "value": value}])
        for step in range(first, last + 1):
            loggers.write([{"step": step, "tag": "loss", "value": value}])
        loggers.close(failed=False)
    assert on_the_board(tmp_path) == {
        "loss": [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)],
        "validation_loss": [(2, 2.0)],
    }


# ---- wandb and MLflow, where they are installed ----


def of_wandb(file: Path) -> tuple[str, int, Curves]:
    """The run's id, its exit code and its curves in a file that `wandb sync` would send: a log of LevelDB's format."""
    from wandb.proto.wandb_internal_pb2 import Record

    def records() -> Iterator[Any]:
        data, at, read = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            _, size, kind = struct.unpack("<IHB", data[at : at + 7])
            read, at = read + data[at + 7 : at + 7 + size], at + 7 + size
            if kind in (1, 4):  # whole, or the last piece
                yield Record.FromString(read)
                read = b""

    name, code, curves = "", -1, Curves()
    for record in records():
        kind = record.WhichOneof("record_type")
        name = record.run.run_id if kind == "run" else name
        code = record.exit.exit_code if kind == "exit" else code
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for tag in row if kind == "history" else ():
            if tag not in ("_step", "_runtime", "_timestamp"):
                curves.setdefault(tag, []).append((row["_step"], row[tag]))
    return name, code, curves


def test_a_resumed_run_goes_on_in_its_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs the package wandb (pip install wandb)")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for steps in (2, 3):
        pretrain(
            config(steps=steps, output_dir=tmp_path, loggers=["wandb"], eval_steps=1, **{"checkpoint.interval": 1})
        )
    first, second = (of_wandb(file) for file in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")))
    assert first[0] == second[0] == json.loads((tmp_path / "loggers.json").read_text())["wandb"]
    assert first[1] == second[1] == 0
    assert {tag: first[2].get(tag, []) + second[2][tag] for tag in second[2]} == expected(tmp_path)


def test_a_resumed_run_goes_on_in_its_run_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the package mlflow (pip install mlflow)")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    for steps in (2, 3):
        own = {"steps": steps, "output_dir": tmp_path / "run", "loggers": ["mlflow"], "eval_steps": 1}
        pretrain(config(**own, **{"checkpoint.interval": 1}))
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("labkit").experiment_id])
    assert run.info.run_id == json.loads((tmp_path / "run" / "loggers.json").read_text())["mlflow"]
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    curves = {tag: client.get_metric_history(run.info.run_id, tag) for tag in run.data.metrics}
    assert {tag: [(m.step, m.value) for m in curve] for tag, curve in curves.items()} == expected(tmp_path / "run")
    kept = client.download_artifacts(run.info.run_id, "config.yaml", str(tmp_path))
    assert RunConfig.from_yaml(kept).train.global_batch_size == 2

    loggers = Loggers(config(output_dir=tmp_path / "run", loggers=["mlflow"]), 3, continues=True)
    loggers.write([{"step": 4, "tag": "loss", "value": 1.0}])
    loggers.close(failed=True)
    assert client.get_run(run.info.run_id).info.status == "FAILED"


# ---- what cannot be ----


def test_a_run_without_steps_leaves_nothing(tmp_path: Path) -> None:
    Loggers(config(output_dir=tmp_path, loggers=["tensorboard"]), 0, continues=False).close(failed=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_told_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    find_spec = importlib.util.find_spec

    def without(wanted: str, package: str | None = None) -> object:
        return None if wanted == name else find_spec(wanted, package)

    def started(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(importlib.util, "find_spec", without)
    monkeypatch.setattr(forkserver, "ensure_running", started)
    monkeypatch.setattr(pool.LaunchFolder, "__init__", started)
    words = ["train", "--preset", "tiny", "--nproc", "2", "--output-dir", str(tmp_path), "--loggers", name]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert f"the package {name} is not installed; pip install {name}, or leave this out" in err
    assert problems(presets.tiny(), 1, "cpu") == [], "nobody else needs it"


def test_a_logger_that_is_not_set_up_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's store of files has to be asked for by a variable of its own."""
    pytest.importorskip("mlflow", reason="needs the package mlflow (pip install mlflow)")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    (problem,) = problems(config(loggers=["mlflow"]), 1, "cpu")
    assert problem.startswith("train.loggers = ['mlflow']: The filesystem tracking backend")


def test_a_run_without_a_key_of_wandb_is_told_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="needs the package wandb (pip install wandb)")
    wandb.teardown()  # it remembers the mode of a run before
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    (problem,) = problems(config(loggers=["wandb"]), 1, "cpu")
    assert "No API key configured" in problem and problem.endswith("set WANDB_MODE=offline")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (problem,) = problems(config(tensorboard_dir=tmp_path / "file" / "board"), 1, "cpu")
    assert problem.startswith("train.tensorboard_dir = ") and "cannot be written (Not a directory)" in problem
    assert problems(config(tensorboard_dir=tmp_path / "board"), 1, "cpu") == []
    assert not (tmp_path / "board").exists()
