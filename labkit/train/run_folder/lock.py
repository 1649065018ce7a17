"""The lock of a folder, by which two runs notice each other: its file `.lock`, locked by flock. Needs no torch.

The kernel releases a lock when the process that holds it ends, so a killed run leaves none. The file is open for
writing, because only then Linux locks it on the server of an NFS mount too; otherwise a folder on NFS would be locked
for one machine alone. Some file systems have no locks, and a run there prints a warning and continues.
"""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

LOCK = ".lock"
EARLIER = "run.json"
"""The file that earlier versions locked in `train.output_dir`."""
PATIENCE = 2.0
"""Seconds that a run waits for a lock, since ranks of a killed run may still be ending, or a launch may be looking."""


class FolderError(ValueError):
    """Why a run cannot have a folder, and what to do."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock an existing folder during the block. The lock file names the process for others, and stays.

    Raises FolderError if another run has the lock, and OSError if nothing can be written there.
    """
    with (folder / LOCK).open("a+") as file:
        _lock(file, fcntl.LOCK_EX)
        parent = multiprocessing.parent_process()  # the launching process, which users see
        file.truncate(0)
        json.dump({"pid": os.getpid() if parent is None else parent.pid, "host": socket.gethostname()}, file)
        file.flush()
        yield


def check_free(folder: Path) -> None:
    """Raise FolderError if a run writes into the folder, and OSError for a lock that cannot be opened."""
    for path in _locks_in(folder):
        with path.open("r+") as file:
            _lock(file, fcntl.LOCK_SH)


def is_locked(folder: Path) -> bool | None:
    """Return True if a process is writing into the folder now; None if that cannot be known, or nobody ever did."""
    found = None
    for path in _locks_in(folder):
        try:
            with path.open() as file:
                found = found or not _try_lock(file, fcntl.LOCK_SH)
        except OSError:
            return None
    return found


def _locks_in(folder: Path) -> list[Path]:
    return [folder / name for name in (LOCK, EARLIER) if (folder / name).is_file()]


def _lock(file: IO[str], kind: int) -> None:
    """Lock an open file. Raises FolderError if another process keeps it. Without locks a warning is printed."""
    deadline = time.monotonic() + PATIENCE
    try:
        while not _try_lock(file, kind):
            if time.monotonic() >= deadline:
                rule = "is writing into this folder; name another, or wait until that run has ended"
                raise FolderError(f"{_owner(file)} {rule}")
            time.sleep(0.02)
    except OSError as error:
        rule = "make sure that no second run writes into its folder"
        print(f"labkit: {file.name} cannot be locked ({error.strerror}); {rule}", file=sys.stderr)


def _owner(file: IO[str]) -> str:
    file.seek(0)
    try:
        process = json.load(file)
        return f"process {process['pid']} on {process['host']}"
    except (ValueError, KeyError, TypeError):  # not written yet, or by an earlier version
        return "another run"


def _try_lock(file: IO[str], kind: int) -> bool:
    """Lock an open file. Return False if another process has it. Raises OSError on a file system without locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True
