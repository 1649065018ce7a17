"""Formats and scaling of a run in fp8 (arXiv 2209.05433).

fp8 has four significant bits (e4m3, largest 448) or three (e5m2, largest 57,344). So a tensor is multiplied by a scale,
which brings its largest magnitude, its amax, near the largest number of the format. The product is divided by both
scales. `hybrid` takes e4m3 forward and e5m2 for gradients, which need range more than precision.

| recipe    | scale of                             | from                                                 |
|-----------|--------------------------------------|------------------------------------------------------|
| delayed   | the whole tensor                     | the amax of earlier steps, agreed over tp_dp_cp      |
| current   | the whole tensor                     | its own amax, agreed over tp if it will be gathered  |
| blockwise | 128 x 128 of a weight, 128 of others | the block's own amax, rounded to a power of two      |

A block of 128 lies along the dimension that a product sums over (arXiv 2412.19437).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labkit.config import OptimConfig
from labkit.fp8.casting import E4M3, E5M2

KINDS = ("input", "weight", "grad")
"""The operands of a linear layer's products, in the order of its scales."""


@dataclass(frozen=True)
class Float8Recipe:
    """Formats and scaling of one run."""

    name: str
    """`delayed`, `current` or `blockwise`."""
    hybrid: bool = True
    """e5m2 for gradients; otherwise e4m3 everywhere."""
    amax_history_len: int = 16
    """Steps of the history of `delayed`."""
    amax_compute_algo: str = "max"
    """The amax that `delayed` takes from the history: `max` or `most_recent`."""
    margin: int = 0
    """Powers of two by which `delayed` stays below the largest scale."""

    def dtype(self, kind: str) -> torch.dtype:
        """The format of an operand: `input`, `weight` or `grad`."""
        return E5M2 if self.hybrid and kind == "grad" else E4M3


def float8_recipe(optim: OptimConfig) -> Float8Recipe | None:
    """The recipe that `optim` names; None without fp8."""
    if optim.fp8 == "none":
        return None
    return Float8Recipe(
        optim.fp8_recipe,
        optim.fp8 == "hybrid",
        optim.fp8_amax_history_len,
        optim.fp8_amax_compute_algo,
        optim.fp8_margin,
    )
