"""Decide when a call hangs. The launcher decides it from outside, because a hung rank cannot report it itself.

A rank that computes has no limit. A call is hung if one of these conditions holds for longer than the limit:

| condition                                                          | found by                                   |
|--------------------------------------------------------------------|--------------------------------------------|
| a rank waits in one collective, for one message or at the start    | its status slot, or its stack if it calls  |
|                                                                    | torch.distributed itself                   |
| a rank is stopped by a signal, or was forked and does not run yet  | its process state, and its missing message |
| no rank runs: each sleeps, or waits for a lock, a loader, ..       | the CPU time of ranks and their children   |

If some ranks sleep while others compute, the launcher assumes that the sleep belongs to the work, and does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from labkit.launch import processes
from labkit.launch.failure_report import Outcome, torch_call
from labkit.launch.status import read_slot

PERIOD = 0.5
"""Seconds between two looks, so that a hang is found within a second after the limit."""
_FROZEN = 5.0
"""After this many seconds without a look, launcher and ranks were probably both suspended, so waits are timed anew."""
_SHARE, _SLACK = 0.01, 0.03
"""CPU time that a waiting rank may use, because its gloo thread polls: a share of the time, plus seconds."""


class Watched(Protocol):
    """One rank, with what the watch asks of it."""

    outcome: Outcome

    @property
    def finished(self) -> bool:
        """True once it has answered."""
        ...

    @property
    def pid(self) -> int:
        """Process id."""
        ...

    def ask_for_stack(self) -> None:
        """Have the rank write its stacks."""

    def stack(self) -> str:
        """Text of the stack that the rank wrote after the request."""
        ...


@dataclass
class _Quiet:
    """Since when a rank has not run, and the usage of its processes at that time."""

    since: float
    usage: processes.Usage
    children: float | None = None
    asked: bool = False
    """True once the rank was asked for its stack; it is asked once while it is quiet."""


class HangWatch:
    """The watch over one call. All times are read from one clock by the caller."""

    def __init__(self, limit: float, slots: Path, now: float) -> None:
        """limit: seconds that a rank may wait, inf for any time. slots: the file of the ranks' status slots."""
        self.period = None if math.isinf(limit) else min(PERIOD, limit / 8)
        """Seconds between two looks; None without a limit."""
        self._limit, self._slots = limit, slots
        self._begin = self._last = now
        self._waits: dict[int, float] = {}
        self._quiet: dict[int, _Quiet] = {}
        self._asked: list[Watched] = []
        self._children: dict[int, float] | None = None

    def look(self, silent: Sequence[Watched], now: float) -> bool:
        """Return True for a call that hangs. silent: the ranks that have not answered.

        Within `period` seconds of the last look it does nothing and returns False.
        """
        if self.period is None or not silent or now - self._last < self.period:
            return False
        if now - self._last > _FROZEN + self.period:
            self._begin, self._quiet = now, {}
        self._last, self._children = now, None
        found = self._stacks_show_a_wait()
        for rank in silent:  # all of them: each look is remembered
            found |= self._waits_too_long(rank, now)
        quiet = [rank for rank in silent if self._quiet_for(rank, now) > self._limit]
        self._ask(quiet)
        return found or len(quiet) == len(silent) or any(self._quiet[r.outcome.rank].usage.state == "T" for r in quiet)

    def _waits_too_long(self, rank: Watched, now: float) -> bool:
        if rank.outcome.phase == "starting":
            return now - self._begin > self._limit
        number = rank.outcome.rank
        status, before = read_slot(self._slots, number), self._waits.pop(number, None)
        if not status.inside:
            return False
        self._waits[number] = status.since
        # A record read while the rank writes it may be garbled, but not twice in the same way.
        return before == status.since and now - max(status.since, self._begin) > self._limit

    def _quiet_for(self, rank: Watched, now: float) -> float:
        """Return the seconds in which neither the rank nor its children ran; 0 where the system does not say."""
        number, usage = rank.outcome.rank, processes.usage(rank.pid)
        if usage is None:
            return 0.0
        quiet = self._quiet.get(number)
        if quiet is not None and _is_still(quiet.usage, usage, now - quiet.since):
            if now - quiet.since < self._limit / 2:
                return now - quiet.since
            if self._children is None:
                self._children = processes.children_seconds()
            children = self._children.get(rank.pid, 0.0)
            if quiet.children is None:
                quiet.children = children
            if children == quiet.children:
                return now - quiet.since
        self._quiet[number] = _Quiet(now, usage)
        return 0.0

    def _ask(self, quiet: list[Watched]) -> None:
        """Ask the ranks that have not run for as long as the limit for their stacks, which the next look reads."""
        for rank in quiet:
            memory = self._quiet[rank.outcome.rank]
            if not memory.asked and memory.usage.state != "T" and rank.outcome.phase != "starting":
                memory.asked = True
                self._asked.append(rank)
                rank.ask_for_stack()

    def _stacks_show_a_wait(self) -> bool:
        """Return True if a rank that was asked for its stack waits in torch.distributed."""
        asked, self._asked = self._asked, []
        for rank in asked:
            memory, usage = self._quiet.get(rank.outcome.rank), processes.usage(rank.pid)
            if memory is not None and usage is not None:
                memory.usage = usage  # writing the stack must not count as work of the rank
        return any(torch_call(rank.stack()) for rank in asked if not rank.finished)


def _is_still(before: processes.Usage, after: processes.Usage, seconds: float) -> bool:
    """Return True if the process did no more in between than a waiting process does."""
    same = (before.state, before.switches) == (after.state, after.switches)
    return same and after.state not in ("R", "D") and after.seconds - before.seconds < _SHARE * seconds + _SLACK
