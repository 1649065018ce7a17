"""Cores, memory and libraries of this machine, as far as this process may use them. Nothing but the question for
Transformer Engine needs torch.

Memory is the smaller of two numbers: what the kernel could still give to anybody (MemAvailable), and what the control
groups of this process leave, which a container or a batch system may limit far below it. Readings take the root of the
file system, so that a test can lay out another machine.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

CROWDED = 10
"""Ranks for each core from which on a launch warns."""
GIB = 1 << 30
_HOW_TO_GET_TE = "pip install --no-build-isolation 'transformer-engine[pytorch]', or from conda-forge"
"""It is compiled against the torch and CUDA that are installed."""
_ROOT = Path("/")
_NO_LIMIT = 1 << 60
"""Control groups of version 1 write their lack of a limit as a number near 2^63."""


class Memory(NamedTuple):
    """Bytes of host memory."""

    total: int
    """Of the machine, or of the control group where that has less."""
    available: int
    """Bytes that can still be taken without swapping or being killed."""
    limited: bool
    """True where a control group decides what is available."""

    @property
    def words(self) -> str:
        """The name of what holds the limit, for messages."""
        return "the control group of this process" if self.limited else "this machine"


def usable_cores() -> int:
    """Cores this process may run on, which a container or a batch system can restrict."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def crowding(ranks: int) -> str:
    """A warning for `ranks` processes on this machine, or an empty string."""
    cores = usable_cores()
    if ranks <= CROWDED * cores:
        return ""
    return (
        f"labkit: {ranks} ranks share {cores} {'core' if cores == 1 else 'cores'}; they take turns, so expect each "
        f"to wait {ranks // cores} times as long as it computes"
    )


def host_memory(root: Path = _ROOT) -> Memory:
    """Memory that this process and those it starts may take.

    Without /proc (macOS) all of the machine's memory counts as available, since no portable call tells what is free.
    """
    total, available = _machine(root)
    limited = False
    for limit, used in control_groups(root):
        total = min(total, limit)
        if limit - used < available:
            available, limited = max(0, limit - used), True
    return Memory(total, available, limited)


def _machine(root: Path) -> tuple[int, int]:
    """(total, available) bytes of the whole machine."""
    try:
        lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
        kib = {words[0]: int(words[1]) for words in lines if words}
        return kib["MemTotal:"] * 1024, kib["MemAvailable:"] * 1024
    except (OSError, ValueError, KeyError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total


class _Version(NamedTuple):
    """Names of the files of a control group."""

    mount: str
    limit: str
    usage: str
    cache: str
    """Line of memory.stat: file pages that were read once, which the kernel drops first."""


_VERSION_1 = _Version("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Version("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def control_groups(root: Path = _ROOT) -> Iterator[tuple[int, int]]:
    """(limit, used) bytes of each control group around this process that limits memory, from the inside out.

    Used is without the file cache that the kernel drops first. A container may see its own group as the root of the
    mount and still read the host's path in /proc/self/cgroup, so each part of the path that exists is looked at.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        version = _VERSION_1 if controllers else _VERSION_2
        inside = PurePosixPath(path.lstrip("/"))
        for folder in (inside, *inside.parents) if inside.parts else (inside,):
            if found := _limit(root / version.mount / folder, version):
                yield found


def _limit(folder: Path, version: _Version) -> tuple[int, int] | None:
    try:
        limit = int((folder / version.limit).read_text())  # "max" is no number
        used = int((folder / version.usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit >= _NO_LIMIT else (limit, used - int(stat.get(version.cache, 0)))


def free_gpu_memory() -> list[int]:
    """Free bytes of each GPU that torch will see, in its order; empty where nobody can tell.

    Asks the driver through nvidia-smi, because asking through torch would make a CUDA context of half a gigabyte in
    this process. A GPU cut into instances (MIG) is left out: the driver has no number for the part that a rank gets.
    """
    query = ["nvidia-smi", "--query-gpu=index,uuid,mig.mode.current,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
        free = {name: (int(row[3]) << 20) for row in rows for name in row[:2] if row[2] != "Enabled"}
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [row[0] for row in rows] if visible is None else [name.strip() for name in visible.split(",")]
    return [free[name] for name in names] if all(name in free for name in names) else []


def why_no_transformer_engine() -> str | None:
    """None where `transformer_engine.pytorch` can be imported, else a sentence that says what is missing and how to get
    it. Takes an import of torch.

    Never imported without a GPU: its import then raises RuntimeError, not ImportError.
    """
    import torch

    installed = importlib.util.find_spec("transformer_engine") is not None
    if not torch.cuda.is_available():
        gpu = "no GPU is visible" if torch.version.cuda else "this torch is the CPU build"
        there = "is installed, but" if installed else "is not installed, and"
        needs = "it needs an NVIDIA GPU of the Ampere generation or later"
        return f"Transformer Engine {there} {gpu}: {needs}" + ("" if installed else f", and there {_HOW_TO_GET_TE}")
    if not installed:
        return f"Transformer Engine is not installed: {_HOW_TO_GET_TE}"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, RuntimeError, OSError, AssertionError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"Transformer Engine cannot be imported ({reason}): build it for this torch, {_HOW_TO_GET_TE}"
    return None
