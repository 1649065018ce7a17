"""Routing written down and routed again: one flipped top-k changes everything downstream, so layouts are compared in
float32 with the choices of one of them.

A record is one uint8 tensor [S, B, E] for each forward of a microbatch: bit 0, the expert was chosen (before any
capacity); bit 1, the load-balancing loss counted it (its choice knows neither bias nor groups). Being laid out as the
tokens are, it can be cut and joined as they are.

Shapes: S sequence and B batch of this rank, E experts, T = S x B.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.parallel.ledger import current_scope
from labkit.parallel.recompute import once

CHOSEN, COUNTED = 1, 2


def is_second_forward() -> bool:
    """Whether the forward at hand only makes again, for backward, what was computed before."""
    return current_scope().phase == "recompute"


def encode(map_TE: Tensor, counted_TE: Tensor, sequence: int) -> Tensor:
    """The record of one forward, [S, B, E]."""
    code_TE = map_TE.to(torch.uint8) * CHOSEN + counted_TE.to(torch.uint8) * COUNTED
    return code_TE.view(sequence, -1, map_TE.shape[-1])


def decode(code_SBE: Tensor) -> tuple[Tensor, Tensor]:
    """The choice and what the load-balancing loss counted, bool [T, E] both."""
    code_TE = code_SBE.flatten(0, 1)
    return (code_TE & CHOSEN).bool(), (code_TE & COUNTED).bool()


class RoutingReplay:
    """Records to be used in order, one for each forward of a layer; its recomputation gets the same one again.

    Args:
        records: [S, B, E] each, in the order of the layer's forwards on this rank.
    """

    def __init__(self, records: Sequence[Tensor]) -> None:
        self.records = list(records)
        self._used = 0

    def take(self, shape_SBE: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Choice and counted map of the forward at hand.

        Raises:
            ValueError: no record is left, or it is of another shape.
        """
        position = once(self._next)
        record = self.records[position]
        if tuple(record.shape) != tuple(shape_SBE):
            raise ValueError(
                f"recorded routing {position} has shape {tuple(record.shape)}, this forward {tuple(shape_SBE)} "
                "(sequence, batch, experts of the rank); cut the record as the tokens are cut"
            )
        return decode(record)

    def _next(self) -> int:
        if self._used == len(self.records):
            raise ValueError(f"all {self._used} recorded routings are used; a replay needs one for each forward")
        self._used += 1
        return self._used - 1
