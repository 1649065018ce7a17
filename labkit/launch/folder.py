"""A private folder: of a launch (rendezvous, status slots, output, payloads, results), or of a `labkit run` (sockets).

It goes when its owner is done. If the owning process is killed it stays, and the next process that makes such a folder
removes it: a live folder is locked by its owner, and the system drops the lock of a process that is gone.
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
_NAME = re.compile(rf"({PREFIX}|{RUN_PREFIX})\d+-\w{{8}}")
_swept: set[Path] = set()


class LaunchFolder:
    """A new folder that only this user can read, locked while it is in use.

    parent: where it is made; the system's temporary folder if not given.
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
        for stale in self.path.iterdir():  # a new folder is empty; the store of another launch would be met for ever
            stale.unlink()

    def remove(self) -> None:
        """Remove it with all it holds. May be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _sweep_once(parent: Path) -> None:
    if parent not in _swept:
        _swept.add(parent)
        sweep(parent)


def sweep(parent: Path) -> None:
    """Remove the folders whose owners are gone."""
    for path in parent.glob("labkit-*"):
        if not _NAME.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError while the owner lives
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
