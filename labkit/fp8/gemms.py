"""The three products of a linear layer on fp8 operands.

On a CPU, and for shapes that tensor cores do not take, operands are cast and cast back. Then the product is computed in
float32, which differs from a GPU only by the order of summation. On a GPU with fp8 tensor cores, products with
per-tensor scales go to `torch._scaled_mm`. It takes both operands with the summed dimension along the rows. So dgrad
reads the weight transposed, and wgrad reads input and gradient transposed. The kernels that make operands
(`operands.py`) make the transposed copy in the same pass. Backward then keeps only the transposed input.

Shapes: N rows (sequence x batch), I input size, O output size, K the dimension that a product sums over.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from labkit.comm.capturing import is_graph_capturing
from labkit.comm.groups import Group
from labkit.fp8.casting import COLUMNS, E5M2, ROWS, SQUARE, through_blocks
from labkit.fp8.operands import Operand
from labkit.fp8.recipe import Float8Recipe
from labkit.parallel.layers import Gemms, Packed
from labkit.parallel.parameters.parameter_record import put_gradient


class Scales(Protocol):
    """The scales of all layers of a model chunk (`Float8Scaling`)."""

    recipe: Float8Recipe

    def operand(
        self, index: int, kind: str, x_RC: Tensor, group: Group | None, *, noted: bool, transposed: bool
    ) -> Operand:
        """Cast an operand of layer `index` to fp8, and note its amax."""
        ...

    @property
    def calibrates(self) -> bool:
        """True in the first step of `delayed`, which has no scales of earlier steps."""
        ...

    def note(self, index: int, kind: str, x: Tensor) -> None:
        """Note the amax of an operand that is not cast."""
        ...


ALIGNMENT = 16
"""Sizes of products on fp8 tensor cores are multiples of this."""


def has_tensor_cores(device: torch.device) -> bool:
    """True on a GPU with fp8 tensor cores: Ada, Hopper or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _on_tensor_cores(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> bool:
    """True where `torch._scaled_mm` takes this product: on Ada, Hopper or later. Sizes are multiples of 16, no type is
    float64, and at most one side is e5m2."""
    if not a.is_cuda or not has_tensor_cores(a.device):
        return False
    if out_dtype == torch.float64 or a.dtype == b.dtype == E5M2:
        return False
    return all(size % ALIGNMENT == 0 for size in (*a.shape, *b.shape))


def scaled_product(
    a_MK: Tensor, b_NK: Tensor, scale_inv: tuple[Tensor, Tensor], out_dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """(a b^T) * scale_inv[0] * scale_inv[1] on fp8 tensor cores, [M, N].

    fast: accumulate in fewer bits, as in forward. Gradients need the slower sum.
    """
    first, second = a_MK.contiguous(), b_NK.contiguous().t()  # both rows along the summed dimension
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        first, second, scale_a=scale_inv[0], scale_b=scale_inv[1], out_dtype=out_dtype, use_fast_accum=fast
    )


def product(
    a_MK: Tensor, b_NK: Tensor, scale_inv: tuple[Tensor, Tensor], out_dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """(a b^T) * scale_inv[0] * scale_inv[1] of fp8 operands, [M, N]; summed in float32 at least."""
    if _on_tensor_cores(a_MK, b_NK, out_dtype):
        return scaled_product(a_MK, b_NK, scale_inv, out_dtype, fast=fast)
    wide = torch.float64 if out_dtype == torch.float64 else torch.float32
    summed = a_MK.to(wide) @ b_NK.to(wide).t()
    return (summed * (scale_inv[0] * scale_inv[1])).to(out_dtype)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class CastOperands:
    """The operands of one linear layer, with one scale per tensor (`delayed` and `current`).

    Inputs and gradients are packed as bytes and the reciprocal of their scale. So backward keeps, and sequence
    parallelism gathers, one byte per value. Kernels add a third tensor, the transposed bytes [K, N], except for parts
    of a sequence that are still to be joined. Backward keeps the transposed bytes in place of the first tensor.
    """

    def __init__(self, scaling: Scales, index: int) -> None:
        self._scaling, self._index, self._recipe = scaling, index, scaling.recipe
        self._weight: tuple[Any, ...] | None = None
        self._kept: tuple[Tensor, ...] | None = None

    def forget_weight(self) -> None:
        """Cast the weight again at its next use, since it is about to change."""
        self._weight = None

    def keep_weight(self, weight: Tensor) -> None:
        """Keep the cast weight at a fixed address from now on, so that CUDA graphs can read it.

        Graphs do not cast the weight. Call `refresh_weight` before their replays; it casts the weight only in the
        first microbatch of a step."""
        if self._kept is None:
            self._kept = self._cast(weight.detach(), "weight", None, trains=False)

    def refresh_weight(self, weight: Tensor) -> None:
        """Cast `weight` into the kept weight, if it has changed."""
        state = weight._version, weight.data_ptr()
        if self._kept is not None and (self._weight is None or self._weight[0] != state):
            rows, scale_inv, *columns = self._cast(weight.detach(), "weight", None, trains=True)
            fresh = rows, scale_inv, columns[0] if columns else rows.mT  # torch's cast makes no transposed copy
            for kept, value in zip(self._kept, fresh, strict=False):
                kept.copy_(value)
            self._weight = state, *self._kept

    def for_wgrad(self, packed: Packed) -> Packed:
        """Return what `wgrad` reads of a packed tensor: the transposed values where there are any."""
        return packed if len(packed) < 3 else (packed[0].new_empty(0), *packed[1:])

    def _packed(self, x: Tensor, kind: str, gathered_over: Group | None, *, trains: bool) -> Packed:
        values, scale_inv, *columns = self._cast(x.detach(), kind, gathered_over, trains=trains)
        return values.view(torch.uint8), scale_inv, *(made.view(torch.uint8) for made in columns)

    def _rows(self, packed: Packed, kind: str) -> Tensor:
        """The fp8 values, [N, K]."""
        return _flat(packed[0]).view(self._recipe.dtype(kind))

    def _columns(self, packed: Packed, kind: str) -> Tensor:
        """The fp8 values, [K, N]."""
        return packed[2].view(self._recipe.dtype(kind)) if len(packed) > 2 else self._rows(packed, kind).t()

    def _cast(self, x: Tensor, kind: str, group: Group | None, *, trains: bool) -> tuple[Tensor, ...]:
        """The fp8 values in x's shape, the reciprocal of their scale, and with kernels the values [K, N]."""
        # A gather joins parts of a sequence by rows, so transposed parts could not be joined.
        transposed = group is None and (trains or kind == "weight")
        rows, scale_inv, columns = self._scaling.operand(
            self._index, kind, _flat(x), group, noted=trains, transposed=transposed
        )
        return rows.view(x.shape), scale_inv, *(() if columns is None else (columns,))

    def _cast_weight(self, weight: Tensor) -> tuple[Tensor, ...]:
        """The cast weight, cast once per step: weights do not change between the microbatches of a step."""
        if self._kept is not None:
            if not is_graph_capturing():
                self.refresh_weight(weight)
            return self._kept
        state = weight._version, weight.data_ptr()
        if self._weight is None or self._weight[0] != state:
            self._weight = state, *self._cast(weight.detach(), "weight", None, trains=True)
        return self._weight[1:]


class Float8Gemms(CastOperands, Gemms):
    """The products of one linear layer, with one scale per tensor (`delayed` and `current`)."""

    def pack(self, x: Tensor, kind: str, gathered_over: Group | None, *, trains: bool) -> Packed:
        return self._packed(x, kind, gathered_over, trains=trains)

    def fprop(self, x: Packed, weight: Tensor, bias: Tensor | None) -> Tensor:
        weight8, weight_scale, *_ = self._cast_weight(weight)
        y = product(self._rows(x, "input"), weight8, (x[1], weight_scale), weight.dtype, fast=True)
        y = y.view(*x[0].shape[:-1], -1)
        return y if bias is None else y.add_(bias)

    def dgrad(self, grad: Packed, weight: Tensor) -> Tensor:
        weight8, weight_scale, *transposed = self._cast_weight(weight)
        weight8_IO = transposed[0] if transposed else weight8.t()
        grad_x = product(self._rows(grad, "grad"), weight8_IO, (grad[1], weight_scale), weight.dtype)
        return grad_x.view(*grad[0].shape[:-1], -1)

    def wgrad(
        self, grad: Packed, x: Packed, weight: Tensor, main_grad: Tensor | None, *, replace: bool = False
    ) -> Tensor | None:
        out = weight.dtype if main_grad is None else main_grad.dtype
        grad_weight = product(self._columns(grad, "grad"), self._columns(x, "input"), (grad[1], x[1]), out)
        return grad_weight if main_grad is None else put_gradient(grad_weight, main_grad, replace=replace)


class BlockwiseGemms(Float8Gemms):
    """The products of one linear layer with a scale per block.

    Inputs are kept uncast. Forward sums over their columns and the weight gradient over their rows, so the blocks
    differ. Each cast starts from the uncast values, so that rounding errors do not add up.
    """

    def pack(self, x: Tensor, kind: str, gathered_over: Group | None, *, trains: bool) -> Packed:
        return (x,)

    def fprop(self, x: Packed, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = self._blocks(x[0], "input", ROWS) @ self._cast_weight(weight)[0].t()
        y = y.to(weight.dtype).view(*x[0].shape[:-1], -1)
        return y if bias is None else y.add_(bias)

    def dgrad(self, grad: Packed, weight: Tensor) -> Tensor:
        grad_x = self._blocks(grad[0], "grad", ROWS) @ self._cast_weight(weight)[0]
        return grad_x.to(weight.dtype).view(*grad[0].shape[:-1], -1)

    def wgrad(
        self, grad: Packed, x: Packed, weight: Tensor, main_grad: Tensor | None, *, replace: bool = False
    ) -> Tensor | None:
        grad_weight = self._blocks(grad[0], "grad", COLUMNS).t() @ self._blocks(x[0], "input", COLUMNS)
        if main_grad is None:
            return grad_weight.to(weight.dtype)
        return put_gradient(grad_weight.to(main_grad.dtype), main_grad, replace=replace)

    def _blocks(self, x: Tensor, kind: str, block: tuple[int, int]) -> Tensor:
        return through_blocks(_flat(x.detach()), block, self._recipe.dtype(kind))

    def _cast(self, x: Tensor, kind: str, group: Group | None, *, trains: bool) -> tuple[Tensor, ...]:
        return self._blocks(x, kind, SQUARE), x.new_ones(())
