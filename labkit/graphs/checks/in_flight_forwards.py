"""Forwards in flight, whose backward is still to come, and a check that the pool still holds their tensors.

Graphs of one pool take over each other's dead blocks. The order of the captures decides on the blocks that are dead. A
forward leaves tensors for its backward. Graphs captured between the two do not touch these tensors; all other graphs
may. A graph captured earlier may have used the blocks for temporaries, and a graph captured later may get them. So
while a forward is in flight, a replay of such a graph spoils it. The forward's own graph does so in any case: a second
replay overwrites all tensors of the first.

    captured     F0 F1 B0 F2 B1 B2       (1F1B)
    replayed     F0 F1 F2 ..             F2 spoils F0, because F2 was captured after B0

The check compares times of captures and reads no memory. It finds every spoiled forward, and may reject an order that
would have been right by luck.
"""

from __future__ import annotations

import weakref
from typing import Any

from labkit.comm.capturing import GraphCaptureError


class InFlightForward:
    """One forward, from its replay to the last graph that reads its tensors."""

    __slots__ = ("begin", "end", "has_been_back", "is_repeated", "spoiled_by")

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        self.spoiled_by = ""
        """Name of the graph whose replay spoiled this forward; empty without one."""
        self.is_repeated = False
        """True where that was this forward's own graph."""
        self.has_been_back = False
        """True once its backward has run."""


class InFlightForwards:
    """The forwards in flight in one pool."""

    def __init__(self) -> None:
        self._now = 0
        self._open: dict[InFlightForward, None] = {}

    def captured(self) -> int:
        """Count the capture that ends now; return its time."""
        self._now += 1
        return self._now

    def replayed(self, time: int, name: str) -> None:
        """Note the forwards that a replay of the graph captured at `time` spoils."""
        spoiled = [flight for flight in self._open if not flight.begin < time < flight.end]
        for flight in spoiled:
            flight.spoiled_by, flight.is_repeated = name, time == flight.begin
            del self._open[flight]

    def begun(self, begin: int, end: int) -> InFlightForward:
        """Note a replayed forward, whose tensors are needed until the graph captured at `end` is replayed."""
        flight = InFlightForward(begin, end)
        self._open[flight] = None
        return flight

    def require(self, flight: InFlightForward, name: str, *, is_last: bool) -> None:
        """Check a forward before its backward or its weight gradients. is_last: no later graph reads its tensors.

        Raises:
            GraphCaptureError: another replay has overwritten the forward's tensors.
        """
        if flight.spoiled_by:
            what = "its graph was replayed again" if flight.is_repeated else f"{flight.spoiled_by} was replayed"
            raise GraphCaptureError(
                f"{name}: since this forward {what} and overwrote tensors that the backward reads. Run forwards and "
                "backwards in the order of the capture; for several forwards before their backwards capture a graph "
                "for each (order)"
            )
        if is_last:
            self._open.pop(flight, None)


_of_pools: weakref.WeakKeyDictionary[Any, InFlightForwards] = weakref.WeakKeyDictionary()


def in_flight_of(pool: Any) -> InFlightForwards:
    """The forwards in flight of a pool, one object for all captures that share it. A bare handle gets a new object."""
    try:
        return _of_pools.setdefault(pool, InFlightForwards())
    except TypeError:
        return InFlightForwards()
