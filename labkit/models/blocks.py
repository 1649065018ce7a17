"""The transformer layer: attention and MLP on a residual stream; written once for every layout.

Shapes: S sequence (S/t under sequence parallelism), B batch, H hidden.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from labkit.models.attention import ParallelAttention, Rotary
from labkit.models.build import Build, dropout
from labkit.models.layer_choice import norm_before, row_parallel
from labkit.parallel.mlp import ParallelMLP


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): the pre-LN form, whose residual stream is never normalised."""

    def __init__(self, index: int, build: Build) -> None:
        super().__init__()
        config, name = build.config, f"layers.{index}"
        self.attention = ParallelAttention(f"{name}.attention", build)
        norm, column = norm_before(f"{name}.mlp.norm", build)
        self.mlp = ParallelMLP(
            f"{name}.mlp",
            config.hidden,
            config.ffn_hidden or 4 * config.hidden,
            activation=config.activation,
            output_std=build.residual_std,
            column=column,
            row=row_parallel(build),
            **build.linear(),
        )
        self.mlp.norm = norm  # in the branch it feeds, as in attention
        self.dropout, self.recompute = dropout(config.hidden_dropout, build), build.recompute

    def forward(self, x_SBH: Tensor, rotary: Rotary | None = None) -> Tensor:
        """[S, B, H] -> [S, B, H]."""
        x_SBH = x_SBH + self.dropout(self.attention(x_SBH, rotary))
        mlp = partial(self.recompute.part, "mlp", self.mlp)
        return x_SBH + self.dropout(self.recompute.norm(self.mlp.norm, x_SBH, mlp))  # pyright: ignore[reportArgumentType]
