"""Faults at one step of a save: the process ends, or the system refuses, before the n-th call that changes the disk.

`watched_run` runs inside a rank. From the beginning of one save on it numbers every call by which Python or safetensors
changes a file or a folder. So each of them can be the last one of the process.

A kill leaves what was written in the system's memory, from where it still reaches the disk. A power cut does not: with
`torn` every file that was written and not yet brought to the disk (fsync) is cut to half its length before the kill.
"""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from survival_runs import Course

from labkit.config import RunConfig
from labkit.launch import report_progress, run
from labkit.train import pretrain
from labkit.train.checkpoint import shard_files
from labkit.train.checkpoint.checkpoints import Checkpoints
from labkit.train.checkpoint.manifest import CheckpointError

CALLS = [
    *((os, name) for name in ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir")),
    (io, "open"),
    (shard_files, "save_file"),
]
"""Functions that change the disk, as the code of a save calls them; `open` counts where it opens for writing."""
HELD = 20.0
"""Seconds for which a run that is killed from outside stands still after its save."""


@dataclass(frozen=True)
class SaveFault:
    """A fault in the save after step `step`."""

    step: int
    rank: int = 0
    at: int | None = None
    """Number of the call before which the fault strikes; None only lists the calls."""
    torn: bool = False
    """Files that were not brought to the disk lose their second half."""
    errno: int | None = None
    """The call fails with this error, and so do all after it that do not remove something; None kills the process."""
    prepare: Callable[[], Callable[[], None]] | None = None
    """Called in the rank as the save begins, for faults that the system makes itself. Returns how to undo them."""


@dataclass
class Watched:
    """What happened on one rank."""

    losses: list[float]
    resumed_after: int = 0
    calls: tuple[str, ...] = ()
    """The calls of the save on the rank of the fault."""
    unsynced: tuple[int, ...] = ()
    """Numbers of the calls before which some file was not on the disk yet."""
    error: str = ""
    seconds: float = 0.0
    """From the beginning of the save to its end or to the error."""


class _Watch:
    """Numbers the calls of one save, and lets the fault strike."""

    def __init__(self, fault: SaveFault) -> None:
        self.fault, self.armed, self.begun = fault, False, 0.0
        self.undo: Callable[[], None] = lambda: None
        self.calls: list[str] = []
        self.unsynced: list[int] = []
        self._waiting: dict[tuple[int, int], Path] = {}

    def install(self, *, here: bool) -> None:
        """Watch the saves; `here`: this is the rank of the fault."""
        save = Checkpoints.save

        def begins(checkpoints: Checkpoints, progress: Any, scaler: Any) -> None:
            if progress.step == self.fault.step:
                self.begun, self.armed = time.monotonic(), here
                if here and self.fault.prepare is not None:
                    self.undo = self.fault.prepare()
            save(checkpoints, progress, scaler)

        Checkpoints.save = begins
        if here:
            for module, name in CALLS:
                setattr(module, name, self._watched(name, getattr(module, name)))

    def _watched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            writes = name != "open" or any(sign in _mode(args, named) for sign in "wax+")
            if not self.armed or not writes:
                return original(*args, **named)
            if self._waiting:
                self.unsynced.append(len(self.calls))
            self._strike_before(name)
            self.calls.append(f"{name} {_named(args)}")
            if name == "fsync":
                self._waiting.pop(_identity(os.fstat(args[0])), None)
            done = original(*args, **named)
            if name in ("open", "save_file"):
                path = Path(args[0] if name == "open" else args[1])
                self._waiting[_identity(path.stat())] = path
            return done

        return call

    def _strike_before(self, name: str) -> None:
        number, at = len(self.calls), self.fault.at
        if at is None or number < at:
            return
        if self.fault.errno is not None:
            if number > at and name in ("unlink", "rmdir"):
                return  # removing needs no space
            self.calls.append(f"{name} failed")
            raise OSError(self.fault.errno, os.strerror(self.fault.errno))
        if self.fault.torn:
            for path in self._waiting.values():
                os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)


def watched_run(config: RunConfig, fault: SaveFault) -> Watched:
    """`pretrain` with the fault in it. A save that fails is told, not raised."""
    watch = _Watch(fault)
    watch.install(here=_rank() == fault.rank)
    try:
        result = pretrain(config)
    except CheckpointError as error:
        return Watched([], error=str(error), seconds=time.monotonic() - watch.begun, calls=tuple(watch.calls))
    finally:
        watch.armed = False
        watch.undo()
    return Watched(result.losses, result.resumed_after, tuple(watch.calls), tuple(watch.unsynced))


def calls_of_a_save(course: Course, folder: Path, rank: int = 0) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The calls of the save after step 2 on one rank, and the numbers of those before which a file was not synced."""
    counted = run(watched_run, course.ranks, course.copy(folder), SaveFault(2, rank))
    assert [result.losses for result in counted] == [course.losses[1:]] * course.ranks
    calls, unsynced = counted[rank].calls, counted[rank].unsynced
    end = next(number for number, call in enumerate(calls) if "step_00000003" in call)
    return calls[:end], tuple(number for number in unsynced if number < end)


def announced_run(config: RunConfig, step: int, pids: str, *, hold: bool) -> Watched:
    """`pretrain` that tells the launcher when the save after `step` begins, so that the launcher can kill a rank.

    pids: a folder in which each rank leaves its process id.
    hold: stand still when the save has ended, so that a late kill comes as well. Without it the seconds of the save are
    returned.
    """
    Path(pids, f"rank-{_rank()}").write_text(str(os.getpid()))
    save, commit, times = Checkpoints.save, Checkpoints._commit, [0.0, 0.0]

    def begins(checkpoints: Checkpoints, progress: Any, scaler: Any) -> None:
        if progress.step == step:
            if dist.is_initialized():
                dist.barrier()  # every rank has left its process id
            times[0] = time.monotonic()
            report_progress({"saving": step})
        save(checkpoints, progress, scaler)

    def commits(checkpoints: Checkpoints) -> None:
        commit(checkpoints)
        if checkpoints.last is not None and checkpoints.last.name == f"step_{step:08d}":
            times[1] = time.monotonic()
            time.sleep(HELD if hold else 0.0)

    Checkpoints.save, Checkpoints._commit = begins, commits
    result = pretrain(config)
    return Watched(result.losses, result.resumed_after, seconds=times[1] - times[0])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _mode(args: tuple[Any, ...], named: dict[str, Any]) -> str:
    return str(named.get("mode", args[1] if len(args) > 1 else "r"))


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _named(args: tuple[Any, ...]) -> str:
    """The file of a call, for people."""
    paths = [arg for arg in args if isinstance(arg, str | os.PathLike)]
    if paths:
        return " -> ".join(Path(path).name for path in paths)
    try:
        return Path(os.readlink(f"/proc/self/fd/{args[0]}")).name
    except OSError:
        return str(args[0])
