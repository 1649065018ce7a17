"""An all-to-all in two halves. Work between the halves hides it, forward and backward.

    forward    start: rows leave     |  other work            |  wait: what came
    backward   wait: gradients came  |  the work's backward   |  start: gradients leave

Autograd runs nodes backward from the last made to the first. Gradients leave in the backward of the second half. Then
the backward of the work runs, and the backward of the first half waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from labkit.comm import collectives
from labkit.comm.groups import Group
from labkit.comm.ledger import backward_scope, current_scope, forward_scope

__all__ = ["AllToAllInFlight", "all_to_all_start"]


class _Transit:
    """State that the two halves of an all-to-all share: splits, and the transfer under way in either direction."""

    __slots__ = ("forward", "gradient", "group", "input_splits", "output_splits")

    def __init__(self, group: Group, output_splits: Sequence[int] | None, input_splits: Sequence[int] | None) -> None:
        self.group, self.output_splits, self.input_splits = group, output_splits, input_splits
        self.forward: collectives.Pending | None = None
        self.gradient: collectives.Pending | None = None


class _Depart(Function):
    """First half of an all-to-all: rows leave.

    forward   starts the transfer; the result is an empty ticket        [sum in, ..] -> [0]
    backward  waits for the gradient that _Arrive has sent back         [0] -> [sum in, ..]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, transit: _Transit) -> Tensor:
        ctx.transit = transit
        with forward_scope(ctx, transit.group):
            transit.forward = collectives.all_to_all_async(
                x, transit.group, transit.output_splits, transit.input_splits
            )
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        pending, ctx.transit.gradient = ctx.transit.gradient, None
        assert pending is not None, "the second half's backward comes first"
        return pending.wait(), None


class _Arrive(Function):
    """Second half of an all-to-all: waits for the rows.

    forward   y_r = rows that the ranks sent to r                       [0] -> [sum out, ..]
    backward  starts sending their gradients back, splits swapped       [sum out, ..] -> [0]
    """

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, transit: _Transit) -> Tensor:
        ctx.transit, ctx.layer = transit, current_scope().layer
        pending, transit.forward = transit.forward, None  # lets go of the transfer's buffers
        assert pending is not None, "one wait for each start"
        return pending.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        transit = ctx.transit
        with backward_scope(ctx):
            transit.gradient = collectives.all_to_all_async(
                grads[0], transit.group, transit.input_splits, transit.output_splits
            )
        return grads[0].new_empty(0), None


class AllToAllInFlight:
    """An all-to-all under way; `wait()` returns the received rows, and may be called once."""

    __slots__ = ("_ticket", "_transit")

    def __init__(self, ticket: Tensor, transit: _Transit | None) -> None:
        self._ticket, self._transit = ticket, transit

    def wait(self) -> Tensor:
        """[sum out, ..]: the rows that the ranks sent to this one, in their order."""
        if self._transit is None:
            return self._ticket
        return _Arrive.apply(self._ticket, self._transit)  # type: ignore[no-any-return]


def all_to_all_start(
    x: Tensor,
    group: Group,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
) -> AllToAllInFlight:
    """Start `mappings.all_to_all`. Work before `.wait()` hides the transfer, and its backward hides the way back.

    Raises ValueError for splits that do not fit the group or x.
    """
    if group.size == 1:
        return AllToAllInFlight(x, None)
    transit = _Transit(group, output_splits, input_splits)
    return AllToAllInFlight(_Depart.apply(x, transit), transit)  # type: ignore[arg-type]
