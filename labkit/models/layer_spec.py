"""The parts that a transformer layer is made of, as Megatron's layer specs name them.

`LayerSpec` names labkit's own. `labkit.fp8` and `labkit.te` have others, from which `labkit.train.layer_spec` chooses.
All of them have the same constructors and parameter names and are called alike, so the blocks are written once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from labkit.config import ModelConfig
from labkit.models.core_attention import CoreAttention
from labkit.models.norm_and_dropout import Norm
from labkit.moe.experts import StackedLinear
from labkit.parallel.groups import Group, ParallelGroups
from labkit.parallel.layers import NATIVE, ColumnParallelLinear, Precision, RowParallelLinear
from labkit.parallel.random import RngTracker
from labkit.parallel.recompute import checkpoint


class LayerSpec:
    """labkit's own modules, which compute in the type of their tensors."""

    transformer_impl: ClassVar[str] = "local"
    """The value of `model.transformer_impl` that asks for this spec."""
    row_parallel: ClassVar[Callable[..., nn.Module]] = RowParallelLinear
    """The constructor of row-parallel layers."""
    expert_linear: ClassVar[Callable[..., nn.Module]] = StackedLinear
    """The constructor of the projections of routed experts, where they are grouped products."""

    @property
    def checkpoint(self) -> Callable[..., Any]:
        """The function that recomputes a part of a layer in backward."""
        return checkpoint

    def precision(self, groups: ParallelGroups, device: torch.device | str | None) -> Precision:
        """How the linear layers of one model chunk compute."""
        return NATIVE

    def norm_before(
        self, name: str, config: ModelConfig, *, sequence_parallel: bool, **factory_kwargs: Any
    ) -> tuple[nn.Module, Callable[..., nn.Module]]:
        """A norm, and the constructor of the column-parallel layer behind it."""
        return Norm(name, config, sequence_parallel=sequence_parallel, **factory_kwargs), ColumnParallelLinear

    def core_attention(
        self, name: str, config: ModelConfig, rng: RngTracker | None, tp: Group, cp: Group | None, cp_comm_type: str
    ) -> nn.Module:
        """softmax(q k^T / sqrt(D)) v of this rank's heads."""
        return CoreAttention(config, rng, cp, cp_comm_type, name=name)


LOCAL = LayerSpec()
"""The spec of a model that is given no other."""
