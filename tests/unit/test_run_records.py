"""A run's folder read back while it is written: lines that are cut, half written or not finite; states; folders."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
from run_files import append, begun

from labkit.config import presets
from labkit.train import pretrain
from labkit.train.reporting.run_records import GRACE, OVERDUE, RunRecords, names_of, runs_in
from labkit.train.run_folder.contents import CONFIG, METRICS, STATE

SMALL = {"layers": 1, "hidden": 16, "heads": 2, "seq_length": 8, "global_batch_size": 2}


def line(step: int, loss: float, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": loss, "step_time": 2.0, **more}


def read(folder: Path) -> RunRecords:
    run = RunRecords(folder)
    run.refresh()
    return run


def aged(folder: Path, seconds: float) -> None:
    for file in folder.iterdir():
        os.utime(file, (time.time() - seconds,) * 2)


def test_a_real_run_is_read_as_it_was_trained(tmp_path: Path) -> None:
    config = presets.tiny().override({**SMALL, "steps": 3, "eval_steps": 1, "eval_interval": 2})
    result = pretrain(config.override({"output_dir": str(tmp_path)}))
    run = read(tmp_path)
    assert run.state == "finished" and run.over and run.layout == "1 rank"
    assert run.series["loss"] == list(enumerate(result.losses, start=1))
    for name in ("learning_rate", "grad_norm", "tokens_per_second", "validation_loss", "test_loss"):
        assert run.series[name] == result.series(name) != []
    values, last = run.values(), [record for record in result.metrics if "loss" in record][-1]
    assert (values["step"], values["steps"], "eta" in values) == (3, 3, False)
    assert values["loss"] == last["loss"] and values["validation_loss"] == run.series["validation_loss"][-1][1]


def test_the_last_line_counts_once_it_ends(tmp_path: Path) -> None:
    whole = json.dumps(line(1, 5.0)) + "\n" + json.dumps(line(2, 4.0)) + "\n"
    run = RunRecords(tmp_path)
    for cut in range(len(whole) + 1):
        (tmp_path / METRICS).write_text(whole[:cut])
        run.refresh()
        assert len(run.series.get("loss", ())) == whole[:cut].count("\n")
    assert run.series["loss"] == [(1, 5.0), (2, 4.0)] and not run.refresh()


@pytest.mark.parametrize("regrown", [0, 1, 2, 5])
def test_a_resumed_run_cuts_its_file_and_writes_on(tmp_path: Path, regrown: int) -> None:
    """In place, shorter or longer than what was read, and with other losses; nothing of the lost steps stays."""
    append(tmp_path, *(line(step, 10.0 - step) for step in range(1, 5)), {"step": 4, "validation_loss": 7.0})
    run = read(tmp_path)
    assert len(run.series["loss"]) == 4 and run.values()["validation_loss"] == 7.0
    kept = "".join((tmp_path / METRICS).read_text().splitlines(keepends=True)[:2])
    with (tmp_path / METRICS).open("r+") as file:
        file.truncate(len(kept))
        file.seek(len(kept))
        file.writelines(json.dumps(line(step, 20.0 - step)) + "\n" for step in range(3, 3 + regrown))
    assert run.refresh()
    expected = [(1, 9.0), (2, 8.0), *((step, 20.0 - step) for step in range(3, 3 + regrown))]
    assert run.series["loss"] == expected and "validation_loss" not in run.values()


def test_another_run_in_the_same_folder_and_no_file_at_all(tmp_path: Path) -> None:
    append(tmp_path, line(1, 5.0), line(2, 4.0))
    run = read(tmp_path)
    (tmp_path / METRICS).unlink()
    run.refresh()
    assert run.series == {} and run.values() == {}
    append(tmp_path, line(1, 3.0))
    run.refresh()
    assert run.series["loss"] == [(1, 3.0)]


def test_steps_that_go_back_in_one_file_replace_those_before(tmp_path: Path) -> None:
    append(tmp_path, line(1, 5.0), line(2, 4.0), {"step": 2, "validation_loss": 4.5}, line(3, 3.0), line(2, 4.1))
    run = read(tmp_path)
    assert run.series["loss"] == [(1, 5.0), (2, 4.1)] and run.series["validation_loss"] == []
    assert run.values()["step"] == 2 and run.values()["loss"] == 4.1


def test_numbers_that_are_not_finite_are_kept_as_they_were(tmp_path: Path) -> None:
    append(tmp_path, line(1, 5.0, grad_norm=1.0), line(2, math.nan, grad_norm=math.inf), line(3, 4.0, grad_norm=None))
    run = read(tmp_path)
    assert [step for step, _ in run.series["loss"]] == [1, 2, 3] and math.isnan(run.series["loss"][1][1])
    assert run.series["grad_norm"] == [(1, 1.0), (2, math.inf)]


def test_what_is_no_record_is_left_out(tmp_path: Path) -> None:
    records = ['{"step": 1, "lo', "[]", "null", '{"loss": 1.0}', '{"step": "2", "loss": 1.0}', "\xff", "", "{}"]
    (tmp_path / METRICS).write_text("\n".join([*records, json.dumps(line(3, 2.0)), ""]), encoding="latin-1")
    assert read(tmp_path).series["loss"] == [(3, 2.0)]


def test_the_states_of_a_run(tmp_path: Path) -> None:
    """By the lock of a run in this process, as another process sees it."""
    folder = begun(tmp_path, tp=2)
    (tmp_path / METRICS).unlink()
    run = read(tmp_path)
    assert (run.state, run.over, run.layout) == ("starting", False, "2 ranks, tp 2")
    aged(tmp_path, GRACE + 1)
    assert not run.refresh() and run.state == "starting", "a large model takes minutes to build"
    append(tmp_path, line(1, 5.0), line(2, 4.0))
    assert run.refresh() and run.state == "running" and run.values()["eta"] == 7 * 2.0
    aged(tmp_path, GRACE + 1)
    assert run.refresh() and run.state == "stale" and not run.over and "eta" not in run.values()
    append(tmp_path, line(3, 4.0, step_time=GRACE))
    run.refresh()
    aged(tmp_path, GRACE * OVERDUE / 2)
    run.refresh()
    assert run.state == "running", "a line is due after ten steps of a minute"
    folder.release()
    run.refresh()
    assert run.state == run.words == "unfinished" and run.over
    (tmp_path / "checkpoints" / "step_00000003").mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest").write_text("step_00000003")
    assert run.words == "stopped at step 3 of 9, can be resumed"
    aged(tmp_path, GRACE / 2)
    assert not run.over, "torchrun may start it again"
    (tmp_path / STATE).write_text('{"state": "finished"}')
    assert run.refresh() and run.state == "finished" and run.over


def test_metrics_alone_have_a_state_by_their_age(tmp_path: Path) -> None:
    append(tmp_path, line(1, 5.0))
    run = read(tmp_path)
    assert (run.state, run.over, run.layout) == ("running", False, "") and "steps" not in run.values()
    aged(tmp_path, GRACE + 1)
    run.refresh()
    assert run.state == "stale" and run.over


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    begun(tmp_path, line(1, 5.0))
    monkeypatch.setattr("fcntl.flock", no_locks)
    assert read(tmp_path).state == "running"
    aged(tmp_path, GRACE + 1)
    run = read(tmp_path)
    assert run.state == "stale" and run.over


@pytest.mark.parametrize("text", ["", "train: {steps: [1]}", "nonsense: 1", "\t"])
def test_a_configuration_that_cannot_be_read_hides_no_run(tmp_path: Path, text: str) -> None:
    append(tmp_path, line(1, 5.0))
    (tmp_path / CONFIG).write_text(text)
    assert "steps" not in read(tmp_path).values() and read(tmp_path).series["loss"] == [(1, 5.0)]


def test_folders_of_runs_and_folders_of_such_folders(tmp_path: Path) -> None:
    for name in ("b", "a", "deep/a"):
        append(tmp_path / name, line(1, 5.0))
    (tmp_path / "notes").mkdir()
    started = begun(tmp_path / "c")
    (tmp_path / "c" / METRICS).unlink()
    inside = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    assert runs_in([tmp_path]) == (inside, [])
    deep = tmp_path / "deep" / "a"
    assert runs_in([tmp_path / "b", str(tmp_path), tmp_path / "deep"]) == ([inside[1], inside[0], inside[2], deep], [])
    assert names_of([*inside, deep]) == [str(tmp_path / "a"), "b", "c", str(deep)]
    started.release()
    (tmp_path / "file").write_text("")
    for folder, rule in {
        "c": "ended before the first line of metrics.jsonl",
        "notes": "holds no metrics.jsonl, nor does a folder in it; give the train.output_dir",
        "gone": "no such folder; give the train.output_dir",
        "file": "is not a folder; give the train.output_dir",
    }.items():
        found, [problem] = runs_in([tmp_path / folder])
        assert found == [] and problem.startswith(f"{tmp_path / folder}: ") and rule in problem
