"""Memory that this process and its children may take, on the host and on GPUs.

Available memory is the smaller of two numbers: the kernel's MemAvailable, and the rest that the control groups of this
process leave. A container or a batch system may limit these groups far below the machine's memory. Functions that read
files take the root of the file system, so that a test can describe another machine.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

GIB = 1 << 30
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
