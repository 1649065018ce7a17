"""The folder of a run: locked while it is written, never written over unasked, its configuration beside the metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from labkit.config import ConfigError, RunConfig, presets
from labkit.train import pretrain
from labkit.train.reporting.earlier_run import CONFIG, WRITTEN, cut_after
from labkit.train.reporting.output_folder import STATE, RunFolder, folder_problem


def config(folder: Path, **changes: object) -> RunConfig:
    return presets.tiny().override({"output_dir": str(folder), "steps": 1, "global_batch_size": 1, **changes})


def claimed(folder: Path, **changes: object) -> RunFolder:
    run = RunFolder(config(folder, **changes), 1)
    run.claim()
    return run


def problem(folder: Path, **changes: object) -> str:
    return folder_problem(config(folder, **changes))


def test_a_run_leaves_its_configuration_and_its_end(tmp_path: Path) -> None:
    asked = config(tmp_path / "new" / "run", overwrite=True)
    pretrain(asked)
    assert json.loads((tmp_path / "new/run" / STATE).read_text())["state"] == "finished"
    again = RunConfig.from_yaml(tmp_path / "new/run" / CONFIG)
    assert again == asked.override({"overwrite": False}), "a repeat must not write over the original"
    assert "holds a finished run" in folder_problem(again)


def test_a_run_that_raises_is_unfinished(tmp_path: Path) -> None:
    def forward_step(*_: object) -> None:
        raise KeyError("in the first step")

    with pytest.raises(KeyError):
        pretrain(config(tmp_path), forward_step=forward_step)  # type: ignore[arg-type]
    assert "holds a run that did not finish" in problem(tmp_path) and problem(tmp_path, overwrite=True) == ""
    with pytest.raises(ConfigError, match="did not finish"):
        pretrain(config(tmp_path))


def test_two_runs_of_one_process(tmp_path: Path) -> None:
    """The second is refused, also with --overwrite, and the first does not notice."""
    first = claimed(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("of the first")
    for overwrite in (False, True):
        assert f"process {os.getpid()} on " in problem(tmp_path, overwrite=overwrite)
        with pytest.raises(ConfigError, match="is writing there; name another folder"):
            claimed(tmp_path, overwrite=overwrite)
    assert (tmp_path / "metrics.jsonl").read_text() == "of the first"
    first.finish()
    assert "holds a finished run" in problem(tmp_path)
    claimed(tmp_path, overwrite=True).let_go()


@pytest.mark.parametrize("name", [STATE, CONFIG, f".{CONFIG}.partial", *WRITTEN])
def test_a_folder_or_pipe_in_the_place_of_a_file_is_seen_before_a_run_starts(tmp_path: Path, name: str) -> None:
    for make in (os.mkdir, os.mkfifo):
        folder = tmp_path / make.__name__
        folder.mkdir()
        make(folder / name)
        assert f": {name} in it is no file, and a run writes one there; move it" in problem(folder, overwrite=True)


@pytest.mark.parametrize("path", ["a/b", "missing/../b", "a/../../b/"])
def test_a_look_leaves_no_folder_behind(tmp_path: Path, path: str) -> None:
    (tmp_path / "here").mkdir()
    assert problem(tmp_path / "here" / path) == "" and os.listdir(tmp_path) == ["here"]
    assert os.listdir(tmp_path / "here") == []


def test_a_look_does_not_turn_a_run_away(tmp_path: Path) -> None:
    """While a launch looks at the folder it shares the lock for a moment; a run waits that long."""
    claimed(tmp_path).finish()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            problem(tmp_path)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(20):
            claimed(tmp_path, overwrite=True).finish()
    finally:
        stop.set()
        looking.join()


CLAIM_AND_DIE = """
import os, sys
from labkit.config import presets
from labkit.train.reporting.output_folder import RunFolder

RunFolder(presets.tiny().override({"output_dir": sys.argv[1]}), 1).claim()
os._exit(9)
"""


def test_a_killed_run_leaves_no_lock(tmp_path: Path) -> None:
    died = subprocess.run([sys.executable, "-c", CLAIM_AND_DIE, str(tmp_path)], timeout=120, check=False)
    assert died.returncode == 9
    assert "holds a run that did not finish, and no checkpoint of it is resumed" in problem(tmp_path)
    claimed(tmp_path, overwrite=True).finish()


SAVES = {"checkpoint.dir": "saved", "interval": 10, "steps": 50}
BEGINS_AGAIN: dict[str, tuple[dict[str, object], int, bool]] = {
    "the same": ({}, 9, True),
    "killed in the first save": ({}, 10, True),
    "killed before the first line": ({}, 0, True),
    "behind the first save": ({}, 11, False),
    "asynchronous, before the second save": ({"checkpoint.asynchronous": True}, 20, True),
    "asynchronous, behind the second save": ({"checkpoint.asynchronous": True}, 21, False),
    "without checkpoints": ({"checkpoint.dir": None, "interval": 100}, 9, False),
}
"""Name -> (fields of the run, steps that it had made when it was killed, whether it may begin again)."""


@pytest.mark.parametrize("name", BEGINS_AGAIN)
def test_a_run_that_had_no_checkpoint_yet_may_begin_again(tmp_path: Path, name: str) -> None:
    changes, steps, may = BEGINS_AGAIN[name]
    changes = SAVES | changes
    claimed(tmp_path, **changes).let_go()
    lines = "".join(f'{{"step": {step}}}\n' for step in range(1, steps + 1)) + '{"step": 7'
    (tmp_path / "metrics.jsonl").write_text(lines)
    refused = "" if may else "holds a run that did not finish, and no checkpoint of it is resumed"
    launched = changes | {"allow_oversubscription": True, "record_events": False, "distributed_timeout_minutes": 3.0}
    assert problem(tmp_path, **changes) == problem(tmp_path, **launched)
    assert problem(tmp_path, **changes).startswith(f"train.output_dir = {str(tmp_path)!r}: {refused}") or may
    assert "did not finish" in problem(tmp_path, **changes, lr=0.5), "another configuration"
    run = RunFolder(config(tmp_path, **changes), 1)
    if not may:
        with pytest.raises(ConfigError, match=refused.replace("(", r"\(")):
            run.claim()
        assert (tmp_path / "metrics.jsonl").read_text() == lines
        return
    assert run.claim() == f"{tmp_path}: the run had ended before its first checkpoint, so it begins again"
    assert not (tmp_path / "metrics.jsonl").exists()
    run.finish()
    assert "holds a finished run" in problem(tmp_path, **changes)


def test_a_run_that_was_killed_ahead_of_its_configuration_may_begin_again(tmp_path: Path) -> None:
    claimed(tmp_path, **SAVES).let_go()
    (tmp_path / CONFIG).unlink()
    assert problem(tmp_path, **SAVES) == "" and "did not finish" in problem(tmp_path)


@pytest.mark.parametrize("end", [b"", b'{"step": 3}', b'{"step": 5}\n', b"[]\n", b'{"st', b"\0\0\n"], ids=repr)
def test_a_cut_leaves_whole_lines_alone(tmp_path: Path, end: bytes) -> None:
    """A kill may leave a line without its end, also one that is JSON; the next line would go on in it."""
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"kind": "timer"}\n{"step": 3}\n' + end)
    cut_after(tmp_path / "metrics.jsonl", 4)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n{"kind": "timer"}\n{"step": 3}\n'


def test_a_disk_without_room_for_the_configuration_is_told_in_a_sentence(tmp_path: Path) -> None:
    claimed(tmp_path, seed=7).let_go()
    (tmp_path / f".{CONFIG}.partial").mkdir()  # stands for any error of the file system
    with pytest.raises(ConfigError, match=r"train\.output_dir = .*: cannot be written \(Is a directory\)"):
        claimed(tmp_path, overwrite=True)
    (tmp_path / f".{CONFIG}.partial").rmdir()
    assert RunConfig.from_yaml(tmp_path / CONFIG).train.seed == 7 and "did not finish" in problem(tmp_path)


def test_overwrite_touches_labkits_files_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert problem(tmp_path) == "", "other people's files are no run"
    claimed(tmp_path).finish()
    for name in WRITTEN:
        (tmp_path / name).write_text("old")
    claimed(tmp_path, overwrite=True, seed=7).let_go()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["notes.txt", STATE, CONFIG])
    assert RunConfig.from_yaml(tmp_path / CONFIG).train.seed == 7


def test_a_configuration_of_ones_own_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text("train: {steps: 3}")
    for overwrite in (False, True):
        assert "its config.yaml was not written by a run" in problem(tmp_path, overwrite=overwrite)
    assert (tmp_path / CONFIG).read_text() == "train: {steps: 3}"


@pytest.mark.parametrize("name", WRITTEN)
def test_files_of_an_older_version_count_as_a_run(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    assert "did not finish" in problem(tmp_path) and problem(tmp_path, overwrite=True) == ""


@pytest.mark.parametrize("text", ["{", '{"state": "fin', "null", "[]"])
def test_half_a_state_is_a_run_that_was_killed(tmp_path: Path, text: str) -> None:
    (tmp_path / STATE).write_text(text)
    assert "did not finish" in problem(tmp_path)


def test_looking_leaves_no_trace(tmp_path: Path) -> None:
    assert problem(tmp_path / "a" / "b") == "" and list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert "cannot be written (Not a directory)" in problem(tmp_path / "file" / "run")
    with pytest.raises(ConfigError, match="cannot be written"):
        claimed(tmp_path / "file" / "run")


def test_a_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    claimed(tmp_path).finish()
    assert "run.json cannot be locked (No locks available)" in capsys.readouterr().err
