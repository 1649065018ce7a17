"""Cores, memory and libraries that this process may use. Only `why_no_transformer_engine` needs torch.

Available memory is the smaller of two numbers: the kernel's MemAvailable, and what the limits of this process's control
groups leave. A container or a batch system may set these limits far below the machine's memory. Functions that read
files take the root of the file system, so that a test can describe another machine.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from labkit.config.errors import counted

CROWDED = 10
"""Ranks per core above which a launch warns."""
FILES_PER_RANK = 3
"""Descriptors that the launching process holds for each rank: its connection, its sentinel and its lifeline."""
_FILES_TO_START = 12
"""Descriptors that it needs for a moment to start a rank, and those of the fork server."""
GIB = 1 << 30
MORE_FILES = "raise the limit of the shell (`ulimit -n 4096`), or start fewer ranks"
_HOW_TO_GET_TE = "pip install --no-build-isolation 'transformer-engine[pytorch]', or from conda-forge"
"""pip compiles it against the installed torch and CUDA."""
_ROOT = Path("/")
_NO_LIMIT = 1 << 60
"""Larger limits mean no limit, because control groups of version 1 then write a number near 2^63."""


class Memory(NamedTuple):
    """Bytes of host memory."""

    total: int
    """Memory of the machine, or of the control group if its limit is lower."""
    available: int
    """Bytes that processes can still take without swapping or being killed."""
    limited: bool
    """True if a control group decides `available`."""

    @property
    def words(self) -> str:
        """Who sets the limit, in words for messages."""
        return "the control group of this process" if self.limited else "this machine"


def usable_cores() -> int:
    """Return the number of cores that this process may use. A container or a batch system can restrict them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def crowding(ranks: int) -> str:
    """Return a warning if `ranks` are too many for the cores of this machine, or an empty string."""
    cores = usable_cores()
    if ranks <= CROWDED * cores:
        return ""
    return (
        f"labkit: {ranks} ranks share {counted(cores, 'core')}; they take turns, so expect each "
        f"to wait {ranks // cores} times as long as it computes"
    )


def too_few_files(ranks: int) -> str:
    """Return why this process cannot open the descriptors that it holds for `ranks`, or an empty string."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = FILES_PER_RANK * ranks + _FILES_TO_START
    try:
        left = limit - len(os.listdir("/dev/fd"))
    except OSError:  # not even the list can be opened
        left = 0
    if limit == resource.RLIM_INFINITY or left >= needed:
        return ""
    need = f"{counted(ranks, 'rank')} need{'s' if ranks == 1 else ''}"
    return f"{need} about {needed:,} open files, and {left:,} of {limit:,} are left; {MORE_FILES}"


def host_memory(root: Path = _ROOT) -> Memory:
    """Return the memory that this process and its children may take.

    Without /proc (macOS) all memory of the machine counts as available, since no portable call tells the free part.
    """
    total, available = _machine(root)
    limited = False
    for limit, used in control_groups(root):
        total = min(total, limit)
        if limit - used < available:
            available, limited = max(0, limit - used), True
    return Memory(total, available, limited)


def _machine(root: Path) -> tuple[int, int]:
    """Return (total, available) bytes of the whole machine."""
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
    """Line of memory.stat with the file pages that were read once; the kernel drops them first."""


_VERSION_1 = _Version("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Version("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def control_groups(root: Path = _ROOT) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) bytes of each control group of this process that limits memory, from the inside out.

    `used` excludes the file cache that the kernel drops first. A container may see its own group as the root of the
    mount, but the host's path in /proc/self/cgroup. So every existing part of the path is read.
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
    """Return the free bytes of each GPU that torch will see, in torch's order; empty if they are unknown.

    nvidia-smi asks the driver, whereas torch would make a CUDA context of half a gigabyte in this process. A GPU cut
    into instances (MIG) is left out, because the driver has no number for the part that a rank gets.
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
    """Return None if `transformer_engine.pytorch` can be imported, else what is missing and how to get it.

    Imports torch. Without a GPU it does not try the import, which would raise RuntimeError instead of ImportError.
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
