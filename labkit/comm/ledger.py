"""The record of every collective, with its bytes and its layer, and the hooks that alter collectives in tests.

A `CommLedger` counts the communication of a piece of code. So "two all-reduces forward and two backward per layer"
(arXiv 1909.08053, section 3) is something to assert. A `comm_scope` says for which layer and in which phase the calls
are made; names nest by dots, and a query for `layers.3` covers `layers.3.mlp.fc2`.

The scope belongs to a thread, because autograd runs backward passes on threads of its own. Functions store the scope in
forward and enter it again in backward. Ledgers and hooks belong to the process: they must see those threads too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from labkit.comm.groups import Group
from labkit.events import observers, observing, start_observers


class Scope(NamedTuple):
    """On whose behalf a call is made."""

    layer: str | None = None
    phase: str | None = None


class _Current(threading.local):
    scope = Scope()


_current = _Current()


def current_scope() -> Scope:
    """The scope that calls of this thread are booked under."""
    return _current.scope


class comm_scope:
    """`with comm_scope(layer="layers.3.mlp", phase="forward")`: book the block's communication there.

    An argument that is None keeps the value of the enclosing scope. A class rather than a generator, because layers
    enter it on every call.
    """

    __slots__ = ("_new", "_old")

    def __init__(self, layer: str | None = None, phase: str | None = None) -> None:
        self._new = Scope(layer, phase)

    def __enter__(self) -> Scope:
        self._old = old = _current.scope
        new = self._new
        if new.layer is None or new.phase is None:
            new = Scope(old.layer if new.layer is None else new.layer, old.phase if new.phase is None else new.phase)
        _current.scope = new
        return new

    def __exit__(self, *exception: object) -> None:
        _current.scope = self._old


def remember_scope(ctx: Any, group: Group) -> None:
    """Keep group and layer in the context of an autograd function, for its `backward_scope`."""
    ctx.group, ctx.layer = group, _current.scope.layer


def forward_scope(ctx: Any, group: Group) -> comm_scope:
    """`remember_scope`, and book the block as forward, or as the phase already set."""
    remember_scope(ctx, group)
    return comm_scope(phase=_current.scope.phase or "forward")


def backward_scope(ctx: Any) -> comm_scope:
    """Book what follows as the backward of the layer that ran forward."""
    return comm_scope(layer=ctx.layer, phase="backward")


def _covers(wanted: str | None, layer: str | None) -> bool:
    """True if a query for `wanted` includes `layer`: the same name, or a part of it after a dot."""
    return wanted is None or (layer is not None and (layer == wanted or layer.startswith(wanted + ".")))


@dataclass(frozen=True, slots=True)
class CommRecord:
    """One collective or message as this rank issued it."""

    operation: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `barrier`, `gather_objects`, `send` or
    `recv`."""
    group: str
    """Name of the group: `tp`, `dp_cp`, ..."""
    group_size: int
    """Ranks in the group."""
    bytes: int
    """Size of this rank's input tensor (of the received tensor for `recv`), in bytes."""
    dtype: str
    """`float32`, `bfloat16`, ..."""
    layer: str | None
    """Layer of the scope, None outside any."""
    phase: str | None
    """`forward`, `backward`, `recompute`, `gradients`, ...; None outside any scope."""
    kept: int = 0
    """Bytes of an `all_to_all` that stay on this rank: `bytes - kept` leave it."""


@dataclass(frozen=True, slots=True)
class Selector:
    """A choice of calls; a field that is None means any. `layer` includes the layers named below it."""

    operation: str | None = None
    group: str | None = None
    phase: str | None = None
    layer: str | None = None

    def matches(self, operation: str, group: str, scope: Scope) -> bool:
        """True if a call of `operation` on `group` under `scope` is meant."""
        return (
            (self.operation is None or self.operation == operation)
            and (self.group is None or self.group == group)
            and (self.phase is None or self.phase == scope.phase)
            and _covers(self.layer, scope.layer)
        )


_ledgers: list[CommLedger] = []


class CommLedger:
    """`with CommLedger() as ledger:` writes down every call to `labkit.comm.collectives` that this process makes.

    Groups of size 1 communicate nothing and are not recorded. Ledgers nest; each sees everything inside its block.
    """

    def __init__(self) -> None:
        self.records: list[CommRecord] = []

    def __enter__(self) -> CommLedger:
        _ledgers.append(self)
        observers.append(self)
        start_observers.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _ledgers.remove(self)
        observers.remove(self)
        start_observers.remove(self)

    def select(
        self,
        *,
        operation: str | None = None,
        group: str | None = None,
        phase: str | None = None,
        layer: str | None = None,
    ) -> list[CommRecord]:
        """The records that agree with every field given; `layer="layers.3"` includes `layers.3.mlp`."""
        wanted = Selector(operation, group, phase, layer)
        return [r for r in self.records if wanted.matches(r.operation, r.group, Scope(r.layer, r.phase))]

    def count(self, **wanted: str | None) -> int:
        """Number of calls that agree with the fields given (see `select`)."""
        return len(self.select(**wanted))

    def bytes(self, **wanted: str | None) -> int:
        """Their payload in bytes, summed over calls (see `CommRecord.bytes`)."""
        return sum(record.bytes for record in self.select(**wanted))

    def table(self) -> str:
        """One line per (operation, group, phase, layer): calls and bytes, in order of first appearance."""
        totals: dict[tuple[str, str, str, str], list[int]] = {}
        for r in self.records:
            total = totals.setdefault((r.operation, r.group, r.phase or "-", r.layer or "-"), [0, 0])
            total[0] += 1
            total[1] += r.bytes
        rows = [("operation", "group", "phase", "layer", "calls", "bytes")]
        rows += [(*key, str(calls), f"{size:,}") for key, (calls, size) in totals.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(6)]
        aligned = [
            "  ".join(c.ljust(w) if i < 4 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))) for row in rows
        ]
        return "\n".join(line.rstrip() for line in aligned)


def is_watched() -> bool:
    """True if a ledger or a hook asks for the scope of calls."""
    return bool(_ledgers or _hooks)


def book(operation: str, group: str, group_size: int, size: int, dtype: str, kept: int = 0) -> None:
    """Write one call into every open ledger."""
    if _ledgers:
        record = CommRecord(operation, group, group_size, size, dtype, *_current.scope, kept)
        for ledger in _ledgers:
            ledger.records.append(record)


# ---- hooks: what tests and chapters do to matching calls ----


@dataclass(eq=False, slots=True)
class Hook:
    """The object that `dropped` and `delayed` give to their block."""

    selector: Selector
    delay: float | None
    """Seconds that the call takes at least; None drops the call."""
    calls: int = 0
    """Calls that it has dropped so far."""
    bandwidth: float | None = None
    """Payload bytes a second of a link that calls use one after another; None is no link."""
    free_at: float = 0.0
    """When the link is done with what it was given, on the clock of `time.perf_counter`."""

    def seconds(self, size: int) -> float:
        """Seconds that a call of `size` bytes takes from now, after the calls that the link has still to carry."""
        assert self.delay is not None
        if self.bandwidth is None:
            return self.delay
        now = time.perf_counter()
        self.free_at = max(now, self.free_at) + self.delay + size / self.bandwidth
        return self.free_at - now


_hooks: list[Hook] = []


@contextmanager
def _hooked(hook: Hook) -> Iterator[Hook]:
    _hooks.append(hook)
    try:
        with observing(hook):
            yield hook
    finally:
        _hooks.remove(hook)


def dropped(
    *, operation: str | None = None, group: str | None = None, phase: str | None = None, layer: str | None = None
) -> AbstractContextManager[Hook]:
    """Matching calls communicate nothing and leave this rank's own data as the result.

    This plants the fault "somebody forgot the all-reduce" without touching the layer. All ranks of the group must
    enter it alike, else the others wait for ever. Dropped calls are not booked in the ledger; the hook counts them.
    """
    return _hooked(Hook(Selector(operation, group, phase, layer), None))


def delayed(
    seconds: float,
    *,
    bandwidth: float | None = None,
    operation: str | None = None,
    group: str | None = None,
    phase: str | None = None,
    layer: str | None = None,
) -> AbstractContextManager[Hook]:
    """Matching calls finish no earlier than `seconds` after they were issued, as on a slow network.

    With a `bandwidth` (payload bytes a second) they share one link, one after another. A call begins when those before
    it are done, and takes `seconds` plus its bytes over the bandwidth.

    The delay sleeps, so it can be hidden behind computation exactly as a real transfer can, on any number of cores.

    Raises ValueError for a bandwidth that is not positive.
    """
    if bandwidth is not None and not bandwidth > 0:
        raise ValueError(f"a link of {bandwidth} bytes a second carries nothing; give a positive bandwidth")
    return _hooked(Hook(Selector(operation, group, phase, layer), seconds, bandwidth=bandwidth))


def is_dropped(operation: str, group: str) -> bool:
    """True if a call in the current scope is to be left out."""
    if not _hooks:
        return False
    found = [h for h in _hooks if h.delay is None and h.selector.matches(operation, group, _current.scope)]
    for hook in found:
        hook.calls += 1
    return bool(found)


def delay_of(operation: str, group: str, size: int) -> float:
    """Seconds that a call of `size` bytes in the current scope takes at least; 0 without a hook."""
    if not _hooks:
        return 0.0
    scope = _current.scope
    return max(
        (h.seconds(size) for h in _hooks if h.delay is not None and h.selector.matches(operation, group, scope)),
        default=0.0,
    )
