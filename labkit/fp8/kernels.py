"""Triton kernels for fp8 operands: amax, scale, clamp, cast and transposed cast in one pass over a tensor.

torch passes over memory for each of |x|, amax, float32, x * scale, clamp, cast and the transposed copy. A bf16
value moves 4 + 2 + 6 + 8 + 8 + 5 + 2 = 35 bytes. `sweep` reads x once and writes what is asked: 2 bytes read, 1 or 2
written. Each program also writes the largest magnitude of its tile, so the amax needs no atomics and no zeros.
A second kernel of one program reduces these peaks and makes the scale. A maximum does not depend on its order, so amax,
scale and values equal torch's to the bit.

Only `operands` imports this module, where Triton runs. Triton compiles a kernel at its first launch, which needs a
C compiler. `NoKernel` says that the compilation failed, or that a CUDA graph is being captured, which forbids it.

With TRITON_INTERPRET=1 the kernels run on a CPU. Triton's interpreter rounds casts to fp8 wrongly (triton#8322). There
the kernels write clamped float32 values, and torch casts these.

Shapes: R rows, C columns; P programs, one for each tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton import knobs  # pyright: ignore[reportMissingImports]

from labkit.comm.capturing import is_graph_capturing
from labkit.fp8.casting import LARGEST_SCALE

TILE_R, TILE_C = 64, 64
"""A row of a tile is two sectors of 32 bytes or more of the input and of both results."""
WARPS = 8
"""16 values a thread: 64 registers or fewer on Hopper, so that many loads are under way. Not tuned on a GPU."""
PEAKS_AT_ONCE = 8192

INTERPRETED: bool = knobs.runtime.interpret
"""True where the kernels run in Triton's interpreter, on a CPU."""


class NoKernel(RuntimeError):
    """A kernel cannot run. The message says why; it is empty where the kernel only cannot be compiled now."""


@triton.jit(do_not_specialize_on_alignment=["scale"])
def _sweep_tile(
    x, rows, columns, scale, peaks, height, width, row_step, column_step, limit,
    CAST: tl.constexpr, COLUMNS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(width, C)
    tile = tl.program_id(0)
    first_row, first_column = tile // across * R, tile % across * C
    top, left = first_row.to(tl.int64), first_column.to(tl.int64)  # inside a tile 32 bits are enough
    row_R, column_C = tl.arange(0, R), tl.arange(0, C)
    inside_RC = (first_row + row_R < height)[:, None] & (first_column + column_C < width)[None, :]
    x += top * row_step + left * column_step
    x_RC = tl.load(x + row_R[:, None] * row_step + column_C[None, :] * column_step, mask=inside_RC, other=0.0)
    x_RC = x_RC.to(tl.float32)
    # The bits of a float without sign order as its magnitude: all numbers, then infinity, then NaN.
    bits_RC = x_RC.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.store(peaks + tile, tl.max(tl.max(bits_RC, axis=1), axis=0).to(tl.float32, bitcast=True))
    if CAST:
        scaled_RC = x_RC * tl.load(scale)
        scaled_RC = tl.where(scaled_RC > limit, limit, scaled_RC)  # comparisons with NaN are false: NaN stays
        scaled_RC = tl.where(scaled_RC < -limit, -limit, scaled_RC)
        scaled_RC = tl.where(bits_RC == 0x7F800000, float("nan"), scaled_RC)  # an infinity must not saturate
        cast_RC = scaled_RC.to(rows.dtype.element_ty)
        rows += top * width + left
        tl.store(rows + row_R[:, None] * width + column_C[None, :], cast_RC, mask=inside_RC)
        if COLUMNS:
            columns += left * height + top
            inside_CR = (first_column + column_C < width)[:, None] & (first_row + row_R < height)[None, :]
            tl.store(columns + column_C[:, None] * height + row_R[None, :], tl.trans(cast_RC), mask=inside_CR)


@triton.jit(
    do_not_specialize=["count", "known", "noted"],
    do_not_specialize_on_alignment=["peaks", "scale", "inverse", "so_far"],
)
def _settle(
    peaks, scale, inverse, so_far, count, limit, largest_scale, shrink, known, noted, AT_ONCE: tl.constexpr
):  # fmt: skip
    bits = tl.zeros((AT_ONCE,), dtype=tl.int32)
    start = 0
    while start < count:  # no range(): Triton 3.6's interpreter takes no bound that is an argument
        place = start + tl.arange(0, AT_ONCE)
        some = tl.load(peaks + place, mask=place < count, other=0.0).to(tl.int32, bitcast=True)
        bits = tl.maximum(bits, some & 0x7FFFFFFF)
        start += AT_ONCE
    amax_bits = tl.max(bits, axis=0)
    amax = amax_bits.to(tl.float32, bitcast=True)
    finite = amax_bits < 0x7F800000
    # The scale as `scale_of` has it: torch divides a number by a tensor as number * reciprocal. On a GPU tl's `/` is an
    # approximation, div_rn is not.
    factor = limit * tl.div_rn(1.0, tl.where(finite & (amax_bits > 0), amax, 1.0))
    factor = tl.where(factor > largest_scale, largest_scale, factor)
    factor = tl.where(amax_bits == 0, 1.0, factor)
    factor = tl.where(amax_bits == 0x7F800000, 0.0, tl.where(finite, factor, amax)) * shrink
    given = tl.load(scale, mask=known != 0, other=1.0)
    given = tl.where(finite, given, float("nan"))  # saturation would hide values that are not finite
    tl.store(scale, factor, mask=known == 0)
    used = tl.where(known != 0, given, factor)
    tl.store(inverse, tl.where(used == 0, float("inf"), tl.div_rn(1.0, tl.where(used == 0, 1.0, used))))
    before = tl.load(so_far, mask=noted != 0, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.store(so_far, tl.maximum(before, amax_bits).to(tl.float32, bitcast=True), mask=noted != 0)


# ---- launches ----

_has_run: set[tuple[Any, ...]] = set()
"""Kernels that are compiled and loaded, each with the properties of its arguments for which Triton compiles."""


def _launch(kernel: Any, grid: int, key: tuple[Any, ...], device: Tensor, *args: Any, **constants: Any) -> None:
    """Start `grid` programs on the current stream of `device`'s GPU."""
    first = (kernel.__name__, device.device, *key)
    with torch.cuda.device_of(device):
        if first in _has_run:
            kernel[(grid,)](*args, **constants, num_warps=WARPS)
            return
        if is_graph_capturing():
            raise NoKernel
        try:
            kernel[(grid,)](*args, **constants, num_warps=WARPS)
        except Exception as error:  # the compiler, its launcher's C compiler, the driver: each raises what it likes
            raise NoKernel(f"{type(error).__name__}: {error}") from error
        _has_run.add(first)


def sweep(
    x_RC: Tensor,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    transposed: bool = False,
    written: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(peaks [P], rows [R, C], columns [C, R]) of x, float32, bfloat16 or float16, in any strides.

    peaks: the largest magnitudes of its tiles, float32.
    rows, columns: x * scale in fp8 `dtype`, and with `transposed` its transpose; None without `dtype`. With `written`
        float32 they hold the clamped values before the cast.

    Raises:
        NoKernel: the kernel cannot be compiled here and now.
    """
    (height, width), casts = x_RC.shape, dtype is not None
    tiles = -(-height // TILE_R) * -(-width // TILE_C)
    peaks = x_RC.new_empty(tiles, dtype=torch.float32)
    into = written or (torch.float32 if INTERPRETED else dtype)
    rows = x_RC.new_empty((height, width), dtype=into) if casts else None
    columns = x_RC.new_empty((width, height), dtype=into) if casts and transposed else None
    key = x_RC.dtype, into, transposed, *x_RC.shape, *x_RC.stride(), x_RC.data_ptr() % 16
    _launch(
        _sweep_tile, tiles, key, x_RC,
        x_RC, peaks if rows is None else rows, peaks if columns is None else columns, peaks if scale is None else scale,
        peaks, height, width, *x_RC.stride(), 1.0 if dtype is None else torch.finfo(dtype).max,
        CAST=casts, COLUMNS=columns is not None, R=TILE_R, C=TILE_C,
    )  # fmt: skip
    if INTERPRETED and casts and written is None:
        rows, columns = (None if made is None else made.to(dtype) for made in (rows, columns))
    return peaks, rows, columns


def scales(
    peaks_P: Tensor, dtype: torch.dtype, margin: int = 0, *, known: Tensor | None = None, so_far: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(scale, 1 / scale) of a tensor whose tiles have these largest magnitudes, float32 scalars.

    known: the scale of an earlier cast. Its reciprocal is NaN if the tensor holds a value that is not finite.
    so_far: raised to the tensor's amax, in place.

    Raises:
        NoKernel: the kernel cannot be compiled here and now.
    """
    scale = peaks_P.new_empty(()) if known is None else known
    inverse = peaks_P.new_empty(())
    _launch(
        _settle, 1, (), peaks_P,
        peaks_P, scale, inverse, peaks_P if so_far is None else so_far, peaks_P.numel(), torch.finfo(dtype).max,
        LARGEST_SCALE, 2.0**-margin, int(known is not None), int(so_far is not None), AT_ONCE=PEAKS_AT_ONCE,
    )  # fmt: skip
    return scale, inverse
