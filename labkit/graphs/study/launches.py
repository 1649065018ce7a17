"""Times at which a device runs operations that a host launches: a model of them, and a measurement by torch's profiler.

Model: the host needs `launch` to issue an operation (Python, autograd, dispatch, driver) and does not wait for it. The
device runs operations in order, one at a time. So operation i starts at

    start[i] = max(end[i - 1], (i + 1) launch)

and a device whose operations are shorter than a launch waits for the host. A graph is issued once, at any size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


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


def measure_launches(function: Callable[[], Any], names: Collection[str], *, calls: int = 10) -> Launches:
    """Call `function` under torch's profiler; times of the fastest of `calls`, from its first operation on.

    names: without CUDA, the operations that count (`OperationLog` lists them); an operation inside another does not
    count again. With CUDA all kernels and their launches count.
    """
    function()
    return min((_profiled(function, set(names)) for _ in range(calls)), key=lambda found: found.end)


def _profiled(function: Callable[[], Any], names: set[str]) -> Launches:
    from torch.profiler import ProfilerActivity, profile

    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    if on_cuda:
        torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with quiet(), profile(activities=activities) as seen:
        function()
        if on_cuda:
            torch.cuda.synchronize()
    events = sorted(seen.events() or [], key=lambda event: event.time_range.start)
    if on_cuda:
        host = [_run(event) for event in events if "Launch" in event.name and "::" not in event.name]
        device = [_run(event) for event in events if event.device_type.name == "CUDA"]
    else:
        host, device = [], [_run(event) for event in events if _counts(event, names)]
    zero = min((run.start for run in (*host, *device)), default=0.0)
    return Launches(*(tuple(Run(r.name, r.start - zero, r.end - zero) for r in lane) for lane in (host, device)))


def _run(event: Any) -> Run:
    return Run(event.name.removeprefix("aten::"), event.time_range.start, event.time_range.end)


def _counts(event: Any, names: set[str]) -> bool:
    outer = event.cpu_parent
    while outer is not None:
        if outer.name.removeprefix("aten::") in names:
            return False
        outer = outer.cpu_parent
    return event.name.startswith("aten::") and event.name.removeprefix("aten::") in names


@contextmanager
def quiet() -> Iterator[None]:
    """Silence standard error: some builds of the profiler write a line to it at start and stop."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
