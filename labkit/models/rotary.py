"""Rotary positions (RoPE, arXiv 2104.09864): pairs of features turned by an angle that grows with the position.

Shapes: S sequence, B batch, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.models.build import Build

Rotary = tuple[Tensor, Tensor]
"""cos and sin, each [S, 1 or B x heads, 1, D/2]."""


def rotary_table(length: int, dim: int, theta: float) -> Tensor:
    """Angles of RoPE (arXiv 2104.09864) in float64, [length, dim / 2]: position x theta^(-2i / dim)."""
    if dim % 2:
        raise ValueError(f"rotary positions turn pairs of features; a head of {dim} features has an odd one")
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return torch.outer(torch.arange(length, dtype=torch.float64), frequencies)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn feature i of each head with feature i + D/2 by the angle of its position; [S, heads, n, D] -> the same."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class RotaryTable(nn.Module):
    """cos and sin of every position of a model chunk, [seq_length, D/2]; the same for all layers, in no checkpoint."""

    cos: Tensor
    sin: Tensor

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        angles = rotary_table(config.seq_length, config.hidden // config.heads, config.rope_theta)
        self.register_buffer("cos", angles.cos().to(**build.factory_kwargs), persistent=False)
        self.register_buffer("sin", angles.sin().to(**build.factory_kwargs), persistent=False)
        self.sequence_parts = build.sequence_parts
        self.heads = max(1, (config.kv_heads or config.heads) // build.group.size)

    def forward(self, x_SBH: Tensor, position_ids_BS: Tensor | None) -> Rotary:
        """cos and sin of this microbatch: [S, 1, 1, D/2], or for positions of one's own [S, B x key/value heads of this
        rank, 1, D/2]."""
        if position_ids_BS is None:
            length = x_SBH.shape[0] * self.sequence_parts
            return self.cos[:length, None, None], self.sin[:length, None, None]
        alike = position_ids_BS.shape[0] == 1  # one row for all samples, and so for all heads
        positions = position_ids_BS.t().repeat_interleave(1 if alike else self.heads, dim=1)
        return self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2)
