"""When work on a CUDA stream ran, on the clock of every other Event, without waiting for it as it is launched.

A kernel launch returns before the kernel runs, so the host's clock around an action would time its launch, and waiting
for the device after each action would remove the overlap that is to be seen. Here a `torch.cuda.Event` is put on the
stream before and after the action, and their times are read once, at the end. CUDA events know differences only: one
more event, at a moment when host and device meet, ties them to `time.perf_counter()`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from labkit.events import active_recorder, span


class StreamClock:
    """Reads CUDA events as seconds of `time.perf_counter()`. Making one waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.synchronize(device)
        self._origin = self.mark()
        self._origin.synchronize()
        self._seconds = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """An event that happens when the current stream gets here."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, event: torch.cuda.Event) -> float:
        """When `event` happened; waits for it. A float32 of milliseconds: to 1 us within 16 s of the clock's making."""
        event.synchronize()
        return self._seconds + 1e-3 * self._origin.elapsed_time(event)

    @contextmanager
    def span(self, name: str, kind: str, *, microbatch: int | None = None, chunk: int | None = None) -> Iterator[None]:
        """`labkit.events.span` for the work that the block puts on the stream; its times come with `settle`."""
        recorder = active_recorder()
        if recorder is None:
            yield
            return
        start = self.mark()
        yield
        end = self.mark()
        times = lambda: (self.seconds(start), self.seconds(end))  # noqa: E731
        recorder.add_later(name, kind, times, microbatch=microbatch, chunk=chunk)


def stream_clock(device: torch.device) -> StreamClock | None:
    """A clock for what follows, where events are recorded and the device is a GPU; else None."""
    return StreamClock(device) if device.type == "cuda" and active_recorder() is not None else None


def span_on(
    clock: StreamClock | None, name: str, kind: str, *, microbatch: int | None = None, chunk: int | None = None
) -> AbstractContextManager[None]:
    """A span on the clock's stream, or one of the host where there is no clock."""
    return (span if clock is None else clock.span)(name, kind, microbatch=microbatch, chunk=chunk)
