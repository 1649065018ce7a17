"""Named timers at three levels, their smallest and largest times over ranks, and lines of JSON.

A timer is a sum of Events: a stopped timer records an Event of kind `timer`, and the finest level sums the Events of
the pipeline runtime and the collectives by kind. So the numbers in `metrics.jsonl` and the bars of a timeline agree.

    level 0   step, validation
    level 1   forward-backward, finalize-grads, optimizer
    level 2   forward, backward, input_grad, weight_grad, send, recv, collective, wait
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import IO, Any

from labkit.events import Event, active_recorder, ranged
from labkit.output_files import naming

LEVEL_2_KINDS = ("forward", "backward", "input_grad", "weight_grad", "send", "recv", "collective", "wait")


class Timer:
    """One named timer; `with timer:` or `start` and `stop`."""

    def __init__(self, name: str, timers: Timers | None) -> None:
        """timers: gets the time. None, for levels that are off, keeps no time and leaves only a profiler's range."""
        self.name = name
        self.seconds = 0.0
        """The last span, from start to stop."""
        self._timers = timers
        self._started: float | None = None

    def start(self, barrier: bool = False) -> None:
        """Start the clock. Megatron's argument `barrier` is ignored, as a barrier would change the measured time."""
        assert self._started is None, f"timer {self.name!r} is already running"
        self._range = ranged(self.name)
        self._range.__enter__()
        self._started = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        """Stop the clock, add the time, and record an Event of kind `timer`."""
        assert self._started is not None, f"timer {self.name!r} was not started"
        start, end, self._started = self._started, time.perf_counter(), None
        self.seconds = end - start
        self._range.__exit__(None, None, None)
        if self._timers is not None:
            self._timers.add(self.name, start, end)

    def __enter__(self) -> Timer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


class Timers:
    """All timers of one rank: `with timers("optimizer", log_level=1): ...`."""

    def __init__(self, log_level: int = 0, *, profiled: bool = False) -> None:
        """log_level: 0, 1 or 2; a timer of a finer level costs one comparison. profiled: the run has a profile, in
        which phases are ranges at every level."""
        if log_level not in (0, 1, 2):
            raise ValueError(
                f"train.timing_log_level is {log_level}; choose 0 (steps), 1 (phases) or 2 (single operations)"
            )
        self.log_level = log_level
        self.phase: Callable[[str], AbstractContextManager[Any]] = (
            partial(self, log_level=1) if log_level >= 1 or profiled else nullcontext
        )
        """Makes the timer of a phase of the step. At level 0 it keeps no time, but is a range in a profiled run, and
        otherwise a context that does nothing."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str, log_level: int = 0) -> Timer:
        """Return the timer of that name; the first call sets its level. A timer whose level is finer than that of
        `Timers` keeps no time and is only a range."""
        return self._timers.setdefault(name, Timer(name, self if log_level <= self.log_level else None))

    def add(self, name: str, start: float, end: float) -> None:
        """Add `end - start` seconds to `name` and record the span as an Event."""
        self._seconds[name] += end - start
        recorder = active_recorder()
        if recorder is not None:
            recorder.add(name, "timer", start, end)

    def feed(self, events: Iterable[Event]) -> None:
        """At level 2, add the seconds of recorded Events to the sum of their kind."""
        if self.log_level < 2:
            return
        for event in events:
            if event.kind in LEVEL_2_KINDS:
                self._seconds[event.kind] += event.duration

    def take(self) -> dict[str, float]:
        """Return the seconds by name since the last call."""
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken


def min_max_over_ranks(seconds_by_rank: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """Return (least, most) seconds of each timer over the ranks that ran it, in order of first appearance."""
    names = dict.fromkeys(name for seconds in seconds_by_rank for name in seconds)
    found = {name: [seconds[name] for seconds in seconds_by_rank if name in seconds] for name in names}
    return {name: (min(values), max(values)) for name, values in found.items()}


def scalars(line: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every number of a line of metrics, such as `{"step": 3, "tag": "timers/step/max", "value": 0.5}`.

    A list becomes `tag/0`, `tag/1`, .., and a timer's pair `tag/min` and `tag/max`. Texts are left out.
    """
    for name, value in line.items():
        if name != "step":
            for tag, number in _numbers(name, value):
                yield {"step": line["step"], "tag": tag, "value": number}


def _numbers(tag: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, int | float):
        yield tag, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(f"{tag}/{name}", inner)
    elif isinstance(value, tuple | list):
        names = ("min", "max") if isinstance(value, tuple) else range(len(value))
        for name, inner in zip(names, value, strict=True):
            yield from _numbers(f"{tag}/{name}", inner)


def strict(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return `record` with null for numbers that are not finite; see `json_lines`."""
    bad = {name: str(value) for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    return {**record, **dict.fromkeys(bad), "not_finite": bad} if bad else dict(record)


def json_lines(records: Iterable[Mapping[str, Any]]) -> str:
    """Return a line of JSON for each record.

    JSON has no numbers that are not finite. Their value is null, and `not_finite` names them: `{"grad_norm": null,
    "not_finite": {"grad_norm": "inf"}}`.
    """
    return "".join(json.dumps(strict(record), allow_nan=False) + "\n" for record in records)


class JsonLines:
    """Writes one JSON object per line to a file, or does nothing without a path."""

    def __init__(self, path: Path | None, *, append: bool = False) -> None:
        """Create or empty the file, and create its folders. append: keep what is in the file."""
        self._file: IO[str] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a" if append else "w")
            self._path = path

    def write(self, *records: Mapping[str, Any]) -> None:
        """Write a line for each record (`json_lines`), and flush, so that the lines of a run that dies are kept."""
        if self._file is not None:
            self.write_text(json_lines(records))

    def write_text(self, lines: str) -> None:
        """Write lines that are JSON already, and flush."""
        if self._file is not None:
            with naming(self._path):
                self._file.write(lines)
                self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with naming(self._path):
                self._file.close()
            self._file = None
