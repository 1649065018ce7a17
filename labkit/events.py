"""The one record of when something happened, predicted or measured.

A simulator and a training run write the same `Event`, so both can be drawn on one axis and exported to one trace. Times
are seconds. Measured ones are `time.perf_counter()`. On one Linux machine that is the same clock in every process, so
events of several ranks compare without correction.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from labkit.output_files import appearing

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


class EventRecorder:
    """Collects the events of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.step: int | None = None
        """Written into every event from here on."""
        self._events: list[Event] = []
        self._fields: list[tuple[Any, ...]] = []
        """Of events that nobody has asked for yet: what is recorded should take as little time as can be."""
        self._later: list[tuple[int, Callable[[], Event]]] = []

    @property
    def events(self) -> list[Event]:
        """So far, in order of their end; the list itself, which may be cleared."""
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


observers: list[object] = []
"""Whoever sees what this process does while a block runs: recorders of Events, ledgers, hooks, graph captures. The list
is nearly always empty. Code between two actions of a pipeline looks here once, and then makes nothing for them."""
start_observers: list[object] = []
"""Those of them that must see a transfer start: all but recorders, which are told when it has ended."""


@contextmanager
def observing(observer: object, *, starts: bool = True) -> Iterator[None]:
    """`observer` is one of them inside the block; `starts` says whether it must see transfers start."""
    lists = (observers, start_observers) if starts else (observers,)
    for each in lists:
        each.append(observer)
    try:
        yield
    finally:
        for each in lists:
            each.remove(observer)


_active: EventRecorder | None = None


def active_recorder() -> EventRecorder | None:
    """The recorder of the innermost `recording`, or None when nothing is recorded."""
    return _active


@contextmanager
def recording(rank: int) -> Iterator[EventRecorder]:
    """Record everything that this process reports while the block runs."""
    global _active
    outer, mine = _active, EventRecorder(rank)
    _active = mine
    try:
        with observing(mine, starts=False):
            yield mine
        mine.settle()
    finally:
        _active = outer


@contextmanager
def not_recording() -> Iterator[None]:
    """Record nothing inside the block: what runs there is no part of the work, or cannot be timed."""
    global _active
    outer, _active = _active, None
    try:
        yield
    finally:
        _active = outer


MakeRange = Callable[[str], AbstractContextManager[Any]]
"""A name -> a context that a profiler shows as a range, such as `torch.profiler.record_function`."""
_make_range: MakeRange | None = None


@contextmanager
def ranging(make: MakeRange) -> Iterator[None]:
    """Inside the block every span, timer and transfer is a range of a profiler."""
    global _make_range
    outer, _make_range = _make_range, make
    try:
        with observing(make, starts=False):
            yield
    finally:
        _make_range = outer


def ranged(name: str) -> AbstractContextManager[Any]:
    """A range with this name; outside `ranging` a context that does nothing."""
    return nullcontext() if _make_range is None else _make_range(name)


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

    A class and no generator, because it stands between two actions of a pipeline.
    """

    __slots__ = ("_fields", "_kind", "_name", "_range", "_recorder", "_start")

    def __init__(
        self, name: str, kind: str, *, microbatch: int | None = None, chunk: int | None = None, bytes: int | None = None
    ) -> None:
        """`kind` is one of KINDS; the rest is as in `Event`."""
        self._name, self._kind, self._fields = name, kind, (microbatch, chunk, bytes)

    def __enter__(self) -> None:
        self._recorder, self._range = _active, None if _make_range is None else _make_range(self._name)
        if self._range is not None:
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


def write_jsonl(events: Iterable[Event], path: str | Path) -> Path:
    """Write one JSON object a line, leaving out fields that are None; returns the path."""
    path = Path(path)
    with appearing(path) as draft, draft.open("w") as file:
        for event in events:
            file.write(json.dumps({k: v for k, v in asdict(event).items() if v is not None}) + "\n")
    return path


def read_jsonl(path: str | Path) -> list[Event]:
    """Read what `write_jsonl` wrote."""
    with Path(path).open() as file:
        return [Event(**json.loads(line)) for line in file if line.strip()]
