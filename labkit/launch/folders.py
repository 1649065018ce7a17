"""Private folders of a launch, which do not outlive the process that made them.

One holds a launch's rendezvous, status slots, output, payloads and results. Others hold the sockets of a `labkit run`
or of the fork server. The owner locks its folder and removes it at the end. If the owner is killed, the system drops
the lock, so the owner's fork server, or the next process that makes such a folder, can remove the old one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

PREFIX = "labkit-launch-"
RUN_PREFIX = "labkit-run-"
SERVER_PREFIX = "labkit-fork-"
_NAME = re.compile(rf"({PREFIX}|{RUN_PREFIX}|{SERVER_PREFIX})\d+-\w{{8}}")
LONGEST_PARENT = 55
"""Most bytes of the path to a folder with sockets. The path of a socket may have 104 bytes (macOS) or 107 (Linux), and
our folder and name take 47 of them."""
_swept: set[Path] = set()


def parent_of_sockets() -> Path:
    """Return the temporary folder, or /tmp where its path is too long for a socket or not printable, as ZeroMQ asks."""
    parent = tempfile.gettempdir()
    return Path(parent if len(os.fsencode(parent)) <= LONGEST_PARENT and parent.isprintable() else "/tmp")


class LaunchFolder:
    """A new folder that only this user can read, locked while it is in use.

    parent: the folder that holds it; None is the system's temporary folder.
    """

    def __init__(self, prefix: str = PREFIX, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        _sweep_once(parent)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent))
            with contextlib.suppress(FileNotFoundError):  # swept by another process before it was locked
                self._lock = os.open(self.path, os.O_RDONLY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if os.path.samestat(os.stat(self.path), os.fstat(self._lock)):
                    break
        for stale in self.path.iterdir():  # a new folder is empty, else ranks would meet in the store of another launch
            stale.unlink()

    def remove(self) -> None:
        """Remove it with everything in it. May be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _sweep_once(parent: Path) -> None:
    if parent not in _swept:
        _swept.add(parent)
        sweep(parent)


def sweep_all() -> None:
    """Call `sweep` on the folder that holds the folders of launches, and on the one that holds those with sockets."""
    for parent in {Path(tempfile.gettempdir()), parent_of_sockets()}:
        sweep(parent)


def sweep(parent: Path) -> None:
    """Remove the folders whose owners are gone."""
    for path in parent.glob("labkit-*"):
        if not _NAME.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):  # another user's, or gone in the meantime
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError while the owner lives
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
