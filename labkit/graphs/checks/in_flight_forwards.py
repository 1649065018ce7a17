"""Forwards whose backward is still to come, and whether what they left in the pool is still there.

Graphs of one pool take over each other's dead blocks, and which are dead followed from the order of the captures. What
a forward leaves for its backward is safe from every graph that was captured between the two, and from no other: one
from before may use those blocks for its own temporaries, one from behind was given them. So while a forward waits, a
replay from outside that span spoils it. Above all its own graph: a second forward writes over all that the first left.

    captured     F0 F1 B0 F2 B1 B2       (1F1B)
    replayed     F0 F1 F2 ..             F0 is spoiled by F2, which was captured behind B0

The check costs no look at memory: times of captures are compared. It may refuse a lucky order, and misses none.
"""

from __future__ import annotations

import weakref
from typing import Any

from labkit.parallel.communication.capturing import GraphCaptureError


class InFlightForward:
    """One forward between its replay and the last graph that reads what it left."""

    __slots__ = ("begin", "end", "has_been_back", "is_repeated", "spoiled_by")

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        self.spoiled_by = ""
        """Which graph's replay came in between; empty while all is well."""
        self.is_repeated = False
        """Whether that was this forward's own graph."""
        self.has_been_back = False
        """Whether its backward has run."""


class InFlightForwards:
    """The forwards under way in one pool."""

    def __init__(self) -> None:
        self._now = 0
        self._open: dict[InFlightForward, None] = {}

    def captured(self) -> int:
        """The time of the capture that ends now."""
        self._now += 1
        return self._now

    def replayed(self, time: int, name: str) -> None:
        """A graph captured at `time` is replayed: note whom it spoils."""
        spoiled = [flight for flight in self._open if not flight.begin < time < flight.end]
        for flight in spoiled:
            flight.spoiled_by, flight.is_repeated = name, time == flight.begin
            del self._open[flight]

    def begun(self, begin: int, end: int) -> InFlightForward:
        """A forward was replayed, and what it left is needed up to the graph captured at `end`."""
        flight = InFlightForward(begin, end)
        self._open[flight] = None
        return flight

    def require(self, flight: InFlightForward, name: str, *, is_last: bool) -> None:
        """Before the backward (or the weight gradients) of a forward. is_last: nothing reads what it left any more.

        Raises:
            GraphCaptureError: another replay has written over what the forward left.
        """
        if flight.spoiled_by:
            what = "its graph was replayed again" if flight.is_repeated else f"{flight.spoiled_by} was replayed"
            raise GraphCaptureError(
                f"{name}: since this forward {what}, over what the backward reads. Run forwards and backwards in the "
                "order of the capture; for several forwards ahead of their backwards capture a graph for each (order)"
            )
        if is_last:
            self._open.pop(flight, None)


_of_pools: weakref.WeakKeyDictionary[Any, InFlightForwards] = weakref.WeakKeyDictionary()


def in_flight_of(pool: Any) -> InFlightForwards:
    """Those of a pool, the same for all captures that share it. A bare handle of the device's gets new ones."""
    try:
        return _of_pools.setdefault(pool, InFlightForwards())
    except TypeError:
        return InFlightForwards()
