"""The record of every collective, with its bytes and its layer.

A `CommLedger` counts the communication of a piece of code, so that a test can assert "two all-reduces forward and two
backward per layer" (arXiv 1909.08053, section 3). A `comm_scope` says for which layer and in which phase the calls are
made; names nest by dots, and a query for `layers.3` covers `layers.3.mlp.fc2`.

The scope belongs to a thread, because autograd runs backward passes on threads of its own. The operators of
`parallel/mappings.py` store the scope in forward and enter it again in backward; a linear layer has its name in its
`LinearPlan`. A ledger belongs to the process, because it must see those threads too.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from labkit.comm.groups import Group
from labkit.events import watchers, watchers_of


class Scope(NamedTuple):
    """The layer for which a call is made, and the phase in which it is made."""

    layer: str | None = None
    phase: str | None = None


class _Current(threading.local):
    scope = Scope()


_current = _Current()


def current_scope() -> Scope:
    """Return the scope that calls of this thread are booked under."""
    return _current.scope


class comm_scope:
    """`with comm_scope(layer="layers.3.mlp", phase="forward")`: book the block's communication there.

    An argument that is None keeps the value of the enclosing scope. It is a class and not a generator, because layers
    enter it on every call and a class is faster.
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
    """Call `remember_scope`, and book the block as forward, or as the phase already set."""
    remember_scope(ctx, group)
    return comm_scope(phase=_current.scope.phase or "forward")


def backward_scope(ctx: Any) -> comm_scope:
    """Book what follows as the backward of the layer that ran forward."""
    return comm_scope(layer=ctx.layer, phase="backward")


def _covers(wanted: str | None, layer: str | None) -> bool:
    """Return True if a query for `wanted` includes `layer`: the same name, or a part of it after a dot."""
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
        """Return True if a call of `operation` on `group` under `scope` is one of the chosen."""
        return (
            (self.operation is None or self.operation == operation)
            and (self.group is None or self.group == group)
            and (self.phase is None or self.phase == scope.phase)
            and _covers(self.layer, scope.layer)
        )


class CommLedger:
    """`with CommLedger() as ledger:` writes down every call to `labkit.comm.collectives` that this process makes.

    Groups of size 1 communicate nothing and are not recorded. Ledgers nest; each sees everything inside its block.
    """

    def __init__(self) -> None:
        self.records: list[CommRecord] = []

    def __enter__(self) -> CommLedger:
        watchers.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        watchers.remove(self)

    def select(
        self,
        *,
        operation: str | None = None,
        group: str | None = None,
        phase: str | None = None,
        layer: str | None = None,
    ) -> list[CommRecord]:
        """Return the records that agree with every field given; `layer="layers.3"` includes `layers.3.mlp`."""
        wanted = Selector(operation, group, phase, layer)
        return [r for r in self.records if wanted.matches(r.operation, r.group, Scope(r.layer, r.phase))]

    def count(self, **wanted: str | None) -> int:
        """Return the number of calls that agree with the fields given (see `select`)."""
        return len(self.select(**wanted))

    def bytes(self, **wanted: str | None) -> int:
        """Return the payload in bytes of the calls that agree with the fields given (see `CommRecord.bytes`)."""
        return sum(record.bytes for record in self.select(**wanted))

    def table(self) -> str:
        """Return a line per (operation, group, phase, layer), with calls and bytes, in order of first appearance."""
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


def book(operation: str, group: Group, size: int = 0, dtype: str = "none", kept: int = 0) -> None:
    """Write one call into every open ledger. The arguments are fields of `CommRecord`; `size` counts bytes."""
    ledgers = watchers_of(CommLedger)
    if ledgers:
        record = CommRecord(operation, group.name, group.size, size, dtype, *_current.scope, kept)
        for ledger in ledgers:
            ledger.records.append(record)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type without `torch.`, such as `float32`."""
    return str(dtype).removeprefix("torch.")
