"""The folder of a run, read back while the run still writes it. Needs no torch.

Only the files count. A run that resumes cuts metrics.jsonl at its checkpoint and appends to it, so `RunRecords`
compares the file with the last line that it read. If that line is gone, the file is read from its start. The last line
may be half written, so it counts only once it ends. A step below the one before it replaces what the file had from that
step on.

    finished     the run marked run.json at its end
    starting     a process holds the folder's lock, and there is no line yet
    running      a process holds the lock
    stale        the same, but the next line is long overdue
    unfinished   nobody holds the lock: the run failed, or was stopped or killed

Without a lock, or on a file system without locks, the age of the files decides between running and stale.
"""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import IO, Any, Literal

from labkit.config import ConfigError
from labkit.config.axis_sizes import sizes_in_words
from labkit.config.errors import counted
from labkit.train.checkpoint.manifest import CheckpointError
from labkit.train.checkpoint.step_folders import latest_step
from labkit.train.reporting.progress_line import FIELDS
from labkit.train.run_folder.contents import CONFIG, METRICS, STATE, checkpoints_in
from labkit.train.run_folder.lock import is_locked

State = Literal["starting", "running", "stale", "unfinished", "finished"]
GRACE = 60.0
"""Seconds without a new line after which a run may count as stale, or as over if nobody holds its lock."""
OVERDUE = 10
"""A run is stale if its next line takes this many times as long as the last ones."""
_RECENT = 20
"""Lines that are averaged to predict the time left."""


class RunRecords:
    """One run: `refresh` reads what is new, the attributes have it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state: State = "starting"
        self._locked: bool | None = None
        self._forget()

    def _forget(self) -> None:
        """Begin with an empty file, perhaps of another run."""
        self.series: dict[str, list[tuple[int, float]]] = {}
        """Name in metrics.jsonl -> (step, value) in the order of steps; NaN or infinite where the run had that."""
        self._config: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._step, self._offset, self._tail = 0, 0, b""

    # ---- what the run has done ----

    def refresh(self) -> bool:
        """Read what is new. Return True if there are new lines, or if the state has changed."""
        before = self.state, self._offset, self._tail
        words, self._locked = self._words(), is_locked(self.folder)  # before the lines: once it is over, these are all
        self._read_lines()
        if not self._config:
            self._read_config()
        self.state = self._state_of(words)
        return (self.state, self._offset, self._tail) != before

    def values(self) -> dict[str, Any]:
        """Return the values of the last step as `progress_line` shows them, with the number of steps of the run, the
        last validation and the time left. Empty before the first line."""
        if not self._last:
            return {}
        values = {"step": self._step, **self._last}
        for name in ("validation_loss", "validation_perplexity", "test_loss", "test_perplexity"):
            if points := self.series.get(name):
                values[name] = points[-1][1]
        steps, times = self._config.get("train.steps"), self.series.get("step_time", [])[-_RECENT:]
        if steps is not None:
            values["steps"] = steps
            if self.state == "running" and times:
                values["eta"] = (steps - self._step) * fmean(seconds for _, seconds in times)
        return values

    @property
    def layout(self) -> str:
        """Ranks and axes, such as `4 ranks, tp 2 x pp 2`; empty if the files do not have them."""
        ranks = self._words().get("world_size")
        named = "" if ranks is None else counted(ranks, "rank")
        axes = {axis: self._config.get(f"parallel.{axis}", 1) for axis in ("tp", "cp", "ep", "pp")}
        sizes = sizes_in_words({axis: size for axis, size in axes.items() if size != 1})
        return ", ".join(filter(None, [named, sizes]))

    @property
    def words(self) -> str:
        """The state, or for an unfinished run with a checkpoint how far it got and that it can be resumed."""
        steps, saved = self._config.get("train.steps"), None
        with suppress(CheckpointError):  # its folder cannot be read
            saved = latest_step(checkpoints_in(self.folder)) if self.state == "unfinished" else None
        if saved is None or steps is None:
            return self.state
        after = "" if saved == self._step else f" after step {saved}"
        return f"stopped at step {self._step} of {steps}, can be resumed{after}"

    @property
    def over(self) -> bool:
        """True if no more lines will come: the run is finished, or nobody writes there any more."""
        left = self._locked is False and self.age() > GRACE
        return self.state == "finished" or left or (self._locked is None and self.state == "stale")

    # ---- the lines ----

    def _read_lines(self) -> None:
        try:
            with (self.folder / METRICS).open("rb") as file:
                if not self._continues(file):
                    self._forget()
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except OSError:  # removed, or not yet there
            self._forget()
            return
        if newline:
            lines = whole.split(b"\n")
            for line in lines:
                self._take(line)
            self._offset += len(whole) + 1
            self._tail = lines[-1] + b"\n"

    def _continues(self, file: IO[bytes]) -> bool:
        """Return True if the file still has the last line that was read, at its place."""
        file.seek(self._offset - len(self._tail))
        return file.read(len(self._tail)) == self._tail

    def _take(self, line: bytes) -> None:
        """Take in one line. A line that is not a record is skipped, because a killed run may have left half of one."""
        try:
            record = json.loads(line)
        except ValueError:
            return
        if not isinstance(record, dict) or not isinstance(step := record.get("step"), int):
            return
        if step < self._step:
            self._go_back_to(step)
        self._step = step
        for name, text in _texts(record.get("not_finite")):
            record[name] = float(text)
        numbers = {name: value for name in FIELDS if isinstance(value := record.get(name), int | float)}
        for name, value in numbers.items():
            points = self.series.setdefault(name, [])
            if points and points[-1][0] == step:
                points.pop()
            points.append((step, value))
        if "loss" in record:
            self._last = numbers

    def _go_back_to(self, step: int) -> None:
        """Drop the points from `step` on."""
        for points in self.series.values():
            del points[bisect_left(points, step, key=lambda point: point[0]) :]

    # ---- the state ----

    def _state_of(self, words: dict[str, Any]) -> State:
        if words.get("state") == "finished":
            return "finished"
        if self._locked is False:
            return "unfinished"
        if self._locked and not self.series:
            return "starting"
        return "stale" if self.age() > max(GRACE, OVERDUE * self._seconds_a_line()) else "running"

    def _words(self) -> dict[str, Any]:
        """Return the contents of run.json; empty if there is none, or half of one."""
        try:
            words = json.loads((self.folder / STATE).read_bytes())
        except (OSError, ValueError):
            return {}
        return words if isinstance(words, dict) else {}

    def age(self) -> float:
        """Return the seconds since the run last wrote one of its files."""
        files = (self.folder / METRICS, self.folder / STATE)
        return min((time.time() - file.stat().st_mtime for file in files if file.exists()), default=float("inf"))

    def _seconds_a_line(self) -> float:
        """Return the seconds that the steps of the last line took."""
        times = self.series.get("step_time", [])[-2:]
        if not times:
            return 0.0
        first = times[0][0] if len(times) > 1 else 0
        return (times[-1][0] - first) * times[-1][1]

    def _read_config(self) -> None:
        with suppress(ConfigError):  # not written yet, or by another version
            from labkit.config import yaml_text  # training itself does without PyYAML

            self._config, _ = yaml_text.read(self.folder / CONFIG)


def _texts(not_finite: Any) -> list[tuple[str, str]]:
    """Return (name, `nan`, `inf` or `-inf`) of the numbers that JSON cannot write (`metrics.strict`)."""
    if not isinstance(not_finite, dict):
        return []
    return [(name, text) for name, text in not_finite.items() if text in ("nan", "inf", "-inf")]


# ---- folders ----


def runs_in(folders: Sequence[str | os.PathLike[str]]) -> tuple[list[Path], list[str]]:
    """Return the folders of runs, and a sentence for each given folder that has none.

    folders: folders of runs (`train.output_dir`), or folders whose subfolders are those of runs.
    """
    found, problems = list[Path](), list[str]()
    for folder in map(Path, folders):
        if not folder.is_dir():
            kind = "is not a folder" if folder.exists() else "no such folder"
            problems.append(f"{folder}: {kind}; give the train.output_dir of a run, or a parent folder")
        elif _is_run(folder):
            found.append(folder)
        elif inside := sorted(child for child in folder.iterdir() if _is_run(child)):
            found += inside
        elif (folder / STATE).exists():
            problems.append(f"{folder}: its run ended before the first line of {METRICS}; there is nothing to show")
        else:
            problems.append(
                f"{folder}: holds no {METRICS}, nor does a folder in it; give the train.output_dir of a run"
            )
    return list(dict.fromkeys(found)), problems


def _is_run(folder: Path) -> bool:
    """Return True if the folder has metrics, or a run that is starting."""
    state = folder / STATE
    return (folder / METRICS).is_file() or (state.is_file() and is_locked(folder) is not False)


def pause(seconds: float) -> None:
    """Sleep between two looks at the runs, at most half a second at once.

    A signal that arrives just before a sleep begins is served only after it (CPython). In one long sleep Ctrl-C would
    now and then seem to do nothing.
    """
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.5))


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return a short name of each folder: its last part, or the whole path where two end alike."""
    ends = [folder.resolve().name for folder in folders]
    return [end if ends.count(end) == 1 else str(folder) for folder, end in zip(folders, ends, strict=True)]
