"""Copies of chapters, and what became of the exercises in one of them."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from labkit.check.chapter_copies import CHAPTERS, chapters_in
from labkit.cli.grading.limits import Limits, running

STATES = ("solved", "attempted", "untouched", "missing", "unreadable")
LARGEST = 64 << 20
"""Bytes of a copy; one with pictures has less than one MiB."""
START = 120.0
"""Seconds for a process to load torch and the chapter's imports on a busy machine."""


class Copy(NamedTuple):
    """One learner's copy of a chapter."""

    student: str
    chapter: str
    path: Path


Row = dict[str, Any]


def copies_in(folder: Path) -> list[Copy]:
    """Return the copies of chapters in the folders of students, or those in `folder` itself as one student's.

    Links are left out, because they may point anywhere; a file counts by the chapter's number at its beginning.
    """
    numbers = {path.name[:2] for path in chapters_in(CHAPTERS)}
    folders = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.is_symlink()]
    found: list[Copy] = []
    for each in [folder, *folders]:
        files = [path for path in chapters_in(each) if path.is_file() and not path.is_symlink()]
        found += [Copy(each.resolve().name, path.name[:2], path) for path in files if path.name[:2] in numbers]
    return found


def score_copy(copy: Copy, folder: Path, seconds: float, held: Limits) -> list[Row]:
    """Score one copy in a process of its own. Exercises of which it says nothing have been stopped with it."""
    known = exercise_names(copy.chapter)
    whole = START + len(known) * (seconds + 5)
    common = {"student": copy.student, "chapter": copy.chapter}
    try:
        if copy.path.stat().st_size > LARGEST:
            raise ValueError(f"has more than {LARGEST >> 20} MiB")
        content = copy.path.read_bytes()
        _check_is_notebook(content)
    except (OSError, ValueError) as problem:
        return [common | _row(name, "unreadable", reasons=[f"{copy.path.name} {problem}"]) for name in known]
    command = [sys.executable, "-m", "labkit.cli.grading.learner", copy.chapter, str(seconds), json.dumps(held)]
    with tempfile.TemporaryDirectory(prefix="labkit-grade-") as own:
        written = running(command, content, Path(own), folder.resolve(), whole, held)
    found = {row["exercise"]: row for row in map(_read, written.splitlines()) if row}
    stopped = "the process that scored it ended before this exercise"
    return [common | found.get(name, _row(name, "attempted", reasons=[stopped])) for name in known]


def _check_is_notebook(content: bytes) -> None:
    """Raise ValueError where this is no notebook."""
    try:
        cells = json.loads(content)["cells"]
        if all(isinstance(cell["cell_type"], str) for cell in cells):
            return
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError("is no notebook")


def exercise_names(chapter: str = "") -> list[str]:
    """Return the names of all exercises, or of one chapter's, which the chapters' own cells tell."""
    texts = [path.read_text(encoding="utf-8") for path in chapters_in(CHAPTERS) if path.name.startswith(chapter)]
    return sorted(set(re.findall(r'check\(\\"(\d\d\.\w+)\\"', "".join(texts))))


def _row(name: str, state: str, reasons: Sequence[str] = ()) -> Row:
    return {"exercise": name, "state": state, "passed": 0, "total": 0, "seconds": 0.0, "reasons": list(reasons)}


def _read(line: bytes) -> Row:
    """Return a result as the process wrote it; empty where it wrote something else."""
    kinds = {"exercise": str, "state": str, "passed": int, "total": int, "seconds": float, "reasons": list}
    try:
        found = json.loads(line)
        right = all(isinstance(found[name], kind) for name, kind in kinds.items()) and found["state"] in STATES
    except (ValueError, KeyError, TypeError):
        return {}
    return {name: found[name] for name in kinds} if right else {}
