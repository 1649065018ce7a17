"""Casting to fp8: the scale that brings a tensor, or each of its blocks, into the range of a format, and the cast.

Shapes: R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK = 128
"""Side of a block of the blockwise recipe."""
ROWS, COLUMNS, SQUARE = (1, BLOCK), (BLOCK, 1), (BLOCK, BLOCK)
"""Blocks of an operand that is summed over its last dimension, over its first, and of a weight, summed over both."""
LARGEST_SCALE = 2.0**126
"""Scale of a tensor so small that a larger scale would overflow float32."""


def scale_of(amax: Tensor, dtype: torch.dtype, *, power_of_two: bool = False) -> Tensor:
    """The factor that brings `amax` to the largest number of `dtype`, float32; 1 for a tensor of zeros.

    An infinite amax gives 0 and a NaN gives NaN. The cast tensor then holds a NaN, so the overflow shows.
    """
    factor = (torch.finfo(dtype).max / amax.float()).clamp(max=LARGEST_SCALE)
    if power_of_two:
        factor = torch.exp2(torch.floor(torch.log2(factor)))
    return torch.where(amax > 0, factor, torch.where(amax.isnan(), amax.float(), 1.0))


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x * scale in fp8, rounded to nearest; values too large become the largest number. `scale` broadcasts."""
    wide = x if x.dtype == torch.float64 else x.float()
    limit = torch.finfo(dtype).max
    return (wide * scale).clamp(-limit, limit).to(dtype)


def block_scales(x_RC: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Scales of the blocks of x, powers of two, [ceil(R / rows), ceil(C / columns)]; edge blocks may be smaller."""
    rows, columns = block
    down, right = -x_RC.shape[0] % rows, -x_RC.shape[1] % columns
    padded = F.pad(x_RC.detach().abs(), (0, right, 0, down))
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    return scale_of(blocks.amax(dim=(1, 3)), dtype, power_of_two=True)


def spread(scales: Tensor, block: tuple[int, int], shape: Iterable[int]) -> Tensor:
    """Each block's scale at each of its elements."""
    rows, columns = shape
    return scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]


def through_blocks(x_RC: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """x rounded through blockwise fp8, in float32 (float64 for float64)."""
    scale = spread(block_scales(x_RC, block, dtype), block, x_RC.shape)
    wide = x_RC.dtype if x_RC.dtype == torch.float64 else torch.float32
    return cast(x_RC, scale, dtype).to(wide) / scale
