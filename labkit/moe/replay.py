"""Routing records and their replay. One flipped top-k changes everything after it, so two layouts are compared in
float32 with the choices of one of them.

A record is one uint8 tensor [S, B, E] for each forward of a microbatch. Bit 0: the token chose the expert, before any
capacity. Bit 1: the load-balancing loss counted the expert; the loss's choice ignores bias and groups. A record has the
layout of the tokens, so it can be cut and joined like them.

Shapes: S sequence and B batch of this rank, E experts, T = S x B.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.comm.ledger import current_scope
from labkit.parallel.recompute import once

CHOSEN, COUNTED = 1, 2


def is_second_forward() -> bool:
    """Return True during recomputation, when a forward runs again for backward."""
    return current_scope().phase == "recompute"


def encode(map_TE: Tensor, counted_TE: Tensor, sequence: int) -> Tensor:
    """Return the record of one forward, [S, B, E]."""
    code_TE = map_TE.to(torch.uint8) * CHOSEN + counted_TE.to(torch.uint8) * COUNTED
    return code_TE.view(sequence, -1, map_TE.shape[-1])


def decode(code_SBE: Tensor) -> tuple[Tensor, Tensor]:
    """Return the choice, and the choice that the load-balancing loss counted; both bool [T, E]."""
    code_TE = code_SBE.flatten(0, 1)
    return (code_TE & CHOSEN).bool(), (code_TE & COUNTED).bool()


class RoutingReplay:
    """Records that forwards of a layer use in order; a recomputed forward gets the same record again.

    Args:
        records: [S, B, E] each, in the order of the layer's forwards on this rank.
    """

    def __init__(self, records: Sequence[Tensor]) -> None:
        self.records = list(records)
        self._used = 0

    def take(self, shape_SBE: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return choice and counted map of the current forward.

        Raises:
            ValueError: no record is left, or the record has another shape.
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
