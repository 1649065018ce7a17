"""The results of evaluations in a file of JSON lines, a row for each checkpoint, and the state of one that was cut off.

    results.jsonl            a row for each finished evaluation
    results.jsonl.partial    the scored items of the one that was under way: an evaluation with the same key goes on

A key names everything that a result depends on: task, checkpoint and its checksum, text file, settings. A row whose key
is there already is not evaluated again. Machines may have disks of their own, so all ranks do as rank 0's file says.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.config import ParallelConfig
from labkit.data.text import read_lines
from labkit.output_files import appearing, naming
from labkit.parallel.collectives import gather_objects
from labkit.parallel.groups import initialize_model_parallel

Key = dict[str, Any]


def digest_of(file: str | Path) -> str:
    """SHA-256 of a file, the first 16 digits."""
    with Path(file).open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:16]


def agreed(find: Callable[[], Any]) -> Any:
    """Rank 0's result, on all ranks, which call this together: files may differ between their looks."""
    own = find()
    with initialize_model_parallel(ParallelConfig()) as groups:
        return gather_objects(own, groups.world)[0]


class Records:
    """The rows of one file. Raises ValueError for a file with a line that is no row."""

    def __init__(self, path: str | Path) -> None:
        self.path, self.partial = Path(path), Path(f"{path}.partial")
        self.rows: list[dict[str, Any]] = []
        lines = read_lines(self.path, "--out") if self.path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                self.rows.append(dict(json.loads(line)))
            except (ValueError, TypeError):
                raise ValueError(f"{self.path}, line {number}, is no row of results; name another file") from None

    def finished(self, key: Key) -> dict[str, Any] | None:
        """The row of this key, or None."""
        return next((row for row in self.rows if row.get("key") == key), None)

    def done(self, key: Key) -> list[Any]:
        """The items that an evaluation with this key had scored when it was cut off; [] if there was none."""
        try:
            kept = json.loads(self.partial.read_text(encoding="utf-8"))
            return list(kept["done"]) if kept["key"] == key else []
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def keep(self, key: Key, done: list[Any]) -> None:
        """Store the items scored so far, for the next start."""
        with appearing(self.partial) as draft:
            draft.write_text(json.dumps({"key": key, "done": done}), encoding="utf-8")

    def add(self, row: dict[str, Any]) -> None:
        """Append a row, and forget what was kept of it."""
        with naming(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows.append(row)
        self.partial.unlink(missing_ok=True)
