"""Linear layers cut by columns or by rows over the tensor-parallel group (arXiv 1909.08053, section 3).

Weights are stored as torch stores them, [output, input]; "column" and "row" speak of the paper's A in Y = XA, which is
the transpose. A column-parallel layer followed by a row-parallel one needs one all-reduce forward (g, after the second)
and one backward (f, before the first), because the split dimension never has to be whole in between.

Shapes: S sequence, B batch, I input size, O output size; t = size of the group; N = S x B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from labkit.events import span
from labkit.parallel import collectives
from labkit.parallel.groups import Group
from labkit.parallel.ledger import comm_scope
from labkit.parallel.mappings import (
    backward_scope,
    forward_scope,
    gather_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from labkit.parallel.parameter_record import Replicated, put_gradient, record_of
from labkit.parallel.weight_grad_store import deferred
from labkit.parallel.weights import Seed, make_parameter

if TYPE_CHECKING:
    from labkit.parallel.fp8 import Float8Scaling


def weight_gradient(
    grad_NO: Tensor, x_NI: Tensor, main_grad: Tensor | None = None, *, replace: bool = False
) -> Tensor | None:
    """dL/dW = grad^T x, [O, I]. With `main_grad` it is added there, or with `replace` put there, and None returned: no
    gradient tensor is made."""
    if main_grad is None:
        return grad_NO.t() @ x_NI
    if main_grad.dtype != x_NI.dtype:
        return put_gradient(grad_NO.t() @ x_NI, main_grad, replace=replace)
    if replace:
        torch.mm(grad_NO.t(), x_NI, out=main_grad)
    else:
        main_grad.addmm_(grad_NO.t(), x_NI)
    return None


Packed = tuple[Tensor, ...]
"""An input or an output's gradient as it is kept and gathered: the first tensor has its rows, the others its scales."""


class Gemms:
    """The three products of a linear layer, in the type of its tensors. `fp8.Float8Gemms` has the same surface."""

    def pack(self, x: Tensor, kind: str, gathered_over: Group | None, *, trains: bool) -> Packed:
        """What a product takes in place of x, kept for backward.

        kind: `input` or `grad`, the gradient of the output.
        gathered_over: the group whose parts of the sequence are joined before the product; None where x is whole.
        trains: whether a backward can follow.
        """
        return (x,)

    def for_wgrad(self, packed: Packed) -> Packed:
        """Of a packed tensor what `wgrad` reads: all that backward keeps of an input."""
        return packed

    def fprop(self, x: Packed, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b: [.., I] -> [.., O]."""
        return F.linear(x[0], weight, bias)

    def dgrad(self, grad: Packed, weight: Tensor) -> Tensor:
        """dy W: [.., O] -> [.., I]."""
        return grad[0] @ weight

    def wgrad(
        self, grad: Packed, x: Packed, weight: Tensor, main_grad: Tensor | None, *, replace: bool = False
    ) -> Tensor | None:
        """dy^T x, [O, I]; with `main_grad` it is added there, with `replace` put there, and None returned."""
        grad_NO, x_NI = (packed[0].reshape(-1, packed[0].shape[-1]) for packed in (grad, x))
        return weight_gradient(grad_NO, x_NI, main_grad, replace=replace)


IN_OWN_TYPE = Gemms()
"""What linear layers use unless they are told otherwise."""


@dataclass(frozen=True)
class LinearPlan:
    """What a linear layer does, and by which products."""

    name: str
    """For Events."""
    group: Group
    """Tensor-parallel group; size 1 makes all communication the identity."""
    sequence_parallel: bool = False
    """Outside the region each rank holds its part of the sequence."""
    accumulate: bool = False
    """Add the weight gradient to `weight.main_grad` where it exists."""
    gemms: Gemms = IN_OWN_TYPE
    """The products, in the type of the tensors or in fp8."""

    @property
    def gathered_over(self) -> Group | None:
        """The group that joins a sequence, where it is cut."""
        return self.group if self.sequence_parallel else None


class _ColumnLinear(Function):
    """y = x W^T + b with f inside, so that its all-reduce hides behind a GEMM.

    forward   y_r = x W_r^T + b_r            [S, B, I] x [O/t, I] -> [S, B, O/t]
    dgrad     dx = sum_r dy_r W_r            [S, B, O/t] x [O/t, I] -> [S, B, I], all-reduce started, not awaited
    wgrad     dW_r = dy_r^T x, db_r = sum dy [O/t, N] x [N, I] -> [O/t, I], while the all-reduce runs

    Under sequence parallelism x is gathered from [S/t, B, I] in forward, not kept but gathered again in backward, and
    dx is reduce-scattered instead of all-reduced.

    Where a `WeightGradStore` collects, wgrad waits for its W, and so does the second gather of x, which only it needs.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan, trains: bool) -> Tensor:
        ctx.plan, ctx.parameters = plan, (weight, bias)
        with forward_scope(ctx, plan.group):
            part, *scales = packed = plan.gemms.pack(x, "input", plan.gathered_over, trains=trains)
            ctx.save_for_backward(weight, *plan.gemms.for_wgrad(packed))
            whole = collectives.all_gather(part, plan.group) if plan.sequence_parallel else part
        return plan.gemms.fprop((whole, *scales), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        plan, trained = ctx.plan, _trained(ctx)
        weight, part, *scales = ctx.saved_tensors
        own, pending = grads[0], None

        def gathered() -> Packed:
            return (collectives.all_gather(part, plan.group) if plan.sequence_parallel else part, *scales)

        with backward_scope(ctx):
            grad = plan.gemms.pack(own, "grad", None, trains=True)
            kept = plan.gemms.for_wgrad(grad)
            later = deferred(trained, lambda: _parameter_gradients(plan, trained, kept, own, gathered()))
            regathers = plan.sequence_parallel and not later
            regathering = collectives.all_gather_async(part, plan.group) if regathers else None
            if ctx.needs_input_grad[0]:
                with span(f"{plan.name} input_grad", "input_grad"):
                    grad_x = plan.gemms.dgrad(grad, weight)
                start = collectives.reduce_scatter_async if plan.sequence_parallel else collectives.all_reduce_async
                pending = start(grad_x, plan.group)
            whole = part if regathering is None else regathering.wait()
            now = (None, None) if later else _parameter_gradients(plan, trained, kept, own, (whole, *scales))
            return None if pending is None else pending.wait(), *now, None, None


class _RowLinear(Function):
    """y = x W^T + b with g inside: the sum needs no buffer of its own, and the bias is added in place, once.

    forward   y = (sum_r x_r W_r^T) + b      [S, B, I/t] x [O, I/t] -> [S, B, O], all-reduced
    dgrad     dx_r = dy W_r                  [S, B, O] x [O, I/t] -> [S, B, I/t]
    wgrad     dW_r = dy^T x_r, db = sum dy   [O, N] x [N, I/t] -> [O, I/t]

    Under sequence parallelism y is reduce-scattered to [S/t, B, O], dy gathered, and db the sum over this rank's part.

    Where a `WeightGradStore` collects, wgrad waits for its W, and keeps the gathered dy, which dgrad needed at once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan, trains: bool) -> Tensor:
        ctx.plan, ctx.parameters = plan, (weight, bias)
        packed = plan.gemms.pack(x, "input", None, trains=trains)
        ctx.save_for_backward(weight, *plan.gemms.for_wgrad(packed))
        partial = plan.gemms.fprop(packed, weight, None)
        reduce = collectives.reduce_scatter if plan.sequence_parallel else collectives.all_reduce
        with forward_scope(ctx, plan.group):
            y = reduce(partial, plan.group)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        plan, trained = ctx.plan, _trained(ctx)
        weight, *x = ctx.saved_tensors
        own, grad_x = grads[0], None
        with backward_scope(ctx):
            part, *scales = plan.gemms.pack(own, "grad", plan.gathered_over, trains=True)
            grad = (collectives.all_gather(part, plan.group) if plan.sequence_parallel else part, *scales)
            if ctx.needs_input_grad[0]:
                with span(f"{plan.name} input_grad", "input_grad"):
                    grad_x = plan.gemms.dgrad(grad, weight)
            kept = plan.gemms.for_wgrad(grad)
            later = deferred(trained, lambda: _parameter_gradients(plan, trained, kept, own, tuple(x)))
            now = (None, None) if later else _parameter_gradients(plan, trained, kept, own, tuple(x))
        return grad_x, *now, None, None


Trained = tuple[Tensor | None, Tensor | None]
"""Weight and bias, each None where it wants no gradient; or their gradients."""


def _trained(ctx: Any) -> Trained:
    weight, bias = ctx.parameters
    _, wants_weight, wants_bias, *_ = ctx.needs_input_grad
    return weight if wants_weight else None, bias if wants_bias else None


def _parameter_gradients(plan: LinearPlan, trained: Trained, grad: Packed, bias_grad: Tensor, x: Packed) -> Trained:
    """Gradients of weight and bias where they are wanted; `bias_grad` is the gradient of what the bias was added to."""
    weight, bias = trained
    grad_weight = grad_bias = None
    with span(f"{plan.name} weight_grad", "weight_grad"):
        if weight is not None:
            main_grad = getattr(weight, "main_grad", None) if plan.accumulate else None
            if main_grad is None:
                grad_weight = plan.gemms.wgrad(grad, x, weight, None)
            else:
                record = record_of(weight)
                plan.gemms.wgrad(grad, x, weight, main_grad, replace=not record.has_gradient)
                record.has_gradient = True
        if bias is not None:
            grad_bias = bias_grad.reshape(-1, bias_grad.shape[-1]).sum(0)
    return grad_weight, grad_bias


def column_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan) -> Tensor:
    """The function behind `ColumnParallelLinear`, for weights that are held elsewhere (a tied output layer)."""
    return _ColumnLinear.apply(x, weight, bias, plan, torch.is_grad_enabled())  # type: ignore[no-any-return]


def row_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan) -> Tensor:
    """The function behind `RowParallelLinear`."""
    return _RowLinear.apply(x, weight, bias, plan, torch.is_grad_enabled())  # type: ignore[no-any-return]


class _Lookup(Function):
    """Rows of a table: a linear layer whose inputs are one-hot rows that nobody makes. The ids have no gradient.

    forward   y_n = W[id_n]                           [..] -> [.., I]
    wgrad     dW_v = sum of the dy_n with id_n = v    [.., I] -> [O, I], dense
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.parameter, ctx.name = weight, name
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (ids,), parameter, name = ctx.saved_tensors, ctx.parameter, ctx.name

        def wgrad() -> tuple[Tensor]:
            with span(f"{name} weight_grad", "weight_grad"):
                return (torch.ops.aten.embedding_dense_backward(grads[0], ids, parameter.shape[0], -1, False),)

        return None, None if deferred((parameter,), wgrad) else wgrad()[0], None


def table_lookup(ids: Tensor, weight: Tensor, name: str) -> Tensor:
    """The rows of `weight` [O, I] that `ids` name, [.., I]: `F.embedding` whose gradient can be put off to W."""
    return _Lookup.apply(ids, weight, name)  # type: ignore[no-any-return]


def _check_divides(name: str, what: str, size: int, group: Group, stride: int = 1) -> None:
    if size % (group.size * stride):
        raise ValueError(
            f"{name}: {what} {size} cannot be cut over tp={group.size}"
            + (f" in {stride} blocks" if stride > 1 else "")
            + f"; it must be a multiple of {group.size * stride}"
        )


class ColumnParallelLinear(nn.Module):
    """y = x A + b with A cut by columns: every rank sees all of x and makes its part of the output.

    Holds `weight` [O/t, I] and `bias` [O/t]. The operator f is part of the layer.

    Args:
        name: name in the whole model; parameters are `<name>.weight` and `<name>.bias`.
        input_size: I.
        output_size: O; must be a multiple of t x partition_stride.
        group: tensor-parallel group.
        bias: whether there is one (it starts at 0).
        gather_output: return the whole output, [S, B, O], on every rank.
        skip_bias_add: return the bias instead of adding it, so that the caller can fuse it with what follows.
        sequence_parallel: x is this rank's part of the sequence, [S/t, B, I].
        gradient_accumulation_fusion: add the weight gradient to `weight.main_grad` where it exists.
        float8: scales of the products in fp8; None computes in the type of the tensors.
        seed, std: of the initial weight, N(0, std) by (seed, name).
        partition_stride: blocks of the output cut each by itself (2 for [gate; up]).
        replicated: columns of the output that neighbouring ranks make alike; y and the parameters are then this
            rank's own columns and these, more than O/t.

    Raises:
        ValueError: sizes that do not divide, or options that exclude each other.
    """

    def __init__(
        self,
        name: str,
        input_size: int,
        output_size: int,
        *,
        group: Group,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
        gradient_accumulation_fusion: bool = False,
        float8: Float8Scaling | None = None,
        seed: Seed = 0,
        std: float = 0.02,
        partition_stride: int = 1,
        replicated: Replicated | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        alike = 0 if replicated is None else group.size // replicated.ranks * replicated.rows
        what = "output size" if replicated is None else "output size without its replicated columns"
        _check_divides(name, what, output_size - alike, group, partition_stride)
        if gather_output and (skip_bias_add or partition_stride > 1 or replicated):
            raise ValueError(
                f"{name}: gather_output goes neither with skip_bias_add nor with partition_stride > 1 or replicated"
            )
        self.name, self.group = name, group
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        cut: dict[str, Any] = {"group": group, "partition_dim": 0, "partition_stride": partition_stride}
        cut |= {"replicated": replicated, "dtype": dtype, "device": device}
        self.weight = make_parameter(f"{name}.weight", (output_size, input_size), seed=seed, std=std, **cut)
        self.bias = make_parameter(f"{name}.bias", (output_size,), fill=0.0, **cut) if bias else None
        sequence_parallel = sequence_parallel and group.size > 1
        gemms = float8.gemms(name) if float8 else IN_OWN_TYPE
        self.plan = LinearPlan(name, group, sequence_parallel, gradient_accumulation_fusion, gemms)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [S, B, I] -> (y [S, B, O/t] or [S, B, O], the bias if it was skipped, else None)."""
        with comm_scope(layer=self.name):
            y = column_parallel_linear(x, self.weight, None if self.skip_bias_add else self.bias, self.plan)
            if self.gather_output:
                y = gather_from_tensor_model_parallel_region(y, self.group)
        return y, self.bias if self.skip_bias_add else None


class RowParallelLinear(nn.Module):
    """y = x A + b with A cut by rows: every rank has its part of x and makes a partial sum of the whole output.

    Holds `weight` [O, I/t] and `bias` [O], the latter whole and alike on every rank: it is added once, after the sum.
    The operator g is part of the layer.

    Args:
        name: name in the whole model; parameters are `<name>.weight` and `<name>.bias`.
        input_size: I; must be a multiple of t.
        output_size: O.
        group: tensor-parallel group.
        bias: whether there is one (it starts at 0).
        input_is_parallel: x is already this rank's part, [S, B, I/t]; if False it is cut here.
        skip_bias_add: return the bias instead of adding it.
        sequence_parallel: return this rank's part of the sequence, [S/t, B, O] (reduce-scatter in place of g).
        gradient_accumulation_fusion: add the weight gradient to `weight.main_grad` where it exists.
        float8: scales of the products in fp8; None computes in the type of the tensors.
        seed, std: of the initial weight, N(0, std) by (seed, name).

    Raises:
        ValueError: t does not divide the input size, or sequence_parallel without input_is_parallel.
    """

    def __init__(
        self,
        name: str,
        input_size: int,
        output_size: int,
        *,
        group: Group,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
        gradient_accumulation_fusion: bool = False,
        float8: Float8Scaling | None = None,
        seed: Seed = 0,
        std: float = 0.02,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check_divides(name, "input size", input_size, group)
        if sequence_parallel and not input_is_parallel:
            raise ValueError(f"{name}: sequence_parallel needs input_is_parallel=True (the sequence is whole inside)")
        self.name, self.group = name, group
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        sequence_parallel = sequence_parallel and group.size > 1
        cut: dict[str, Any] = {"group": group, "partition_dim": 1}
        made: dict[str, Any] = {"dtype": dtype, "device": device}
        self.weight = make_parameter(f"{name}.weight", (output_size, input_size), seed=seed, std=std, **cut, **made)
        self.bias = make_parameter(f"{name}.bias", (output_size,), fill=0.0, **made) if bias else None
        if self.bias is not None:
            record_of(self.bias).sequence_parallel = sequence_parallel
        gemms = float8.gemms(name) if float8 else IN_OWN_TYPE
        self.plan = LinearPlan(name, group, sequence_parallel, gradient_accumulation_fusion, gemms)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [S, B, I/t] (or [S, B, I]) -> (y [S, B, O], the bias if it was skipped, else None)."""
        with comm_scope(layer=self.name):
            if not self.input_is_parallel:
                x = scatter_to_tensor_model_parallel_region(x, self.group)
            y = row_parallel_linear(x, self.weight, None if self.skip_bias_add else self.bias, self.plan)
        return y, self.bias if self.skip_bias_add else None
