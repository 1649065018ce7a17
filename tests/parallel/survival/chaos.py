"""A thread that does something bad to a run every few seconds, and looks at its memory and descriptors in between."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from damages import flip
from survival_runs import train
from torch import nn

from labkit.config import RunConfig


@dataclass(frozen=True)
class Usage:
    """A process at one moment."""

    memory: float
    """MB of its own (RssAnon)."""
    files: int
    """Open descriptors."""


def usage_of(pid: int) -> Usage | None:
    """None for a process that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return Usage(int(status.partition("RssAnon:")[2].split()[0]) / 1024, len(os.listdir(f"/proc/{pid}/fd")))
    except (OSError, IndexError):
        return None


def noted(config: RunConfig, told: str, pause: float) -> tuple[list[float], int]:
    """`pretrain` whose ranks leave their process ids and pause after each step. Returns losses and where it went on."""
    Path(told, f"rank-{dist.get_rank()}").write_text(str(os.getpid()))
    result = train(config, observer=_Pause(pause))
    return result.losses, result.resumed_after


class _Pause:
    """An observer that waits after each step, where a whole run is too short for faults."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_model(self, groups: Any, chunks: Any, schedule: Any) -> None:
        """Nothing to do."""

    def on_gradients(self, step: int, chunks: list[nn.Module]) -> None:
        """Nothing to do."""

    def on_update(self, step: int, chunks: list[nn.Module]) -> None:
        """Wait."""
        time.sleep(self.seconds)


class Chaos(threading.Thread):
    """Every `period` seconds one fault, each kind in turn, `most` in all. It waits until the run has begun again."""

    def __init__(self, told: Path, checkpoints: Path, *, period: float, most: int) -> None:
        super().__init__(name="chaos", daemon=True)
        self.told, self.checkpoints, self.period, self.most = told, checkpoints, period, most
        self.faults: Counter[str] = Counter()
        self.seen: list[Usage] = []
        """The largest of the ranks at each look."""
        self._chance, self._end, self._struck = random.Random(1), threading.Event(), set[int]()

    def run(self) -> None:
        """Until `stop` is called."""
        kinds: list[Callable[[], None]] = [
            self.kill,
            self.kill_in_a_save,
            self.crash,
            self.damage_and_kill,
            self.stop_a_rank,
        ]
        due = time.monotonic() + self.period
        while not self._end.wait(0.2):
            self.look()
            if not (self.checkpoints / "latest").exists():
                continue
            if self.faults.total() < self.most and time.monotonic() >= due and self._struck.isdisjoint(self.pids()):
                kinds[self.faults.total() % len(kinds)]()
                due = time.monotonic() + self.period

    def stop(self) -> None:
        """End the thread."""
        self._end.set()
        self.join()

    def pids(self) -> list[int]:
        """Process ids of the ranks that live."""
        found = []
        for path in self.told.glob("rank-*"):
            with suppress(OSError, ValueError):
                pid = int(path.read_text())
                if usage_of(pid) is not None:
                    found.append(pid)
        return found

    def look(self) -> None:
        """Note memory and descriptors."""
        found = [usage for pid in self.pids() if (usage := usage_of(pid)) is not None]
        if found:
            self.seen.append(Usage(max(u.memory for u in found), max(u.files for u in found)))

    def _send(self, number: signal.Signals, what: str) -> None:
        pids = self.pids()
        if pids:
            with suppress(ProcessLookupError):
                os.kill(self._chance.choice(pids), number)
                self._struck.update(pids)
                self.faults[what] += 1

    def kill(self) -> None:
        """A rank ends."""
        self._send(signal.SIGKILL, "kill -9")

    def crash(self) -> None:
        """A rank ends as by a bug in C."""
        self._send(signal.SIGSEGV, "crash (SIGSEGV)")

    def stop_a_rank(self) -> None:
        """A rank stands still until the launcher ends all."""
        self._send(signal.SIGSTOP, "standstill (SIGSTOP)")

    def kill_in_a_save(self) -> None:
        """A rank ends while a checkpoint is being written."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not self._end.is_set():
            if any(self.checkpoints.glob(".step_*.partial")):
                self._send(signal.SIGKILL, "kill -9 in a save")
                return
            time.sleep(0.0005)

    def damage_and_kill(self) -> None:
        """One bit of the newest checkpoint changes, if there is one before it, then a rank ends."""
        with suppress(OSError, ValueError):
            *_, _, newest = sorted(self.checkpoints.glob("step_*"))
            shard = self._chance.choice(sorted(newest.glob("*.safetensors")))
            flip(shard, self._chance.randrange(shard.stat().st_size), self._chance.randrange(8))
            self._send(signal.SIGKILL, "a bit flipped, then kill -9")
