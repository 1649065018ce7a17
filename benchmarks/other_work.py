"""How many cores other processes kept busy while something was measured.

    others = OtherWork()
    ...                     # what is measured, in this process and its children
    others.cores()          # 0.03

A load average cannot tell: it counts the threads of the measured ranks themselves, of which dozens may wake up at once.
So this subtracts: what the cores of this process worked, less what the process and its children worked. Time that the
host of a virtual machine took away counts as work of others.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path

PROC = Path("/proc")
MAX_OTHERS = 0.2
"""Cores that others may keep busy on average beside a time that is quoted."""
UNCERTAIN = 0.2
"""Seconds of work that a look may miss or count twice: Linux counts hundredths of a second for each process."""


class OtherWork:
    """What others worked on the cores of this process since the object was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._before = used() if (PROC / "stat").exists() else None

    def cores(self, limit: float = MAX_OTHERS, *, across_ranks: bool = False) -> float | None:
        """How many cores others kept busy on average; None on a system without /proc, which is any but Linux.

        limit: cores that the answer is held against. The tighter it is, the longer a look must be: after a short
            measurement this waits until `UNCERTAIN` over the seconds is within the limit, a second for 0.2 cores.
        across_ranks: every rank of one machine calls this alike, and none of them is another.
        """
        if self._before is None:
            return None
        time.sleep(max(0.0, self._start + UNCERTAIN / limit - time.monotonic()))
        seconds = time.monotonic() - self._start
        idle, own = (after - before for after, before in zip(used(), self._before, strict=True))
        busy, own = len(os.sched_getaffinity(0)) - idle / seconds, own / seconds
        if across_ranks:
            busy, own = _of_all_ranks(busy, own)
        return max(0.0, busy - own)


def used() -> tuple[float, float]:
    """(seconds that the cores of this process were idle, seconds that it and its children worked), both ever."""
    ticks = os.sysconf("SC_CLK_TCK")
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    lines = (line.split() for line in (PROC / "stat").read_text().splitlines())
    idle = sum(int(words[4]) + int(words[5]) for words in lines if words[0] in names)  # waiting for a disk is idle
    return idle / ticks, _work_of_tree(os.getpid()) / ticks


def _work_of_tree(root: int) -> int:
    """Ticks that a process and its children worked, those that have ended included."""
    work: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for folder in PROC.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()  # a name may hold blanks
        except OSError:  # it has just ended
            continue
        work[int(folder.name)] = sum(map(int, fields[11:15]))
        children[int(fields[1])].append(int(folder.name))
    total, waiting = 0, [root]
    while waiting:
        process = waiting.pop()
        total += work.get(process, 0)
        waiting += children[process]
    return total


def _of_all_ranks(busy: float, own: float) -> tuple[float, float]:
    """The busiest rank's view of the cores, and the work of all ranks."""
    import torch
    import torch.distributed as dist

    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    most, all_own = (torch.tensor(value, dtype=torch.float64, device=device) for value in (busy, own))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(all_own)
    return most.item(), all_own.item()
