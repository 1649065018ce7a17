"""Experts that sleep instead of computing, and routings of a chosen skew: what an uneven load costs, on few cores.

Rows travel for real, between real processes; only the products are slept, so that the waiting of many ranks for the
fullest can be timed where they all share two cores.

Shapes: T tokens, E experts, N rows of this rank, H hidden, L local experts.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from labkit.events import span


class SleepingExperts(nn.Module):
    """In the place of a layer's experts: sleeps for each of its rows and returns them, weighted.

    Args:
        seconds_per_row: of one row through one expert.

    Attributes:
        rows: N of the last forward.
    """

    def __init__(self, seconds_per_row: float) -> None:
        super().__init__()
        self.seconds_per_row = seconds_per_row
        self.rows = 0

    def forward(self, tokens_NH: Tensor, tokens_per_expert: Tensor, probs_N: Tensor) -> Tensor:
        """[N, H], rows of each local expert [L], weights [N] -> [N, H]."""
        self.rows = int(tokens_per_expert.sum())
        with span(f"{self.rows} rows", "forward"):
            time.sleep(self.rows * self.seconds_per_row)
        return tokens_NH * probs_N.unsqueeze(-1)


def zipf_logits(tokens: int, num_experts: int, skew: float, *, seed: int = 0) -> Tensor:
    """Logits [T, E], float64, whose top-k draws experts without replacement with chances that fall as (e + 1)^-skew.

    It is Zipf's law: skew 0 is even, at 1 expert 0 is twice as popular as expert 1, at 3 eight times. The Gumbel noise
    that turns a top-k into such a draw (arXiv 1903.06059) depends on the seed alone: more skew moves few tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(tokens, num_experts, generator=generator, dtype=torch.float64).clamp_(min=1e-12)
    popularity = torch.arange(1, num_experts + 1, dtype=torch.float64).log()
    return -skew * popularity - (-uniform.log()).log()
