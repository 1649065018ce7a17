"""One product for all experts of a rank: rows grouped by expert, each group times a matrix of its own.

A loop over E experts launches 3 E small GEMMs for a projection: E in forward, 2 E in backward. Most of them are too
small to fill the device. Grouped products take only 3 launches. The device decides on the operator:

| form    | operator                  | where                                                                         |
|---------|---------------------------|-------------------------------------------------------------------------------|
| batched | `torch.bmm` of views      | every expert has the same number of rows (drop-and-pad); nothing is copied    |
| grouped | `torch._grouped_mm`       | GPU: bf16, one kernel that reads the group borders on the device (Hopper or   |
|         |                           | later; on older GPUs torch loops inside the call, and waits for the borders)  |
|         |                           | CPU: fp32, bf16, fp16; one call whose loop over groups is inside, in C++      |
| padded  | `torch.bmm` of copies     | other cases: float64, and widths that are not a multiple of 16 bytes          |

The padded form copies every group to a block as large as the largest group. Its work grows with the skew, up to E times
if one expert takes all rows. Comparisons of layouts run in float64, so they too make one call.

Shapes: N rows (one for each token and expert of this rank that it visits), E experts of this rank. C rows of the
largest group, I input size, O output size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from labkit.events import span
from labkit.moe.dispatch.host_copy import host_numbers
from labkit.parallel.layers import Packed
from labkit.parallel.parameters.parameter_record import put_gradient, record_of
from labkit.parallel.weight_grad_store import deferred, is_collecting

ALIGNMENT = 16
"""`torch._grouped_mm` takes rows of a multiple of this many bytes."""


class Segments:
    """The rows of each expert: the first counts[0] rows belong to expert 0, the next counts[1] to expert 1, and so on.

    Args:
        tokens_per_expert: [E], integers. On the host nothing waits for a GPU. On a GPU the grouped form reads them
            there, and any other form copies them to the host first.
    """

    def __init__(self, tokens_per_expert: Tensor | Sequence[int]) -> None:
        self.tokens_per_expert = torch.as_tensor(tokens_per_expert)
        self._offsets: dict[torch.device, Tensor] = {}
        self._aligned: Segments | None = None

    @cached_property
    def counts(self) -> list[int]:
        """Rows of each expert."""
        return host_numbers(self.tokens_per_expert)

    @property
    def equal(self) -> bool:
        """True if all experts are known to have the same number of rows; counts on a GPU are not read."""
        return self.tokens_per_expert.device.type == "cpu" and len(set(self.counts)) <= 1

    def offsets(self, device: torch.device) -> Tensor:
        """Return the end of each group, [E] int32, on `device`; copied once, or for equal groups computed there.

        A CUDA graph may hold the latter: its replays could not read what the host has freed.
        """
        if self.equal and device not in self._offsets:
            numbers = torch.arange(1, len(self.counts) + 1, dtype=torch.int32, device=device)
            self._offsets[device] = numbers * self.counts[0]
        elif device not in self._offsets:
            ends = self.tokens_per_expert.cumsum(0).to(torch.int32)
            if device.type == "cuda" and ends.device.type == "cpu":
                ends = ends.pin_memory()  # a copy from pageable memory would make the host wait
            self._offsets[device] = ends.to(device, non_blocking=True)
        return self._offsets[device]

    def empty(self, device: torch.device) -> Tensor:
        """Return True for experts without rows, [E] bool, on `device`."""
        ends = self.offsets(device)
        return ends.diff(prepend=ends.new_zeros(1)) == 0

    def blocks(self, rows: Tensor) -> Tensor:
        """[N, ..] -> [E, C, ..]: each group in a block of its own, padded with zeros; a view where all are equal."""
        experts, largest = len(self.counts), max(self.counts)
        if self.equal:
            return rows.reshape(experts, largest, *rows.shape[1:])
        return self.spread(rows, self._blocks).view(experts, largest, *rows.shape[1:])

    def rows(self, blocks: Tensor) -> Tensor:
        """[E, C, ..] -> [N, ..]: the inverse of `blocks`."""
        flat = blocks.flatten(0, 1)
        return flat if self.equal else self.collect(flat, self._blocks)

    @cached_property
    def _blocks(self) -> Segments:
        """Groups as large as the largest: the blocks laid end to end."""
        return Segments([max(self.counts)] * len(self.counts))

    def aligned(self) -> Segments:
        """Return groups whose rows are the next multiple of 16, as fp8 tensor cores take them; self if all are one."""
        if self._aligned is None:
            counts = [-(-count // ALIGNMENT) * ALIGNMENT for count in self.counts]
            if counts == self.counts:
                return self
            self._aligned = Segments(counts)
        return self._aligned

    def spread(self, rows: Tensor, into: Segments) -> Tensor:
        """[N, ..] -> [N', ..]: each group at the begin of its larger group of `into`, zeros after it."""
        if into is self:
            return rows
        spread = rows.new_zeros(sum(into.counts), *rows.shape[1:])
        return spread.index_copy_(0, self._slots(into, rows.device), rows)

    def collect(self, rows: Tensor, spread_into: Segments) -> Tensor:
        """[N', ..] -> [N, ..]: the inverse of `spread`."""
        return rows if spread_into is self else rows.index_select(0, self._slots(spread_into, rows.device))

    def experts_of_rows(self, device: torch.device) -> Tensor:
        """Return the expert of each row, [N] on `device`, without a copy to it."""
        place = torch.arange(sum(self.counts), dtype=torch.int32, device=device)
        return torch.searchsorted(self.offsets(device), place, right=True)

    def _slots(self, into: Segments, device: torch.device) -> Tensor:
        """Return the position that each row has in `into`, [N] on `device`."""
        expert = self.experts_of_rows(device)
        added_E = into.offsets(device) - self.offsets(device)  # up to the end of each group
        return torch.arange(len(expert), device=device) + F.pad(added_E[:-1], (1, 0))[expert]


# ---- the two kinds of products ----


def _is_native(segments: Segments, rows: Tensor, *widths: int) -> bool:
    """Return True if `torch._grouped_mm` takes rows of this type and operands of these widths in one call."""
    types = (torch.bfloat16,) if rows.is_cuda else (torch.float32, torch.bfloat16, torch.float16)
    if segments.equal or rows.dtype not in types or not len(rows):
        return False
    return all(width * rows.element_size() % ALIGNMENT == 0 for width in widths)


def grouped_product(a_NI: Tensor, b_EIO: Tensor, segments: Segments) -> Tensor:
    """Multiply each group of rows by its expert's matrix: y_n = a_n b_e, [N, O]. `b_EIO` may be a transposed view."""
    if _is_native(segments, a_NI, *b_EIO.shape[1:]):
        return F.grouped_mm(a_NI, b_EIO, offs=segments.offsets(a_NI.device))
    return segments.rows(torch.bmm(segments.blocks(a_NI), b_EIO))


def grouped_weight_gradient(
    grad_NO: Tensor, x_NI: Tensor, segments: Segments, main_grad: Tensor | None = None, *, replace: bool = False
) -> Tensor | None:
    """Return dL/dW_e = (rows of e in grad)^T (rows of e in x), [E, O, I]; zeros for an expert without rows.

    With `main_grad` the result is added there, or with `replace` written there, and None is returned.
    """
    if _is_native(segments, x_NI, grad_NO.shape[1], x_NI.shape[1]):
        made = F.grouped_mm(grad_NO.t(), x_NI, offs=segments.offsets(x_NI.device))
        if made.is_cuda:  # some kernels do not write the sum over zero rows: pytorch#172439
            made.masked_fill_(segments.empty(made.device)[:, None, None], 0)
        return made if main_grad is None else put_gradient(made, main_grad, replace=replace)
    grad_EOC, x_ECI = segments.blocks(grad_NO).transpose(1, 2), segments.blocks(x_NI)
    if main_grad is None:
        return torch.bmm(grad_EOC, x_ECI)
    if main_grad.dtype != x_NI.dtype:
        return put_gradient(torch.bmm(grad_EOC, x_ECI), main_grad, replace=replace)
    main_grad.baddbmm_(grad_EOC, x_ECI, beta=0.0 if replace else 1.0)
    return None


# ---- the linear layer ----


class GroupedGemms:
    """The three products of all experts of a rank, in the type of their tensors. `labkit.fp8` has another kind."""

    def pack(self, x_NK: Tensor, kind: str, segments: Segments, *, trains: bool) -> Packed:
        """Turn x into the form that the products take; here x has that form already.

        kind: `input`, or `grad` for the gradient of the output.
        trains: a backward can follow.
        """
        return (x_NK,)

    def for_wgrad(self, packed: Packed) -> Packed:
        """Return the part of a packed tensor that `wgrad` reads, because backward keeps no more of an input."""
        return packed

    def fprop(self, x: Packed, weight_EOI: Tensor, segments: Segments) -> Tensor:
        """Return y_e = x_e W_e^T, [N, O]."""
        return grouped_product(x[0], weight_EOI.transpose(1, 2), segments)

    def dgrad(self, grad: Packed, weight_EOI: Tensor, segments: Segments) -> Tensor:
        """Return dx_e = dy_e W_e, [N, I]."""
        return grouped_product(grad[0], weight_EOI, segments)

    def wgrad(
        self, grad: Packed, x: Packed, weight_EOI: Tensor, segments: Segments, main_grad: Tensor | None, *,
        replace: bool = False,
    ) -> Tensor | None:  # fmt: skip
        """Return dW_e = dy_e^T x_e as `grouped_weight_gradient` does."""
        return grouped_weight_gradient(grad[0], x[0], segments, main_grad, replace=replace)


@dataclass(frozen=True)
class GroupedPlan:
    """Name and options of a grouped linear layer."""

    name: str
    """Name in Events."""
    accumulate: bool = False
    """Add the weight gradient to `weight.main_grad` where it exists."""
    gemms: GroupedGemms = field(default_factory=GroupedGemms)
    """The products, in the type of the tensors or in another."""


class _GroupedLinear(Function):
    """y_n = x_n W_e^T for every row n of expert e.

        forward   y_e = x_e W_e^T            [N_e, I] x [O, I] -> [N_e, O] for all e in one call
        dgrad     dx_e = dy_e W_e            [N_e, O] x [O, I] -> [N_e, I]
        wgrad     dW_e = dy_e^T x_e          [O, N_e] x [N_e, I] -> [O, I]

    While a `WeightGradStore` collects, wgrad is postponed to W. A rank without rows runs all three on empty tensors, so
    that it stays in autograd's graph and its weight gradients are zeros.
    """

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, weight_EOI: Tensor, segments: Segments, plan: GroupedPlan, trains: bool
    ) -> Tensor:
        x = plan.gemms.pack(x_NI, "input", segments, trains=trains)
        ctx.save_for_backward(weight_EOI, *plan.gemms.for_wgrad(x))
        ctx.weight, ctx.segments, ctx.plan = weight_EOI, segments, plan
        return plan.gemms.fprop(x, weight_EOI, segments)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (weight_EOI, *x), segments, plan = ctx.saved_tensors, ctx.segments, ctx.plan
        gemms, grad = plan.gemms, plan.gemms.pack(grads[0].contiguous(), "grad", segments, trains=True)
        trained = ctx.weight if ctx.needs_input_grad[1] else None
        grad_x = None
        if ctx.needs_input_grad[0]:
            with span(f"{plan.name} input_grad", "input_grad"):
                grad_x = gemms.dgrad(grad, weight_EOI, segments)
        grad = gemms.for_wgrad(grad) if is_collecting() else grad

        def wgrad() -> tuple[Tensor | None]:
            if trained is None:
                return (None,)
            with span(f"{plan.name} weight_grad", "weight_grad"):
                main_grad = getattr(trained, "main_grad", None) if plan.accumulate else None
                if main_grad is None:
                    return (gemms.wgrad(grad, tuple(x), trained, segments, None),)
                record = record_of(trained)
                gemms.wgrad(grad, tuple(x), trained, segments, main_grad, replace=not record.has_gradient)
                record.has_gradient = True
                return (None,)

        grad_weight = None if deferred((trained,), wgrad) else wgrad()[0]
        return grad_x, grad_weight, None, None, None


def grouped_linear(x_NI: Tensor, weight_EOI: Tensor, segments: Segments, plan: GroupedPlan) -> Tensor:
    """Multiply rows by their experts' matrices, [N, O]: one product forward, one for each gradient."""
    trains = torch.is_grad_enabled()
    return _GroupedLinear.apply(x_NI.contiguous(), weight_EOI, segments, plan, trains)  # type: ignore[no-any-return]
