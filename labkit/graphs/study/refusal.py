"""A refusal as text, with the user's line, for chapters, whose cells must not end in an error."""

from __future__ import annotations

import linecache
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

_NOT_THE_USER = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<")
_PLACE = re.compile(r"^\S.*?:\d+ \(in [^)]*\): ")
"""The start of a message, `file:line (in code): `; a `Refusal` shows the line itself instead."""


@dataclass(frozen=True)
class Refusal:
    """An error as text: the line of the user's code that was running, and the reason."""

    line: str
    """Source of the innermost line that is neither torch's nor labkit's; empty without such a line."""
    reason: str
    """Message of the error."""

    @classmethod
    def of(cls, error: BaseException) -> Refusal:
        """A caught exception as a refusal."""
        below = error.__cause__  # the device's own error
        line = (_line_of(below.__traceback__) if below is not None else "") or _line_of(error.__traceback__)
        return cls(line, _PLACE.sub("", str(error).strip().split("\n")[0]))

    def __repr__(self) -> str:
        reason = textwrap.fill(self.reason, 96, initial_indent="  ", subsequent_indent="  ")
        return f"{self.line or 'refused'}\n{reason}"


def refused(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Refusal:
    """Call `function`, which must fail, and return the refusal.

    Any RuntimeError counts: a GraphCaptureError, and on a GPU CUDA's own error.

    Raises:
        ValueError: the call did not fail.
    """
    try:
        function(*args, **kwargs)
    except RuntimeError as error:
        return Refusal.of(error)
    raise ValueError(f"{getattr(function, '__name__', function)} ran, and was expected to be refused")


def _line_of(trace: TracebackType | None) -> str:
    line = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(_NOT_THE_USER):
            line = linecache.getline(file, trace.tb_lineno).strip() or line
        trace = trace.tb_next
    return line
