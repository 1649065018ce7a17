"""The private folder of one launch: rendezvous, status slots, output, payloads and results.

It goes when the launch ends. If the launching process is killed it stays, and the next process that launches anything
removes it: a live folder is locked by its owner, and the system drops the lock of a process that is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "labkit-launch-"
_NAME = re.compile(PREFIX + r"\d+-\w{8}")
_FRESH = 60.0
"""Seconds in which a folder is left alone, because its owner may not have locked it yet."""
_swept = False


class LaunchFolder:
    """A new folder that only this user can read, locked while it is in use."""

    def __init__(self) -> None:
        _sweep_once()
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        for stale in self.path.iterdir():  # a new folder is empty; the store of another launch would be met for ever
            stale.unlink()

    def remove(self) -> None:
        """Remove it with all it holds. May be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _sweep_once() -> None:
    global _swept
    if not _swept:
        _swept = True
        sweep(Path(tempfile.gettempdir()))


def sweep(parent: Path) -> None:
    """Remove the folders whose owners are gone."""
    for path in parent.glob(PREFIX + "*"):
        if not _NAME.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            if time.time() - path.stat().st_mtime < _FRESH:
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError while the owner lives
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
