"""A record of each rank's current wait, which the launcher can read even if the rank no longer answers.

Every launch has one small file with one record per rank, and all ranks map the file into memory. `waiting` writes a
record in about a microsecond, without a system call, so that each collective can afford it. When a rank hangs, holds
the GIL or is stopped by a signal, the launcher reads its record from outside. A rank also adds up its finished waits.

The last byte of the file goes the other way: the launcher writes it to ask all ranks to stop. A rank that starts later
reads it as well, which a signal could not promise.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

RECORD_BYTES = 256
_RECORD = struct.Struct("<Bd247p")  # inside (1) or left (0), time.monotonic() at entry, the text cut to 246 bytes


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

    def __init__(self, path: Path | None, rank: int) -> None:
        """path: None for a rank that labkit's launcher did not start; then nobody else reads the record."""
        if path is None:
            self._map, rank = mmap.mmap(-1, RECORD_BYTES + 1), 0
        else:
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)
        self._start = rank * RECORD_BYTES
        self._current: _Wait | None = None
        self.waited = 0.0
        """Seconds of all finished waits; a wait inside another counts once."""

    @property
    def asked_to_stop(self) -> bool:
        """True if the launcher has asked all ranks to stop (`ask_to_stop`)."""
        return self._map[-1] == 1

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
        """Mark the wait as over and add its time, or write the surrounding wait again."""
        ended, self._current = self._current, outer
        if outer is None:
            self._map[self._start] = 0
            if ended is not None:
                self.waited += time.monotonic() - ended[1]
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


def waited_seconds() -> float:
    """Return the seconds that this rank has waited for others so far; 0 outside a rank."""
    return current.waited if current is not None else 0.0


def create_slots(path: Path, world_size: int) -> None:
    """Create the file of empty records that the ranks of one launch share."""
    path.write_bytes(bytes(RECORD_BYTES * world_size + 1))


def ask_to_stop(path: Path, asked: bool) -> None:
    """Ask all ranks of a launch to stop, or take the request back."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([asked]))


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
