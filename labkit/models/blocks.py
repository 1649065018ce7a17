"""The transformer layer: attention and MLP on a residual stream; written once for every layout.

Shapes: S sequence (S/t under sequence parallelism), B batch, H hidden.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from labkit.graphs.graphable import GraphableMegatronModule
from labkit.graphs.scope import layer_scope
from labkit.models.attention import ParallelAttention, Rotary
from labkit.models.build import Build, dropout
from labkit.models.layer_choice import dense_mlp, moe_mlp


class TransformerLayer(GraphableMegatronModule):
    """x + attention(norm(x)), then x + mlp(norm(x)): the pre-LN form, whose residual stream is never normalised.

    `mlp` is a `ParallelMLP`, or a `MoELayer` where `moe.is_moe_layer(index)` says so. Either half can be captured in a
    CUDA graph by itself (`labkit.graphs.scope`).
    """

    def __init__(self, index: int, build: Build) -> None:
        super().__init__(build.graph)
        name, has_experts = f"layers.{index}", build.moe.is_moe_layer(index)
        self.attention = ParallelAttention(f"{name}.attention", build)
        norm, self.mlp = (moe_mlp if has_experts else dense_mlp)(f"{name}.mlp", build)
        self.mlp.norm = norm  # in the branch it feeds, as in attention
        self.part = "moe" if has_experts else "mlp"
        self.dropout, self.recompute = dropout(build.config.hidden_dropout, build), build.recompute
        self.scope = layer_scope(self.graph, has_experts=has_experts)
        self._new_input = partial(_new_input, build)

    def forward(self, x_SBH: Tensor, rotary: Rotary | None = None) -> Tensor:
        """[S, B, H] -> [S, B, H]."""
        return self._forward_mlp(self._forward_attention(x_SBH, rotary))

    def _forward_attention(self, x_SBH: Tensor, rotary: Rotary | None) -> Tensor:
        return x_SBH + self.dropout(self.attention(x_SBH, rotary))

    def _forward_mlp(self, x_SBH: Tensor) -> Tensor:
        mlp = partial(self.recompute.part, self.part, self.mlp)
        return x_SBH + self.dropout(self.recompute.norm(self.mlp.norm, x_SBH, mlp))  # pyright: ignore[reportArgumentType]

    # ---- CUDA graphs ----

    def is_graphable(self) -> bool:
        """Whether the configured scope covers a part of this layer."""
        return bool(self.scope)

    def get_layer_static_inputs(self, seq_length: int, micro_batch_size: int) -> dict[str, Tensor]:
        """`x_SBH`, this rank's part of `micro_batch_size` sequences; the model adds what else its layers share."""
        return {"x_SBH": self._new_input(seq_length, micro_batch_size)}

    def get_submodules_under_cudagraphs(self) -> list[nn.Module]:
        """The halves that are captured."""
        return [half for half, inside in ((self.attention, self.scope.attention), (self.mlp, self.scope.mlp)) if inside]

    def cuda_graph_inputs(self, x_SBH: Tensor, rotary: Rotary | None = None) -> tuple[Tensor, ...]:
        """The rotary tables belong to attention."""
        return super().cuda_graph_inputs(x_SBH, rotary if self.scope.attention else None)

    def cuda_graph_capture(self, *tensors: Tensor) -> Any:
        """The halves in scope: x_SBH and, with attention, the rotary tables -> x_SBH."""
        x_SBH, *rotary = tensors
        if self.scope.attention:
            x_SBH = self._forward_attention(x_SBH, (rotary[0], rotary[1]) if rotary else None)
        return self._forward_mlp(x_SBH) if self.scope.mlp else x_SBH

    def cuda_graph_replay(self, x_SBH: Tensor, rotary: Rotary | None = None) -> Tensor:
        """The half before the graph, the graph, and the half behind it; [S, B, H] -> [S, B, H]."""
        if not self.scope.attention:
            x_SBH = self._forward_attention(x_SBH, rotary)
        x_SBH = self.run_cuda_graph(x_SBH, rotary)
        return x_SBH if self.scope.mlp else self._forward_mlp(x_SBH)


def _new_input(build: Build, seq_length: int, micro_batch_size: int) -> Tensor:
    cp = 1 if build.cp is None else build.cp.size
    length = seq_length // cp // build.sequence_parts
    return torch.ones(length, micro_batch_size, build.config.hidden, **build.made, requires_grad=True)
