"""A refusal as text, with the user's line, for chapters, whose cells must not end in an error."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.graphs.user_line import TORCH, user_frame

_NOT_THE_USER = (TORCH, str(Path(__file__).parents[2]), "<")
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
        raised = (error.__cause__, error)  # the cause is the device's own error
        frames = [frame for one in raised if one is not None and (frame := user_frame(one, _NOT_THE_USER))]
        line = (frames[0].line or "") if frames else ""
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
    raise ValueError(f"{getattr(function, '__name__', function)} ran, but was expected to be rejected")
