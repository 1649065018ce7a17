"""Locks on files, by which two runs notice each other (flock).

The kernel releases a lock when the process that holds it ends, so a killed run leaves none. The locked file is open for
writing: only then Linux locks it on the server of an NFS mount too. A directory on NFS would be locked for one machine
alone. Some file systems have no locks. A run there prints a warning and continues.
"""

from __future__ import annotations

import errno
import fcntl
import sys
import time
from pathlib import Path

SHARED, EXCLUSIVE = fcntl.LOCK_SH, fcntl.LOCK_EX
"""Kinds of locks: any number of processes share one; a process that writes has the other, alone."""


def try_lock(descriptor: int, kind: int) -> bool:
    """Lock an open file. Return False if another process has it. Raises OSError on a file system without locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def lock(descriptor: int, kind: int, file: Path, *, patience: float = 0.0) -> bool:
    """Lock an open file, or try to for `patience` seconds. Return False if another process keeps it.

    file: its path, for the warning on a file system without locks. There the result is True.
    """
    deadline = time.monotonic() + patience
    try:
        while not try_lock(descriptor, kind):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
    except OSError as error:
        print(
            f"labkit: {file} cannot be locked ({error.strerror}); see to it that no second run writes into its folder",
            file=sys.stderr,
        )
    return True
