"""The transformer layer: attention and MLP on a residual stream; written once for every layout.

Shapes: S sequence (S/t under sequence parallelism), B batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.groups import Group
from labkit.models.attention import ParallelAttention
from labkit.models.build import Build
from labkit.models.embedding import Rotary
from labkit.moe.layer import MoELayer
from labkit.parallel.layers import NATIVE
from labkit.parallel.mlp import ParallelMLP


@dataclass(frozen=True)
class LayerParts:
    """The two halves of a layer, for CUDA graphs and merged pairs; `forward` is `run_mlp(run_attention(x))`.

    A `MoELayer` in place of the MLP declares its own steps: its methods, in the order of its table.
    """

    attention: nn.Module
    """Attention, with its norm inside."""
    norm: nn.Module
    """The norm of the second half."""
    mlp: nn.Module
    run_attention: Callable[[Tensor, Rotary | None], Tensor]
    """x + attention(norm(x)): [S, B, H] -> [S, B, H]."""
    run_mlp: Callable[[Tensor], Tensor]
    """x + mlp(norm(x)): [S, B, H] -> [S, B, H]."""
    add_mlp: Callable[[Tensor, Tensor], Tensor]
    """The end of `run_mlp`: (output of the MLP, residual) -> their sum, with dropout."""
    until_dispatch: Callable[[Tensor, Rotary | None], tuple[Any, ...]] | None
    """What a merged pair computes before the all-to-all (`TransformerLayer.until_dispatch`); None where it has none."""
    groups_of_attention: tuple[Group, ...]
    """The groups over which the first half communicates."""
    groups_of_mlp: tuple[Group, ...]
    """The groups over which a dense second half communicates; a `MoELayer` has its own."""
    new_input: Callable[[int, int], Tensor]
    """(length of whole sequences, batch) -> a new tensor of the shape, type and device of x."""


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): the pre-LN form. The residual stream itself is never normalised.

    `mlp` is a `ParallelMLP`, or a `MoELayer` where `moe.is_moe_layer(index)` says so.
    """

    def __init__(self, index: int, build: Build) -> None:
        super().__init__()
        name, has_experts = f"{build.prefix}layers.{index}", build.moe.is_moe_layer(index)
        self.attention = ParallelAttention(f"{name}.attention", build)
        norm, self.mlp = (moe_mlp if has_experts else dense_mlp)(f"{name}.mlp", build)
        self.mlp.norm = norm  # the norm belongs to its branch, as in attention
        self.part = "moe" if has_experts else "mlp"
        self.dropout, self.recompute = build.dropout(build.config.hidden_dropout), build.recompute
        self.recomputes_norm, self.recomputes_mlp = (self.recompute.selects(p) for p in ("layernorm", self.part))
        self._build = build

    def forward(self, x_SBH: Tensor, rotary: Rotary | None = None, *mask: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, H]."""
        return self.forward_mlp(self.forward_attention(x_SBH, rotary, *mask))

    def forward_attention(self, x_SBH: Tensor, rotary: Rotary | None, *mask: Tensor) -> Tensor:
        """Compute the first half, x + attention(norm(x))."""
        return x_SBH + self.dropout(self.attention(x_SBH, rotary, *mask))

    def forward_mlp(self, x_SBH: Tensor) -> Tensor:
        """Compute the second half, x + mlp(norm(x)). Backward computes norm or MLP again where configured."""
        norm: Any = self.mlp.norm
        mlp: Any = partial(self.recompute.part, self.part, self.mlp) if self.recomputes_mlp else self.mlp
        made_SBH = self.recompute.norm(norm, x_SBH, mlp) if self.recomputes_norm else mlp(norm(x_SBH))
        return self.add_mlp(made_SBH, x_SBH)

    def add_mlp(self, made_SBH: Tensor, residual_SBH: Tensor) -> Tensor:
        """Return the residual stream after the MLP: the residual plus the MLP's output, with dropout."""
        return residual_SBH + self.dropout(made_SBH)

    def until_dispatch(self, x_SBH: Tensor, rotary: Rotary | None) -> tuple[Any, ...]:
        """Compute what comes before the all-to-all in a merged pair: `before_dispatch(x + attention(norm(x)))`."""
        return self.before_dispatch(self.forward_attention(x_SBH, rotary))

    def before_dispatch(self, x_SBH: Tensor) -> tuple[Any, ...]:
        """Return x, and with experts what comes before their all-to-all (`MoELayer.before_dispatch`)."""
        if not isinstance(self.mlp, MoELayer):
            return (x_SBH,)
        norm: Any = self.mlp.norm
        return (x_SBH, *self.recompute.norm(norm, x_SBH, self.mlp.before_dispatch))

    def parts(self) -> LayerParts:
        """Return the two halves of this layer, for CUDA graphs and merged pairs."""
        build = self._build
        over_cp = () if build.cp is None else (build.cp,)
        return LayerParts(
            attention=self.attention,
            norm=self.mlp.norm,  # pyright: ignore[reportArgumentType]
            mlp=self.mlp,
            run_attention=self.forward_attention,
            run_mlp=self.forward_mlp,
            add_mlp=self.add_mlp,
            until_dispatch=self.until_dispatch,
            groups_of_attention=(build.group, *over_cp),
            # All ranks that hold parts of a sample agree on scales, where a precision has scales.
            groups_of_mlp=(build.group, *(() if build.precision is NATIVE else over_cp)),
            new_input=partial(_new_input, build),
        )


def dense_mlp(name: str, build: Build) -> tuple[nn.Module, ParallelMLP]:
    """Return the norm, and the MLP after it."""
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
    """Return the norm, and the layer of experts after it.

    The norm is a module of its own in every spec, because no linear layer could apply it for both router and experts.
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
        expert_linear=build.spec.expert_linear(build.precision),
        precision=build.precision,
        aux_loss_scale=build.aux_loss_scale,
        rng=build.rng,
        part=build.recompute.part,
        **build.factory_kwargs,
    )
    return build.norm(f"{name}.norm"), layer


def _new_input(build: Build, seq_length: int, micro_batch_size: int) -> Tensor:
    cp = 1 if build.cp is None else build.cp.size
    length = seq_length // cp // build.sequence_parts
    return torch.ones(length, micro_batch_size, build.config.hidden, **build.factory_kwargs, requires_grad=True)
