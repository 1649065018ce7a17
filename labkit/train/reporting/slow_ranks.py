"""Ranks that compute longer than their peers, such as one on a hot or shared core.

Ranks wait for each other in every step, so all have the same step time, which does not show a slow rank. The *busy
time* of a rank is its step time without its waits for other ranks (`labkit.launch.status`). The rank that all others
wait for has the longest busy time.

Peers of a rank are the other ranks of its pipeline stage, which do the same work. Stages differ in work by design, so
the only rank of a stage is measured by its own usual time, the median of earlier steps. A step that is slow on all
stages then names nobody.

A single slow step means nothing, because another program may have run, or a file may have been read. A rank is slow if
at least `OFTEN` of its last `STEPS` steps took `RATIO` times as long as those of its peers. A rank that needs 1.5 times
as long has nearly all its steps above 1.25, although steps vary.

On a GPU the host does not see the waits, which are kernels of NCCL, so no rank is compared there.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from labkit.comm.groups import ParallelGroups
from labkit.launch import status

STEPS = 20
"""Steps over which ranks are compared."""
RATIO = 1.25
"""A step counts as slow if it took this many times as long as that of the peers."""
OFTEN = 18
"""This many slow steps of the last `STEPS` make a slow rank."""
PAUSE = 200
"""Steps until the same rank is named again."""
_HISTORY = 10 * STEPS
"""Earlier steps whose median is the usual time of a rank."""


@dataclass(frozen=True)
class Pace:
    """One rank's busy times, as the other ranks see them."""

    stage: int
    """Pipeline rank."""
    host: str
    busy: list[float]
    """Seconds of the last steps, at most `STEPS`, the oldest first."""
    usual: float
    """Median of earlier steps; 0 while there are fewer than `STEPS` of them."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that is slow."""

    rank: int
    ratio: float
    """Median over the steps of the rank's time divided by that of its peers."""
    host: str
    alone: bool
    """The rank has no peers in its stage."""

    def __str__(self) -> str:
        than = "before, unlike the other stages," if self.alone else "the median of its stage"
        times = f"{self.ratio:.1f} times as long as {than} for {STEPS} steps"
        return f"rank {self.rank} computes {times} (host {self.host})"


def slow_ranks(paces: Sequence[Pace]) -> list[SlowRank]:
    """Return the slow ranks of a run. paces: the pace of each rank, all over the same steps."""
    in_stage = [sum(other.stage == pace.stage for other in paces) for pace in paces]
    found = []
    for rank, pace in enumerate(paces):
        alone = in_stage[rank] == 1
        others = [other for place, other in enumerate(paces) if place != rank]
        if alone:
            peers = [_relative(other) for other in others if other.usual > 0]
            own = _relative(pace) if pace.usual > 0 else []
        else:
            peers = [other.busy for other in others if other.stage == pace.stage]
            own = pace.busy
        ratios = list(_ratios(own, peers))
        if len(ratios) == STEPS and sum(ratio >= RATIO for ratio in ratios) >= OFTEN:
            found.append(SlowRank(rank, median(ratios), pace.host, alone))
    return found


def _relative(pace: Pace) -> list[float]:
    return [seconds / pace.usual for seconds in pace.busy]


def _ratios(own: Sequence[float], peers: Sequence[Sequence[float]]) -> Iterator[float]:
    """Yield for each step this rank's time divided by the median of its peers; nothing without peers."""
    for seconds, *others in zip(own, *peers) if peers else ():
        if (middle := median(others)) > 0:
            yield seconds / middle


class PaceWatch:
    """Measures this rank's busy time, and remembers which slow ranks were named; every rank remembers the same."""

    def __init__(self, groups: ParallelGroups) -> None:
        self._stage, self._host = groups.pp.rank, socket.gethostname()
        self._measures = groups.device.type == "cpu" and groups.world.size > 1
        self._busy: deque[float] = deque(maxlen=STEPS)
        self._earlier: deque[float] = deque(maxlen=_HISTORY)
        self._waited = 0.0
        self._named: dict[int, int] = {}

    def begin_step(self) -> None:
        """Note how long this rank has waited so far."""
        if self._measures:
            self._waited = status.waited_seconds()

    def end_step(self, seconds: float) -> None:
        """Take in a step of `seconds`, waits included."""
        if self._measures:
            if len(self._busy) == STEPS:
                self._earlier.append(self._busy[0])
            self._busy.append(max(0.0, seconds - (status.waited_seconds() - self._waited)))

    def pace(self) -> Pace:
        """Return this rank's busy times for the other ranks."""
        usual = median(self._earlier) if len(self._earlier) >= STEPS else 0.0
        return Pace(self._stage, self._host, list(self._busy), usual)

    def news(self, step: int, paces: Sequence[Pace]) -> list[str]:
        """Return a sentence for each slow rank not named in the last `PAUSE` steps. paces: those of all ranks."""
        slow = [found for found in slow_ranks(paces) if step - self._named.get(found.rank, -PAUSE) >= PAUSE]
        self._named |= {found.rank: step for found in slow}
        return [str(found) for found in slow]
