"""The user's line in the traceback of an error that torch, CUDA or a capture has raised."""

from __future__ import annotations

import contextlib
from pathlib import Path
from traceback import FrameSummary, extract_tb

import torch

TORCH = str(Path(torch.__file__).parent)
_INTERNAL = (TORCH, str(Path(__file__).parent), contextlib.__file__, "<frozen")


def user_frame(error: BaseException, internal: tuple[str, ...] = _INTERNAL) -> FrameSummary | None:
    """The innermost frame of the error whose file does not start with a name of `internal`; None without one.

    internal: by default the files of torch and of labkit.graphs.
    """
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(internal)]
    return frames[-1] if frames else None


def raised_at(error: BaseException) -> str:
    """`file:line (in code)` of the user's line; empty where the error has none."""
    frame = user_frame(error)
    return "" if frame is None else f"{frame.filename}:{frame.lineno} (in {frame.name})"
