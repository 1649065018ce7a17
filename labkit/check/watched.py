"""A learner's function under watch: what it raises, whether it returns anything, and whether it ends."""

from __future__ import annotations

import functools
import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from labkit.check.reader_frames import reader_frames

SECONDS = 10.0
"""Longest time of one case. Exercises are small: the slowest case of a right answer takes a few tenths of a second."""

NOT_TRIED = "not tried, because an earlier case did not end"

Step = TypeVar("Step")


class Endless(SystemExit):
    """Ends a case that takes too long.

    Judges turn it into a failed case like any error, while an `except Exception` of the learner does not catch it.
    """


def raised(error: BaseException) -> str:
    """Name an exception in words that fit into a sentence."""
    message = " ".join(str(error).split())
    if isinstance(error, Endless):
        return message
    return f"{type(error).__name__}: {message[:200]}" if message else type(error).__name__


class Watch:
    """Hands out a learner's function as `answer`, and remembers what became of its calls."""

    def __init__(self, answer: Any, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self.calls = self.nones = 0
        self.frames: dict[str, tuple[str, ...]] = {}
        """Error that left the function, in words -> the reader's frames where it first arose."""
        self._endless = False
        self.answer = self._watched(answer) if inspect.isfunction(answer) else answer

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if self._endless:
                raise Endless(NOT_TRIED)
            try:
                result = function(*args, **kwargs)
            except (Exception, SystemExit) as error:
                if raised(error) not in self.frames:
                    self.frames[raised(error)] = reader_frames(error)
                raise
            self.calls += 1
            self.nones += result is None
            return result

        return called

    def limited(self, steps: Iterator[Step]) -> Iterator[Step]:
        """Yield the steps. One that takes longer than `seconds` gets an `Endless`, wherever its code is then."""
        while True:
            with self.alarm():
                step = next(steps, None)
            if step is None:
                return
            yield step

    @contextmanager
    def alarm(self) -> Iterator[None]:
        """Raise Endless in the block after `seconds`. Only the main thread can: elsewhere nothing is limited."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ring(_signal: int, _frame: Any) -> None:
            self._endless = True
            raise Endless(f"no end after {self.seconds:g} seconds")

        before = signal.signal(signal.SIGALRM, ring)
        timer = signal.setitimer(signal.ITIMER_REAL, self.seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, *timer)
            signal.signal(signal.SIGALRM, before)
