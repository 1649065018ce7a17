"""stdout and stderr of a command whose reader may leave, as `head` does in `labkit train ... | head -1`.

The command goes on without printing, and ends with the same exit code as with a reader. So a run that writes files is
not lost, and `parity` still answers by its exit code. Any other failure to write, such as a full disk, is raised once.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class _Pipe(io.FileIO):
    """A descriptor that becomes /dev/null when it can no longer be written."""

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except BlockingIOError:
            raise
        except OSError as error:
            # A stream must not keep text that it could not write: the interpreter would try again at its end, and fail.
            self._discard()
            if isinstance(error, BrokenPipeError):
                return memoryview(data).nbytes
            raise

    def _discard(self) -> None:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self.fileno())
        os.close(nothing)


@contextmanager
def readers_may_leave() -> Iterator[None]:
    """Inside the block this process's own stdout and stderr outlive their readers.

    A process that was started without them prints nothing. Streams that tests or notebooks put in their place stay."""
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
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
