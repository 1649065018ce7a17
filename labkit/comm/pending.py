"""A transfer between its start and its end.

`start` begins a transfer and returns a `Pending`. `start` also counts the call, and books the call for an open ledger
or hook. While it blocks, the launcher's status slot names the call.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import count

import torch
from torch import Tensor

from labkit.comm import backends
from labkit.comm.capturing import GraphCaptureError, active_capture, call_site
from labkit.comm.groups import Group
from labkit.comm.ledger import book, delay_of, is_watched
from labkit.events import active_recorder, observers, ranged, start_observers
from labkit.launch import status, waiting

Finish = Callable[[], Tensor]
"""Waits for a transfer and returns its result."""

_issued: defaultdict[tuple[str, int], Iterator[int]] = defaultdict(lambda: count(1))


def numbers(group: Group) -> Iterator[int]:
    """The number of each call in a group, as in `all_reduce tp #12`. Ranks that disagree on it lost step."""
    return _issued[group.name, group.ranks[0]]


class Pending:
    """A transfer under way. `wait()` returns its result; further calls return the same tensor at once.

    Until then neither read the output nor write the input.
    """

    __slots__ = ("_finish", "_group", "_kind", "_not_before", "_number", "_operation", "_result", "_started", "_x")

    def __init__(
        self, operation: str, x: Tensor, group: Group, number: int, kind: str, finish: Finish | None, delay: float = 0.0
    ) -> None:
        self._operation, self._x, self._group, self._number, self._kind = operation, x, group, number, kind
        self._finish = finish
        self._result: Tensor | None = None
        self._started = time.perf_counter()
        self._not_before = self._started + delay if delay else 0.0

    @property
    def _name(self) -> str:
        return f"{self._operation} {self._group.name}"

    @property
    def _label(self) -> str:
        """Name of this call in the report of a hang."""
        return f"{self._operation} {self._group.name} #{self._number} {described(self._x.shape, self._x.dtype)}"

    def begin(self, finish_of: Callable[[], Finish]) -> Pending:
        """Start the transfer."""
        if backends.start_may_block(self._x):
            with ranged(self._name), waiting(self._label):
                self._finish = finish_of()
        elif observers:
            with ranged(self._name):
                self._finish = finish_of()
        else:
            self._finish = finish_of()
        return self

    def wait(self) -> Tensor:
        """Block until the transfer is complete and return its result."""
        return self._complete(wait_event=True)

    def _complete(self, wait_event: bool) -> Tensor:
        """Wait and return the result. With `wait_event=False` record no `wait` Event: the caller blocks anyway."""
        finish = self._finish
        if finish is None:
            assert self._result is not None
            return self._result
        if observers:
            result = self._observed(finish, wait_event)
        elif (slot := status.current) is not None:
            outer = slot.enter(self._label)
            try:
                result = self._in_due_time(finish) if self._not_before else finish()
            finally:
                slot.leave(outer)
        else:
            result = self._in_due_time(finish) if self._not_before else finish()
        self._finish, self._result, self._x = None, result, result  # the input may be freed now
        return result

    def _observed(self, finish: Finish, wait_event: bool) -> Tensor:
        """`_complete` while Events are recorded, a profiler gets ranges or a graph is captured."""
        if active_capture() is not None:
            raise GraphCaptureError(
                f"{call_site(__file__)}: {self._name} was started before the capture of this graph; a CUDA graph holds "
                "only transfers that begin and end inside it. Wait for this one before the captured part"
            )
        blocked = time.perf_counter()
        with ranged(f"wait {self._name}"), waiting(self._label):
            result = self._in_due_time(finish)
        recorder = active_recorder()
        if recorder is not None:
            end = time.perf_counter()
            if wait_event:
                recorder.add(f"wait {self._name}", "wait", blocked, end)
            if 0.0 < self._not_before < blocked:
                end = self._not_before  # it ended before the wait, at the time that the delay gave it
            recorder.add(self._name, self._kind, self._started, end, bytes=_bytes(self._x))
        return result

    def _in_due_time(self, finish: Finish) -> Tensor:
        """`finish()`, no sooner than a `delayed` block allows."""
        result = finish()
        if self._not_before:
            time.sleep(max(0.0, self._not_before - time.perf_counter()))
        return result


class Done(Pending):
    """Result of a call on a group of size 1, or of a dropped call: complete from the start, without a record."""

    __slots__ = ()

    def __init__(self, result: Tensor) -> None:
        self._finish, self._result = None, result


def start(
    operation: str,
    x: Tensor,
    group: Group,
    finish_of: Callable[[], Finish],
    *,
    kind: str = "collective",
    kept: int = 0,
) -> Pending:
    """Book the call, start it, and return its `Pending`. `kept` bytes of x stay on this rank."""
    delay = 0.0
    if start_observers and is_watched():
        size = _bytes(x)
        book(operation, group.name, group.size, size, _word(x.dtype), kept)
        delay = delay_of(operation, group.name, size)
    return Pending(operation, x, group, next(numbers(group)), kind, None, delay).begin(finish_of)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


@lru_cache(1024)
def described(shape: torch.Size, dtype: torch.dtype) -> str:
    """`(4, 8) float32`, for the report of a hang. Cached: a run uses few shapes."""
    return f"{tuple(shape)} {_word(dtype)}"


def _word(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype)[6:]
