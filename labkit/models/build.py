"""What every part of a model is built with, and its smallest parts: norm and dropout.

Under sequence parallelism what lies outside the tensor-parallel regions sees a part of the sequence: S is then
S/t, each rank drops its own positions, and the gradients of such parameters are parts of a sum (`sequence_parallel`).

Shapes: S sequence, B batch, H hidden; t = tensor-parallel size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.config import ModelConfig, MoEConfig
from labkit.models.core_attention import drop
from labkit.models.recomputation import Recomputation
from labkit.moe.balance import AuxLossScale
from labkit.parallel import te
from labkit.parallel.fp8 import Float8Scaling
from labkit.parallel.groups import Group, ParallelGroups
from labkit.parallel.parameter_record import record_of
from labkit.parallel.random import RngTracker
from labkit.parallel.recompute import checkpoint
from labkit.parallel.weights import DeviceSeed, Seed, make_parameter


@dataclass(frozen=True, kw_only=True)
class Build:
    """What every part of one model is built with."""

    config: ModelConfig
    """Shape of the model."""
    group: Group
    """Tensor-parallel group."""
    seed: int
    """Of the weights."""
    groups: ParallelGroups | None = None
    """All groups of this rank; only layers with experts need them."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """Which layers have experts, and how."""
    aux_loss_scale: AuxLossScale | None = None
    """Scale of what routers add to the gradient, one for all of the chunk."""
    rng: RngTracker | None = None
    """States for dropout and jitter; None where the model draws nothing."""
    dtype: torch.dtype = torch.float32
    """Of parameters and activations."""
    device: torch.device | str | None = None
    """Where parameters live; None is the host."""
    gradient_accumulation_fusion: bool = False
    """Weight gradients go straight into `main_grad`."""
    sequence_parallel: bool = False
    """Between tensor-parallel regions a rank holds S/t positions (arXiv 2205.05198)."""
    cp: Group | None = None
    """Context-parallel group, over which attention communicates; None is this rank alone."""
    cp_comm_type: str = "p2p"
    """How it does: `p2p` or `all_gather`."""
    float8: Float8Scaling | None = None
    """Scales of the linear layers' products in fp8; None computes in `dtype`."""
    made: dict[str, Any] = field(init=False)
    """dtype and device, as every constructor takes them."""
    recompute: Recomputation = field(init=False)
    """What backward computes again."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "made", {"dtype": self.dtype, "device": self.device})
        object.__setattr__(self, "recompute", Recomputation(self.config, self.rng, checkpoint=self._checkpoint()))
        object.__setattr__(self, "sequence_parallel", self.sequence_parallel and self.group.size > 1)

    def _checkpoint(self) -> Callable[..., Any]:
        """The engine's own where its fp8 scales must be replayed."""
        in_engine = self.float8 is not None and self.config.transformer_impl == "transformer_engine"
        return te.checkpoint if in_engine else checkpoint

    def linear(self, *, std: float | None = None) -> dict[str, Any]:
        """Keyword arguments that all linear layers share; `std` is init_std unless given."""
        shared = {
            "group": self.group,
            "bias": self.config.bias,
            "sequence_parallel": self.sequence_parallel,
            "gradient_accumulation_fusion": self.gradient_accumulation_fusion,
            "float8": self.float8,
        }
        return self.made | shared | {"seed": self.weight_seed, "std": self.config.init_std if std is None else std}

    @property
    def weight_seed(self) -> Seed:
        """`seed`, as `config.use_cpu_initialization` has it."""
        return self.seed if self.config.use_cpu_initialization else DeviceSeed(self.seed)

    @property
    def sequence_parts(self) -> int:
        """Ranks over which positions are cut between tensor-parallel regions: t under sequence parallelism, else 1."""
        return self.group.size if self.sequence_parallel else 1

    def own_positions(self, length: int) -> slice:
        """Of `length` positions, those of this rank between tensor-parallel regions."""
        part = length // self.sequence_parts
        first = self.group.rank * part if self.sequence_parallel else 0
        return slice(first, first + part)

    def whole_here(self, parameter: nn.Parameter) -> nn.Parameter:
        """A parameter that every rank holds whole, outside the tensor-parallel regions; marks what its gradient is."""
        record_of(parameter).sequence_parallel = self.sequence_parallel
        return parameter

    @property
    def residual_std(self) -> float:
        """Of projections that add to the residual stream: init_std / sqrt(2 x layers) (arXiv 1909.08053, 4.1)."""
        return self.config.init_std / math.sqrt(2 * self.config.layers)


def dropout(p: float, build: Build) -> nn.Module:
    """Dropout between tensor-parallel regions; nothing where p is 0.

    The ranks of a group hold the same activations and must drop the same of them: the default state. Under sequence
    parallelism they hold different positions and must drop each its own: the model-parallel state.
    """
    if not p:
        return nn.Identity()
    return OwnDropout(p, build.rng) if build.sequence_parallel else Dropout(p)


class Dropout(nn.Dropout):
    """Dropout from the default random state, with a mask of one byte per element."""

    def forward(self, input: Tensor) -> Tensor:
        """Any shape -> the same."""
        return drop(input, self.p) if self.training else input


class OwnDropout(Dropout):
    """Dropout from this rank's own random state."""

    def __init__(self, p: float, rng: RngTracker | None) -> None:
        super().__init__(p)
        assert rng is not None, "dropout of parts of a sequence needs the random states of model_parallel_seed"
        self.rng = rng

    def forward(self, input: Tensor) -> Tensor:
        """Any shape -> the same."""
        if not self.training:
            return input
        with self.rng.fork("model-parallel-rng"):
            return super().forward(input)


class Norm(nn.Module):
    """LayerNorm, or RMSNorm (arXiv 1910.07467) which has neither mean nor bias. Whole on every rank.

    Under sequence parallelism a rank's gradient is the sum over its own positions: `finalize_model_grads` adds them up.
    """

    def __init__(self, name: str, build: Build) -> None:
        super().__init__()
        shape = (build.config.hidden,)
        self.eps = build.config.norm_eps
        self.weight = build.whole_here(make_parameter(f"{name}.weight", shape, fill=1.0, **build.made))
        self.bias = None
        if build.config.norm == "layernorm":
            self.bias = build.whole_here(make_parameter(f"{name}.bias", shape, fill=0.0, **build.made))

    def forward(self, x_SBH: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, H], normalised over H."""
        if self.bias is None:
            return F.rms_norm(x_SBH, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x_SBH, self.weight.shape, self.weight, self.bias, self.eps)
