"""A process with limits, for code that nobody here has read.

Everywhere: limits of the system (`setrlimit`) for CPU time, memory, size of a file, open files and processes, an empty
folder of its own, and SIGKILL for everything that it has started once it ends or its time is up. Started by root, it
runs as nobody, because the limit of processes doesn't hold for root.

With bubblewrap (`bwrap`) also: no network, no other process in sight, all files read-only, other learners' copies
hidden, and a folder that is memory and bounded. Without it such code may still use the network, read what the user can
read, and write as many files as it likes where the user may write.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

FILE_BYTES = 64 << 20
"""Largest file that it can write; with bubblewrap also all its files together."""
OPEN_FILES = 256
PROCESSES = 64
"""More processes and threads than its user has when it starts."""
_CHILD_SUBREAPER = 36  # prctl(2): orphans of my descendants become my children


class Limits(NamedTuple):
    """What a process with limits gets."""

    cpu_seconds: int
    """Of one process; its children have as much each."""
    memory: int
    """Bytes of addresses of one process; torch alone takes about 1.5 GiB of them."""
    processes: int
    """Processes and threads of its user, all together."""
    user: tuple[int, int] | None
    """uid and gid to run as; None for those that it has."""

    def hold(self) -> None:
        """Limit this process and all that it starts from now on. Nothing can take that back."""
        values = {
            resource.RLIMIT_CPU: self.cpu_seconds, resource.RLIMIT_AS: self.memory, resource.RLIMIT_FSIZE: FILE_BYTES,
            resource.RLIMIT_NOFILE: OPEN_FILES, resource.RLIMIT_NPROC: self.processes, resource.RLIMIT_CORE: 0,
        }  # fmt: skip
        for kind, value in values.items():
            most = resource.getrlimit(kind)[1]
            kept = value if most == resource.RLIM_INFINITY else min(value, most)
            resource.setrlimit(kind, (kept, kept))
        if self.user:
            os.setgroups([])
            os.setgid(self.user[1])
            os.setuid(self.user[0])


def limits(cpu_seconds: int, memory: int, jobs: int) -> Limits:
    """Return the limits of each of `jobs` processes at a time."""
    user = None if with_bubblewrap() else nobody()
    return Limits(cpu_seconds, memory, _threads_of(user[0] if user else os.getuid()) + jobs * PROCESSES, user)


def with_bubblewrap() -> bool:
    """Return True if bubblewrap is installed and may do its work here."""
    return _bubblewrap() is not None


@cache
def _bubblewrap() -> str | None:
    found = shutil.which("bwrap")
    if found is None:
        return None
    tried = [found, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true"]
    return found if subprocess.run(tried, capture_output=True, check=False).returncode == 0 else None


@cache
def nobody() -> tuple[int, int] | None:
    """Return uid and gid for a process that root starts; None for others, and where nobody couldn't read labkit."""
    if os.geteuid() != 0:
        return None
    needed = {Path(sys.executable), Path(os.path.realpath(sys.executable)), Path(__file__).resolve()}
    folders = {parent for path in needed for parent in path.parents}
    if any(not folder.stat().st_mode & 0o001 for folder in folders):
        return None
    with suppress(KeyError):
        user = pwd.getpwnam("nobody")
        return user.pw_uid, user.pw_gid
    return None


def running(command: Sequence[str], given: bytes, folder: Path, hidden: Path, seconds: float, held: Limits) -> bytes:
    """Run the command and return what it writes into a pipe, the number of whose end is its last word.

    given: its stdin. folder: an empty folder for what it writes. hidden: a folder that it doesn't see with bubblewrap.
    It has `seconds` by the clock; when this returns, nothing is left of it and of what it started.
    """
    reading, writing = os.pipe()
    if held.user:
        os.chown(folder, *held.user)
    kept = ("PATH", "LANG", "LC_ALL", "PYTHONPATH")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {"HOME": str(folder), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    with _starting:
        own_its_orphans()
        process = subprocess.Popen(
            [*_wrapped(folder, hidden), *command, str(writing)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, cwd=folder, env=environment, pass_fds=[writing], start_new_session=True,
        )  # fmt: skip
        _started.add(process.pid)
    os.close(writing)
    try:
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(given)
        return _until(reading, time.monotonic() + seconds)
    finally:
        os.close(reading)
        _end(process)


def _wrapped(folder: Path, hidden: Path) -> list[str]:
    """Return the words before the command; none without bubblewrap."""
    bubblewrap = _bubblewrap()
    if bubblewrap is None:
        return []
    memory = ["--size", str(FILE_BYTES), "--tmpfs"]
    return [
        bubblewrap, "--unshare-all", "--die-with-parent", "--new-session", "--ro-bind", "/", "/", "--proc", "/proc",
        "--dev", "/dev", *memory, "/tmp", *memory, str(hidden), *memory, str(folder), "--chdir", str(folder), "--",
    ]  # fmt: skip


def _threads_of(uid: int) -> int:
    """Return how many threads a user has, which is what the system counts as processes."""
    count = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry.stat().st_uid == uid:
                count += len(os.listdir(entry / "task"))
    return count


def _until(reading: int, deadline: float) -> bytes:
    """Return what comes from the pipe until its other end closes or the deadline has passed."""
    pieces: list[bytes] = []
    while (left := deadline - time.monotonic()) > 0 and select.select([reading], [], [], left)[0]:
        piece = os.read(reading, 1 << 16)
        if not piece:
            break
        pieces.append(piece)
    return b"".join(pieces)


@cache
def own_its_orphans() -> None:
    """Make processes whose parent has ended children of this one, so that none can hide (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)


_starting = threading.Lock()
_started: set[int] = set()
"""Processes of `running` that have not ended. Whatever else is a child of this process has lost its parent."""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, its group, and all orphans that it leaves."""
    for end in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            end(process.pid, signal.SIGKILL)
    process.wait()
    with _starting:
        _started.discard(process.pid)
        while orphans := _children() - _started:
            for pid in orphans:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)


def _children() -> set[int]:
    """Return the children of this process."""
    found: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if entry.read_text().rpartition(")")[2].split()[1] == str(os.getpid()):
                found.add(int(entry.parent.name))
    return found
