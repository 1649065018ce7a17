"""Statistics of the router of one layer: load of the experts, dropped tokens, losses.

Each rank adds them up over microbatches on the device. `summarize` adds them over ranks.

Shapes: T tokens of this rank, E experts, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.comm.collectives import all_reduce
from labkit.comm.groups import ParallelGroups
from labkit.comm.ledger import comm_scope

LOSSES = ("load_balancing_loss", "z_loss")


@dataclass(frozen=True)
class RouterSummary:
    """One layer's routing over all ranks of its stage and the microbatches since the last reset."""

    tokens_per_expert: tuple[int, ...]
    """Choices of each expert, before any capacity; they add up to tokens x top_k."""
    dropped: int
    """Choices that exceeded an expert's capacity."""
    load_balancing_loss: float
    """Mean over microbatches, without its coefficient: 1 where load and scores are even."""
    z_loss: float
    """Mean over microbatches, without its coefficient."""
    max_over_mean: float
    """Load of the fullest expert over the mean load, 1 at even load: the time of the experts relative to even load."""
    load_entropy: float
    """Entropy of the load's distribution over the log of the number of experts: 1 is even load, 0 one expert alone."""

    @classmethod
    def of(cls, totals: Sequence[float], parts: int = 1) -> RouterSummary:
        """Read `RouterStatistics.totals`, summed over ranks. parts: ranks that share the losses of a microbatch."""
        *counts, dropped, balance, z, forwards = totals
        load = torch.tensor(counts, dtype=torch.float64)
        share = load / load.sum().clamp(min=1)
        entropy = -torch.special.xlogy(share, share).sum().item()
        microbatches = max(1.0, forwards / parts)
        return cls(
            tokens_per_expert=tuple(int(count) for count in counts),
            dropped=int(dropped),
            load_balancing_loss=balance / microbatches,
            z_loss=z / microbatches,
            max_over_mean=(load.max() / load.mean()).item() if load.any() else 1.0,
            load_entropy=entropy / math.log(len(counts)) if len(counts) > 1 else 1.0,
        )


class RouterStatistics:
    """Totals of one layer on one rank. Adding to them reads nothing back from the device.

    Args:
        num_experts: E.
        device: device of the totals; None is the host.
    """

    def __init__(self, num_experts: int, *, device: torch.device | str | None = None) -> None:
        self.totals = torch.zeros(num_experts + len(LOSSES) + 2, dtype=torch.float64, device=device)
        """[E + 4]: all totals below, in their order."""
        self.tokens_per_expert = self.totals[:num_experts]
        """[E], this rank's choices before any capacity."""
        self.dropped = self.totals[num_experts]
        """This rank's choices over capacity."""
        self.losses = {name: self.totals[num_experts + 1 + i] for i, name in enumerate(LOSSES)}
        """Sums over microbatches of this rank's parts, without coefficients."""
        self.forwards = self.totals[-1]
        """Number of microbatches."""

    def add_routing(self, tokens_per_expert: Tensor, dropped: Tensor | None = None) -> None:
        """Count one microbatch: its choices before any capacity, [E], and the number of dropped ones."""
        self.tokens_per_expert += tokens_per_expert
        if dropped is not None:
            self.dropped += dropped
        self.forwards += 1

    def add_loss(self, name: str, part: Tensor) -> None:
        """Add this rank's part of a loss of LOSSES, without its coefficient."""
        self.losses[name] += part.detach()

    def reset(self) -> None:
        """Set all totals to zero."""
        self.totals.zero_()


def summarize(statistics: Sequence[RouterStatistics], groups: ParallelGroups) -> list[RouterSummary]:
    """Return one summary for each layer, over all ranks of this pipeline stage (tp x dp x cp).

    All these ranks call it, with the same layers. It makes one all-reduce and one read of the device for all layers.
    """
    if not statistics:
        return []
    totals_LN = torch.stack([layer.totals for layer in statistics])
    with comm_scope(layer="moe", phase="report"):
        all_reduce(totals_LN, groups.tp_dp_cp)
    return [RouterSummary.of(row, groups.tp_cp.size) for row in totals_LN.tolist()]
