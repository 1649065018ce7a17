"""Cores and open files of this machine, and what too few of them mean for a launch."""

from __future__ import annotations

import os
import resource

from labkit.config.errors import counted

CROWDED = 10
"""Ranks per core above which a launch warns."""
FILES_PER_RANK = 3
"""Descriptors that the launching process holds for each rank: its connection, its sentinel and its lifeline."""
_FILES_TO_START = 12
"""Descriptors that it needs for a moment to start a rank, and those of the fork server."""
MORE_FILES = "raise the limit of the shell (`ulimit -n 4096`), or start fewer ranks"


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
