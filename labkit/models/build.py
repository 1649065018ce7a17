"""What every part of a model is built with, and its smallest parts: norm and dropout.

Shapes: S sequence, B batch, H hidden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.config import ModelConfig
from labkit.parallel.groups import Group
from labkit.parallel.random import RngTracker
from labkit.parallel.weights import make_parameter


@dataclass(frozen=True, kw_only=True)
class Build:
    """What every part of one model is built with."""

    config: ModelConfig
    """Shape of the model."""
    group: Group
    """Tensor-parallel group."""
    seed: int
    """Of the weights."""
    rng: RngTracker | None = None
    """States for dropout; None where the model drops nothing."""
    dtype: torch.dtype = torch.float32
    """Of parameters and activations."""
    device: torch.device | str | None = None
    """Where parameters live; None is the host."""
    gradient_accumulation_fusion: bool = False
    """Weight gradients go straight into `main_grad`."""
    made: dict[str, Any] = field(init=False)
    """dtype and device, as every constructor takes them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "made", {"dtype": self.dtype, "device": self.device})

    def linear(self, *, std: float | None = None) -> dict[str, Any]:
        """Keyword arguments that all linear layers share; `std` is init_std unless given."""
        fusion = self.gradient_accumulation_fusion
        shared = {"group": self.group, "bias": self.config.bias, "gradient_accumulation_fusion": fusion}
        return self.made | shared | {"seed": self.seed, "std": self.config.init_std if std is None else std}

    @property
    def residual_std(self) -> float:
        """Of projections that add to the residual stream: init_std / sqrt(2 x layers) (arXiv 1909.08053, 4.1)."""
        return self.config.init_std / math.sqrt(2 * self.config.layers)


def dropout(p: float) -> nn.Module:
    """Dropout from the default random state; nothing where p is 0."""
    return nn.Dropout(p) if p else nn.Identity()


class Norm(nn.Module):
    """LayerNorm, or RMSNorm (arXiv 1910.07467) which has neither mean nor bias. Whole on every rank."""

    def __init__(self, name: str, build: Build) -> None:
        super().__init__()
        shape = (build.config.hidden,)
        self.eps = build.config.norm_eps
        self.weight = make_parameter(f"{name}.weight", shape, fill=1.0, **build.made)
        with_bias = build.config.norm == "layernorm"
        self.bias = make_parameter(f"{name}.bias", shape, fill=0.0, **build.made) if with_bias else None

    def forward(self, x_SBH: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, H], normalised over H."""
        if self.bias is None:
            return F.rms_norm(x_SBH, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x_SBH, self.weight.shape, self.weight, self.bias, self.eps)
