"""Times of work on a CUDA stream, on the clock of every other Event, without a wait at the launch.

A kernel launch returns before the kernel runs. So the host's clock around an action would time the launch, and a wait
after each action would remove the overlap that we want to see. Here a `torch.cuda.Event` is put on the stream before
and after the action, and their times are read once, at the end. CUDA events only know differences, so one more event,
recorded when host and device are synchronised, ties them to `time.perf_counter()`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from labkit.events import active_recorder, ranged


class StreamClock:
    """Reads CUDA events as seconds of `time.perf_counter()`. Making one waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.synchronize(device)
        self._origin = self.mark()
        self._origin.synchronize()
        self._seconds = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """Record and return an event that happens when the current stream gets here."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, event: torch.cuda.Event) -> float:
        """Wait for `event` and return its time, exact to 1 us for 16 s, since CUDA gives milliseconds as a float32."""
        event.synchronize()
        return self._seconds + 1e-3 * self._origin.elapsed_time(event)

    @contextmanager
    def span(self, name: str, kind: str, *, microbatch: int | None = None, chunk: int | None = None) -> Iterator[None]:
        """Record an Event for the block's work on the stream, as `events.span` does; its times come with `settle`."""
        recorder = active_recorder()
        if recorder is None:
            with ranged(name):
                yield
            return
        start = self.mark()
        with ranged(name):
            yield
        end = self.mark()
        times = lambda: (self.seconds(start), self.seconds(end))  # noqa: E731
        recorder.add_later(name, kind, times, microbatch=microbatch, chunk=chunk)
