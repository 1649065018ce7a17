"""The one record of when something happened, predicted or measured.

A simulator and a training run write the same `Event`, so both can be drawn on one axis and exported to one trace. Times
are seconds. Measured ones are `time.perf_counter()`. On one Linux machine that is the same clock in every process, so
events of several ranks compare without correction.

A recorder is one of the `watchers` of this process. The list is here, below everything that works or communicates, so
that all of it can ask whether somebody watches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

KINDS = (
    "forward",
    "backward",
    "input_grad",
    "weight_grad",
    "graph_replay",
    "send",
    "recv",
    "collective",
    "wait",
    "optimizer",
    "data",
    "timer",
)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took from `start` to `end` seconds on one rank."""

    rank: int
    """Global rank."""
    name: str
    """For people: `2F0`, `all_reduce tp`, `forward-backward`."""
    kind: str
    """One of KINDS."""
    start: float
    """Seconds."""
    end: float
    """Seconds."""
    microbatch: int | None = None
    """Microbatch, where the event belongs to one."""
    chunk: int | None = None
    """Model chunk on the rank, where the event belongs to one."""
    bytes: int | None = None
    """Payload of a communication, in bytes."""
    step: int | None = None
    """Optimizer step, counted from 1, of a training run; a validation belongs to the step before it."""

    @property
    def duration(self) -> float:
        """Seconds from start to end."""
        return self.end - self.start

    def record(self) -> dict[str, Any]:
        """Return the fields by name, without those that are None."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}


class EventRecorder:
    """Collects the events of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.step: int | None = None
        """Written into every event from here on."""
        self._events: list[Event] = []
        self._fields: list[tuple[Any, ...]] = []
        """The fields of events that nobody has asked for yet: an `Event` is made only when somebody asks."""
        self._later: list[tuple[int, Callable[[], Event]]] = []

    @property
    def events(self) -> list[Event]:
        """The events so far, in order of their end. This is the list itself, which may be cleared."""
        while self._fields:
            fields, self._fields = self._fields, []
            self._events += [Event(self.rank, *each) for each in fields]
        return self._events

    def add(
        self,
        name: str,
        kind: str,
        start: float,
        end: float,
        *,
        microbatch: int | None = None,
        chunk: int | None = None,
        bytes: int | None = None,
    ) -> None:
        """Append one event that has already ended."""
        self._fields.append((name, kind, start, end, microbatch, chunk, bytes, self.step))

    def add_later(
        self,
        name: str,
        kind: str,
        times: Callable[[], tuple[float, float]],
        *,
        microbatch: int | None = None,
        chunk: int | None = None,
    ) -> None:
        """Keep the place of an event whose (start, end) only `settle` can ask for: work that a GPU has yet to do."""
        fields = {"microbatch": microbatch, "chunk": chunk, "step": self.step}
        self._later.append((len(self.events), lambda: Event(self.rank, name, kind, *times(), **fields)))

    def settle(self) -> None:
        """Put the events of `add_later` into their places, which waits for their work. `recording` ends with it."""
        waiting, self._later = self._later, []
        for position, event in reversed(waiting):
            self.events.insert(position, event())


# ---- who watches ----

watchers: list[object] = []
"""Whoever watches this process while a block of theirs runs: recorders of Events, profilers, ledgers, `dropped` and
`delayed` calls, graph captures. All threads share the list, because autograd runs backward on threads of its own.

`pretrain` puts its recorder here unless nothing asks for Events (`train.record_events`, `write_events`,
`timing_log_level`). Otherwise the list is nearly always empty, so code that must be fast first checks whether it is,
and then does nothing for watchers.
"""

W = TypeVar("W")


@contextmanager
def watching(watcher: W) -> Iterator[W]:
    """Inside the block `watcher` is one of the watchers."""
    watchers.append(watcher)
    try:
        yield watcher
    finally:
        watchers.remove(watcher)


def watchers_of(kind: type[W]) -> list[W]:
    """The watchers of one kind; the innermost block's is the last."""
    return [watcher for watcher in watchers if isinstance(watcher, kind)]


def innermost(kind: type[W]) -> W | None:
    """The watcher of one kind whose block is the innermost, or None."""
    return next((watcher for watcher in reversed(watchers) if isinstance(watcher, kind)), None)


def active_recorder() -> EventRecorder | None:
    """The recorder of the innermost `recording`, or None when nothing is recorded."""
    return innermost(EventRecorder)


@contextmanager
def recording(rank: int) -> Iterator[EventRecorder]:
    """Record everything that this process reports while the block runs."""
    with watching(EventRecorder(rank)) as recorder:
        yield recorder
        recorder.settle()


@contextmanager
def not_recording() -> Iterator[None]:
    """Record nothing inside the block: what runs there is not part of the work, or cannot be timed."""
    recorders = watchers_of(EventRecorder)
    for recorder in recorders:
        watchers.remove(recorder)
    try:
        yield
    finally:
        watchers[:0] = recorders


MakeRange = Callable[[str], AbstractContextManager[Any]]
"""A name -> a context that a profiler shows as a range, such as `torch.profiler.record_function`."""


class _Profiler:
    """The watcher of a `ranging` block."""

    def __init__(self, make_range: MakeRange) -> None:
        self.make_range = make_range


@contextmanager
def ranging(make: MakeRange) -> Iterator[None]:
    """Inside the block every span, timer and transfer is a range of a profiler."""
    with watching(_Profiler(make)):
        yield


def ranged(name: str) -> AbstractContextManager[Any]:
    """A range with this name; outside `ranging` a context that does nothing."""
    profiler = innermost(_Profiler)
    return nullcontext() if profiler is None else profiler.make_range(name)


@contextmanager
def timed(timers: Any, name: str, log_level: int = 2) -> Iterator[None]:
    """Start and stop a named timer of the caller's, `timers(name, log_level=n)`, if there is one."""
    timer = timers(name, log_level=log_level) if timers is not None else None
    if timer is not None:
        timer.start()
    try:
        yield
    finally:
        if timer is not None:
            timer.stop()


class span:
    """`with span("2F0", "forward"):` records the block as one event, and as a range inside `ranging`; nothing is
    recorded where nobody asks.

    It is a class rather than a generator, because it runs between any two actions of a pipeline.
    """

    __slots__ = ("_fields", "_kind", "_name", "_range", "_recorder", "_start")

    def __init__(
        self, name: str, kind: str, *, microbatch: int | None = None, chunk: int | None = None, bytes: int | None = None
    ) -> None:
        """`kind` is one of KINDS; the rest is as in `Event`."""
        self._name, self._kind, self._fields = name, kind, (microbatch, chunk, bytes)

    def __enter__(self) -> None:
        self._recorder = self._range = None
        if watchers:
            self._recorder, self._range = active_recorder(), ranged(self._name)
            self._range.__enter__()
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
        if self._recorder is not None:
            end = time.perf_counter()
            microbatch, chunk, bytes = self._fields
            self._recorder.add(
                self._name, self._kind, self._start, end, microbatch=microbatch, chunk=chunk, bytes=bytes
            )


def shift_to_zero(events: Iterable[Event]) -> list[Event]:
    """The same events with the earliest start at 0, in order of start."""
    ordered = sorted(events, key=lambda event: (event.start, event.rank))
    if not ordered:
        return []
    origin = ordered[0].start
    return [replace(event, start=event.start - origin, end=event.end - origin) for event in ordered]
