"""The folder of a run: its lock, its state and its configuration. Needs no torch.

    run.json       state of the run; locked by the process that writes the other files
    config.yaml    the resolved configuration: `labkit train --config FOLDER/config.yaml` trains the same again
    metrics.jsonl, scalars.jsonl, events.jsonl    see `reporting.py`

The lock ends with its process (`train/file_lock.py`), so a killed run leaves none. A killed run leaves the word
`unfinished` in run.json. A folder with a run, finished or not, is refused without `train.overwrite`.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from labkit.config import ConfigError, RunConfig, TrainConfig
from labkit.config.errors import shown
from labkit.train import file_lock

STATE = "run.json"
CONFIG = "config.yaml"
WRITTEN = ("metrics.jsonl", "scalars.jsonl", "events.jsonl")
"""Files that grow during the run."""
_PATIENCE = 1.0
"""Seconds for which a run tries to lock its folder: another launch may hold the lock for a moment to look."""


def folder_problem(train: TrainConfig, *, continues: bool = False) -> str:
    """Return why a run cannot write into `train.output_dir`, or an empty string. Leaves no file behind.

    continues: the run resumes the run whose files are there.
    """
    if train.output_dir is None:
        return ""
    folder = Path(train.output_dir)
    return _sentence(train, unwritable(folder) or _holds(folder, overwrite=train.overwrite or continues))


def _sentence(train: TrainConfig, problem: str) -> str:
    return f"train.output_dir = {shown(train.output_dir, 200)}: {problem}" if problem else ""


def unwritable(folder: Path) -> str:
    """Return why nothing can be written into the folder, or an empty string.

    The function tries, since permissions do not tell (a read-only mount, root). It removes folders that it made.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return _cannot(error)
    finally:
        for path in made:
            with contextlib.suppress(OSError):  # another launch may use it by now
                path.rmdir()
    return ""


def _cannot(error: OSError) -> str:
    return f"cannot be written ({error.strerror or error}); name a folder that can"


def _holds(folder: Path, *, overwrite: bool) -> str:
    """Return why this run must not use the files in the folder, or an empty string."""
    try:
        descriptor = os.open(folder / STATE, os.O_RDWR)
    except FileNotFoundError:
        return _left_over(folder, None, overwrite=overwrite)
    except OSError as error:
        return f"{STATE} in it cannot be read ({error.strerror or error}); name another folder"
    try:
        if not file_lock.lock(descriptor, file_lock.SHARED, folder / STATE):
            return _busy(descriptor)
        return _left_over(folder, descriptor, overwrite=overwrite)
    finally:
        os.close(descriptor)


def _busy(descriptor: int) -> str:
    state = _read(descriptor)
    who = f"process {state['pid']} on {state['host']}" if {"pid", "host"} <= state.keys() else "another run"
    return f"{who} is writing there; name another folder, or wait until that run has ended"


def _left_over(folder: Path, descriptor: int | None, *, overwrite: bool) -> str:
    """Return why the files of an earlier run must stay, or an empty string. No other process writes there now."""
    state = {} if descriptor is None else _read(descriptor)
    if not state and (folder / CONFIG).exists():
        return f"its {CONFIG} was not written by a run, and this run would replace it; move it, or name another folder"
    if overwrite or not (state or any((folder / name).exists() for name in WRITTEN)):
        return ""
    replace = "name another folder, or let --overwrite (train.overwrite) replace its files"
    if state.get("state") == "finished":
        return f"holds a finished run; {replace}"
    return f"holds a run that did not finish, and no checkpoint of it is resumed (checkpoint.dir); {replace}"


def _read(descriptor: int) -> dict[str, Any]:
    """Return the contents of run.json. An incomplete file is from a run that was killed at its start: unfinished."""
    text = os.pread(descriptor, 1 << 16, 0)
    if not text:
        return {}
    try:
        state = json.loads(text)
    except ValueError:
        state = None
    return state if isinstance(state, dict) and state else {"state": "unfinished"}


def cut_after(path: Path, step: int) -> None:
    """Remove the lines of later steps from a file of JSON lines, and a line that was cut off in the middle."""
    if not path.exists():
        return
    kept = 0
    with path.open("rb") as file:
        for line in file:
            try:
                written = json.loads(line).get("step") or 0
            except ValueError:
                break
            if written > step:
                break
            kept += len(line)
    os.truncate(path, kept)


class RunFolder:
    """The folder of one run, in the process that writes its files: `claim`, then `finish` or `let_go`."""

    def __init__(self, config: RunConfig, world_size: int, *, continues_after: int | None = None) -> None:
        """world_size: stored with the state, because the configuration does not have it.
        continues_after: the run resumes the run whose files are there, after so many of its steps."""
        assert config.train.output_dir is not None, "without a folder nothing is written"
        self._world_size, self._continues_after = world_size, continues_after
        self._config, self._folder = config, Path(config.train.output_dir)
        self._descriptor = -1

    def claim(self) -> None:
        """Make and lock the folder, remove files of an earlier run with `train.overwrite`, store the configuration.

        A resumed run keeps the files, and removes only lines of steps that the checkpoint does not have.

        Raises ConfigError if the folder cannot be written, is locked, or has a run.
        """
        if problem := self._opened():
            self.let_go()
            raise ConfigError([_sentence(self._config.train, problem)])
        for name in WRITTEN:
            if self._continues_after is None:
                (self._folder / name).unlink(missing_ok=True)
            else:
                cut_after(self._folder / name, self._continues_after)
        self._write("unfinished")
        again = self._config.replaced({"train.overwrite": False})  # overwrite is for this launch only
        (self._folder / CONFIG).write_text(again.to_yaml(), encoding="utf-8")

    def _opened(self) -> str:
        """Open and lock run.json. Return why that fails or why the present files must stay, or an empty string."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._folder / STATE, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            return _cannot(error)
        if not file_lock.lock(self._descriptor, file_lock.EXCLUSIVE, self._folder / STATE, patience=_PATIENCE):
            return _busy(self._descriptor)
        replaces = self._config.train.overwrite or self._continues_after is not None
        return _left_over(self._folder, self._descriptor, overwrite=replaces)

    def _write(self, state: str) -> None:
        """Write run.json in place: a new file of that name would not have the lock."""
        parent = multiprocessing.parent_process()  # the launching process, which users see
        pid = os.getpid() if parent is None or parent.pid is None else parent.pid
        words = {
            "state": state,
            "world_size": self._world_size,
            "pid": pid,
            "host": socket.gethostname(),
            "written": time.strftime("%FT%T%z"),
        }
        text = (json.dumps(words) + "\n").encode()
        os.pwrite(self._descriptor, text, 0)
        os.ftruncate(self._descriptor, len(text))

    def finish(self) -> None:
        """Mark the run as finished and release the lock."""
        self._write("finished")
        self.let_go()

    def let_go(self) -> None:
        """Release the lock; run.json stays as it is."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
