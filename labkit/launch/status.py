"""A record of each rank's current wait, which the launcher can read even if the rank no longer answers.

Every launch has one small file with one record per rank, and all ranks map the file into memory. `waiting` writes a
record in about a microsecond, without a system call, so that each collective can afford it. When a rank hangs, holds
the GIL or is stopped by a signal, the launcher reads its record from outside.
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
    """The current wait or, if `inside` is False, the last one; empty if the rank never waited."""
    inside: bool
    """True while the rank waits."""
    since: float
    """`time.monotonic()` at the start of the wait; all processes of one machine share this clock."""


_Wait = tuple[bytes, float]
"""The text of the wait, encoded, and its start."""


class StatusSlot:
    """This rank's record in the shared file."""

    def __init__(self, path: Path, rank: int) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._start = rank * RECORD_BYTES
        self._current: _Wait | None = None

    def enter(self, text: str) -> _Wait | None:
        """Write that the rank waits for `text`. Return the surrounding wait, for `leave`."""
        outer = self._current
        self._current = encoded, since = text.encode(), time.monotonic()
        _RECORD.pack_into(self._map, self._start, 1, since, encoded)
        return outer

    def clear(self) -> None:
        """Erase the record."""
        self._current = None
        _RECORD.pack_into(self._map, self._start, 0, 0.0, b"")

    def leave(self, outer: _Wait | None) -> None:
        """Mark the wait as over, or write the surrounding wait again."""
        self._current = outer
        if outer is None:
            self._map[self._start] = 0
        else:
            encoded, since = outer
            _RECORD.pack_into(self._map, self._start, 1, since, encoded)


current: StatusSlot | None = None
"""This process's record; None outside a rank."""


class waiting:
    """Record the wait of this rank while the block runs: `with waiting("all_reduce tp #12 (4, 8) float32"):`.

    The launcher reports a hang with this text. Outside a rank the block records nothing. Blocks nest.
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
    """Make `slot` the record of this process. The launcher calls this."""
    global current
    current = slot


def create_slots(path: Path, world_size: int) -> None:
    """Create the file of empty records that the ranks of one launch share."""
    path.write_bytes(bytes(RECORD_BYTES * world_size))


def read_slot(path: Path, rank: int) -> Status:
    """Read the record of one rank from outside.

    The launcher reads records to explain a failure, so reading must not fail itself. A record may be garbled if the
    rank writes it at the same time. If the file is gone, the record is empty.
    """
    try:
        with path.open("rb") as file:
            file.seek(rank * RECORD_BYTES)
            record = file.read(RECORD_BYTES)
    except FileNotFoundError:
        return Status("", False, 0.0)
    inside, since, encoded = _RECORD.unpack(record)
    return Status(encoded.decode(errors="replace"), bool(inside), since)
