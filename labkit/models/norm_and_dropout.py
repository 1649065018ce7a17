"""Norm and dropout: the parts of a layer between its tensor-parallel regions.

Under sequence parallelism both see this rank's part of the sequence, so each rank drops its own positions.

Shapes: S sequence, B batch, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.config import ModelConfig
from labkit.parallel.parameters.parameter_record import record_of
from labkit.parallel.parameters.weights import make_parameter
from labkit.parallel.random import RngTracker


class Norm(nn.Module):
    """LayerNorm, or RMSNorm (arXiv 1910.07467), which has neither mean nor bias. Every rank holds it whole.

    Under sequence parallelism a rank's gradient sums only over its own positions, so `finalize_model_grads` adds the
    ranks' gradients up.

    Args:
        name: name in the whole model.
        config: `hidden`, `norm` and `norm_eps`.
        sequence_parallel: the gradients of its parameters are partial sums over the tensor-parallel group.
        factory_kwargs: dtype and device of its parameters.
    """

    def __init__(self, name: str, config: ModelConfig, *, sequence_parallel: bool, **factory_kwargs: Any) -> None:
        super().__init__()
        self.eps, shape = config.norm_eps, (config.hidden,)
        self.weight = make_parameter(f"{name}.weight", shape, fill=1.0, **factory_kwargs)
        with_bias = config.norm == "layernorm"
        self.bias = make_parameter(f"{name}.bias", shape, fill=0.0, **factory_kwargs) if with_bias else None
        for parameter in self.parameters():
            record_of(parameter).sequence_parallel = sequence_parallel

    def forward(self, x_SBH: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, H], normalised over H."""
        if self.bias is None:
            return F.rms_norm(x_SBH, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x_SBH, self.weight.shape, self.weight, self.bias, self.eps)


def drop(x: Tensor, p: float) -> Tensor:
    """Drop elements, keeping a mask of one byte each on every device; on a CPU `F.dropout` keeps one of x's type."""
    return torch.native_dropout(x, p, True)[0] if p else x


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
