"""How far rounding to fp8 may move a value, and a product: for the tests of dense layers and of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.fp8.casting import E4M3, E5M2, scale_of

RECIPES = ("delayed", "current", "blockwise")
UNIT = {E4M3: 2.0**-4, E5M2: 2.0**-3}
"""Largest relative error of rounding to nearest: half of the last bit."""
TINY = {E4M3: 2.0**-10, E5M2: 2.0**-17}
"""Half of the smallest number: the largest absolute error below the normal numbers."""
SLACK = 1 + 1e-6
"""Scales are float32."""


def random(*shape: int, seed: int, std: float = 1.0) -> Tensor:
    return std * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rounding_bound(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """How far a value may move when it is cast: half a bit, or half of the smallest number."""
    return torch.maximum(x.abs() * UNIT[dtype], TINY[dtype] / scale.double()) * SLACK


def product_bound(
    a: Tensor, b: Tensor, formats: tuple[torch.dtype, torch.dtype], amax: tuple[Tensor, Tensor]
) -> Tensor:
    """Bound of |fp8(a) fp8(b) - a b| from |fp8(x) - x| <= e(x): |a| e(b) + e(a) |b| + e(a) e(b)."""
    error = [
        rounding_bound(x, scale_of(top, dtype, power_of_two=True), dtype)  # a power of two is the coarser scale
        for x, dtype, top in zip((a, b), formats, amax, strict=True)
    ]
    return (a.abs() @ error[1] + error[0] @ b.abs() + error[0] @ error[1]) * SLACK
