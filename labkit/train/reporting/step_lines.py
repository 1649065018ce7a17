"""Files with one JSON object per line, read back when a run goes on in them. Needs no torch.

A kill may leave a line without its newline, even if it is complete JSON, and the next line would be appended to it. So
only whole lines count, up to the first that is not a record.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

EVALUATIONS = ("validation_loss", "test_loss")


def steps_of(path: Path) -> list[int]:
    """Return the step of each line; none if there is no file."""
    return [step for _, step in _whole_lines(path)]


def evaluations_at(path: Path, step: int) -> set[str]:
    """Return the evaluations, `validation_loss` and `test_loss`, that a metrics.jsonl has of this step."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines()) if path.exists() else ()
    return {name for line in lines if line.get("step") == step for name in EVALUATIONS if name in line}


def cut_after(path: Path, step: int) -> None:
    """Remove the lines of later steps, and a line that was cut off in the middle."""
    kept = 0
    for size, written in _whole_lines(path):
        if written > step:
            break
        kept += size
    if path.exists():
        os.truncate(path, kept)


def _whole_lines(path: Path) -> Iterator[tuple[int, int]]:
    """Yield (bytes, step) of the lines of a file up to the first that is not a record; step 0 if a line has none."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                step = json.loads(line).get("step")
            except (ValueError, AttributeError):
                return
            if not line.endswith(b"\n"):
                return
            yield len(line), step if isinstance(step, int) else 0
