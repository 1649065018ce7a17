"""stdout and stderr of a command: lines that fit the terminal, and pipes whose reader may leave.

On a terminal a long line is broken at blanks, so that no number and no word is cut; `table` breaks inside its cells. A
file or pipe gets whole lines, which are the same whatever the width of a terminal.

The reader of a pipe may leave, as `head` does in `labkit train ... | head -1`. The command then goes on without
printing, and ends with the same exit code as with a reader. So a run that writes files is not lost, and the exit code
of `parity` still gives its answer. Any other failure to write, such as a full disk, is raised once.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from typing import Any, TextIO

_GAP = "  "
"""The blanks between two columns of a table."""


def room(stream: TextIO | None = None) -> int | None:
    """Return the columns of the terminal at `stream` (stdout by default), 80 if it does not tell; None for a file or
    pipe.

    The environment variable COLUMNS overrides what the terminal tells."""
    target: TextIO = stream or sys.stdout
    if not target.isatty():
        return None
    wanted = os.environ.get("COLUMNS", "")[:9]
    return (int(wanted) if wanted.isdecimal() else 0) or os.get_terminal_size(target.fileno()).columns or 80


def show(text: str, head: str = "", stream: TextIO | None = None) -> None:
    """Print `text`, as `folded` breaks it for the stream (stdout by default)."""
    print("\n".join(folded(text, head, room(stream))), file=stream, flush=True)


def loading(what: object) -> None:
    """Say on a terminal what is loaded, before work of some seconds that prints nothing."""
    if sys.stderr.isatty():
        show(f"loading {what}", stream=sys.stderr)


def folded(text: str, head: str = "", width: int | None = None) -> list[str]:
    """Return `head` and `text` in lines of at most `width` columns, broken at blanks; without a width in whole lines.

    A broken line continues below `text`. Without a head it continues below its own text after a label such as `1.` or
    `rank 3`, or two blanks further in. A word longer than the width stays whole.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        start = head or re.match(r" *(?:\d+\. |rank \d+ +)?", line).group()  # pyright: ignore[reportOptionalMemberAccess]
        body = line if head else line[len(start) :]
        indent = " " * len(start if head else start or _GAP)
        lines += _wrapped(body, width, start, indent) if width else [start + body]
    return lines


def table(
    rows: Sequence[Sequence[str]], right: Collection[int] = (), width: int | None = None, *, below: bool = False
) -> list[str]:
    """Return aligned lines for `rows` of cells, the first of which has the heads; columns in `right` are right-aligned.

    If a line is longer than `width`, its widest cells are broken at blanks. If that is not enough, each cell gets a
    line of its own, after its head. With `below`, the last column of a table that is too wide is first moved below its
    rows, without the cells that are `none`.
    """
    kept, notes = [list(row) for row in rows], [""] * len(rows)
    columns = list(zip(*rows))
    widths = [max(map(len, column)) for column in columns]
    least = [max(len(word) for cell in column for word in [*cell.split(), ""]) for column in columns]

    def too_wide() -> bool:
        return width is not None and sum(widths) + len(_GAP) * (len(widths) - 1) > width

    if below and too_wide():
        head, *cells = (row.pop() for row in kept)
        notes = ["", *("" if cell == "none" else f"{head}: {cell}" for cell in cells)]
        del widths[-1]
    while too_wide():
        able = [i for i, size in enumerate(widths) if size > least[i]]
        if not able:
            pairs = ["\n".join(": ".join(cells) for cells in zip(rows[0], row)) for row in rows[1:]]
            return folded("\n\n".join(pairs), "", width)
        widths[max(able, key=widths.__getitem__)] -= 1
    parts = [[_wrapped(cell, size) for cell, size in zip(row, widths)] for row in kept]
    widths = [max(len(line) for cell in column for line in cell) for column in zip(*parts)]
    lines = []
    for row, note in zip(parts, notes):
        for cells in zip_longest(*row, fillvalue=""):
            sides = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths))]
            lines.append(_GAP.join(sides).rstrip())
        lines += folded(note, _GAP * 2, width) if note else []
    return lines


def _wrapped(text: str, width: int, head: str = "", indent: str = "") -> list[str]:
    wrapper = textwrap.TextWrapper(max(1, width), head, indent, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text) or [head]


def _escaped(error: UnicodeError) -> tuple[str, int]:
    r"""Escape what a stream cannot encode, so that no character ends a command; a byte that is not UTF-8 as `\xff`."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end].encode("ascii", "backslashreplace").decode()
    return re.sub(r"\\udc([89a-f][0-9a-f])", r"\\x\1", text), error.end


codecs.register_error("labkit", _escaped)


class _Pipe(io.FileIO):
    """A descriptor that becomes /dev/null when it can no longer be written."""

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except BlockingIOError:
            raise
        except OSError as error:
            # A stream must not keep text that it could not write, because the interpreter would try again at its end,
            # and fail.
            self._discard()
            if isinstance(error, BrokenPipeError):
                return memoryview(data).nbytes
            name = "standard output" if self.fileno() == 1 else "standard error"
            raise OSError(error.errno, error.strerror, name) from error

    def _discard(self) -> None:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self.fileno())
        os.close(nothing)


@contextmanager
def readers_may_leave() -> Iterator[None]:
    """In the block, let this process's own stdout and stderr outlive their readers.

    A process that was started without them prints nothing. Streams that tests or notebooks put in their place are left
    alone."""
    before = sys.stdout, sys.stderr
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - closed with the process
        elif stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, _outliving(stream))
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # main has flushed, and reported a failure
                stream.flush()
        sys.stdout, sys.stderr = before


def _outliving(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    stream.flush()
    pipe = _Pipe(stream.fileno(), "w", closefd=False)
    unbuffered = isinstance(stream.buffer, io.RawIOBase)  # python -u
    return io.TextIOWrapper(
        pipe if unbuffered else io.BufferedWriter(pipe),  # pyright: ignore[reportArgumentType]
        encoding=stream.encoding,
        errors="labkit",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
