"""Self-attention with its norm and projections, and rotary positions.

The sequence stays first. The fused projection makes, per key/value head, its query heads, then its key, then its value:
[q ... q k v] [q ... q k v] ... (Megatron's order), so that a tensor-parallel slice of the columns is a slice of whole
groups. Where key/value heads are fewer than ranks, neighbouring ranks share a group: each has its own query heads and a
copy of the one key and value (`Replicated`). Megatron cuts the columns evenly there, and gathers the heads in every
forward. Heads of all samples are handed to the attention kernel as one row of B x heads heads, which needs neither a
transpose in memory before it nor one after.

Shapes: S sequence, B batch, H hidden, D head dimension; t = tensor-parallel size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.config import ModelConfig
from labkit.models.build import Build
from labkit.parallel.parameters.parameter_record import Replicated

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


def kv_copies(config: ModelConfig, tp: int) -> int:
    """Ranks of tp that hold the same key/value head: 1 where no rank goes without a head of its own.

    Raises:
        ValueError: heads that cannot be shared out over tp.
    """
    kv_heads = config.kv_heads or config.heads
    if config.heads % tp or (kv_heads % tp and tp % kv_heads):
        raise ValueError(
            f"{config.heads} heads and {kv_heads} key/value heads cannot be shared by tp={tp} ranks; heads must be a "
            "multiple of tp, and kv_heads a multiple or a divisor"
        )
    return max(1, tp // kv_heads)


class ParallelAttention(nn.Module):
    """Causal self-attention on the normalised input; whole heads on each rank (arXiv 1909.08053, section 3).

    One all-reduce forward (after `proj`), one backward (before `qkv`); nothing is communicated between heads. The
    copies of a key/value head add up their gradients once a step (`finalize_model_grads`).

    Raises:
        ValueError: heads that do not divide hidden, or that cannot be shared out over tp.
    """

    def __init__(self, name: str, build: Build) -> None:
        super().__init__()
        config, tp = build.config, build.group.size
        kv_heads = config.kv_heads or config.heads
        if config.hidden % config.heads or config.heads % kv_heads:
            raise ValueError(f"{name}: hidden {config.hidden}, heads {config.heads}, kv_heads {kv_heads} must divide")
        self.name, self.recompute = name, build.recompute
        self.recomputes_norm = self.recompute.selects("layernorm")
        self.recomputes_core = self.recompute.selects("core_attn")
        self.head_dim = config.hidden // config.heads
        copies = kv_copies(config, tp)
        self.kv_heads = max(1, kv_heads // tp)
        self.queries_per_kv = config.heads // tp // self.kv_heads
        replicated = Replicated(copies, 2 * self.head_dim) if copies > 1 else None
        columns = (config.heads + 2 * kv_heads) * self.head_dim
        self.norm, column = build.norm_before(f"{name}.norm")
        self.core = build.spec.core_attention(name, config, build.rng, build.group, build.cp, build.cp_comm_type)
        self.qkv = column(f"{name}.qkv", config.hidden, columns, replicated=replicated, **build.linear())
        proj = build.linear(std=build.residual_std)
        self.proj = build.spec.row_parallel(f"{name}.proj", config.hidden, config.hidden, **proj)

    def forward(self, x_SBH: Tensor, rotary: Rotary | None = None) -> Tensor:
        """[S, B, H] -> [S, B, H], to be added to x."""
        if self.recomputes_norm:
            mixed = self.recompute.norm(self.norm, x_SBH, lambda y_SBH: self.qkv(y_SBH)[0])
        else:
            mixed, _ = self.qkv(self.norm(x_SBH))
        output, _ = self.proj(self.attend(mixed, rotary))
        return output

    def attend(self, mixed: Tensor, rotary: Rotary | None = None) -> Tensor:
        """softmax(q k^T / sqrt(D)) v of this rank's heads: [S, B, (its heads + 2 its kv_heads) D] -> [S, B, H / t]."""
        length, batch, _ = mixed.shape
        per_group = mixed.view(length, batch * self.kv_heads, self.queries_per_kv + 2, self.head_dim)
        q, k, v = per_group.split((self.queries_per_kv, 1, 1), dim=2)
        if rotary is not None:
            # The copy of v lets `mixed` go: otherwise it would be kept for backward beside the rotated q and k.
            q, k, v = rotate(q, rotary), rotate(k, rotary), v.clone()
        elif self.queries_per_kv > 1:  # the same, for the queries that the next line must copy
            k, v = k.clone(), v.clone()
        rows = (length, -1, self.head_dim)
        q, k, v = q.reshape(rows), k.reshape(rows), v.reshape(rows)
        q, k, v = q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        attended = self.recompute.part("core_attn", self.core, q, k, v) if self.recomputes_core else self.core(q, k, v)
        return attended.transpose(1, 2).reshape(length, batch, -1)
