"""Processes seen from outside: how to end them together, and what the system says about their state and their work."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SEES_USAGE = Path("/proc/self/stat").exists()
"""True if this system reports the usage of another process; macOS does not."""
_TICK = 1.0 / os.sysconf("SC_CLK_TCK")


def die_with(descriptor: int) -> None:
    """End this process and its children by SIGKILL as soon as the other end of the pipe `descriptor` closes.

    A rank's parent is the fork server, so the usual PR_SET_PDEATHSIG would watch the wrong process. The process that
    called `run` holds the writing end of the pipe, and however it ends, the kernel sends the signal. So this works even
    while the rank holds the GIL, sleeps in C, or is stopped. The caller must lead its process group.
    """
    if kill_group_at_close(descriptor, os.getpgid(0)):
        if select.select([descriptor], [], [], 0)[0]:  # it closed before the signal was armed
            os.killpg(0, signal.SIGKILL)
        return

    def watch() -> None:
        select.select([descriptor], [], [])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="labkit-die-with-parent", daemon=True).start()


def kill_group_at_close(descriptor: int, group: int) -> bool:
    """Have the system end a process group by SIGKILL when the other end of the pipe `descriptor` closes.

    A process of the group must have inherited `descriptor`. Returns False if the system has no such signal (macOS).
    """
    if not hasattr(fcntl, "F_SETSIG"):
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, -group)  # negative: the whole group
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    return True


@contextlib.contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Delay a Ctrl-C until the end of the block, for work that must not stop halfway."""
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is ever interrupted
        return
    noted: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *details: noted.append(details))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if noted and callable(before):
            before(*noted[0])


def process_state(pid: int) -> str | None:
    """Return the one-letter state of a process (R running, S sleeping, T stopped, Z ended, ...); None without one."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.parent.parent.joinpath("self").exists():
        try:
            return stat.read_text().rpartition(")")[2].split()[0]
        except OSError:
            return None
    found = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return found.stdout.strip()[:1] or None


class Usage(NamedTuple):
    """What a process has done so far."""

    state: str
    """One-letter state of its main thread."""
    switches: int
    """How often its main thread went to wait. As long as this number does not change, the main thread does not move."""
    seconds: float
    """CPU time of all its threads, and of its children that have ended."""


def usage(pid: int) -> Usage | None:
    """Return what a process has done so far; None if there is no such process, or if the system does not say."""
    try:
        fields = _fields(Path(f"/proc/{pid}"))
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return Usage(fields[0], int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0]), _seconds(fields))


def children_seconds() -> dict[int, float]:
    """Return process group -> CPU time of its living processes except the leader; for a rank these are its children."""
    found: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended in the meantime
                fields = _fields(entry)
                if fields[2] != entry.name:
                    found[int(fields[2])] = found.get(int(fields[2]), 0.0) + _seconds(fields)
    return found


def _fields(entry: Path) -> list[str]:
    """Return state, parent, process group and so on: the fields of /proc/PID/stat after the name."""
    return entry.joinpath("stat").read_text().rpartition(")")[2].split()


def _seconds(fields: list[str]) -> float:
    return sum(map(int, fields[11:15])) * _TICK  # utime and stime of the process and of its ended children


def send_signal(pid: int, number: signal.Signals) -> None:
    """Signal a process that may already be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_family(pid: int) -> None:
    """SIGKILL a rank and everything that it started (a running rank leads its own process group)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    send_signal(pid, signal.SIGKILL)
