"""Whose modules a layer is made of: labkit's own, or Transformer Engine's (`model.transformer_impl`).

Both have the same constructors, the same parameter names and are called alike, so the blocks are written once. What
stands behind attention, an MLP or experts, comes with the norm before it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from labkit.models.build import Build, Norm
from labkit.models.core_attention import CoreAttention
from labkit.moe.layer import MoELayer
from labkit.parallel import te
from labkit.parallel.layers import ColumnParallelLinear, RowParallelLinear
from labkit.parallel.mlp import ParallelMLP


def norm_before(name: str, build: Build) -> tuple[nn.Module, Callable[..., nn.Module]]:
    """A norm, and the constructor of the column-parallel layer behind it.

    Transformer Engine's layer normalises its input itself; its norm then only holds the parameters.
    """
    if build.config.transformer_impl == "local":
        return Norm(name, build), ColumnParallelLinear
    norm = te.FusedNorm(name, build.config, sequence_parallel=build.sequence_parallel, **build.made)
    return norm, partial(te.NormColumnParallelLinear, norm=norm)


def row_parallel(build: Build) -> Callable[..., nn.Module]:
    """The constructor of row-parallel layers."""
    return RowParallelLinear if build.config.transformer_impl == "local" else te.RowParallelLinear


def core_attention(build: Build) -> nn.Module:
    """softmax(q k^T / sqrt(D)) v of this rank's heads."""
    if build.config.transformer_impl == "local":
        return CoreAttention(build.config, build.rng, build.cp, build.cp_comm_type)
    return te.CoreAttention(build.config, build.rng, build.group, build.cp, build.cp_comm_type)


def dense_mlp(name: str, build: Build) -> tuple[nn.Module, ParallelMLP]:
    """The norm, and the MLP behind it."""
    norm, column = norm_before(f"{name}.norm", build)
    mlp = ParallelMLP(
        name,
        build.config.hidden,
        build.config.ffn_hidden or 4 * build.config.hidden,
        activation=build.config.activation,
        output_std=build.residual_std,
        column=column,
        row=row_parallel(build),
        **build.linear(),
    )
    return norm, mlp


def moe_mlp(name: str, build: Build) -> tuple[nn.Module, MoELayer]:
    """The norm, and the layer of experts behind it.

    The norm is labkit's own also with Transformer Engine: its output goes to router, experts and shared experts, and no
    linear layer could apply it for all of them.
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
        float8=build.float8,
        aux_loss_scale=build.aux_loss_scale,
        rng=build.rng,
        part=build.recompute.part,
        **build.made,
    )
    return Norm(f"{name}.norm", build), layer
