"""A model of the times at which a device runs the operations that a host launches.

The host needs `launch` to issue an operation (Python, autograd, dispatch, driver) and does not wait for it. The
device runs operations in order, one at a time. So operation i starts at

    start[i] = max(end[i - 1], (i + 1) launch)

and a device whose operations are shorter than a launch waits for the host. A graph is issued once, at any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Run(NamedTuple):
    """One operation, or one launch, on a lane of a timeline; microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Launches:
    """Runs of host and device. Without a GPU `host` is empty, since the host itself computes."""

    host: tuple[Run, ...]
    device: tuple[Run, ...]

    @property
    def end(self) -> float:
        """End of the last run, in microseconds."""
        return max((run.end for run in (*self.host, *self.device)), default=0.0)

    @property
    def busy(self) -> float:
        """Share of the time in which the device works."""
        return sum(run.end - run.start for run in self.device) / self.end if self.end else 0.0


def predict_launches(durations: Sequence[float], launch: float, *, graph: bool = False) -> Launches:
    """Predict host and device for operations of these `durations`, issued one by one or in one `graph`.

    launch: time to issue one operation, or the graph. Raises ValueError for negative times.
    """
    if launch < 0 or any(duration < 0 for duration in durations):
        raise ValueError(f"times are 0 or more, got launch {launch:g} and durations {list(durations)}")
    issued = [launch] * len(durations) if graph else [launch * (i + 1) for i in range(len(durations))]
    host = {time: Run("graph" if graph else str(i), time - launch, time) for i, time in enumerate(issued)}
    device: list[Run] = []
    for i, (duration, ready) in enumerate(zip(durations, issued, strict=True)):
        start = max(ready, device[-1].end if device else 0.0)
        device.append(Run(str(i), start, start + duration))
    return Launches(tuple(host.values()), tuple(device))


WAIT = "wait"
"""Entry of a program at which the host waits until the device has ended everything that was launched."""
Program = Sequence[float | Sequence[float] | str]
"""What a host does in order: a number launches one operation, a list launches a graph of operations, or `WAIT`."""


def run_program(program: Program, launch: float) -> Launches:
    """Predict host and device for a program; durations and `launch` in microseconds.

    Raises:
        ValueError: negative times, or an entry that is neither a time, a list of times nor `WAIT`.
    """
    host: list[Run] = []
    device: list[Run] = []
    now = 0.0  # of the host
    for entry in program:
        ended = device[-1].end if device else 0.0
        if isinstance(entry, str):
            if entry != WAIT:
                raise ValueError(f"{entry!r} is no entry of a program; give a time, a list of times or {WAIT!r}")
            now = max(now, ended)
            continue
        operations = list(entry) if isinstance(entry, Sequence) else [entry]
        if launch < 0 or any(duration < 0 for duration in operations):
            raise ValueError(f"times are 0 or more, got launch {launch:g} and {entry}")
        host.append(Run("graph" if isinstance(entry, Sequence) else "", now, now + launch))
        now += launch
        for duration in operations:
            start = max(now, device[-1].end if device else 0.0)
            device.append(Run("", start, start + duration))
    return Launches(tuple(host), tuple(device))
