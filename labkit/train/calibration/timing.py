"""Times of a call: the lower quartile of repeated batches, and how far they spread.

What disturbs a call only ever makes it longer. So the lower quartile is closer to the machine than the median, and on a
quiet machine they agree.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

LEAST = 5
"""Batches of calls that are timed, at least."""


class Sample(NamedTuple):
    """A measured number, in the unit of its name, and its spread."""

    value: float
    spread: float
    """Relative half width: half of what lies between the quartiles, over the value."""

    def inverted(self, factor: float) -> Sample:
        """Return `factor` / value with the same spread: the rate of a time."""
        return Sample(factor / self.value, self.spread)


def nothing() -> None:
    """Wait for nothing: a CPU is done when a call returns."""


@dataclass(frozen=True)
class Stopwatch:
    """Times calls on one device."""

    clock: Callable[[], float] = time.perf_counter
    """Seconds."""
    wait: Callable[[], Any] = nothing
    """Waits until the device has done its work, such as `torch.cuda.synchronize`."""
    budget: float = 0.05
    """Seconds for one call's batches; more only if `LEAST` batches take longer."""
    batch: float = 0.001
    """Seconds of a batch, at least: several calls if one is shorter, so that reading the clock does not count."""

    def sample(self, call: Callable[[], Any]) -> Sample:
        """Return the seconds of one call, after a call that warms up and one that tells how long it takes."""
        call()
        calls = max(1, int(self.batch / max(self.once(call), 1e-9)))
        end, seconds = self.clock() + self.budget, []
        while len(seconds) < LEAST or self.clock() < end:
            seconds.append(self.once(call, calls) / calls)
        return spread_of(seconds)

    def once(self, call: Callable[[], Any], calls: int = 1) -> float:
        """Return the seconds of `calls` calls."""
        self.wait()
        start = self.clock()
        for _ in range(calls):
            call()
        self.wait()
        return self.clock() - start


def spread_of(values: Iterable[float]) -> Sample:
    """Return the lower quartile of these seconds with their spread."""
    values = list(values)
    if len(values) < 2:
        return Sample(values[0], 0.0)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Sample(low, (high - low) / 2 / low)


def joined(samples: list[Sample]) -> Sample:
    """Return the mean of what several ranks or sizes gave. Its spread is theirs, or half their range, if wider."""
    values = [sample.value for sample in samples]
    mean = statistics.fmean(values)
    return Sample(mean, max((max(values) - min(values)) / 2 / mean, *(sample.spread for sample in samples)))
