"""The transformer layer: attention and MLP on a residual stream; written once for every layout.

Shapes: S sequence (S/t under sequence parallelism), B batch, H hidden.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from labkit.models.attention import ParallelAttention, Rotary
from labkit.models.build import Build, dropout
from labkit.models.layer_choice import dense_mlp, moe_mlp


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): the pre-LN form, whose residual stream is never normalised.

    `mlp` is a `ParallelMLP`, or a `MoELayer` where `moe.is_moe_layer(index)` says so.
    """

    def __init__(self, index: int, build: Build) -> None:
        super().__init__()
        name, has_experts = f"layers.{index}", build.moe.is_moe_layer(index)
        self.attention = ParallelAttention(f"{name}.attention", build)
        norm, self.mlp = (moe_mlp if has_experts else dense_mlp)(f"{name}.mlp", build)
        self.mlp.norm = norm  # in the branch it feeds, as in attention
        self.part = "moe" if has_experts else "mlp"
        self.dropout, self.recompute = dropout(build.config.hidden_dropout, build), build.recompute

    def forward(self, x_SBH: Tensor, rotary: Rotary | None = None) -> Tensor:
        """[S, B, H] -> [S, B, H]."""
        x_SBH = x_SBH + self.dropout(self.attention(x_SBH, rotary))
        mlp = partial(self.recompute.part, self.part, self.mlp)
        return x_SBH + self.dropout(self.recompute.norm(self.mlp.norm, x_SBH, mlp))  # pyright: ignore[reportArgumentType]
