"""The process groups of this process. Layouts share them; the last layout that lets go of a process group frees it.

A `Communicator` is one torch process group. A `Lease` is the use of a communicator by one layout. A new layout reuses
the communicator that an earlier layout holds over the same ranks for the same purpose. Its lease ends when the layout
is closed or collected.

Ranks let go of layouts at different moments: one rank closes early, another keeps a layout in a variable, a third waits
for its garbage collector. Five rules make sure that reuse and freeing do not hang for this reason:

1. *Own names.* torch names a local group after the number of groups that the process holds, so uneven ranks would wait
   for each other under different names. `Communicator.name` counts the requests for these ranks and this purpose; all
   members make the same requests, in the same order.
2. *The first decides.* After each request the store has one cell that is written once. A member that asks for the
   communicator again writes `shared`; a member that lets go of it writes `left`. The first word counts, and all members
   follow it: they share the old communicator, or make a new one.
3. *The last frees.* gloo fails in a rank whose neighbour closes its sockets too early. So every member counts itself
   out in the store, and frees its side when all members have done so.
4. *No rank waits.* A member reads the store only at the start of a layout, after `close`, and before and after each
   call of the launcher (`sweep`). The garbage collector only notes which communicators it has let go of.
5. *A failed call ends all sharing.* After an exception ranks may have made different numbers of requests. The launcher
   counts the failed calls, the names hold that count, and later layouts share nothing with earlier ones.

NCCL ends a communicator only when all its ranks ask together, which rule 4 forbids. So an NCCL communicator without a
lease waits for the next layout over its ranks, and ends with the process.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from labkit.launch import info

Key = tuple[str, tuple[int, ...], timedelta]
"""Purpose, global ranks and time limit. Layouts share a communicator if all three are equal."""
_PATIENCE = 1.0
"""Seconds that a rank waits for a process group to end. With a stuck operation the group ends later, in a thread."""


@dataclass(eq=False)
class Communicator:
    """One process group of torch, with the number of layouts that use it."""

    key: Key
    name: str
    """The same on all members, and on no other communicator of the launch."""
    process_group: Any
    cell: str
    """Key in the store under which the members agree to share this communicator next, or to leave it."""
    leases: int = 0


class Lease:
    """The use of one communicator by one layout."""

    def __init__(self, process_group: Any, communicator: Communicator | None = None) -> None:
        """communicator: None for a process group that the registry does not own, such as torch's default group."""
        self.process_group = process_group
        """torch's ProcessGroup; None once the lease has ended."""
        self._end = None
        if communicator is not None:
            communicator.leases += 1
            self._end = weakref.finalize(self, _registry().let_go.append, communicator)
            self._end.atexit = False

    def close(self) -> None:
        """End the lease. The communicator is freed by the next `sweep`, if no other lease holds it."""
        self.process_group = None
        if self._end is not None:
            self._end()


class LayoutLeases:
    """The leases of one layout: equal requests get the same lease."""

    def __init__(self, timeout: timedelta) -> None:
        self.closed = False
        self._timeout = timeout
        self._leases: dict[tuple[str, tuple[int, ...]], Lease] = {}
        sweep()

    def lease(self, purpose: str, ranks: tuple[int, ...]) -> Lease:
        """Return the process group over `ranks` for `purpose`; every rank of `ranks` asks for it, in the same order."""
        if self.closed:
            raise RuntimeError(closed_layout(purpose, ranks))
        if (purpose, ranks) not in self._leases:
            self._leases[purpose, ranks] = _registry().lease((purpose, ranks, self._timeout))
        return self._leases[purpose, ranks]

    def use_world(self, purpose: str) -> None:
        """Let torch's default group serve `purpose` over all ranks."""
        self._leases[purpose, tuple(range(dist.get_world_size()))] = Lease(dist.group.WORLD)

    def close(self) -> None:
        """End all leases, in the order in which they were made. Closing twice is fine."""
        self.closed = True
        for lease in self._leases.values():
            lease.close()
        self._leases.clear()
        sweep()


def closed_layout(name: str, ranks: tuple[int, ...]) -> str:
    """Return the error message for a group that is used after its layout was closed."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return (
        f"group {name} of ranks {shown} belongs to a layout that was closed; "
        "make the layout again with initialize_model_parallel"
    )


class _Registry:
    """All communicators of this process, for as long as torch's default group lives."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.let_go: deque[Communicator] = deque()
        """One entry for each lease that ended since the last sweep. The garbage collector runs only its `append`."""
        self._shared: dict[Key, Communicator] = {}
        self._requests: Counter[Key] = Counter()
        self._leaving: list[Communicator] = []
        self._failed_calls = info.failed_calls()
        self._frees = dist.get_backend() == "gloo"
        self._store = distributed_c10d._get_default_store()
        info.between_calls(sweep)

    def lease(self, key: Key) -> Lease:
        """Return a lease for `key`, of the held communicator if all members still hold it, else of a new one."""
        self._requests[key] += 1
        name = self._name(key)
        held = self._shared.get(key)
        if held is None or not self._claims(held, "shared"):
            held = self._shared[key] = Communicator(key, name, _new_process_group(key, name), "")
        held.cell = f"{name}/next"
        return Lease(held.process_group, held)

    def sweep(self) -> None:
        """Leave the communicators that no layout uses any more; free those that all their members have left."""
        if self._failed_calls != info.failed_calls():
            self._failed_calls = info.failed_calls()
            idle = [held for held in self._shared.values() if held.leases == 0]
            self._shared.clear()
            self._requests.clear()
            for communicator in idle:
                self._leave(communicator)
        while self.let_go:
            communicator = self.let_go.popleft()
            communicator.leases -= 1
            if communicator.leases == 0:
                self._give_up(communicator)
        if self._leaving and self._frees:
            ended = [each for each in self._leaving if self._store.check([f"{each.name}/ended"])]
            self._leaving = [each for each in self._leaving if each not in ended]
            _free(ended)

    def _name(self, key: Key) -> str:
        purpose, ranks, timeout = key
        members = hashlib.sha1(f"{ranks} {timeout}".encode(), usedforsecurity=False).hexdigest()
        return f"labkit/{purpose}/{members}/{self._failed_calls}.{self._requests[key]}"

    def _give_up(self, communicator: Communicator) -> None:
        """Leave a communicator that no layout of this rank uses, unless its members have agreed to share it next."""
        if self._shared.get(communicator.key) is not communicator:
            self._leave(communicator)
        elif self._frees and self._claims(communicator, "left"):
            del self._shared[communicator.key]
            self._leave(communicator)

    def _claims(self, held: Communicator, word: str) -> bool:
        """Return True if the members agree on `word` (`shared` or `left`) after the last request for `held`."""
        if not self._frees:
            return word == "shared"
        return self._store.compare_set(held.cell, "", word).decode() == word

    def _leave(self, communicator: Communicator) -> None:
        """Count this rank out of the communicator; the last member marks it as ended."""
        self._leaving.append(communicator)
        if self._store.add(f"{communicator.name}/members out", 1) == len(communicator.key[1]):
            self._store.set(f"{communicator.name}/ended", "")


_current: _Registry | None = None


def _registry() -> _Registry:
    global _current
    if _current is None or _current.world is not dist.group.WORLD:
        _current = _Registry(dist.group.WORLD)
    return _current


def sweep() -> None:
    """Free the communicators that no rank uses any more. The call never waits for another rank.

    If the process that holds the store has gone, ranks cannot agree any more, and the groups end with this process.
    """
    if _current is not None and dist.is_initialized() and _current.world is dist.group.WORLD:
        with suppress(dist.DistError):
            _current.sweep()


def _free(communicators: list[Communicator]) -> None:
    """End process groups and their threads. An operation that is stuck in one of them does not hold up this rank."""
    if not communicators:
        return
    handles = []
    for communicator in communicators:
        handles.append(communicator.process_group)
        dist.destroy_process_group(communicator.process_group)
        communicator.process_group = None
    freeing = threading.Thread(target=handles.clear, name="labkit frees groups", daemon=True)
    freeing.start()
    freeing.join(_PATIENCE)


def _new_process_group(key: Key, name: str) -> Any:
    """Make a process group; only its members call this."""
    purpose, ranks, timeout = key
    with _local(dist.group.WORLD, name):
        return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True, group_desc=purpose)


@contextmanager
def _local(world: Any, name: str) -> Iterator[None]:
    """Let torch make a group with the given name, for which only its members call.

    The default group is unbound from its GPU inside the block. torch would split the NCCL communicator of a bound
    group, and every rank of the world would have to call. Members of an unbound group connect on first use.
    """
    bound, naming = world.bound_device_id, distributed_c10d._process_group_name
    if bound is not None:
        world.bound_device_id = None
    distributed_c10d._process_group_name = lambda *_, **__: name  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        distributed_c10d._process_group_name = naming
        if bound is not None:
            world.bound_device_id = bound
