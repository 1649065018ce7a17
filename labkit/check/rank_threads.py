"""Ranks of an exercise: threads, each with its own data, that meet in collectives.

A learner's function is the program of one rank. It gets the data of its own rank alone and can reach another rank's
data only through a call in which all ranks meet.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

PATIENCE = 20.0
"""Seconds that a rank waits for the others, where no alarm (`watched.py`) ends the case before."""


class Stalled(Exception):
    """Raised when the ranks do not call the same operation."""


class RankThreads:
    """Threads that meet in collectives, each of which sees only its own data."""

    def __init__(self, size: int) -> None:
        self.size, self.calls = size, Counter[str]()
        self._slots: list[tuple[str, Any]] = [("", None)] * size
        self._barrier = threading.Barrier(size, timeout=PATIENCE)

    def meet(self, rank: int, name: str, value: Any) -> list[Any]:
        """Give a value and get those of all ranks. Raises Stalled if the ranks call different operations."""
        self._slots[rank] = (name, value)
        self._barrier.wait()
        slots = list(self._slots)
        self._barrier.wait()
        if rank == 0:
            self.calls[name] += 1
        for other, (theirs, _) in enumerate(slots):
            if theirs != slots[0][0]:
                raise Stalled(f"rank 0 is in {slots[0][0]} and rank {other} in {theirs}: they deadlock")
        return [each for _, each in slots]

    def run(self, program: Callable[[int], Any]) -> list[Any]:
        """Return the result of `program(rank)` for each rank. Raises the first error of the lowest rank."""
        found: list[Any] = [None] * self.size
        errors: dict[int, BaseException] = {}

        def one(rank: int) -> None:
            try:
                found[rank] = program(rank)
                self.meet(rank, "return", None)
            except (Exception, SystemExit) as error:
                if not isinstance(error, threading.BrokenBarrierError):
                    errors[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.size)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:  # the alarm of a case that does not end
            self._barrier.abort()
            for thread in threads:
                _end(thread)
            raise
        if errors:
            raise errors[min(errors)]
        return found


def _end(thread: threading.Thread) -> None:
    """Raise SystemExit in a thread, so that an endless loop of Python does not take a core from now on."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
