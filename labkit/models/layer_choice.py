"""Whose modules a layer is made of: labkit's own, or Transformer Engine's (`model.transformer_impl`).

Both have the same constructors, the same parameter names and are called alike, so the blocks are written once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from labkit.models.build import Build, Norm
from labkit.models.core_attention import CoreAttention
from labkit.parallel import te
from labkit.parallel.layers import ColumnParallelLinear, RowParallelLinear


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
