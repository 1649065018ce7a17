"""SIGTERM ends a run after its current step, on all ranks after the same one.

A scheduler sends SIGTERM before it takes a machine away. The request travels in three stages:

1. `labkit train` starts its ranks and gets the signal itself (`passing_on`). It asks all its ranks through the shared
   file of `labkit.launch.status`. A rank of torchrun, or of a script, gets the signal directly (`listening`).
2. A rank that was asked tells the others in the exchange of the gradient norm, which every step has anyway
   (`gradient_statistics`). So all ranks learn in the same step that one of them was asked.
3. All ranks leave the loop after this step by `RunInterrupted`. The command then exits with `EXIT_CODE`.

A rank ignores further SIGTERMs: a scheduler may signal every process of a job, and torchrun its ranks once more. One
may also come when the ranks have already told each other, so a process that was stopped ignores it for a moment longer
(`_handling`). The process that asks too long in vain kills the ranks. torchrun does so after `--shutdown-timeout`
seconds.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from labkit.launch import info, launcher, status

EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: try again later. Batch scripts queue the job again."""
PATIENCE = 60.0
"""Seconds that the ranks of `labkit train` get to finish a step and to save."""
_SAME_REQUEST = 1.0
"""Seconds within which a further SIGTERM belongs to the same request: the scheduler reaches all processes of a job."""

_signalled = False
_listening = False


class RunInterrupted(Exception):
    """A run ended before its last step, because a rank was asked to stop. All ranks raise this after the same step."""

    def __init__(self, step: int, steps: int, checkpoint: str | None = None) -> None:
        """step: finished steps. steps: those that were asked for. checkpoint: where the state was saved, if it was."""
        self.step, self.steps, self.checkpoint = step, steps, checkpoint
        kept = f"checkpoint: {checkpoint}" if checkpoint is not None else "nothing was saved"
        super().__init__(f"stopped by SIGTERM after step {step:,} of {steps:,}; {kept}")


def stop_requested() -> bool:
    """Return True if this rank was asked to end the run."""
    return _signalled or (status.current is not None and status.current.asked_to_stop)


def _in_main_thread() -> bool:
    """Return True in the thread to which Python delivers signals."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None], *, command: bool = False) -> Iterator[None]:
    """Inside the block SIGTERM calls `handler`. If RunInterrupted ends the block, or `command` is True and the process
    is about to end anyway, SIGTERM is ignored for `_SAME_REQUEST` seconds more. Later ones find the handler of before.
    """
    before = signal.signal(signal.SIGTERM, handler)
    before = signal.SIG_DFL if before is None else before
    ended_at = 0.0

    def ignore_for_a_moment(number: int, _frame: FrameType | None) -> None:
        if time.monotonic() - ended_at >= _SAME_REQUEST:
            signal.signal(number, before)
            os.kill(os.getpid(), number)

    after = ignore_for_a_moment if command else before
    try:
        yield
    except RunInterrupted:
        after = ignore_for_a_moment
        raise
    finally:
        ended_at = time.monotonic()
        signal.signal(signal.SIGTERM, after)


@contextmanager
def listening() -> Iterator[None]:
    """Inside the block SIGTERM asks this rank to stop, instead of killing it. Other threads than the main one, and
    blocks inside such a block, change nothing."""
    global _signalled, _listening
    if _listening or not _in_main_thread():
        yield
        return

    def note(_number: int, _frame: FrameType | None) -> None:
        global _signalled
        _signalled = True

    with _handling(note):
        _signalled, _listening = False, True
        try:
            yield
        finally:
            _signalled, _listening = False, False


@contextmanager
def passing_on(patience: float = PATIENCE) -> Iterator[None]:
    """Inside the block SIGTERM asks the ranks of this process's launches to stop.

    A second SIGTERM, or `patience` seconds without an end, raises KeyboardInterrupt, at which the launcher kills its
    ranks. Ranks of torchrun get the signal themselves; there the block changes nothing.
    """
    if info.under_torchrun() or not _in_main_thread():
        yield
        return
    asked_at = 0.0
    deadline: threading.Timer | None = None

    def ask(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked_at, deadline
        now = time.monotonic()
        if not asked_at:
            asked_at = now
            launcher.ask_to_stop()
            deadline = threading.Timer(patience, os.kill, (os.getpid(), signal.SIGTERM))
            deadline.daemon = True
            deadline.start()
        elif now - asked_at >= min(_SAME_REQUEST, patience):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise KeyboardInterrupt(
                f"the ranks were killed {now - asked_at:.0f} s after SIGTERM, before the end of their step; the last "
                "checkpoint, if any, is older"
            )

    with _handling(ask, command=True):
        try:
            yield
        finally:
            if deadline is not None:
                deadline.cancel()
            launcher.ask_to_stop(False)
