"""The progress of a training run on standard error, from the reports of rank 0.

On a terminal of 60 columns or more, one line is drawn again and again. It has as many values as fit, the most important
first, and from 80 columns on a bar in the rest of the line. A narrower terminal, a terminal of unknown width, and a
file get whole lines with all values. These show the first step, the last, and some between: one per second at first,
and one per minute after a hundred minutes. An evaluation always has its own line.

Until the first step a thread shows the stage of the start and its seconds. A terminal gets them each second, a file
gets one line for a stage that takes long.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from functools import partial
from textwrap import fill
from typing import Any, TextIO

from labkit.train.reporting.progress_line import all_lines, one_line

NARROWEST = 60
"""Fewest columns of a terminal for one line that is drawn again and again."""
WITH_BAR = 80
"""Fewest columns for a bar after the values."""
LONG_STAGE = 10
"""Seconds after which a stage of the start gets a line of its own if no line can be drawn again."""
_BAR, _LEAST_BAR = "  {percentage:3.0f}%|{bar}|", 12
"""Form of the bar, and columns of the shortest."""


def columns(stream: TextIO) -> int | None:
    """Return the width of the terminal of `stream`: None for a file or pipe, 0 for a terminal of unknown width."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):  # no terminal, or a Python stream without a file descriptor
        return None


class ProgressBar:
    """`with ProgressBar(100) as bar: run(..., progress=bar.update)`."""

    def __init__(self, steps: int, stream: TextIO | None = None, *, shown: bool = True) -> None:
        """steps: steps of the whole run. stream: standard error by default. shown: False on ranks of torchrun that
        print nothing."""
        self._steps, self._stream, self._shown = steps, stream or sys.stderr, shown
        self._bar: Any = None
        self._unshown: dict[str, Any] | None = None
        self._started, self._shown_at = time.monotonic(), -math.inf
        self._stage, self._begun = "starting ranks", self._started
        self._first, self._drawing = threading.Event(), threading.Lock()

    def __enter__(self) -> ProgressBar:
        if self._shown and (columns(self._stream) or 0) >= NARROWEST:
            from tqdm.auto import tqdm

            self._bar = tqdm(
                total=self._steps, file=self._stream, mininterval=0.1, miniters=1, ncols=NARROWEST, bar_format="{desc}",
                desc=self._stage_words(0),
            )  # fmt: skip
        if self._shown:
            threading.Thread(target=self._show_stages, name="stages", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave the last state on the screen, also after a failure; a run without a step to do has no such state."""
        self._end_stages()
        if self._bar is not None:
            self._bar.leave = bool(self._bar.n or kind)
            self._bar.close()
        self._show_rest()

    def update(self, values: dict[str, Any]) -> None:
        """Show a finished step, an evaluation after it, or a stage of the start."""
        if "stage" in values:
            with self._drawing:
                self._stage, self._begun = values["stage"], time.monotonic()
            return
        if "message" in values:
            self._show_rest()
            self._print(values["message"])
            return
        self._end_stages()
        values = {"steps": self._steps, **values}
        if "loss" not in values:
            self._show_rest()
            self._write(values)
        elif self._bar is not None:
            self._redraw(values)
        else:
            self._unshown = values
            if self._is_due():
                self._show_rest()

    def _stage_words(self, seconds: float) -> str:
        return f"{self._stage}, {seconds:.0f} s"

    def _show_stages(self) -> None:
        """In a thread: show the stage until the first step."""
        told = ""
        while not self._first.wait(1.0):
            with self._drawing:
                seconds = time.monotonic() - self._begun
                if self._first.is_set():
                    return
                if self._bar is not None:
                    self._bar.set_description_str(self._stage_words(seconds))
                elif seconds >= LONG_STAGE and self._stage != told:
                    told = self._stage
                    self._print(self._stage_words(seconds))

    def _end_stages(self) -> None:
        with self._drawing:
            self._first.set()

    def _redraw(self, values: dict[str, Any]) -> None:
        wide = columns(self._stream) or NARROWEST
        width, bar = wide - 1, _BAR if wide >= WITH_BAR else ""  # a character in the last column may break the line
        self._bar.ncols, self._bar.bar_format = width, "{desc}" + bar
        self._bar.set_description_str(one_line(values, width - _LEAST_BAR if bar else width), refresh=False)
        self._bar.update(values["step"] - self._bar.n)

    def _is_due(self) -> bool:
        """Return True if a whole line is due. The longer the run, the rarer its lines."""
        now = time.monotonic()
        return now - self._shown_at >= min(60.0, max(1.0, (now - self._started) / 100))

    def _show_rest(self) -> None:
        """Print a whole line for the last step, if it has none yet."""
        if self._unshown is not None:
            self._write(self._unshown)
            self._shown_at, self._unshown = time.monotonic(), None

    def _write(self, values: dict[str, Any]) -> None:
        self._print("\n".join(all_lines(values, columns(self._stream) or None)))

    def _print(self, text: str) -> None:
        if width := columns(self._stream):
            fold = partial(fill, width=width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
            text = "\n".join(map(fold, text.split("\n")))
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)
