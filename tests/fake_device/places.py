"""Where in the project's source something happens."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(f"{ROOT / folder}/" for folder in ("labkit", "benchmarks"))


@cache
def short(file: str) -> str | None:
    """A file of labkit or of the benchmarks, from the root of the project; None for others."""
    return str(Path(file).relative_to(ROOT)) if file.startswith(OURS) else None


def where() -> str:
    """The two innermost lines of labkit or of a benchmark on the stack."""
    frame, found = sys._getframe(1), []
    while frame is not None and len(found) < 2:
        if (file := short(frame.f_code.co_filename)) is not None:
            found.append(f"{file}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(found) or "no line of ours"
