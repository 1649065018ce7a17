"""An all-to-all in two halves, which overlaps with the work between them, forward and backward.

    forward    start: rows leave         |  other work            |  wait: rows have come
    backward   wait: gradients have come |  the work's backward   |  start: gradients leave

Autograd runs nodes backward from the last made to the first. So gradients leave in the backward of the second half,
then the backward of the work runs, and at last the backward of the first half waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from labkit.comm import collectives
from labkit.comm.groups import Group
from labkit.comm.ledger import backward_scope, current_scope, forward_scope
from labkit.comm.pending import Pending


class AllToAllInFlight:
    """An all-to-all under way; `wait()` returns the received rows, and may be called once."""

    __slots__ = ("group", "input_splits", "output_splits", "pending", "ticket")

    def __init__(self, group: Group, output_splits: Sequence[int] | None, input_splits: Sequence[int] | None) -> None:
        self.group, self.output_splits, self.input_splits = group, output_splits, input_splits
        self.pending: Pending | None = None
        """The transfer of rows in forward, or of their gradients in backward; None before and after."""
        self.ticket: Tensor | None = None
        """What ties the second half to the first in the autograd graph: an empty tensor, or in a group of one all
        rows."""

    def wait(self) -> Tensor:
        """Wait, and return the rows that the ranks sent to this one, in their order: [sum out, ..]."""
        ticket, self.ticket = self.ticket, None
        assert ticket is not None, "one wait for each start"
        return ticket if self.group.size == 1 else _Arrive.apply(ticket, self)  # type: ignore[return-value]

    def arrived(self) -> Tensor:
        """Wait for the transfer, release its buffers, and return what arrived."""
        pending, self.pending = self.pending, None
        assert pending is not None, "a transfer starts in the other half, and is awaited once"
        return pending.wait()


class _Depart(Function):
    """First half of an all-to-all: rows leave.

    forward   starts the transfer; the result is an empty ticket        [sum in, ..] -> [0]
    backward  waits for the gradient that _Arrive has sent back         [0] -> [sum in, ..]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: AllToAllInFlight) -> Tensor:
        ctx.flight = flight
        with forward_scope(ctx, flight.group):
            flight.pending = collectives.all_to_all_async(x, flight.group, flight.output_splits, flight.input_splits)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.flight.arrived(), None


class _Arrive(Function):
    """Second half of an all-to-all: waits for the rows.

    forward   y_r = rows that the ranks sent to r                       [0] -> [sum out, ..]
    backward  starts sending their gradients back, splits swapped       [sum out, ..] -> [0]
    """

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, flight: AllToAllInFlight) -> Tensor:
        ctx.flight, ctx.layer = flight, current_scope().layer
        return flight.arrived()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        flight, gradient = ctx.flight, grads[0]
        with backward_scope(ctx):
            flight.pending = collectives.all_to_all_async(
                gradient, flight.group, flight.input_splits, flight.output_splits
            )
        return gradient.new_empty(0), None


def all_to_all_start(
    x: Tensor,
    group: Group,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
) -> AllToAllInFlight:
    """Start `mappings.all_to_all`. Work before `.wait()` overlaps with it, and so does the work's backward.

    Raises ValueError for splits that do not fit the group or x.
    """
    flight = AllToAllInFlight(group, output_splits, input_splits)
    flight.ticket = x if group.size == 1 else _Depart.apply(x, flight)  # type: ignore[assignment]
    return flight
