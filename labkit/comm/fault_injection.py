"""Calls that are dropped or delayed on purpose, for chapters and tests.

`dropped` plants the fault "somebody forgot the all-reduce" without touching a layer. `delayed` plants a slow network.
A collective is late if each rank waits longer for it. A message is late if it leaves late: its receiver may have been
waiting for a long time already, so a delay that began with the receive would be over before the message comes.
Both are watchers (`labkit.events`), so a training that nobody watches never looks for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from labkit.comm.groups import Group
from labkit.comm.ledger import Selector, current_scope
from labkit.events import watchers_of, watching

# ---- dropped ----


@dataclass(eq=False, slots=True)
class Dropped:
    """What `dropped` gives to its block."""

    selector: Selector
    calls: int = 0
    """Calls that it has dropped so far."""


def dropped(
    *, operation: str | None = None, group: str | None = None, phase: str | None = None, layer: str | None = None
) -> AbstractContextManager[Dropped]:
    """Make matching collectives communicate nothing and leave this rank's own data as the result.

    All ranks of the group must enter the block, otherwise the others deadlock. Dropped calls are not booked in the
    ledger; the `Dropped` that the block gets counts them. Messages and calls without tensors are never dropped.
    """
    return watching(Dropped(Selector(operation, group, phase, layer)))


def dropped_result(operation: str, x: Tensor, group: Group, *details: Any) -> Tensor | None:
    """Return this rank's own data if a `dropped` block names this call of `collectives.issue`, and otherwise None.

    Raises ValueError for a call whose result this rank cannot make alone.
    """
    if operation not in _OWN_DATA:
        return None
    found = [each for each in watchers_of(Dropped) if each.selector.matches(operation, group.name, current_scope())]
    for each in found:
        each.calls += 1
    return _OWN_DATA[operation](x, group, *details) if found else None


def _own_sum(x: Tensor, group: Group, op: str, in_place: bool) -> Tensor:
    return x if in_place else x.clone()


def _own_part_for_all(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None, out: Tensor | None) -> Tensor:
    if sizes is not None:
        raise ValueError("an all_gather of unequal parts cannot be dropped: this rank has no tensor of that shape")
    return torch.cat([x] * group.size, dim=dim) if out is None else out


def _own_row(x: Tensor, group: Group, dim: int, op: str, sizes: Sequence[int] | None, out: Tensor | None) -> Tensor:
    parts = x.chunk(group.size, dim) if sizes is None else x.split(list(sizes), dim)
    own = parts[group.rank]
    return own.clone() if out is None else out.copy_(own)


def _own_rows(
    x: Tensor, group: Group, output_splits: Sequence[int] | None, input_splits: Sequence[int] | None
) -> Tensor:
    """Return as many rows as expected: this rank's own, then zeros."""
    rows = x.shape[0] if output_splits is None else sum(output_splits)
    zeros = x.new_zeros(max(0, rows - x.shape[0]), *x.shape[1:])
    return torch.cat([x[:rows], zeros])


_OWN_DATA: dict[str, Callable[..., Tensor]] = {
    "all_reduce": _own_sum,
    "all_gather": _own_part_for_all,
    "reduce_scatter": _own_row,
    "all_to_all": _own_rows,
    "broadcast": lambda x, group, src: x,
}
"""What a dropped call leaves as its result; the arguments are those of the function in `gloo.py` and `nccl.py`."""


# ---- delayed ----


@dataclass(eq=False, slots=True)
class Delayed:
    """What `delayed` gives to its block."""

    selector: Selector
    seconds: float
    """Seconds that a call takes at least, in addition to its time on the link."""
    bandwidth: float | None = None
    """Payload bytes per second of a link that calls use one after another; None is no link."""
    free_at: float = 0.0
    """Time at which the link has carried all calls so far, on the clock of `time.perf_counter`."""

    def due(self, size: int) -> float:
        """Return the earliest end of a call of `size` bytes that is issued now, after the link's earlier calls."""
        now = time.perf_counter()
        if self.bandwidth is None:
            return now + self.seconds if self.seconds else 0.0
        self.free_at = max(now, self.free_at) + self.seconds + size / self.bandwidth
        return self.free_at


def delayed(
    seconds: float,
    *,
    bandwidth: float | None = None,
    operation: str | None = None,
    group: str | None = None,
    phase: str | None = None,
    layer: str | None = None,
) -> AbstractContextManager[Delayed]:
    """Make matching calls finish no earlier than `seconds` after they were issued, as on a slow network.

    With a `bandwidth` (payload bytes per second) they share one link, one after another. A call begins when those
    before it are done, and takes `seconds` plus its bytes over the bandwidth.

    A send of host tensors leaves that late, so its receiver gets it late no matter when it began to wait. Give
    `operation="send"` for a pipeline, or receives are delayed as well, from the moment at which each was issued.

    The delay sleeps, so it can overlap with computation exactly as a real transfer can, on any number of cores.

    Raises ValueError for a bandwidth that is not positive.
    """
    if bandwidth is not None and not bandwidth > 0:
        raise ValueError(f"a link of {bandwidth} bytes per second carries nothing; give a positive bandwidth")
    return watching(Delayed(Selector(operation, group, phase, layer), seconds, bandwidth))


def due_time(operation: str, group: Group, size: int) -> float:
    """Return the earliest end of a call that is issued now, on the clock of `time.perf_counter`; 0 without a delay."""
    found = [each for each in watchers_of(Delayed) if each.selector.matches(operation, group.name, current_scope())]
    return max((each.due(size) for each in found), default=0.0)


def started_in_due_time(
    start: Callable[[], Callable[[], Tensor]], due: float, *, leaves_late: bool
) -> Callable[[], Tensor]:
    """Start a call and return what finishes it; for a delayed call that is not before `due`.

    leaves_late: a thread of this rank starts the call at `due`; otherwise it starts now, and its end is late.
    """
    if due and leaves_late:
        leaving = _departures().submit(lambda: (time.sleep(max(0.0, due - time.perf_counter())), start())[1])
        return lambda: leaving.result()()
    finish = start()
    if not due:
        return finish

    def finish_late() -> Tensor:
        result = finish()
        time.sleep(max(0.0, due - time.perf_counter()))
        return result

    return finish_late


@cache
def _departures() -> ThreadPoolExecutor:
    """The thread that starts late messages; a single one, so that they leave in the order of sending."""
    return ThreadPoolExecutor(1, "late messages")
