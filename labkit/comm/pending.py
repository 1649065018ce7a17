"""A transfer between its start and its end."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import count

import torch
from torch import Tensor

from labkit.comm.capturing import GraphCaptureError, active_capture, call_site
from labkit.comm.groups import Group
from labkit.comm.ledger import dtype_name
from labkit.events import active_recorder, ranged, watchers
from labkit.launch import waiting

Finish = Callable[[], Tensor]
"""Waits for a transfer and returns its result."""

_numbers: defaultdict[tuple[str, int], Iterator[int]] = defaultdict(lambda: count(1))
"""Group, by name and first rank -> the numbers of its calls, as in `all_reduce tp #12`. Ranks that disagree on the
number are out of step."""


class Pending:
    """A transfer under way. `wait()` returns its result; further calls return the same tensor at once.

    Before it returns, neither read the output nor write the input.
    """

    __slots__ = ("_group", "_number", "_operation", "_result", "_started", "_x", "due", "finish")

    def __init__(self, operation: str, x: Tensor, group: Group, finish: Finish | None = None) -> None:
        """finish: the function that finishes a transfer, if it runs already. Code that needs `label` for the start sets
        it afterwards."""
        self._operation, self._x, self._group = operation, x, group
        self._number = next(_numbers[group.name, group.ranks[0]])
        self._started = time.perf_counter()
        self._result: Tensor | None = None
        self.finish = finish
        self.due = 0.0
        """The end that a `delayed` block gives the transfer, on the clock of `time.perf_counter`; 0 without one."""

    @property
    def name(self) -> str:
        """Name of the Event and of the range in a profiler: `all_reduce tp`."""
        return f"{self._operation} {self._group.name}"

    @property
    def label(self) -> str:
        """Name of this call in the report of a hang: `all_reduce tp #12 (4, 8) float32`."""
        return f"{self._operation} {self._group.name} #{self._number} {_described(self._x.shape, self._x.dtype)}"

    def wait(self, *, event: bool = True) -> Tensor:
        """Block until the transfer is complete and return its result.

        event: record the time for which the caller blocks as an Event of kind `wait`, while somebody records.
        """
        if self.finish is not None:
            if watchers:
                result = self._wait_watched(self.finish, event)
            else:
                with waiting(self.label):
                    result = self.finish()
            self.finish, self._result, self._x = None, result, result  # the input may be freed now
        assert self._result is not None
        return self._result

    def _wait_watched(self, finish: Finish, event: bool) -> Tensor:
        """Finish while Events are recorded, a profiler gets ranges or a graph is captured."""
        if active_capture() is not None:
            raise GraphCaptureError(
                f"{call_site(__file__)}: {self.name} was started before the capture of this graph; a CUDA graph holds "
                "only transfers that begin and end inside it. Wait for this one before the captured part"
            )
        blocked = time.perf_counter()
        with ranged(f"wait {self.name}"), waiting(self.label):
            result = finish()
        recorder = active_recorder()
        if recorder is not None:
            end = time.perf_counter()
            if event:
                recorder.add(f"wait {self.name}", "wait", blocked, end)
            if 0.0 < self.due < blocked:
                end = self.due  # it ended before the wait, at the time that the delay gave it
            kind = self._operation if self._operation in ("send", "recv") else "collective"
            recorder.add(self.name, kind, self._started, end, bytes=self._x.nbytes)
        return result


class Done(Pending):
    """Result of a call on a group of size 1, or of a dropped call: complete from the start, without a record."""

    __slots__ = ()

    def __init__(self, result: Tensor) -> None:
        self.finish, self._result = None, result


@lru_cache(1024)
def _described(shape: torch.Size, dtype: torch.dtype) -> str:
    """Return shape and type as `(4, 8) float32`. The result is cached, because a run uses few shapes."""
    return f"{tuple(shape)} {dtype_name(dtype)}"
