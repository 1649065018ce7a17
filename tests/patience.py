"""Limits in seconds that are strict where tests run alone, and fair where they don't."""

import os
import time
from collections.abc import Callable
from pathlib import Path


def on_this_machine(seconds: float) -> float:
    """A limit in seconds, stretched by as much as the machine is overloaded: over the last minute, or right now.

    The average over a minute is still low when a busy minute has just begun, so the processes that run now count too.
    """
    load = os.getloadavg()[0]
    if (now := Path("/proc/loadavg")).exists():  # Linux: "0.31 0.40 0.51 running/all last-pid"
        load = max(load, int(now.read_text().split()[3].split("/")[0]))
    return seconds * max(1.0, load / len(os.sched_getaffinity(0)))


def soon(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait until the condition holds; whether it came to hold in time. Load that begins meanwhile counts."""
    start = time.monotonic()
    while time.monotonic() - start < on_this_machine(seconds):
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())
