"""The results of evaluations in a file of JSON lines, and the state of an evaluation that was interrupted.

    results.jsonl            a row for each finished evaluation of a checkpoint
    results.jsonl.partial    the items that an unfinished one has scored; an evaluation with the same key continues it

A key names everything that a result depends on: task, checkpoint and its checksum, text file, settings. A result whose
key has a row is not computed again. Machines may have disks of their own, so all ranks do what rank 0's file says.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from labkit.comm.collectives import gather_objects
from labkit.comm.groups import initialize_model_parallel
from labkit.config import ParallelConfig
from labkit.data.text import read_lines
from labkit.output_files import appearing, naming

Key = dict[str, Any]


def digest_of(file: str | Path) -> str:
    """Return the first 16 digits of the SHA-256 of a file."""
    with Path(file).open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:16]


def agreed(find: Callable[[], Any]) -> Any:
    """Return rank 0's result on all ranks, which call this together, because a file may change between their reads."""
    own = find()
    with initialize_model_parallel(ParallelConfig()) as groups:
        return gather_objects(own, groups.world)[0]


class Records:
    """The rows of one file. Raises ValueError if a line of it is not a row, or if the path is not that of a file."""

    def __init__(self, path: str | Path) -> None:
        self.path, self.partial = Path(path), Path(f"{path}.partial")
        for own in (self.path, self.partial):
            if own.exists() and not own.is_file():
                raise ValueError(f"--out: {str(own)!r} is not a regular file; name another file")
        self.rows: list[dict[str, Any]] = []
        lines = read_lines(self.path, "--out") if self.path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                self.rows.append({**json.loads(line)})
            except (ValueError, TypeError, RecursionError):
                raise ValueError(f"{self.path}, line {number}, is not a row of results; name another file") from None

    def finished(self, key: Key) -> dict[str, Any] | None:
        """Return the row of this key, or None."""
        return next((row for row in self.rows if row.get("key") == key), None)

    def done(self, key: Key) -> list[Any]:
        """Return the items that an interrupted evaluation with this key had scored; [] if there was none."""
        try:
            kept = json.loads(self.partial.read_text(encoding="utf-8"))
            return list(kept["done"]) if kept["key"] == key else []
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return []

    def keep(self, key: Key, done: list[Any]) -> None:
        """Store the items scored so far, for the next start."""
        with suppress(ValueError), appearing(self.partial) as draft:  # not finite: all ranks refuse it in the end
            draft.write_text(json.dumps({"key": key, "done": done}, allow_nan=False), encoding="utf-8")

    def add(self, row: dict[str, Any]) -> None:
        """Append a row, and delete what was stored of the unfinished evaluation."""
        line = json.dumps(row, allow_nan=False) + "\n"
        with naming(self.path), self.path.open("ab+") as file:
            if file.tell():  # it was opened at its end
                file.seek(-1, os.SEEK_END)
                line = line if file.read() == b"\n" else f"\n{line}"
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        self.rows.append(row)
        self.partial.unlink(missing_ok=True)
