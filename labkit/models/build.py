"""`LayerSpec`: the parts of a layer. `Build`: the arguments that every part of one model chunk is built with.

Under sequence parallelism the parts outside the tensor-parallel regions see S/t positions. So each rank draws its own
dropout there, and its gradients of such parameters are parts of a sum (`sequence_parallel`).

Shapes: S sequence, B batch, H hidden; t = tensor-parallel size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn

from labkit.comm.groups import Group, ParallelGroups
from labkit.config import ModelConfig, MoEConfig
from labkit.models.core_attention import CoreAttention
from labkit.models.norm_and_dropout import Dropout, Norm, OwnDropout
from labkit.models.recomputation import Recomputation
from labkit.moe.balance import AuxLossScale
from labkit.moe.experts import StackedLinear
from labkit.parallel.layers import NATIVE, ColumnParallelLinear, LinearOptions, Precision, RowParallelLinear
from labkit.parallel.parameters.parameter_record import record_of
from labkit.parallel.parameters.weights import DeviceSeed, Seed, WeightOptions
from labkit.parallel.random import RngTracker
from labkit.parallel.recompute import checkpoint


class LayerSpec:
    """The parts of a transformer layer, as Megatron's layer specs name them: here labkit's own modules.

    `labkit.fp8` and `labkit.te` have other specs, and `labkit.train.layer_spec` chooses. All have the same constructors
    and parameter names and are called alike, so the blocks are written once.
    """

    transformer_impl: ClassVar[str] = "local"
    """The value of `model.transformer_impl` that asks for this spec."""
    row_parallel: ClassVar[Callable[..., nn.Module]] = RowParallelLinear
    """The constructor of row-parallel layers."""

    @property
    def checkpoint(self) -> Callable[..., Any]:
        """The function that recomputes a part of a layer in backward."""
        return checkpoint

    def precision(self, groups: ParallelGroups, device: torch.device | str | None) -> Precision:
        """Return the precision in which the linear layers of one model chunk compute."""
        return NATIVE

    def expert_linear(self, precision: Precision) -> Callable[..., nn.Module]:
        """Return the constructor of the projections of routed experts when `moe.grouped_gemm` is on.

        precision: that of the chunk, from this spec.
        """
        return StackedLinear

    def norm_before(
        self, name: str, config: ModelConfig, *, sequence_parallel: bool, **factory_kwargs: Any
    ) -> tuple[nn.Module, Callable[..., nn.Module]]:
        """Return a norm, and the constructor of the column-parallel layer after it, which may apply the norm itself."""
        return Norm(name, config, sequence_parallel=sequence_parallel, **factory_kwargs), ColumnParallelLinear

    def core_attention(
        self, name: str, config: ModelConfig, rng: RngTracker | None, tp: Group, cp: Group | None, cp_comm_type: str
    ) -> nn.Module:
        """Return the module that computes softmax(q k^T / sqrt(D)) v of this rank's heads."""
        return CoreAttention(config, rng, cp, cp_comm_type, name=name)


LOCAL = LayerSpec()
"""labkit's own modules, the spec of a model that is given no other."""


@dataclass(frozen=True, kw_only=True)
class Build:
    """The arguments that every part of one model is built with."""

    config: ModelConfig
    """Shape of the model."""
    group: Group
    """Tensor-parallel group."""
    seed: int
    """Seed of the weights."""
    groups: ParallelGroups | None = None
    """All groups of this rank; only layers with experts need them."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """The layers that have experts, and their settings."""
    rng: RngTracker | None = None
    """States for dropout and jitter; None where the model draws nothing."""
    dtype: torch.dtype = torch.float32
    """Type of parameters and activations."""
    device: torch.device | str | None = None
    """Device of the parameters; None is the host."""
    gradient_accumulation_fusion: bool = False
    """Weight gradients go straight into `main_grad`."""
    sequence_parallel: bool = False
    """Between tensor-parallel regions a rank holds S/t positions (arXiv 2205.05198)."""
    prefix: str = ""
    """What the names of layers begin with: `encoder.` or `decoder.` in a model that has both, else nothing."""
    cp: Group | None = None
    """Context-parallel group, over which attention communicates; None is this rank alone."""
    cp_comm_type: str = "p2p"
    """How attention communicates over it: `p2p` or `all_gather`."""
    spec: LayerSpec = LOCAL
    """Parts that the layers are made of."""
    precision: Precision = NATIVE
    """Makes the products of the linear layers; the default computes in `dtype`."""
    factory_kwargs: dict[str, Any] = field(init=False)
    """dtype and device, as every constructor takes them."""
    recompute: Recomputation = field(init=False)
    """The parts that backward computes again."""
    aux_loss_scale: AuxLossScale | None = field(init=False)
    """Scale of what routers add to the gradient, one for all of the chunk; None without experts."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "factory_kwargs", {"dtype": self.dtype, "device": self.device})
        object.__setattr__(self, "recompute", Recomputation(self.config, self.rng, checkpoint=self.spec.checkpoint))
        aux_loss_scale = AuxLossScale(device=self.device) if self.moe.num_experts else None
        object.__setattr__(self, "aux_loss_scale", aux_loss_scale)
        object.__setattr__(self, "sequence_parallel", self.sequence_parallel and self.group.size > 1)

    def half(self, prefix: str, spec: LayerSpec) -> Build:
        """Return the `Build` of one half of an encoder-decoder. It has its own names and parts and shares the rest."""
        made = replace(self, prefix=prefix, spec=spec)
        object.__setattr__(made, "recompute", self.recompute)
        object.__setattr__(made, "aux_loss_scale", self.aux_loss_scale)
        return made

    @property
    def drawn(self) -> WeightOptions:
        """The arguments with which weights are drawn, N(0, init_std) by (seed, name)."""
        return {
            "seed": self.weight_seed,
            "std": self.config.init_std,
            "dtype": self.dtype,
            "device": self.device,
        }

    def linear(self, *, std: float | None = None) -> LinearOptions:
        """Return the arguments that all linear layers share; `std` is init_std unless given."""
        options: LinearOptions = {
            "group": self.group,
            "bias": self.config.bias,
            "sequence_parallel": self.sequence_parallel,
            "gradient_accumulation_fusion": self.gradient_accumulation_fusion,
            "precision": self.precision,
            **self.drawn,
        }
        if std is not None:
            options["std"] = std
        return options

    @property
    def weight_seed(self) -> Seed:
        """`seed`, as `config.use_cpu_initialization` has it."""
        return self.seed if self.config.use_cpu_initialization else DeviceSeed(self.seed)

    @property
    def sequence_parts(self) -> int:
        """Ranks over which positions are cut between tensor-parallel regions: t under sequence parallelism, else 1."""
        return self.group.size if self.sequence_parallel else 1

    def whole_here(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a parameter that every rank holds whole, outside the tensor-parallel regions, its gradient marked."""
        record_of(parameter).sequence_parallel = self.sequence_parallel
        return parameter

    @property
    def residual_std(self) -> float:
        """std of projections that add to the residual stream: init_std / sqrt(2 x layers) (arXiv 1909.08053, 4.1)."""
        return self.config.init_std / math.sqrt(2 * self.config.layers)

    def norm_before(self, name: str) -> tuple[nn.Module, Callable[..., nn.Module]]:
        """Return a norm, and the constructor of the column-parallel layer after it, which may apply the norm itself."""
        return self.spec.norm_before(name, self.config, sequence_parallel=self.sequence_parallel, **self.factory_kwargs)

    def norm(self, name: str) -> Norm:
        """Return a norm that is not followed by a single linear layer."""
        return Norm(name, self.config, sequence_parallel=self.sequence_parallel, **self.factory_kwargs)

    def dropout(self, p: float) -> nn.Module:
        """Return the dropout between tensor-parallel regions, which does nothing if p is 0.

        The ranks of a group hold the same activations and must drop the same ones, so they draw from the default state.
        Under sequence parallelism they hold different positions and each must drop its own, so they draw from the
        model-parallel state.
        """
        if not p:
            return nn.Identity()
        return OwnDropout(p, self.rng) if self.sequence_parallel else Dropout(p)
