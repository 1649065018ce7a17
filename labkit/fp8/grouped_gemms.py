"""The three products of all experts of a rank on fp8 operands: rows grouped by expert, each group times its own matrix.

Their rows have one scale and each weight has its own. The device, the formats and the type of the result decide on the
form of a product:

| form       | operator                                | where                                                        |
|------------|-----------------------------------------|--------------------------------------------------------------|
| in one     | `torch._scaled_grouped_mm`              | Hopper: e4m3 by e4m3 with a bf16 result, so forward, and     |
|            |                                         | with optim.fp8 = e4m3 the gradients that are to be bf16      |
| one by one | `torch._scaled_mm` for each expert      | the rest on fp8 tensor cores: e5m2 gradients (`hybrid`),     |
|            |                                         | weight gradients added to fp32 ones, other GPUs              |
| cast back  | grouped products of fp32 operands       | CPU, float64; always for `blockwise`, in float64 if given    |

`torch._scaled_grouped_mm` takes a scale for each row and each column, and widths that are multiples of 16. A sum over
the rows of an expert takes multiples of 16 rows, too. So on tensor cores each group is filled up with zeros, as
Megatron's experts do without --moe-router-padding-for-fp8; that changes no result. The first two forms were never run
on a GPU.

Shapes: N rows (one for each token and expert of this rank that it visits), E experts of this rank, I input size, O
output size, K the dimension that a product sums over, C the columns of its result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.comm.groups import Group
from labkit.fp8.casting import COLUMNS, E4M3, ROWS, SQUARE, through_blocks
from labkit.fp8.gemms import ALIGNMENT, CastOperands, Scales, has_tensor_cores, product
from labkit.moe.grouped_gemm import GroupedGemms, Segments, grouped_product, grouped_weight_gradient
from labkit.parallel.layers import Packed
from labkit.parallel.parameters.parameter_record import put_gradient


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _in_one(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> bool:
    """True where `torch._scaled_grouped_mm` takes operands of these widths (the last two sizes of b)."""
    if not _is_hopper(a.device) or not a.numel():
        return False
    return a.dtype == b.dtype == E4M3 and out_dtype == torch.bfloat16 and not any(n % ALIGNMENT for n in b.shape[-2:])


def _in_groups(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], segments: Segments, *, fast: bool) -> Tensor:
    """`torch._scaled_grouped_mm`, its scales made contiguous as it wants them."""
    return torch._scaled_grouped_mm(  # pyright: ignore[reportPrivateImportUsage]
        a, b, *(scale.contiguous() for scale in scales), offs=segments.offsets(a.device),
        out_dtype=torch.bfloat16, use_fast_accum=fast,
    )  # fmt: skip


def grouped_scaled_product(
    a_NK: Tensor, b_ECK: Tensor, scale_inv: tuple[Tensor, Tensor], segments: Segments, out_dtype: torch.dtype, *,
    fast: bool = False,
) -> Tensor:  # fmt: skip
    """a_n b_e^T for each row n of expert e, times scale_inv[0] and times scale_inv[1][e], [N, C]."""
    of_rows, of_experts_E = scale_inv
    if _in_one(a_NK, b_ECK, out_dtype):
        scales = of_rows.expand(len(a_NK)), of_experts_E[:, None].expand(b_ECK.shape[:2])
        return _in_groups(a_NK, b_ECK.contiguous().transpose(1, 2), scales, segments, fast=fast)
    if has_tensor_cores(a_NK.device) and len(a_NK):
        groups = zip(a_NK.split(segments.counts), b_ECK.unbind(), of_experts_E.unbind(), strict=True)
        return torch.cat([product(a, b, (of_rows, scale), out_dtype, fast=fast) for a, b, scale in groups if len(a)])
    wide = torch.float64 if out_dtype == torch.float64 else torch.float32
    summed_NC = grouped_product(a_NK.to(wide), b_ECK.to(wide).transpose(1, 2), segments)
    scale_N = (of_rows * of_experts_E)[segments.experts_of_rows(a_NK.device)]
    return (summed_NC * scale_N[:, None]).to(out_dtype)


def grouped_scaled_weight_gradient(
    grad_ON: Tensor, x_IN: Tensor, scale_inv: tuple[Tensor, Tensor], segments: Segments, out_dtype: torch.dtype
) -> Tensor:
    """grad x^T over the rows of each expert, times both of `scale_inv`, [E, O, I]; zeros for an expert without rows."""
    experts = len(segments.counts)
    if _in_one(grad_ON, x_IN, out_dtype) and not len(grad_ON) % ALIGNMENT:
        scales = scale_inv[0].expand(experts * len(grad_ON)), scale_inv[1].expand(experts * len(x_IN))
        made = _in_groups(grad_ON.contiguous(), x_IN.contiguous().t(), scales, segments, fast=False)
        return made.masked_fill_(segments.empty(made.device)[:, None, None], 0)
    if has_tensor_cores(x_IN.device) and x_IN.numel():
        made_EOI = x_IN.new_zeros(experts, len(grad_ON), len(x_IN), dtype=out_dtype)
        parts = (t.split(segments.counts, dim=1) for t in (grad_ON, x_IN))
        for made, grad, x in zip(made_EOI, *parts, strict=True):
            if grad.shape[1]:
                made.copy_(product(grad, x, scale_inv, out_dtype))
        return made_EOI
    wide = torch.float64 if out_dtype == torch.float64 else torch.float32
    grad_NO, x_NI = (t.t().to(wide).contiguous() for t in (grad_ON, x_IN))
    summed = grouped_weight_gradient(grad_NO, x_NI, segments)
    assert summed is not None
    return (summed * (scale_inv[0] * scale_inv[1])).to(out_dtype)


class GroupedFloat8Gemms(CastOperands, GroupedGemms):
    """The products of one projection of all experts of a rank (`delayed` and `current`).

    In the first step of `delayed` they compute in the type of their tensors and note magnitudes; packed operands then
    are the tensors alone.

    Args:
        scaling: the scales of the model chunk.
        index: row of the scales of the input and of the output gradient.
        experts: rows of the scales of this rank's weights.
    """

    def __init__(self, scaling: Scales, index: int, experts: range) -> None:
        super().__init__(scaling, index)
        self._experts = experts

    def pack(self, x_NK: Tensor, kind: str, segments: Segments, *, trains: bool) -> Packed:
        if not self._scaling.calibrates:
            return self._packed(segments.spread(x_NK, self._filled(segments, x_NK)), kind, None, trains=trains)
        if trains:
            self._scaling.note(self._index, kind, x_NK.detach())
        return (x_NK.detach(),)

    def fprop(self, x: Packed, weight_EOI: Tensor, segments: Segments) -> Tensor:
        if len(x) == 1:
            for index, weight in zip(self._experts, weight_EOI.detach(), strict=True):
                self._scaling.note(index, "weight", weight)
            return super().fprop(x, weight_EOI, segments)
        weight8, scale_E, *_ = self._cast_weight(weight_EOI)
        return self._times(x, "input", weight8, scale_E, segments, weight_EOI.dtype, fast=True)

    def dgrad(self, grad: Packed, weight_EOI: Tensor, segments: Segments) -> Tensor:
        if len(grad) == 1:
            return super().dgrad(grad, weight_EOI, segments)
        weight8, scale_E, *transposed = self._cast_weight(weight_EOI)
        weight8_EIO = transposed[0] if transposed else weight8.transpose(1, 2)
        return self._times(grad, "grad", weight8_EIO, scale_E, segments, weight_EOI.dtype)

    def wgrad(
        self, grad: Packed, x: Packed, weight_EOI: Tensor, segments: Segments, main_grad: Tensor | None, *,
        replace: bool = False,
    ) -> Tensor | None:  # fmt: skip
        if len(grad) == 1:
            return super().wgrad(grad, x, weight_EOI, segments, main_grad, replace=replace)
        columns = self._columns(grad, "grad"), self._columns(x, "input")
        out = weight_EOI.dtype if main_grad is None else main_grad.dtype
        filled = self._filled(segments, columns[0])
        made = grouped_scaled_weight_gradient(*columns, (grad[1], x[1]), filled, out)
        return made if main_grad is None else put_gradient(made, main_grad, replace=replace)

    def _times(
        self, a: Packed, kind: str, b_ECK: Tensor, scale_E: Tensor, segments: Segments, out: torch.dtype, *,
        fast: bool = False,
    ) -> Tensor:  # fmt: skip
        rows = self._rows(a, kind)
        filled = self._filled(segments, rows)
        return segments.collect(grouped_scaled_product(rows, b_ECK, (a[1], scale_E), filled, out, fast=fast), filled)

    def _filled(self, segments: Segments, x: Tensor) -> Segments:
        """The groups as the products take them."""
        return segments.aligned() if has_tensor_cores(x.device) else segments

    def _cast(self, x: Tensor, kind: str, group: Group | None, *, trains: bool) -> tuple[Tensor, ...]:
        """The cast rows; or the cast weights, stacked, with a scale for each."""
        if kind != "weight":
            return super()._cast(x, kind, group, trains=trains)
        made = [
            self._scaling.operand(index, kind, weight_OI, None, noted=trains, transposed=True)
            for index, weight_OI in zip(self._experts, x, strict=True)
        ]
        rows, scales, columns = zip(*made, strict=True)
        stacked = torch.stack(rows), torch.stack(scales)
        made_columns = [found for found in columns if found is not None]  # torch's cast makes none
        return stacked if len(made_columns) < len(columns) else (*stacked, torch.stack(made_columns))


class GroupedBlockwiseGemms(GroupedFloat8Gemms):
    """The same with a scale for each block, as `BlockwiseGemms` has them. No block holds rows of two experts."""

    def pack(self, x_NK: Tensor, kind: str, segments: Segments, *, trains: bool) -> Packed:
        return (x_NK.detach(),)

    def fprop(self, x: Packed, weight_EOI: Tensor, segments: Segments) -> Tensor:
        weight8_EOI, *_ = self._cast_weight(weight_EOI)
        return grouped_product(self._blocks(x[0], "input"), weight8_EOI.transpose(1, 2), segments).to(weight_EOI.dtype)

    def dgrad(self, grad: Packed, weight_EOI: Tensor, segments: Segments) -> Tensor:
        weight8_EOI, *_ = self._cast_weight(weight_EOI)
        return grouped_product(self._blocks(grad[0], "grad"), weight8_EOI, segments).to(weight_EOI.dtype)

    def wgrad(
        self, grad: Packed, x: Packed, weight_EOI: Tensor, segments: Segments, main_grad: Tensor | None, *,
        replace: bool = False,
    ) -> Tensor | None:  # fmt: skip
        grad_NO, x_NI = (
            torch.cat([through_blocks(part, COLUMNS, self._recipe.dtype(kind)) for part in t.split(segments.counts)])
            for t, kind in ((grad[0], "grad"), (x[0], "input"))
        )
        made = grouped_weight_gradient(grad_NO, x_NI, segments)
        assert made is not None
        if main_grad is None:
            return made.to(weight_EOI.dtype)
        return put_gradient(made.to(main_grad.dtype), main_grad, replace=replace)

    def _blocks(self, x_NK: Tensor, kind: str) -> Tensor:
        return through_blocks(x_NK, ROWS, self._recipe.dtype(kind))

    def _cast(self, x: Tensor, kind: str, group: Group | None, *, trains: bool) -> tuple[Tensor, ...]:
        return torch.stack([through_blocks(w, SQUARE, self._recipe.dtype(kind)) for w in x]), x.new_ones(len(x))
