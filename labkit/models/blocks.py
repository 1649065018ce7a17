"""The transformer layer: attention and MLP on a residual stream; written once for every layout.

Shapes: S sequence (S/t under sequence parallelism), B batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from labkit.graphs.graphable import GraphableMegatronModule
from labkit.graphs.partial import fill_store
from labkit.graphs.scope import layer_scope
from labkit.models.attention import ParallelAttention, Rotary
from labkit.models.build import Build
from labkit.moe.layer import MoELayer
from labkit.parallel.groups import Group
from labkit.parallel.mlp import ParallelMLP
from labkit.parallel.precision import NATIVE


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
        self.dropout, self.recompute = build.dropout(build.config.hidden_dropout), build.recompute
        self.recomputes_norm, self.recomputes_mlp = (self.recompute.selects(p) for p in ("layernorm", self.part))
        self.scope = layer_scope(self.graph, has_experts=has_experts)
        self._new_input = partial(_new_input, build)
        self._groups: list[Group] = [*_groups_of_attention(build)] if self.scope.attention else []
        if self.scope.mlp and not has_experts:
            self._groups += _groups_of_linears(build)

    def forward(self, x_SBH: Tensor, rotary: Rotary | None = None) -> Tensor:
        """[S, B, H] -> [S, B, H]."""
        return self._forward_mlp(self._forward_attention(x_SBH, rotary))

    def _forward_attention(self, x_SBH: Tensor, rotary: Rotary | None) -> Tensor:
        return x_SBH + self.dropout(self.attention(x_SBH, rotary))

    def _forward_mlp(self, x_SBH: Tensor) -> Any:
        """[S, B, H] -> [S, B, H]; where a capture ends inside the layer of experts, its outputs and the residual."""
        norm: Any = self.mlp.norm
        mlp: Any = partial(self.recompute.part, self.part, self.mlp) if self.recomputes_mlp else self.mlp
        made: Any = self.recompute.norm(norm, x_SBH, mlp) if self.recomputes_norm else mlp(norm(x_SBH))
        return self._after_mlp(made, x_SBH) if isinstance(made, Tensor) else (*made, x_SBH)

    def _after_mlp(self, made_SBH: Tensor, residual_SBH: Tensor) -> Tensor:
        return residual_SBH + self.dropout(made_SBH)

    # ---- CUDA graphs ----

    def is_graphable(self) -> bool:
        """Whether the configured scope covers a part of this layer."""
        return bool(self.scope)

    def is_wholly_captured(self) -> bool:
        """Whether both halves are in the graph."""
        return self.scope.attention and self.scope.mlp

    def get_layer_static_inputs(self, seq_length: int, micro_batch_size: int) -> dict[str, Tensor]:
        """`x_SBH`, this rank's part of `micro_batch_size` sequences; the model adds what else its layers share."""
        return {"x_SBH": self._new_input(seq_length, micro_batch_size)}

    def get_submodules_under_cudagraphs(self) -> list[nn.Module]:
        """The halves that are captured, or what is captured of the second."""
        found: list[nn.Module] = [self.attention] if self.scope.attention else []
        if self.scope.mlp:
            found.append(self.mlp)
        elif isinstance(self.mlp, MoELayer) and self.scope.router:
            found += [self.mlp.norm, *self.mlp.get_submodules_under_cudagraphs()]  # pyright: ignore[reportArgumentType]
        return found

    def get_groups_under_cudagraphs(self) -> list[Group]:
        """Those of the captured halves."""
        experts = self.mlp.get_groups_under_cudagraphs() if isinstance(self.mlp, MoELayer) else []
        return [*self._groups, *experts]

    def cuda_graph_inputs(self, x_SBH: Tensor, rotary: Rotary | None = None) -> tuple[Tensor, ...]:
        """The rotary tables belong to attention."""
        return super().cuda_graph_inputs(x_SBH, rotary if self.scope.attention else None)

    def cuda_graph_capture(self, *tensors: Tensor) -> Any:
        """What is in scope: x_SBH and, with attention, the rotary tables -> x_SBH, or the outputs of a graph that ends
        inside the layer of experts (`labkit.graphs.partial`)."""
        x_SBH, *rotary = tensors
        if self.scope.attention:
            x_SBH = self._forward_attention(x_SBH, (rotary[0], rotary[1]) if rotary else None)
        return self._forward_mlp(x_SBH) if self.scope.mlp or self.scope.router else x_SBH

    def cuda_graph_replay(self, x_SBH: Tensor, rotary: Rotary | None = None) -> Tensor:
        """What comes before the graph, the graph, and what comes behind it; [S, B, H] -> [S, B, H]."""
        if not self.scope.attention:
            x_SBH = self._forward_attention(x_SBH, rotary)
        made = self.run_cuda_graph(x_SBH, rotary)
        if self.scope.is_partial:
            return self._resume_mlp(made)
        return made if self.scope.mlp else self._forward_mlp(made)

    def _resume_mlp(self, outputs: Sequence[Tensor]) -> Tensor:
        """The rest of the layer of experts, behind a graph with these outputs."""
        assert isinstance(self.mlp, MoELayer)
        residual_SBH = fill_store(self.mlp, outputs, has_shared_output=self.mlp.has_shared_output)
        store = self.mlp.cudagraph_tensor_store
        try:
            made_SBH = self.mlp(store.hidden_states)
        finally:
            store.clear()
        return self._after_mlp(made_SBH, residual_SBH)


def dense_mlp(name: str, build: Build) -> tuple[nn.Module, ParallelMLP]:
    """The norm, and the MLP behind it."""
    norm, column = build.norm_before(f"{name}.norm")
    mlp = ParallelMLP(
        name,
        build.config.hidden,
        build.config.ffn_hidden or 4 * build.config.hidden,
        activation=build.config.activation,
        output_std=build.residual_std,
        column=column,
        row=build.spec.row_parallel,
        **build.linear(),
    )
    return norm, mlp


def moe_mlp(name: str, build: Build) -> tuple[nn.Module, MoELayer]:
    """The norm, and the layer of experts behind it.

    The norm is a module of its own in every spec: its output goes to router, experts and shared experts, and no linear
    layer could apply it for all of them.
    """
    assert build.groups is not None, "experts are placed by all groups of the rank: give Build groups"
    layer = MoELayer(
        name,
        build.config,
        build.moe,
        build.groups,
        sequence_parallel=build.sequence_parallel,
        seed=build.weight_seed,
        output_std=build.residual_std,
        gradient_accumulation_fusion=build.gradient_accumulation_fusion,
        expert_linear=build.spec.expert_linear,
        aux_loss_scale=build.aux_loss_scale,
        rng=build.rng,
        part=build.recompute.part,
        graph=build.graph,
        **build.factory_kwargs,
    )
    return build.norm(f"{name}.norm"), layer


def _groups_of_linears(build: Build) -> list[Group]:
    """Scales of fp8 are agreed on by all ranks that hold parts of a sample."""
    return [build.group] if build.precision is NATIVE or build.cp is None else [build.group, build.cp]


def _groups_of_attention(build: Build) -> list[Group]:
    return [build.group] if build.cp is None else [build.group, build.cp]


def _new_input(build: Build, seq_length: int, micro_batch_size: int) -> Tensor:
    cp = 1 if build.cp is None else build.cp.size
    length = seq_length // cp // build.sequence_parts
    return torch.ones(length, micro_batch_size, build.config.hidden, **build.factory_kwargs, requires_grad=True)
