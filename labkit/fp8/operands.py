"""Operands of products in fp8 with one scale for each tensor: made by Triton's kernels where they run, else by torch.

On a GPU from Hopper on (compute capability 9.0) with Triton, two kernels make an operand. On older GPUs Triton rounds
casts twice (triton#11753), so torch makes operands there. So it does on a CPU, in float64, inside torch.compile, on
tensors of other classes and under an emulated capture. Both give the same bits, with one exception: a tensor with a
known scale and a value that is not finite. There torch makes every value NaN; the kernels make only such values NaN.
Both give NaN as 1 / scale.

Triton compiles a kernel at its first launch, with a C compiler. If that fails, torch takes over for good, and a warning
says why. A kernel that has not run yet cannot run inside the capture of a CUDA graph: torch makes the operand there.

Shapes: R rows, C columns; P parts of a tensor.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from labkit.comm.capturing import active_capture
from labkit.fp8.casting import cast, scale_of

T = TypeVar("T")
KINDS = (torch.float32, torch.bfloat16, torch.float16)
"""Types that the kernels read."""


class _State:
    """The state of this process: may the kernels be used?"""

    torch_alone: bool = False
    """The kernels must not be used, or could not be compiled and are not tried again."""


@contextmanager
def torch_alone() -> Iterator[None]:
    """Inside the block torch makes all operands, for comparisons."""
    before, _State.torch_alone = _State.torch_alone, True
    try:
        yield
    finally:
        _State.torch_alone = before


def peaks(x_RC: Tensor) -> Tensor:
    """Largest magnitudes of parts of x, float32 [P]; their maximum is the amax of x, 0 where x is empty."""

    def by_torch() -> Tensor:
        amax = x_RC.abs().amax().float() if x_RC.numel() else x_RC.new_zeros((), dtype=torch.float32)
        return amax.view(1)

    return _either(x_RC, lambda kernels: kernels.sweep(x_RC)[0], by_torch)


def scales(
    peaks_P: Tensor, dtype: torch.dtype, margin: int = 0, *, so_far: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(scale, 1 / scale) that bring a tensor with these `peaks` to the largest number of `dtype` / 2**margin.

    so_far: raised to the amax, in place; a scalar.
    """

    def by_torch() -> tuple[Tensor, Tensor]:
        amax = peaks_P.amax()
        if so_far is not None:
            torch.maximum(so_far, amax, out=so_far)
        scale = scale_of(amax, dtype) / 2**margin
        return scale, 1 / scale

    return _either(peaks_P, lambda kernels: kernels.scales(peaks_P, dtype, margin, so_far=so_far), by_torch)


Operand = tuple[Tensor, Tensor, Tensor | None]
"""Values in fp8 [R, C], 1 / scale, and the transposed values [C, R] if asked for and made by kernels."""


def operand(x_RC: Tensor, scale: Tensor, inverse: Tensor, dtype: torch.dtype, *, transposed: bool) -> Operand:
    """x in fp8 by the scale of its own amax. inverse: 1 / scale."""

    def by_kernels(kernels: ModuleType) -> Operand:
        _, rows, columns = kernels.sweep(x_RC, scale, dtype, transposed=transposed)
        return rows, inverse, columns

    return _either(x_RC, by_kernels, lambda: (cast(x_RC, scale, dtype), inverse, None))


def operand_by_history(
    x_RC: Tensor, scale: Tensor, dtype: torch.dtype, *, transposed: bool, so_far: Tensor | None
) -> Operand:
    """x in fp8 by a scale from the history. A value that is not finite makes 1 / scale NaN.

    so_far: raised to the amax of x, in place; a scalar.
    """

    def by_kernels(kernels: ModuleType) -> Operand:
        found, rows, columns = kernels.sweep(x_RC, scale, dtype, transposed=transposed)
        _, inverse = kernels.scales(found, dtype, known=scale, so_far=so_far)
        return rows, inverse, columns

    def by_torch() -> Operand:
        amax = peaks(x_RC).amax()
        used = torch.where(amax.isfinite(), scale, torch.nan)  # saturation would hide values that are not finite
        if so_far is not None:
            torch.maximum(so_far, amax, out=so_far)
        return cast(x_RC, used, dtype), 1 / used, None

    return _either(x_RC, by_kernels, by_torch)


# ---- the choice ----


def _either(x: Tensor, by_kernels: Callable[[ModuleType], T], by_torch: Callable[[], T]) -> T:
    kernels = kernels_for(x)
    if kernels is not None:
        try:
            return by_kernels(kernels)
        except kernels.NoKernel as why:
            if str(why):
                _State.torch_alone = True
                warnings.warn(
                    f"fp8 operands are made by torch, in more passes over memory: Triton: {why}", stacklevel=3
                )
    return by_torch()


def kernels_for(x: Tensor) -> ModuleType | None:
    """`kernels` where its kernels take x, else None."""
    interpreted = not x.is_cuda and os.environ.get("TRITON_INTERPRET") == "1"
    if _State.torch_alone or not (x.is_cuda or interpreted) or type(x) is not Tensor:
        return None
    if x.dtype not in KINDS or not x.numel() or torch.compiler.is_compiling() or active_capture() is not None:
        return None
    return importlib.import_module("labkit.fp8.kernels") if _runs_on(x.device) else None


@functools.cache
def _runs_on(device: torch.device) -> bool:
    """True where Triton is installed and casts on `device` as torch does."""
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
