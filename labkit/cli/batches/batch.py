"""Run the settings of a batch, and keep what became of each in `batch.json` next to their folders.

Each setting is a `labkit run` of its own, whose words are in `log.txt` of its folder. The record is written anew after
each one, so whatever ends a batch, the same command goes on with what is left and runs again what has failed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.check.chapter_copies import CHAPTERS, chapters_in
from labkit.cli.batches.settings import Setting
from labkit.cli.grading.copies import Copy, score_copy
from labkit.cli.grading.limits import limits
from labkit.cli.output import room, table
from labkit.config.errors import ConfigError
from labkit.launch.machine import usable_cores
from labkit.launch.processes import kill_family, kill_group_at_close
from labkit.output_files import appearing

if TYPE_CHECKING:
    from labkit.viz.figure import Figure

RECORD, LOG = "batch.json", "log.txt"
PATIENCE = 15.0
"""Seconds that an interrupted chapter gets to end its ranks and to store what it showed."""


@dataclass
class Batch:
    """The settings of one folder, and what became of each."""

    out: Path
    settings: Sequence[Setting]
    options: Sequence[str] = ()
    """More words for each `labkit run`."""
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Folder of a setting -> its result, as `batch.json` has them."""

    def run(self) -> bool:
        """Run what is left, and return True if all are done. Raises ConfigError where another batch uses the folder,
        and KeyboardInterrupt that says what is left."""
        self.out.mkdir(parents=True, exist_ok=True)
        with _alone(self.out):
            self._read()
            try:
                self._run_all([setting for setting in self.settings if not self._is_done(setting)])
            except KeyboardInterrupt:
                left = sum(not self._is_done(setting) for setting in self.settings)
                words = f"interrupted; {left} of {len(self.settings)} settings are left, and the same command runs them"
                raise KeyboardInterrupt(words) from None
            finally:
                self._write()
        return all(self._is_done(setting) for setting in self.settings)

    def _read(self) -> None:
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            known = json.loads((self.out / RECORD).read_text(encoding="utf-8"))
            self.results = {result["folder"]: result for result in known["settings"]}

    def _write(self) -> None:
        with appearing(self.out / RECORD) as draft:
            draft.write_text(json.dumps({"settings": self.rows}, indent=1) + "\n", encoding="utf-8")

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The results, those of this command first."""
        mine = [setting.folder for setting in self.settings]
        return [self.results[folder] for folder in dict.fromkeys([*mine, *self.results]) if folder in self.results]

    def _is_done(self, setting: Setting) -> bool:
        known = self.results.get(setting.folder, {})
        there = (self.out / setting.folder / setting.source.name).is_file()
        return there and known.get("state") == "done" and known.get("chapter_sha256") == _sum(setting.source)

    def _run_all(self, waiting: list[Setting]) -> None:
        cores, running, ended = usable_cores(), list[_Running](), len(self.settings) - len(waiting)
        self._score(waiting)
        try:
            while waiting or running:
                busy = sum(each.setting.ranks for each in running)
                if waiting and (not running or busy + waiting[0].ranks <= cores):
                    running.append(_Running(waiting.pop(0), self.out, self.options))
                    continue
                time.sleep(0.05)
                for each in [each for each in running if each.process.poll() is not None]:
                    running.remove(each)
                    ended += 1
                    self._keep(each.setting, each.result())
                    what = self.results[each.setting.folder]
                    words = f"{each.setting.source.stem} {each.setting.words}: {what['state']}, {what['seconds']:.0f} s"
                    print(f"{ended} of {len(self.settings)}: {words}", file=sys.stderr, flush=True)
        finally:
            for each in running:
                each.interrupt()
            for each in running:
                self._keep(each.setting, each.result() | {"state": "interrupted"})

    def _keep(self, setting: Setting, result: dict[str, Any]) -> None:
        known = {"chapter": setting.source.stem, "parameters": setting.parameters, "folder": setting.folder,
                 "chapter_sha256": _sum(setting.source)}  # fmt: skip
        scores = self.results.get(setting.folder, {}).get("scores", {})
        self.results[setting.folder] = known | {"scores": scores} | result
        self._write()

    def _score(self, settings: Sequence[Setting]) -> None:
        """Score the exercises of learners' copies once each, also where a cell will stop the chapter."""
        found: dict[Path, dict[str, str]] = {}
        known = {path.name[:2] for path in chapters_in(CHAPTERS)}
        for setting in settings:
            source = setting.source.resolve()
            if source.is_relative_to(CHAPTERS) or source.name[:2] not in known:
                continue  # labkit's own chapters have nobody's answers
            if source not in found:
                rows = score_copy(Copy("", source.name[:2], source), self.out, 60.0, limits(90, 8 << 30, 1))
                found[source] = {row["exercise"]: row["state"] for row in rows}
            self.results.setdefault(setting.folder, {"folder": setting.folder})["scores"] = found[source]


class _Running:
    """A `labkit run` of one setting, which ends with this process, however that ends."""

    def __init__(self, setting: Setting, out: Path, options: Sequence[str]) -> None:
        self.setting, self.folder = setting, out / setting.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        pairs = [word for name, text in setting.given.items() for word in ("-p", f"{name}={text}")]
        command = [sys.executable, "-m", "labkit.cli", "run", str(setting.source), "--out", str(self.folder)]
        its_end, self._alive_end = os.pipe()
        self._started = time.monotonic()
        with (self.folder / LOG).open("w") as log:
            log.write(f"$ {shlex.join(['labkit', *command[3:], *pairs, *options])}\n")
            log.flush()
            self.process = subprocess.Popen(
                [*command, *pairs, *options], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, pass_fds=(its_end,),
            )  # fmt: skip
        kill_group_at_close(its_end, self.process.pid)
        os.close(its_end)

    def interrupt(self) -> None:
        """Ask it to end as by Ctrl-C."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)

    def result(self) -> dict[str, Any]:
        """Wait for its end, and return state, seconds and the last words of one that failed."""
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            kill_family(self.process.pid)
            code = self.process.wait()
        os.close(self._alive_end)
        log = (self.folder / LOG).read_text(encoding="utf-8", errors="replace")
        why = "" if code == 0 else "\n".join(log.strip().splitlines()[-3:])
        seconds = round(time.monotonic() - self._started, 1)
        return {"state": "failed" if code else "done", "seconds": seconds, "failure": why}


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Let no other batch into this folder meanwhile. Raises ConfigError if one is there."""
    folder = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigError([f"--out {out}: another batch runs in this folder"], source="labkit run") from None
    finally:
        os.close(folder)


def _sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def plot(rows: Sequence[dict[str, Any]], out: Path) -> Figure:
    """Draw seconds and, where chapters wrote a report, its numbers, with a bar for each setting."""
    from labkit.viz import batch_results

    names = [f"{row['chapter'][:2]} {row['folder'].partition('/')[2].replace(',', ' ')}" for row in rows]
    found: list[dict[str, float]] = []
    for row in rows:
        numbers = {"seconds": float(row["seconds"])}
        with suppress(OSError, ValueError):
            report = json.loads((out / row["folder"] / "report.json").read_text(encoding="utf-8"))
            numbers |= {name: value for name, value in report.items() if isinstance(value, int | float)}
        found.append(numbers)
    all_names = dict.fromkeys(name for numbers in found for name in numbers)
    return batch_results(names, {name: [numbers.get(name) for numbers in found] for name in all_names})


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table with a line for each setting, and below it why some failed."""
    cells: list[tuple[str, ...]] = [("chapter", "parameters", "state", "seconds", "solved")]
    for row in rows:
        scores = Counter(row.get("scores", {}).values())
        solved = f"{scores['solved']} of {scores.total()}" if scores else "-"
        given = " ".join(f"{name}={value}" for name, value in row["parameters"].items() if name != "output_dir")
        cells.append((row["chapter"], given or "defaults", row["state"], f"{row['seconds']:.0f}", solved))
    failed = [f"{row['folder']}: {row['failure']}" for row in rows if row["state"] == "failed"]
    return [*table(cells, (3,), room()), *(["", *failed] if failed else [])]
