"""Linear layers whose three products take fp8 operands (arXiv 2209.05433): formats, scales and their history.

fp8 has four significant bits (e4m3, largest 448) or three (e5m2, largest 57,344), so a tensor is multiplied by a scale
that brings its largest magnitude, its amax, near the largest number of the format, and the product is divided by both
scales. `hybrid` takes e4m3 forward and e5m2 for gradients, which need range more than precision.

| recipe    | scale of                             | from                                                 |
|-----------|--------------------------------------|------------------------------------------------------|
| delayed   | the whole tensor                     | the amax of earlier steps, agreed over tp_dp_cp      |
| current   | the whole tensor                     | its own amax, agreed over tp if it will be gathered  |
| blockwise | 128 x 128 of a weight, 128 of others | the block's own amax, rounded to a power of two      |

A block of 128 lies along the dimension that a product sums over (arXiv 2412.19437).

On a CPU, and for shapes that tensor cores do not take, operands are cast and cast back, and the product is computed in
float32: the same values as on a GPU but for the order of summation. On a GPU that has fp8 tensor cores products with
per-tensor scales go to `torch._scaled_mm`. It wants both operands with the summed dimension along the rows, so dgrad
reads the weight transposed, and wgrad the input and the gradient. Where kernels make operands (`fp8_operands`), they
make the transposed copy in the same pass, and for backward an input is kept transposed alone.

Two choices differ from Transformer Engine's. The history of `delayed` moves on once per optimizer step, not once per
microbatch: scales then do not depend on how microbatches are spread over ranks, activations recomputed in backward are
cast as they were the first time, a step costs one all-reduce, and every layout of tp, cp, dp and pp computes the same
fp8 values as one process (in float64 to the last bits; `current` agrees over dp and pp only). And in the first step,
before there is a history, a tensor is scaled by its own amax (agreed over tp_cp); a scale of 1 would flush the
gradients of a mean loss to zero, since e5m2 has nothing between 0 and 2^-16.

Where ranks hold copies of a key/value head, each casts the gradient that its own query heads give. One process casts
the sum of these, so there the weight gradients agree to the format's precision only.

Shapes: N rows (sequence x batch), I input size, O output size, M layers of a model chunk, L steps of history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.config import OptimConfig
from labkit.parallel import collectives, fp8_operands
from labkit.parallel.capturing import is_graph_capturing
from labkit.parallel.fp8_casting import COLUMNS, E4M3, E5M2, ROWS, SQUARE, scale_of, through_blocks
from labkit.parallel.groups import Group, ParallelGroups
from labkit.parallel.layers import Gemms, Packed
from labkit.parallel.ledger import comm_scope
from labkit.parallel.parameter_record import put_gradient

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
    """L of `delayed`."""
    amax_compute_algo: str = "max"
    """What `delayed` takes from the history: `max` or `most_recent`."""
    margin: int = 0
    """Powers of two by which `delayed` stays below the largest scale."""

    def dtype(self, kind: str) -> torch.dtype:
        """The format of an operand."""
        return E5M2 if self.hybrid and kind == "grad" else E4M3


def float8_recipe(optim: OptimConfig) -> Float8Recipe | None:
    """The recipe that `optim` names; None where it computes without fp8."""
    if optim.fp8 == "none":
        return None
    return Float8Recipe(
        optim.fp8_recipe,
        optim.fp8 == "hybrid",
        optim.fp8_amax_history_len,
        optim.fp8_amax_compute_algo,
        optim.fp8_margin,
    )


# ---- products ----


def _on_tensor_cores(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether `torch._scaled_mm` takes this product: Ada, Hopper or later, sizes in multiples of 16, no float64, and
    e5m2 on one side at most."""
    if not a.is_cuda or torch.cuda.get_device_capability(a.device) < (8, 9):
        return False
    if out_dtype == torch.float64 or a.dtype == b.dtype == E5M2:
        return False
    return all(size % 16 == 0 for size in (*a.shape, *b.shape))


def scaled_product(
    a_MK: Tensor, b_NK: Tensor, scale_inv: tuple[Tensor, Tensor], out_dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """(a b^T) * scale_inv[0] * scale_inv[1] on fp8 tensor cores, [M, N].

    fast: accumulate in fewer bits. Good enough forward; gradients want the slower sum.
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


class Float8Gemms(Gemms):
    """The products of one linear layer, with one scale per tensor (`delayed` and `current`).

    Inputs and gradients are packed as bytes and the reciprocal of their scale: what is kept for backward, and what
    sequence parallelism gathers, is one byte per value. Where kernels make them, a third tensor holds the transposed
    bytes [K, N], unless parts of a sequence are yet to be joined; backward then keeps these in place of the first.
    """

    def __init__(self, scaling: Float8Scaling, index: int) -> None:
        self._scaling, self._index, self._recipe = scaling, index, scaling.recipe
        self._weight: tuple[Any, ...] | None = None
        self._kept: tuple[Tensor, ...] | None = None

    def forget_weight(self) -> None:
        """The weight is about to change: cast it again at its next use."""
        self._weight = None

    def keep_weight(self, weight: Tensor) -> None:
        """From now on the cast weight has an address of its own, where CUDA graphs read it. They do not cast it: call
        `refresh_weight` ahead of their replays, which casts it for the first microbatch of a step alone."""
        if self._kept is None:
            self._kept = self._cast(weight.detach(), "weight", None, trains=False)

    def refresh_weight(self, weight: Tensor) -> None:
        """Bring the kept weight up to date, if `weight` has changed."""
        state = weight._version, weight.data_ptr()
        if self._kept is not None and (self._weight is None or self._weight[0] != state):
            rows, scale_inv, *columns = self._cast(weight.detach(), "weight", None, trains=True)
            fresh = rows, scale_inv, columns[0] if columns else rows.t()  # torch transposes nothing by itself
            for kept, value in zip(self._kept, fresh, strict=False):
                kept.copy_(value)
            self._weight = state, *self._kept

    def pack(self, x: Tensor, kind: str, gathered_over: Group | None, *, trains: bool) -> Packed:
        values, scale_inv, *columns = self._cast(x.detach(), kind, gathered_over, trains=trains)
        return values.view(torch.uint8), scale_inv, *(made.view(torch.uint8) for made in columns)

    def for_wgrad(self, packed: Packed) -> Packed:
        return packed if len(packed) < 3 else (packed[0].new_empty(0), *packed[1:])

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

    def _rows(self, packed: Packed, kind: str) -> Tensor:
        """The fp8 values, [N, K]."""
        return _flat(packed[0]).view(self._recipe.dtype(kind))

    def _columns(self, packed: Packed, kind: str) -> Tensor:
        """The fp8 values, [K, N]."""
        return packed[2].view(self._recipe.dtype(kind)) if len(packed) > 2 else self._rows(packed, kind).t()

    def _cast(self, x: Tensor, kind: str, group: Group | None, *, trains: bool) -> tuple[Tensor, ...]:
        """The fp8 values in x's shape, the reciprocal of their scale, and where kernels make them the values [K, N]."""
        transposed = group is None and (trains or kind == "weight")  # joined parts of a sequence are no joined columns
        rows, scale_inv, columns = self._scaling.operand(
            self._index, kind, _flat(x), group, noted=trains, transposed=transposed
        )
        return rows.view(x.shape), scale_inv, *(() if columns is None else (columns,))

    def _cast_weight(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Cast once per step: between the microbatches of a step weights do not change."""
        if self._kept is not None:
            if not is_graph_capturing():
                self.refresh_weight(weight)
            return self._kept
        state = weight._version, weight.data_ptr()
        if self._weight is None or self._weight[0] != state:
            self._weight = state, *self._cast(weight.detach(), "weight", None, trains=True)
        return self._weight[1:]


class BlockwiseGemms(Float8Gemms):
    """The products of one linear layer with a scale per block. Inputs are kept as they came: forward sums over their
    columns, the weight gradient over their rows, and each cast starts from the values, so that no error is made twice.
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


# ---- scales ----


class Float8Scaling:
    """The scales of all fp8 layers of one model chunk.

    Args:
        recipe: formats and scaling.
        groups: this rank's groups.
        device: where the scales live.
    """

    def __init__(self, recipe: Float8Recipe, groups: ParallelGroups, device: torch.device | str | None = None) -> None:
        self.recipe = recipe
        self._one_sample, self._stage = groups.tp_cp, groups.tp_dp_cp
        self._device = groups.device if device is None else torch.device(device)
        self._members: dict[str, Float8Gemms] = {}
        self._steps = 0
        self._resize(0)

    def gemms(self, name: str) -> Float8Gemms:
        """The products of the layer `name`.

        Raises:
            ValueError: a layer of this name has them already.
        """
        if name in self._members:
            raise ValueError(f"the fp8 scales of {name} belong to another layer; names must differ")
        made = BlockwiseGemms if self.recipe.name == "blockwise" else Float8Gemms
        self._members[name] = made(self, len(self._members))
        self._resize(len(self._members))
        return self._members[name]

    @property
    def names(self) -> tuple[str, ...]:
        """The layers, in the order of `scales`."""
        return tuple(self._members)

    @property
    def scales(self) -> Tensor:
        """Of `delayed`: what each layer's input, weight and output gradient are multiplied by, [M, 3]."""
        return self._scale_M3

    def region(self) -> AbstractContextManager[None]:
        """Where the forward of all layers of one microbatch runs; only Transformer Engine's layers need to be told."""
        return nullcontext()

    def operand(
        self, index: int, kind: str, x_RC: Tensor, group: Group | None, *, noted: bool, transposed: bool
    ) -> fp8_operands.Operand:
        """x in fp8, the reciprocal of its scale (a float32 scalar), and where kernels make it and it is asked for x
        transposed.

        group: whose ranks agree on the scale of `current`, None for this rank alone.
        noted: whether its amax counts for later steps; not so in an evaluation.
        """
        column, dtype = KINDS.index(kind), self.recipe.dtype(kind)
        delayed = self.recipe.name == "delayed"
        assert delayed or self.recipe.name == "current"
        so_far = self._amax_M3[index, column] if noted and delayed else None
        if delayed and self._steps:
            known = self._scale_M3[index, column]
            return fp8_operands.operand_by_history(x_RC, known, dtype, transposed=transposed, so_far=so_far)
        peaks_P = self._agreed(fp8_operands.peaks(x_RC), self._one_sample if delayed else group)
        margin = self.recipe.margin if delayed else 0
        scale, scale_inv = fp8_operands.scales(peaks_P, dtype, margin, so_far=so_far)
        return fp8_operands.operand(x_RC, scale, scale_inv, dtype, transposed=transposed)

    def forget_weights(self) -> None:
        """All layers cast their weights anew at the next use."""
        for member in self._members.values():
            member.forget_weight()

    @property
    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        """What steps change, in place: the largest magnitudes of this step, those of earlier ones, the scales."""
        return self._amax_M3, self._history_LM3, self._scale_M3

    def end_step(self) -> None:
        """After the backward of the last microbatch: weights will change, and `delayed` moves its history on.

        Called by all ranks of tp_dp_cp; the one all-reduce of a step.
        """
        self.forget_weights()
        if self.recipe.name != "delayed" or not self._members:
            return
        amax_M3 = torch.where(self._amax_M3.isfinite(), self._amax_M3, 0)
        with comm_scope(layer="fp8", phase="amax"):
            amax_M3 = collectives.all_reduce(amax_M3, self._stage, "max")
        self._history_LM3.copy_(torch.cat([amax_M3[None], self._history_LM3[:-1]]))  # in place: a graph may hold this
        chosen = self._history_LM3.amax(0) if self.recipe.amax_compute_algo == "max" else amax_M3
        for column, kind in enumerate(KINDS):
            fresh = scale_of(chosen[:, column], self.recipe.dtype(kind)) / 2**self.recipe.margin
            known = self._scale_M3[:, column]
            known.copy_(torch.where(chosen[:, column] > 0, fresh, known))
        self._amax_M3.zero_()
        self._steps += 1

    def state_dict(self) -> dict[str, Tensor]:
        """What a resumed run needs to scale as this one would have: history [L, 3] by layer, and the steps so far."""
        histories = {name: self._history_LM3[:, index].clone() for index, name in enumerate(self._members)}
        scales = {f"{name}.scale": self._scale_M3[index].clone() for index, name in enumerate(self._members)}
        return histories | scales | {"steps": torch.tensor(self._steps)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state_dict`; layers of other chunks in `state` are passed over.

        Raises:
            KeyError: a layer of this chunk is missing.
        """
        for index, name in enumerate(self._members):
            self._history_LM3[:, index] = state[name]
            self._scale_M3[index] = state[f"{name}.scale"]
        self._steps = int(state["steps"])

    def _agreed(self, peaks_P: Tensor, group: Group | None) -> Tensor:
        """The largest magnitude over the ranks of `group`, [1]; the peaks as they are where this rank is alone."""
        if group is None or group.size == 1:
            return peaks_P
        return collectives.all_reduce(peaks_P.amax(), group, "max").view(1)

    def _resize(self, members: int) -> None:
        made: Callable[..., Tensor] = lambda *shape: torch.zeros(*shape, members, 3, device=self._device)  # noqa: E731
        self._amax_M3, self._history_LM3 = made(), made(self.recipe.amax_history_len)
        self._scale_M3 = made() + 1


def end_float8_step(chunks: Iterable[Any]) -> None:
    """`Float8Scaling.end_step` of every model chunk that computes in fp8; nothing for the others."""
    for chunk in chunks:
        scaling = getattr(getattr(chunk, "module", chunk), "float8", None)
        if scaling is not None:
            scaling.end_step()
