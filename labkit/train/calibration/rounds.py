"""Rounds that the ranks of a machine begin together, and how long each stage takes until the last rank is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any

from labkit.comm.collectives import barrier
from labkit.comm.groups import Group
from labkit.train.calibration.timing import nothing

WARM_UP = 5
"""Rounds that do not count."""
Times = list[list[float]]
"""For each round when it began and when each stage ended, in seconds on the clock that a machine's processes share."""


def rounds(*stages: Callable[[], Any], group: Group, count: int, wait: Callable[[], Any] = nothing) -> Times:
    """Run the stages one after the other in each round. Every rank of the group calls this.

    group: ranks of one machine. wait: waits until the device has done its work, such as `torch.cuda.synchronize`.
    """
    found: Times = []
    for _ in range(WARM_UP + count):
        wait()
        barrier(group)
        times = [perf_counter()]
        for stage in stages:
            stage()
            wait()
            times.append(perf_counter())
        found.append(times)
    return found[WARM_UP:]


def best_round(by_rank: Sequence[Times]) -> list[float]:
    """Return the seconds of each stage in the quickest round; whatever disturbs a round only makes it longer.

    The first stage takes what it takes on the slowest rank, although one rank may have left the barrier late. Each
    later stage lasts from the moment when the last rank enters it until the last one is done.
    """
    return min((_seconds(times) for times in zip(*by_rank, strict=True)), key=sum)


def _seconds(times: Sequence[Sequence[float]]) -> list[float]:
    """Return the seconds of each stage of one round, from the times of all ranks."""
    last = [max(of_ranks) for of_ranks in zip(*times, strict=True)]
    first = max(ends[1] - ends[0] for ends in times)
    return [first, *(end - before for before, end in pairwise(last[1:]))]
