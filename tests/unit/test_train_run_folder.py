"""The folder of a run: locked while it is written, never written over unasked, all of a run in it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from labkit.cli import main
from labkit.config import ConfigError, RunConfig, presets
from labkit.train import pretrain
from labkit.train.checkpoint.inventory import checkpoints_at, chosen
from labkit.train.checkpoint.manifest import CheckpointError
from labkit.train.checkpoint.resume import to_try
from labkit.train.reporting.step_lines import cut_after, steps_of
from labkit.train.run_folder.claim import RunFolder, folder_problems
from labkit.train.run_folder.contents import CHECKPOINTS, CONFIG, FILES, LINES, METRICS, STATE
from labkit.train.run_folder.lock import LOCK, is_locked


def config(folder: Path, **changes: object) -> RunConfig:
    return presets.tiny().override({"output_dir": str(folder), "steps": 1, "global_batch_size": 1, **changes})


def claimed(folder: Path, **changes: object) -> RunFolder:
    run = RunFolder(config(folder, **changes), 1)
    run.claim()
    try:
        run.begin()
    except ConfigError:
        run.release()
        raise
    return run


def problem(folder: Path, **changes: object) -> str:
    return "; ".join(folder_problems(config(folder, **changes)))


def test_a_run_leaves_its_configuration_and_its_end(tmp_path: Path) -> None:
    asked = config(tmp_path / "new" / "run", overwrite=True)
    pretrain(asked)
    assert json.loads((tmp_path / "new/run" / STATE).read_text())["state"] == "finished"
    again = RunConfig.from_yaml(tmp_path / "new/run" / CONFIG)
    assert again == asked.override({"overwrite": False}), "a repeat must not write over the original"
    assert "holds a finished run" in folder_problems(again)[0]


def test_everything_of_a_run_is_in_its_folder_and_a_copy_of_it_goes_on(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    asked = config(run, interval=1, keep=1)
    pretrain(asked)
    assert {path.name for path in run.iterdir()} == {LOCK, STATE, CONFIG, *LINES[:2], CHECKPOINTS}
    assert sorted(path.name for path in (run / CHECKPOINTS).iterdir()) == [LOCK, "latest", "step_00000001"]
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert chosen(run, None) == run / CHECKPOINTS / "step_00000001" == checkpoints_at(run)[0]
    shutil.copytree(run, copy)
    assert pretrain(asked.override({"output_dir": str(copy), "steps": 2})).resumed_after == 1
    assert steps_of(copy / METRICS) == [1, 2] and pretrain(asked).losses == []
    begun = asked.override({"output_dir": str(tmp_path / "other"), "checkpoint.load": str(run)})
    assert to_try(begun) == [run / CHECKPOINTS / "step_00000001"] and folder_problems(begun) == []


def test_checkpoints_that_lie_elsewhere_are_found_from_the_folder_of_the_run(tmp_path: Path) -> None:
    run, saved = tmp_path / "run", tmp_path / "saved"
    claimed(run, **{"checkpoint.dir": str(saved)}).finish()
    with pytest.raises(CheckpointError, match="run holds no checkpoint; give the folder of a run"):
        chosen(run, None)
    (saved / "step_00000003").mkdir()
    assert chosen(run, None) == chosen(run, 3) == saved / "step_00000003"
    (run / "step_00000005").mkdir()  # as earlier versions wrote it where both fields named one folder
    assert chosen(run, None) == run / "step_00000005"


def test_a_folder_of_checkpoints_is_locked_by_whatever_field_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labkit.train.run_folder.lock.PATIENCE", 0.1)
    both = claimed(tmp_path / "both", **{"checkpoint.dir": str(tmp_path / "both")})
    inside = claimed(tmp_path / "run", interval=1)
    for folder in (tmp_path / "both", tmp_path / "run" / CHECKPOINTS):
        busy = f"checkpoint.dir = {str(folder)!r}: process {os.getpid()} on "
        assert problem(tmp_path / "other", **{"checkpoint.dir": str(folder)}).startswith(busy)
        with pytest.raises(ConfigError, match="is writing into this folder"):
            claimed(tmp_path / "other", **{"checkpoint.dir": str(folder)})
    both.finish()
    inside.finish()
    claimed(tmp_path / "other", **{"checkpoint.dir": str(tmp_path / "run" / CHECKPOINTS)}).finish()


def test_the_lock_of_an_earlier_version_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was on run.json itself, which named the process."""
    monkeypatch.setattr("labkit.train.run_folder.lock.PATIENCE", 0.1)
    (tmp_path / STATE).write_text('{"state": "unfinished", "pid": 7, "host": "node-1"}\n')
    assert "did not finish" in problem(tmp_path) and is_locked(tmp_path) is False
    with (tmp_path / STATE).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "process 7 on node-1 is writing into this folder" in problem(tmp_path, overwrite=True)
        assert is_locked(tmp_path) is True


def test_a_run_that_raises_is_unfinished(tmp_path: Path) -> None:
    def forward_step(*_: object) -> None:
        raise KeyError("in the first step")

    with pytest.raises(KeyError):
        pretrain(config(tmp_path), forward_step=forward_step)  # type: ignore[arg-type]
    assert "holds a run that did not finish" in problem(tmp_path) and problem(tmp_path, overwrite=True) == ""
    with pytest.raises(ConfigError, match="did not finish"):
        pretrain(config(tmp_path))


def test_two_runs_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused, also with --overwrite, and the first does not notice."""
    monkeypatch.setattr("labkit.train.run_folder.lock.PATIENCE", 0.1)
    first = claimed(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("of the first")
    for overwrite in (False, True):
        assert f"process {os.getpid()} on " in problem(tmp_path, overwrite=overwrite)
        with pytest.raises(ConfigError, match="is writing into this folder; name another"):
            claimed(tmp_path, overwrite=overwrite)
    assert (tmp_path / "metrics.jsonl").read_text() == "of the first"
    first.finish()
    assert "holds a finished run" in problem(tmp_path)
    claimed(tmp_path, overwrite=True).release()


@pytest.mark.parametrize("name", FILES)
def test_a_folder_or_pipe_in_the_place_of_a_file_is_seen_before_a_run_starts(tmp_path: Path, name: str) -> None:
    for make in (os.mkdir, os.mkfifo):
        folder = tmp_path / make.__name__
        folder.mkdir()
        make(folder / name)
        assert f": {name} in it is not a file, and a run writes one there; move it" in problem(folder, overwrite=True)


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
from labkit.train.run_folder.claim import RunFolder

run = RunFolder(presets.tiny().override({"output_dir": sys.argv[1]}), 1)
run.claim()
run.begin()
os._exit(9)
"""


def test_a_killed_run_leaves_no_lock(tmp_path: Path) -> None:
    died = subprocess.run([sys.executable, "-c", CLAIM_AND_DIE, str(tmp_path)], timeout=120, check=False)
    assert died.returncode == 9
    assert "holds a run that did not finish, and no checkpoint of it is resumed" in problem(tmp_path)
    claimed(tmp_path, overwrite=True).finish()


SAVES = {"interval": 10, "steps": 50}
BEGINS_AGAIN: dict[str, tuple[dict[str, object], int, bool]] = {
    "the same": ({}, 9, True),
    "killed in the first save": ({}, 10, True),
    "killed before the first line": ({}, 0, True),
    "behind the first save": ({}, 11, False),
    "asynchronous, before the second save": ({"checkpoint.asynchronous": True}, 20, True),
    "asynchronous, behind the second save": ({"checkpoint.asynchronous": True}, 21, False),
    "without checkpoints": ({"checkpoint.dir": None, "interval": None}, 9, False),
}
"""Name -> (fields of the run, steps that it had made when it was killed, whether it may begin again)."""


@pytest.mark.parametrize("name", BEGINS_AGAIN)
def test_a_run_that_had_no_checkpoint_yet_may_begin_again(tmp_path: Path, name: str) -> None:
    changes, steps, may = BEGINS_AGAIN[name]
    changes = SAVES | changes
    claimed(tmp_path, **changes).release()
    lines = "".join(f'{{"step": {step}}}\n' for step in range(1, steps + 1)) + '{"step": 7'
    (tmp_path / "metrics.jsonl").write_text(lines)
    refused = "" if may else "holds a run that did not finish, and no checkpoint of it is resumed"
    launched = changes | {"allow_oversubscription": True, "record_events": False, "distributed_timeout_minutes": 3.0}
    assert problem(tmp_path, **changes) == problem(tmp_path, **launched)
    assert problem(tmp_path, **changes).startswith(f"train.output_dir = {str(tmp_path)!r}: {refused}") or may
    assert "did not finish" in problem(tmp_path, **changes, lr=0.5), "another configuration"
    run = RunFolder(config(tmp_path, **changes), 1)
    run.claim()
    if not may:
        with pytest.raises(ConfigError, match=refused.replace("(", r"\(")):
            run.begin()
        run.release()
        assert (tmp_path / "metrics.jsonl").read_text() == lines
        return
    assert run.begin() == [f"{tmp_path}: the run had ended before its first checkpoint, so it begins again"]
    assert not (tmp_path / "metrics.jsonl").exists()
    run.finish()
    assert "holds a finished run" in problem(tmp_path, **changes)


def test_a_run_that_was_killed_ahead_of_its_configuration_may_begin_again(tmp_path: Path) -> None:
    claimed(tmp_path, **SAVES).release()
    (tmp_path / CONFIG).unlink()
    assert problem(tmp_path, **SAVES) == "" and "did not finish" in problem(tmp_path)


@pytest.mark.parametrize("end", [b"", b'{"step": 3}', b'{"step": 5}\n', b"[]\n", b'{"st', b"\0\0\n"], ids=repr)
def test_a_cut_leaves_whole_lines_alone(tmp_path: Path, end: bytes) -> None:
    """A kill may leave a line without its end, also one that is JSON; the next line would go on in it."""
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"kind": "timer"}\n{"step": 3}\n' + end)
    cut_after(tmp_path / "metrics.jsonl", 4)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n{"kind": "timer"}\n{"step": 3}\n'


def test_a_disk_without_room_for_the_configuration_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed(tmp_path, seed=7).release()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", full)
        with pytest.raises(ConfigError, match=r"train\.output_dir = .*: cannot be written \(No space left on device\)"):
            claimed(tmp_path, overwrite=True)
    assert RunConfig.from_yaml(tmp_path / CONFIG).train.seed == 7 and "did not finish" in problem(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, CONFIG, STATE]


def test_overwrite_touches_labkits_files_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert problem(tmp_path) == "", "other people's files are no run"
    claimed(tmp_path).finish()
    for name in LINES:
        (tmp_path / name).write_text("old")
    claimed(tmp_path, overwrite=True, seed=7).release()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["notes.txt", LOCK, STATE, CONFIG])
    assert RunConfig.from_yaml(tmp_path / CONFIG).train.seed == 7


def test_a_configuration_of_ones_own_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text("train: {steps: 3}")
    for overwrite in (False, True):
        assert "its config.yaml was not written by a run" in problem(tmp_path, overwrite=overwrite)
    assert (tmp_path / CONFIG).read_text() == "train: {steps: 3}"


@pytest.mark.parametrize("name", LINES)
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
    assert ".lock cannot be locked (No locks available)" in capsys.readouterr().err
