"""A Mamba model: layers of one part each, as Megatron's `MambaModel` has them.

A layer computes x + part(norm(x)). `model.hybrid_override_pattern` gives the part of each layer by Megatron's letters:

    M   Mamba (`MambaMixer`)        *   attention (`ParallelAttention`)        -   MLP (`ParallelMLP`)

So the two layers `*-` are the two halves of a transformer layer. Without a pattern every layer is M. Embedding, output
layer and loss are a GPT's. A pipeline stage holds a run of layers, whatever their parts are.

Shapes: S sequence (S/t under sequence parallelism), B batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from labkit.models.attention import ParallelAttention
from labkit.models.blocks import LayerParts, dense_mlp
from labkit.models.build import Build
from labkit.models.embedding import Rotary
from labkit.models.gpt import GPTModel
from labkit.models.mamba.mamba_mixer import MambaMixer


class Part(NamedTuple):
    """A kind of layer."""

    name: str
    """Name of the module in its layer: the parameters are `layers.3.<name>. ...`."""
    scope: str
    """Its word in `graph.cuda_graph_modules`."""
    make: Callable[[str, Build], nn.Module]
    """(name in the whole model, build) -> the module, with its norm inside."""
    run: Callable[[Any, Tensor, Rotary | None], Tensor]
    """(module, x, rotary) -> part(norm(x)), [S, B, H]. Attention alone reads the rotary tables."""


def _mlp(name: str, build: Build) -> nn.Module:
    norm, mlp = dense_mlp(name, build)
    mlp.norm = norm  # as in a transformer layer, which gives the parameters the same names
    return mlp


PARTS = {
    "M": Part("mamba", "mamba", MambaMixer, lambda mamba, x_SBH, rotary: mamba(x_SBH)),
    "*": Part("attention", "attn", ParallelAttention, lambda attention, x_SBH, rotary: attention(x_SBH, rotary)),
    "-": Part("mlp", "mlp", _mlp, lambda mlp, x_SBH, rotary: mlp(mlp.norm(x_SBH))),
}
"""Letter of the pattern -> kind of layer."""


class SinglePartLayer(nn.Module):
    """x + dropout(part(norm(x))). A CUDA graph holds the whole layer, or none of it."""

    def __init__(self, index: int, build: Build) -> None:
        super().__init__()
        self.kind, self._build = PARTS[build.config.parts_of_layer(index)], build
        self.add_module(self.kind.name, self.kind.make(f"layers.{index}.{self.kind.name}", build))
        self.dropout = build.dropout(build.config.hidden_dropout)

    @property
    def module(self) -> nn.Module:
        """The module of the part, with its norm inside."""
        return self.get_submodule(self.kind.name)

    @property
    def graph_scope(self) -> str:
        """The word of `graph.cuda_graph_modules` that captures this layer."""
        return self.kind.scope

    def forward(self, x_SBH: Tensor, rotary: Rotary | None = None) -> Tensor:
        """[S, B, H] -> [S, B, H]."""
        return self.run(x_SBH, rotary)

    def run(self, x_SBH: Tensor, rotary: Rotary | None) -> Tensor:
        """Compute what `forward` returns; a CUDA graph may replace this method."""
        return x_SBH + self.dropout(self.kind.run(self.module, x_SBH, rotary))

    def parts(self) -> LayerParts:
        """Return the layer as the first half of a transformer layer whose second half does nothing."""
        nothing = nn.Identity()
        return LayerParts(
            attention=self.module,
            norm=nothing,
            mlp=nothing,
            run_attention=self.run,
            run_mlp=nothing,
            add_mlp=lambda made_SBH, _: made_SBH,
            until_dispatch=None,
            groups_of_attention=(self._build.group,),
            groups_of_mlp=(),
            new_input=self._new_input,
        )

    def _new_input(self, seq_length: int, micro_batch_size: int) -> Tensor:
        build = self._build
        shape = (seq_length // build.sequence_parts, micro_batch_size, build.config.hidden)
        return torch.ones(shape, **build.factory_kwargs, requires_grad=True)


class MambaModel(GPTModel):
    """Layers `layers` of a Mamba model, alone or hybrid. The arguments are those of `GPTModel`.

    Raises:
        ValueError: sizes that tp does not divide, or an option this model does not have.
    """

    family = "mamba"

    def new_layer(self, index: int, build: Build) -> nn.Module:
        """Make layer `index` of the whole model, of the part that the pattern names."""
        return SinglePartLayer(index, build)
