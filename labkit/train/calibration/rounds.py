"""Rounds that all ranks begin together: what each stage of a call takes on each rank, and on the slowest one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from labkit.comm.collectives import barrier
from labkit.comm.groups import Group
from labkit.train.calibration.timing import nothing

WARM_UP = 5
"""Rounds that do not count."""
TICK = 0.5e-3
"""Seconds. Rounds begin at multiples of it on the clock that all processes of a machine share, because ranks leave a
barrier at different times: one may have to be woken."""
Times = list[list[float]]
"""For each round, the seconds from its start to the end of each stage."""


def rounds(*stages: Callable[[], Any], group: Group, count: int, wait: Callable[[], Any] = nothing) -> Times:
    """Run the stages one after the other in each round, and return when each ended. Every rank of the group calls this.

    group: ranks of one machine, whose clock they share.
    wait: waits until the device has done its work, such as `torch.cuda.synchronize`.
    """
    found: Times = []
    for _ in range(WARM_UP + count):
        wait()
        barrier(group)
        start, ends = _next_tick(), []
        for stage in stages:
            stage()
            wait()
            ends.append(perf_counter() - start)
        found.append(ends)
    return found[WARM_UP:]


def _next_tick() -> float:
    """Wait for the tick after next, without sleeping, and return it."""
    start = (perf_counter() // TICK + 2) * TICK
    while perf_counter() < start:
        pass
    return start


def best_round(by_rank: Sequence[Times]) -> list[float]:
    """Return when each stage of the quickest round ended on its slowest rank.

    A round is as long as its slowest rank. Whatever disturbs a round only makes it longer, so the quickest one is the
    closest to the machine.
    """
    slowest = [[max(ends) for ends in zip(*of_round, strict=True)] for of_round in zip(*by_rank, strict=True)]
    return min(slowest, key=lambda ends: ends[-1])
