"""Layers made of Transformer Engine's modules, with the constructors and parameter names of labkit's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from labkit.comm.groups import Group, ParallelGroups
from labkit.config import ModelConfig
from labkit.fp8.recipe import Float8Recipe
from labkit.models.build import LayerSpec
from labkit.parallel.layers import NATIVE, Precision
from labkit.parallel.random import RngTracker
from labkit.parallel.recompute import checkpoint as plain_checkpoint
from labkit.te.dot_product import CoreAttention
from labkit.te.engine import EngineFloat8, checkpoint
from labkit.te.linear import FusedNorm, GroupedLinear, NormColumnParallelLinear, RowParallelLinear


class EngineSpec(LayerSpec):
    """Norms, linear layers, core attention and experts of the engine; with a recipe, linear layers cast to fp8."""

    transformer_impl = "transformer_engine"
    row_parallel = RowParallelLinear

    def __init__(self, recipe: Float8Recipe | None = None) -> None:
        self.recipe = recipe

    @property
    def checkpoint(self) -> Callable[..., Any]:
        """The engine's own function with fp8, whose scales the second pass must repeat; else labkit's."""
        return plain_checkpoint if self.recipe is None else checkpoint

    def precision(self, groups: ParallelGroups, device: torch.device | str | None) -> Precision:
        """The engine's fp8 of one model chunk; without a recipe the native precision."""
        return NATIVE if self.recipe is None else EngineFloat8(self.recipe, groups)

    def expert_linear(self, precision: Precision) -> Callable[..., nn.Module]:
        """The engine's layer for all experts of a rank."""
        return GroupedLinear

    def norm_before(
        self, name: str, config: ModelConfig, *, sequence_parallel: bool, **factory_kwargs: Any
    ) -> tuple[nn.Module, Callable[..., nn.Module]]:
        """A module that only holds the norm's parameters, and the constructor of a layer that applies the norm."""
        norm = FusedNorm(name, config, sequence_parallel=sequence_parallel, **factory_kwargs)
        return norm, partial(NormColumnParallelLinear, norm=norm)

    def core_attention(
        self, name: str, config: ModelConfig, rng: RngTracker | None, tp: Group, cp: Group | None, cp_comm_type: str
    ) -> nn.Module:
        """softmax(q k^T / sqrt(D)) v of this rank's heads; the ledger does not book its communication."""
        return CoreAttention(config, rng, tp, cp, cp_comm_type)
