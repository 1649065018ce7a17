"""How long a test waits, on a machine that others use as well."""

from __future__ import annotations

import os
import time
from collections.abc import Callable


def on_this_machine(seconds: float) -> float:
    """A limit in seconds, stretched by as much as the machine is overloaded: strict where tests run alone."""
    return seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def soon(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait until the condition holds; whether it came to hold in time."""
    deadline = time.monotonic() + on_this_machine(seconds)
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()
