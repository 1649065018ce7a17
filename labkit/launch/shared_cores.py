"""Ranks on CPUs do not interrupt each other.

A laptop has fewer cores than the ranks and their gloo threads. By default Linux lets a thread that wakes up interrupt
the one that runs. A rank that sends wakes up the receiver, which may interrupt it while it still holds the lock of the
connection, and gloo's own thread asks for this lock again and again (`epoll_wait` and `try_lock`, in
gloo/transport/tcp/pair.cc) until its time slice is over. With four ranks on two cores this takes most of the time of
small collectives; `benchmarks/shared_cores.py` measures it. Under the policy SCHED_BATCH (sched(7)) a thread that wakes
up waits until the running one waits too, or until its slice ends. All else, such as the share of each thread, stays.
"""

from __future__ import annotations

import contextlib
import os


def do_not_interrupt() -> None:
    """Make this thread, and all that it starts from now on, one whose wake-ups interrupt nobody.

    A policy that somebody has chosen stays. Outside Linux nothing happens.
    """
    if hasattr(os, "sched_setscheduler"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it, and all works without
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
