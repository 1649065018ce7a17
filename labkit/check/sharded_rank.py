"""A rank with sharded layers that works off an order of gathers, computations, frees and scatters, by the clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.events import Event

FORWARD, BACKWARD, MESSAGE = 1.0, 2.0, 1.0
"""Units of time of a layer's forward and backward, and of a gather or scatter of its weights or gradients."""


@dataclass(frozen=True)
class Run:
    """An order, played by the clock."""

    seconds: float
    gathers: int
    events: tuple[Event, ...]


class _CannotRunError(ValueError):
    """Says why an order cannot run."""


class _Rank:
    """A rank that works off an order.

    `gather` and `scatter` only start a message, and the link carries one after another. `compute` waits for the
    layer's weights. All raise _CannotRunError.
    """

    def __init__(self, layers: int, room: int) -> None:
        self.layers, self.room = layers, room
        self.host = self.link = 0.0
        self.whole: dict[int, tuple[float, float]] = {}
        """Layer -> (start of its gather, its arrival)."""
        self.todo = [("forward", i) for i in range(layers)] + [("backward", i) for i in reversed(range(layers))]
        self.scattered: set[int] = set()
        self.events: list[Event] = []

    def send(self, name: str) -> None:
        """Start a message."""
        begins, self.link = max(self.host, self.link), max(self.host, self.link) + MESSAGE
        self.events.append(Event(0, name, "collective", begins, self.link))

    def gather(self, i: int) -> None:
        """Start to make a layer whole."""
        self.send(f"all_gather {i}")
        if i in self.whole:
            raise _CannotRunError(f"layer {i} is gathered while it is whole")
        self.whole[i] = self.host, self.link
        if len(self.whole) > self.room:
            held = f"{len(self.whole)} layers are whole, with room for {self.room}"
            raise _CannotRunError(f"{held}: free a layer before you gather the next")

    def scatter(self, i: int) -> None:
        """Start to sum up a layer's gradient."""
        self.send(f"reduce_scatter {i}")
        if ("backward", i) in self.todo:
            raise _CannotRunError(f"the gradient of layer {i} is scattered before its backward")
        if i in self.scattered:
            raise _CannotRunError(f"the gradient of layer {i} is scattered twice")
        self.scattered.add(i)

    def free(self, i: int) -> None:
        """Drop the part of a layer that other ranks own."""
        if i not in self.whole:
            raise _CannotRunError(f"layer {i} is freed, but is not whole")
        self.events.append(Event(0, f"layer {i}", "data", self.whole.pop(i)[0], self.host))

    def compute(self, what: str, i: int) -> None:
        """Run the forward or the backward of a layer."""
        if not self.todo or (what, i) != self.todo[0]:
            due = " ".join(map(str, self.todo[0])) if self.todo else "nothing"
            raise _CannotRunError(f"{what} {i} comes where {due} is due")
        if i not in self.whole:
            raise _CannotRunError(f"layer {i} is not whole at its {what}: gather it first")
        begins = max(self.host, self.whole[i][1])
        self.host = begins + (FORWARD if what == "forward" else BACKWARD)
        self.events.append(Event(0, f"{what} {i}", what, begins, self.host))
        self.todo.pop(0)

    def end(self) -> None:
        """Check that nothing is left."""
        if self.todo:
            raise _CannotRunError(f"{self.todo[0][0]} {self.todo[0][1]} is missing")
        if missing := sorted(set(range(self.layers)) - self.scattered):
            raise _CannotRunError(f"the gradient of layer {missing[0]} is never scattered, so no rank has the sum")
        if self.whole:
            held = f"layer {min(self.whole)} is still whole at the end"
            raise _CannotRunError(f"{held}: free each layer after its backward")


def played(order: Sequence[tuple[str, int]], layers: int, room: int) -> Run | str:
    """Play an order: what it takes, or why it cannot run."""
    rank = _Rank(layers, room)
    try:
        for what, i in order:
            if what in ("forward", "backward"):
                rank.compute(what, i)
            else:
                {"gather": rank.gather, "scatter": rank.scatter, "free": rank.free}[what](i)
        rank.end()
    except _CannotRunError as error:
        return str(error)
    return Run(max(rank.host, rank.link), sum(what == "gather" for what, _ in order), tuple(rank.events))
