"""Small runs, and what is left of them after they were cut off.

A run of three steps saves after each step and keeps one checkpoint: the hardest case, since every save removes the
checkpoint before it. Dropout is on, so the random states decide the loss as well. Two folders are compared byte by
byte, without labkit's checksums: they hold parameters, moments, buffers and random states.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.config import RunConfig, presets
from labkit.launch import run
from labkit.train import TrainResult, pretrain
from labkit.train.checkpoint.shard_files import Reader
from labkit.train.checkpoint.step_folders import newest_first, step_folder

STEPS = 3
SIZES = {"layers": 2, "hidden": 16, "heads": 4, "seq_length": 8, "global_batch_size": 2}
DROPOUT = dict.fromkeys(("hidden_dropout", "attention_dropout", "embedding_dropout"), 0.1)
TINY = presets.tiny().override({**SIZES, **DROPOUT, "steps": STEPS, "decay_steps": STEPS, "record_events": False})
ZERO = {"optim.distributed_optimizer": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "dp2 zero": (2, ZERO),
}
"""Name -> (ranks, changes of the configuration)."""


def saving(config: RunConfig, folder: Path, **changes: Any) -> RunConfig:
    """`config` with a checkpoint in `folder` after each step, of which one stays."""
    return config.override({"checkpoint.dir": str(folder), "interval": 1, "keep": 1, **changes})


@dataclass(frozen=True)
class Course:
    """What a run does that nobody disturbs, and a folder from which it can be begun again."""

    ranks: int
    config: RunConfig
    losses: list[float]
    """Of all its steps."""
    end: Path
    """Folder of its last checkpoint."""
    begun: Path
    """Checkpoints of the same run, ended after the first step."""

    def copy(self, to: Path) -> RunConfig:
        """A run in the folder `to`, of which one step is done."""
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(self.begun, to)
        return saving(self.config, to)

    def finish(self, config: RunConfig) -> int:
        """Start the run once more, and check that it ends as this one. Return the step after which it went on."""
        results = run(pretrain, self.ranks, config) if self.ranks > 1 else [pretrain(config)]
        after = results[0].resumed_after
        for result in results:
            assert result.losses == self.losses[after:], f"other losses after step {after}"
        folder = Path(config.checkpoint.dir or "")
        assert differing_files(self.end, folder / self.end.name) == []
        assert sorted(path.name for path in folder.iterdir()) == [".lock", "latest", self.end.name]
        return after


def train(config: RunConfig, **arguments: Any) -> TrainResult:
    """`pretrain`, which begins with a certain state of Python's generator: each process has another by itself.

    A run that resumes must find that state in its checkpoint.
    """
    if not newest_first(Path(config.checkpoint.dir or "")):
        random.seed(7)
    return pretrain(config, **arguments)


def undisturbed(folder: Path, ranks: int, config: RunConfig) -> Course:
    """Run `config` to its end, and once more only for its first step."""
    steps, whole = config.train.steps, saving(config, folder / "whole")
    results = run(train, ranks, whole)
    run(train, ranks, saving(config, folder / "begun", steps=1))
    return Course(ranks, config, results[0].losses, step_folder(folder / "whole", steps), folder / "begun")


def differing_files(one: Path, other: Path) -> list[str]:
    """Names of the files with tensors that differ in a byte, or that one folder has alone."""
    names = {path.name for folder in (one, other) for path in folder.glob("*.safetensors")}
    assert names, f"no tensors in {one} and {other}"
    return sorted(name for name in names if _bytes(one / name) != _bytes(other / name))


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def complete_steps(folder: Path, *, but: str = "") -> list[int]:
    """Steps of the checkpoints that a run would find, the newest first. Each must be complete to the last byte.

    but: name of a checkpoint that is known to be damaged.
    """
    paths = [path for path in newest_first(folder) if path.name != but]
    for path in paths:
        assert Reader(path).problems() == []
    return [int(path.name.removeprefix("step_")) for path in paths]


def alive(pids: list[int]) -> list[int]:
    """Those processes that still are there and have not ended."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(pid)
    return found


def listening(pid: int | str = "self") -> set[int]:
    """Ports on which a process listens, by /proc."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return {port for port, inode in _listeners() if inode in inodes}


def open_ports() -> set[int]:
    """Ports on which any process of this machine listens."""
    return {port for port, _ in _listeners()}


def _listeners() -> Iterator[tuple[int, str]]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if Path(table).exists():
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    yield int(fields[1].rpartition(":")[2], 16), fields[9]
