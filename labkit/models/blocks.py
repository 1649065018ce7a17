"""The parts of a decoder: norm, rotary positions, self-attention, transformer layer; written once for every layout.

Attention keeps the sequence first. The fused projection makes, per key/value head, its query heads, then its key,
then its value: [q ... q k v] [q ... q k v] ... (Megatron's order), so that a tensor-parallel slice of the columns is
a slice of whole groups. Heads of all samples are handed to the attention kernel as one row of B x heads heads,
which needs neither a transpose in memory before it nor one after.

Shapes: S sequence, B batch, H hidden, F ffn_hidden, D head dimension; t = tensor-parallel size.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.config import ModelConfig
from labkit.parallel.groups import Group
from labkit.parallel.layers import ColumnParallelLinear, RowParallelLinear
from labkit.parallel.ledger import comm_scope
from labkit.parallel.mlp import ParallelMLP
from labkit.parallel.random import RngTracker
from labkit.parallel.weights import make_parameter

Rotary = tuple[Tensor, Tensor]
"""cos and sin, each [S, 1 or B x heads, 1, D/2]."""


@dataclass(frozen=True, kw_only=True)
class Build:
    """What every part of one model is built with."""

    config: ModelConfig
    """Shape of the model."""
    group: Group
    """Tensor-parallel group."""
    seed: int
    """Of the weights."""
    rng: RngTracker | None = None
    """States for dropout; None where the model drops nothing."""
    dtype: torch.dtype = torch.float32
    """Of parameters and activations."""
    device: torch.device | str | None = None
    """Where parameters live; None is the host."""
    gradient_accumulation_fusion: bool = False
    """Weight gradients go straight into `main_grad`."""
    made: dict[str, Any] = field(init=False)
    """dtype and device, as every constructor takes them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "made", {"dtype": self.dtype, "device": self.device})

    def linear(self, *, std: float | None = None) -> dict[str, Any]:
        """Keyword arguments that all linear layers share; `std` is init_std unless given."""
        fusion = self.gradient_accumulation_fusion
        shared = {"group": self.group, "bias": self.config.bias, "gradient_accumulation_fusion": fusion}
        return self.made | shared | {"seed": self.seed, "std": self.config.init_std if std is None else std}

    @property
    def residual_std(self) -> float:
        """Of projections that add to the residual stream: init_std / sqrt(2 x layers) (arXiv 1909.08053, 4.1)."""
        return self.config.init_std / math.sqrt(2 * self.config.layers)


def dropout(p: float) -> nn.Module:
    """Dropout from the default random state; nothing where p is 0."""
    return nn.Dropout(p) if p else nn.Identity()


class Norm(nn.Module):
    """LayerNorm, or RMSNorm (arXiv 1910.07467) which has neither mean nor bias. Whole on every rank."""

    def __init__(self, name: str, build: Build) -> None:
        super().__init__()
        shape = (build.config.hidden,)
        self.eps = build.config.norm_eps
        self.weight = make_parameter(f"{name}.weight", shape, fill=1.0, **build.made)
        with_bias = build.config.norm == "layernorm"
        self.bias = make_parameter(f"{name}.bias", shape, fill=0.0, **build.made) if with_bias else None

    def forward(self, x_SBH: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, H], normalised over H."""
        if self.bias is None:
            return F.rms_norm(x_SBH, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x_SBH, self.weight.shape, self.weight, self.bias, self.eps)


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


class ParallelAttention(nn.Module):
    """Causal self-attention on the normalised input; whole heads on each rank (arXiv 1909.08053, section 3).

    One all-reduce forward (after `proj`), one backward (before `qkv`); nothing is communicated between heads.

    Raises:
        ValueError: heads that do not divide hidden, or key/value heads that tp does not divide.
    """

    def __init__(self, name: str, build: Build) -> None:
        super().__init__()
        config, tp = build.config, build.group.size
        kv_heads = config.kv_heads or config.heads
        if config.hidden % config.heads or config.heads % kv_heads:
            raise ValueError(f"{name}: hidden {config.hidden}, heads {config.heads}, kv_heads {kv_heads} must divide")
        if kv_heads % tp:
            raise ValueError(
                f"{name}: {kv_heads} key/value heads cannot be shared by tp={tp} ranks; choose tp among the divisors"
            )
        self.name, self.rng, self.dropout = name, build.rng, config.attention_dropout
        self.head_dim = config.hidden // config.heads
        self.kv_heads = kv_heads // tp
        self.queries_per_kv = config.heads // kv_heads
        columns = (config.heads + 2 * kv_heads) * self.head_dim
        self.norm = Norm(f"{name}.norm", build)
        self.qkv = ColumnParallelLinear(f"{name}.qkv", config.hidden, columns, **build.linear())
        proj = build.linear(std=build.residual_std)
        self.proj = RowParallelLinear(f"{name}.proj", config.hidden, config.hidden, **proj)

    def forward(self, x_SBH: Tensor, rotary: Rotary | None = None) -> Tensor:
        """[S, B, H] -> [S, B, H], to be added to x."""
        with comm_scope(layer=self.name):
            mixed, _ = self.qkv(self.norm(x_SBH))
            output, _ = self.proj(self.attend(mixed, rotary))
        return output

    def attend(self, mixed: Tensor, rotary: Rotary | None = None) -> Tensor:
        """softmax(q k^T / sqrt(D)) v of this rank's heads: [S, B, (heads + 2 kv_heads) D / t] -> [S, B, H / t]."""
        length, batch, _ = mixed.shape
        per_group = mixed.view(length, batch * self.kv_heads, self.queries_per_kv + 2, self.head_dim)
        q, k, v = per_group.split((self.queries_per_kv, 1, 1), dim=2)
        if rotary is not None:
            # The copy of v lets `mixed` go: otherwise it would be kept for backward beside the rotated q and k.
            q, k, v = rotate(q, rotary), rotate(k, rotary), v.clone()
        q, k, v = (x.reshape(length, -1, self.head_dim).transpose(0, 1)[None] for x in (q, k, v))
        p = self.dropout if self.training else 0.0
        with self._random_state(p):
            output = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=p, enable_gqa=self.queries_per_kv > 1
            )
        return output.transpose(1, 2).reshape(length, batch, -1)

    def _random_state(self, p: float) -> AbstractContextManager[Any]:
        """Ranks hold different heads, so they must drop different probabilities: the model-parallel state."""
        if p == 0.0:
            return nullcontext()
        assert self.rng is not None, "attention dropout needs the random states of model_parallel_seed"
        return self.rng.fork("model-parallel-rng")


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): the pre-LN form, whose residual stream is never normalised."""

    def __init__(self, index: int, build: Build) -> None:
        super().__init__()
        config, name = build.config, f"layers.{index}"
        self.attention = ParallelAttention(f"{name}.attention", build)
        self.mlp = ParallelMLP(
            f"{name}.mlp",
            config.hidden,
            config.ffn_hidden or 4 * config.hidden,
            activation=config.activation,
            output_std=build.residual_std,
            **build.linear(),
        )
        self.mlp.norm = Norm(f"{name}.mlp.norm", build)  # in the branch it feeds, as in attention
        self.dropout = dropout(config.hidden_dropout)

    def forward(self, x_SBH: Tensor, rotary: Rotary | None = None) -> Tensor:
        """[S, B, H] -> [S, B, H]."""
        x_SBH = x_SBH + self.dropout(self.attention(x_SBH, rotary))
        return x_SBH + self.dropout(self.mlp(self.mlp.norm(x_SBH)))  # pyright: ignore[reportCallIssue]
