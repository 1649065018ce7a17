"""The folder of a run: its lock, its state and its configuration. Needs no torch.

    run.json       state of the run; locked by the process that writes the other files
    config.yaml    the resolved configuration: `labkit train --config FOLDER/config.yaml` trains the same again
    metrics.jsonl, scalars.jsonl, events.jsonl    see `report.py`

The lock ends with its process (`train/file_lock.py`), so a killed run leaves none. A killed run leaves the word
`unfinished` in run.json. `earlier_run.py` says when a folder with a run is refused.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import time
from pathlib import Path
from typing import Any

from labkit.config import ConfigError, RunConfig, TrainConfig
from labkit.config.errors import shown
from labkit.output_files import appearing, cannot_be_written, unwritable
from labkit.train import file_lock
from labkit.train.reporting.earlier_run import CONFIG, WRITTEN, begins_again, cut_after, why_they_stay

STATE = "run.json"
_FILES = (STATE, CONFIG, f".{CONFIG}.partial", *WRITTEN)
_PATIENCE = 1.0
"""Seconds for which a run tries to lock its folder: another launch may hold the lock for a moment to look."""


def folder_problem(config: RunConfig, *, continues: bool = False) -> str:
    """Return why a run cannot write into `train.output_dir`, or an empty string. Leaves no file behind.

    continues: the run resumes the run whose files are there.
    """
    if config.train.output_dir is None:
        return ""
    problem = unwritable(Path(config.train.output_dir), _FILES) or _holds(config, continues=continues)
    return _sentence(config.train, problem)


def _sentence(train: TrainConfig, problem: str) -> str:
    return f"train.output_dir = {shown(train.output_dir, 200)}: {problem}" if problem else ""


def _holds(config: RunConfig, *, continues: bool) -> str:
    """Return why this run must not use the files in the folder, or an empty string."""
    state = Path(config.train.output_dir or "") / STATE
    try:
        descriptor = os.open(state, os.O_RDWR)
    except FileNotFoundError:
        return why_they_stay(config, {}, continues=continues)
    except OSError as error:
        return f"{STATE} in it cannot be read ({error.strerror or error}); name another folder"
    try:
        if not file_lock.lock(descriptor, file_lock.SHARED, state):
            return _busy(descriptor)
        return why_they_stay(config, _read(descriptor), continues=continues)
    finally:
        os.close(descriptor)


def _busy(descriptor: int) -> str:
    state = _read(descriptor)
    who = f"process {state['pid']} on {state['host']}" if {"pid", "host"} <= state.keys() else "another run"
    return f"{who} is writing there; name another folder, or wait until that run has ended"


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


class RunFolder:
    """The folder of one run, in the process that writes its files: `claim`, then `finish` or `let_go`."""

    def __init__(self, config: RunConfig, world_size: int, *, continues_after: int | None = None) -> None:
        """world_size: stored with the state, because the configuration does not have it.
        continues_after: the run resumes the run whose files are there, after so many of its steps."""
        assert config.train.output_dir is not None, "without a folder nothing is written"
        self._world_size, self._continues_after = world_size, continues_after
        self._config, self._folder = config, Path(config.train.output_dir)
        self._descriptor = -1

    def claim(self) -> str:
        """Make and lock the folder, remove or cut the files of the run that was there, store the configuration.

        A resumed run keeps the files, and removes only lines of steps that the checkpoint does not have. Return a
        sentence for the user where a run begins again that had no checkpoint yet, else an empty string.

        Raises ConfigError if the folder cannot be written, is locked, or has a run.
        """
        said = ""
        try:
            problem = self._opened()
            if not problem:
                said = self._begin_files()
        except OSError as error:
            problem = cannot_be_written(error)
        if problem:
            self.let_go()
            raise ConfigError([_sentence(self._config.train, problem)])
        return said

    def _opened(self) -> str:
        """Open and lock run.json. Return why that fails or why the present files must stay, or an empty string."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._folder / STATE, os.O_RDWR | os.O_CREAT, 0o666)
        if not file_lock.lock(self._descriptor, file_lock.EXCLUSIVE, self._folder / STATE, patience=_PATIENCE):
            return _busy(self._descriptor)
        return why_they_stay(self._config, _read(self._descriptor), continues=self._continues_after is not None)

    def _begin_files(self) -> str:
        """Cut or remove the files, write state and configuration. Return the sentence of `claim`."""
        continues = self._continues_after is not None
        again = not (continues or self._config.train.overwrite) and begins_again(self._config, _read(self._descriptor))
        for name in WRITTEN:
            if self._continues_after is not None:
                cut_after(self._folder / name, self._continues_after)
            else:
                (self._folder / name).unlink(missing_ok=True)
        self._write("unfinished")
        stored = self._config.replaced({"train.overwrite": False})  # overwrite is for this launch only
        with appearing(self._folder / CONFIG) as draft:
            draft.write_text(stored.to_yaml(), encoding="utf-8")
        return f"{self._folder}: the run had ended before its first checkpoint, so it begins again" if again else ""

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
