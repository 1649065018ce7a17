"""The lines of a traceback that are the reader's own: neither labkit's nor those of an installed library."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path

MOST = 3
"""Frames that are shown, the last ones: the error arose in the last."""
_OTHERS = tuple(
    str(folder)
    for folder in (
        Path(__file__).parents[1],
        *(sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)


def reader_frames(error: BaseException) -> tuple[str, ...]:
    """Return the reader's last frames, each as its place and its line of code, in the order of the calls."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*_OTHERS, "<frozen"))
    ]
    return tuple(
        f"{_place(frame.filename)}, line {frame.lineno}, in {frame.name}\n    {frame.line}".rstrip()
        for frame in frames[-MOST:]
    )


def _place(filename: str) -> str:
    """Name a cell as Jupyter does (`Cell In[5]`), any other file by its name."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    cell = shell.compile.format_code_name(filename) if shell else None
    return " ".join(cell) if cell else Path(filename).name
