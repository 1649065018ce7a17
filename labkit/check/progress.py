"""What a reader has done, kept in one small JSON file next to the chapters that were worked on.

    {"check": {"06.shapes": "solved"}, "predict": {"06.bytes": "near"}, "hunt": {"08": ["bucket order"]}}

The file is `progress.json` in the folder of the notebook, or the path in LABKIT_PROGRESS. Without that variable it is
kept only while a person sits at the notebook, so that papermill, nbval and scripts leave no file anywhere.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from labkit.output_files import appearing
from labkit.viz.live import is_live

FILE = "progress.json"
KINDS = ("check", "predict", "hunt")
Progress = dict[str, dict[str, Any]]
"""Kind -> name -> state, which is a text or other JSON."""


class BrokenProgress(ValueError):
    """The file is there and is not what labkit wrote. It is left as it is."""


def progress_file(folder: Path | None = None) -> Path:
    """Return the path of the file: LABKIT_PROGRESS, or FILE in the folder (by default the current one)."""
    return Path(os.environ.get("LABKIT_PROGRESS") or (folder or Path()) / FILE)


def is_kept() -> bool:
    """Return True if what the reader does is written down."""
    return bool(os.environ.get("LABKIT_PROGRESS")) or is_live()


def read(path: Path) -> Progress:
    """Return what the file contains; nothing where there is no file. Raises BrokenProgress or OSError."""
    empty: Progress = {kind: {} for kind in KINDS}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return empty
    except ValueError as problem:
        raise BrokenProgress(f"{path} is not JSON ({problem}); move it away, and progress starts anew") from None
    if not isinstance(found, dict) or not all(isinstance(found.get(kind, {}), dict) for kind in KINDS):
        raise BrokenProgress(f"{path} is not a record of progress; move it away, and progress starts anew")
    return empty | found


def record(kind: str, name: str, state: Any) -> None:
    """Write down the state of an exercise (`check`), of a prediction (`predict`) or of a hunt.

    A solved exercise stays solved, and the first bet on a prediction counts; a hunt gets its new state. Nothing is
    written where progress is not kept. Raises BrokenProgress, and OSError if the file cannot be written.
    """
    if not is_kept():
        return
    path = progress_file()
    with _alone(path):
        known = read(path)
        before = known[kind].get(name)
        if (kind, before) == ("check", "solved") or (kind == "predict" and before is not None):
            return
        known[kind][name] = state
        _write(path, known)


def _write(path: Path, known: Progress) -> None:
    with appearing(path) as draft:
        draft.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def identity(new: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Return who the reader is for a board, which the file keeps; `new` makes it. Raises BrokenProgress or OSError."""
    path = progress_file()
    with _alone(path):
        known = read(path)
        if "board" not in known:
            known["board"] = new()
            _write(path, known)
        return known["board"]


def kept(kind: str, name: str, state: Any) -> str:
    """Record a state; return why that failed as a sentence for the reader, empty if it did not."""
    try:
        record(kind, name, state)
    except (BrokenProgress, OSError) as problem:
        return f"Progress was not kept: {problem}."
    return ""


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let no other notebook write the file meanwhile: lock its folder, because the file itself is replaced."""
    folder = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
