"""The wait of a rank, written where the launcher can read it even if the rank cannot answer any more.

Every launch has one small file, mapped into memory by all ranks, with one record a rank. `waiting` writes a record in
about a microsecond, without a system call, so that each collective can afford it. When a rank hangs (or holds the GIL,
or is stopped by a signal) the launcher reads the record from outside.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

RECORD_BYTES = 256
_RECORD = struct.Struct("<Bd247p")  # inside (1) or left (0), time.monotonic() of the entry, the text cut to 246 bytes


@dataclass(frozen=True)
class Status:
    """One rank's record."""

    text: str
    """Its wait or, if `inside` is False, its last one; empty if it never waited."""
    inside: bool
    """True while it waits."""
    since: float
    """`time.monotonic()` when the wait began; the same clock in all processes of one machine."""


_Wait = tuple[bytes, float]
"""The subject of the wait, encoded, and its start."""


class StatusSlot:
    """This rank's record in the shared file."""

    def __init__(self, path: Path, rank: int) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._start = rank * RECORD_BYTES
        self._current: _Wait | None = None

    def enter(self, text: str) -> _Wait | None:
        """Write that the rank waits for `text`; returns what `leave` needs to restore the surrounding wait."""
        outer = self._current
        self._current = encoded, since = text.encode(), time.monotonic()
        _RECORD.pack_into(self._map, self._start, 1, since, encoded)
        return outer

    def clear(self) -> None:
        """Forget what was waited for."""
        self._current = None
        _RECORD.pack_into(self._map, self._start, 0, 0.0, b"")

    def leave(self, outer: _Wait | None) -> None:
        """Mark the wait as over, or go back to the surrounding one."""
        self._current = outer
        if outer is None:
            self._map[self._start] = 0
        else:
            encoded, since = outer
            _RECORD.pack_into(self._map, self._start, 1, since, encoded)


current: StatusSlot | None = None
"""This process's record; None outside a rank."""


class waiting:
    """`with waiting("all_reduce tp #12 (4, 8) float32"):` says what this rank waits for while the block runs.

    A hang is then reported with this text. Outside a rank it does nothing. Blocks nest.
    """

    __slots__ = ("_outer", "_text")

    def __init__(self, text: str) -> None:
        self._text = text

    def __enter__(self) -> None:
        if current is not None:
            self._outer = current.enter(self._text)

    def __exit__(self, *_: object) -> None:
        if current is not None:
            current.leave(self._outer)


def attach(slot: StatusSlot | None) -> None:
    """Make `slot` this process's record (the launcher calls this)."""
    global current
    current = slot


def create_slots(path: Path, world_size: int) -> None:
    """Make the file of empty records that the ranks of one launch share."""
    path.write_bytes(bytes(RECORD_BYTES * world_size))


def read_slot(path: Path, rank: int) -> Status:
    """One rank's record, read from outside.

    A record that is being written may come out garbled, and an empty one stands for a file that somebody has removed:
    it is read to explain a failure, which must not become another one.
    """
    try:
        with path.open("rb") as file:
            file.seek(rank * RECORD_BYTES)
            record = file.read(RECORD_BYTES)
    except FileNotFoundError:
        return Status("", False, 0.0)
    inside, since, encoded = _RECORD.unpack(record)
    return Status(encoded.decode(errors="replace"), bool(inside), since)
