"""y = x W^T + b over the tensor-parallel group, with f, g and their overlap inside (arXiv 1909.08053, section 3).

Weights are stored as torch stores them, [output, input]. f and g could stand around a plain linear function
(`mappings.py`); inside, f's all-reduce hides behind the product that makes the weight gradient.

Shapes: S sequence, B batch, I input size, O output size; t = size of the group; N = S x B.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from labkit.events import observers, span, start_observers
from labkit.parallel import collectives
from labkit.parallel.groups import Group
from labkit.parallel.ledger import comm_scope, current_scope
from labkit.parallel.parameters.parameter_record import record_of
from labkit.parallel.pipeline.weight_grad_store import deferred, is_collecting
from labkit.parallel.precision import IN_OWN_TYPE, Gemms, Packed

_UNOBSERVED = nullcontext()


@dataclass(frozen=True)
class LinearPlan:
    """Settings that forward and backward of one linear layer share."""

    name: str
    """For the ledger and for Events."""
    group: Group
    """Tensor-parallel group; size 1 makes all communication the identity."""
    sequence_parallel: bool = False
    """Outside the region each rank holds its part of the sequence."""
    accumulate: bool = False
    """Add the weight gradient to `weight.main_grad` where it exists."""
    gemms: Gemms = IN_OWN_TYPE
    """The products, in the type of the tensors or in another."""

    @property
    def gathered_over(self) -> Group | None:
        """The group that joins a sequence, where it is cut."""
        return self.group if self.sequence_parallel else None

    def booked(self, phase: str | None = None) -> AbstractContextManager[Any]:
        """Book what the block communicates under this layer and `phase`; None is forward, or the phase already set."""
        if not start_observers and not is_collecting():  # a W that comes later may be observed
            return _UNOBSERVED
        return comm_scope(self.name, phase or current_scope().phase or "forward")

    def timed(self, kind: str) -> AbstractContextManager[None]:
        """Record the block as an Event where somebody records."""
        return span(f"{self.name} {kind}", kind) if observers else _UNOBSERVED


class _LocalLinear(Function):
    """y = x W^T + b of a rank that is alone in its group: neither f nor g.

    forward   y = x W^T + b              [S, B, I] x [O, I] -> [S, B, O]
    dgrad     dx = dy W                  [S, B, O] x [O, I] -> [S, B, I]
    wgrad     dW = dy^T x, db = sum dy   [O, N] x [N, I] -> [O, I]

    `bias_apart` adds the bias to the finished product, as a row-parallel layer does: so both round alike.

    Where a `WeightGradStore` collects, wgrad waits for its W.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan, trains: bool, bias_apart: bool
    ) -> Tensor:
        ctx.plan, ctx.parameters = plan, (weight, bias)
        packed = plan.gemms.pack(x, "input", None, trains=trains)
        ctx.save_for_backward(weight, *plan.gemms.for_wgrad(packed))
        if bias is None or not bias_apart:
            return plan.gemms.fprop(packed, weight, bias)
        return plan.gemms.fprop(packed, weight, None).add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        plan, (weight, *x) = ctx.plan, ctx.saved_tensors
        grad, grad_x = plan.gemms.pack(grads[0], "grad", None, trains=True), None
        if ctx.needs_input_grad[0]:
            with plan.timed("input_grad"):
                grad_x = plan.gemms.dgrad(grad, weight)
        return grad_x, *_now_or_later(ctx, grad, grads[0], tuple(x)), None, None, None


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
        with plan.booked():
            part, *scales = packed = plan.gemms.pack(x, "input", plan.gathered_over, trains=trains)
            ctx.save_for_backward(weight, *plan.gemms.for_wgrad(packed))
            whole = collectives.all_gather(part, plan.group) if plan.sequence_parallel else part
        return plan.gemms.fprop((whole, *scales), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        plan, (weight, part, *scales) = ctx.plan, ctx.saved_tensors
        regathering = pending = None

        def whole() -> Packed:
            if not plan.sequence_parallel:
                return (part, *scales)
            gathered = collectives.all_gather(part, plan.group) if regathering is None else regathering.wait()
            return (gathered, *scales)

        with plan.booked("backward"):
            grad = plan.gemms.pack(grads[0], "grad", None, trains=True)
            if plan.sequence_parallel and not is_collecting():
                regathering = collectives.all_gather_async(part, plan.group)
            if ctx.needs_input_grad[0]:
                with plan.timed("input_grad"):
                    grad_x = plan.gemms.dgrad(grad, weight)
                start = collectives.reduce_scatter_async if plan.sequence_parallel else collectives.all_reduce_async
                pending = start(grad_x, plan.group)
            parameter_gradients = _now_or_later(ctx, grad, grads[0], whole)
            return None if pending is None else pending.wait(), *parameter_gradients, None, None


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
        with plan.booked():
            packed = plan.gemms.pack(x, "input", None, trains=trains)
            ctx.save_for_backward(weight, *plan.gemms.for_wgrad(packed))
            partial = plan.gemms.fprop(packed, weight, None)
            reduce = collectives.reduce_scatter if plan.sequence_parallel else collectives.all_reduce
            y = reduce(partial, plan.group)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        plan, (weight, *x), grad_x = ctx.plan, ctx.saved_tensors, None
        with plan.booked("backward"):
            part, *scales = plan.gemms.pack(grads[0], "grad", plan.gathered_over, trains=True)
            grad = (collectives.all_gather(part, plan.group) if plan.sequence_parallel else part, *scales)
            if ctx.needs_input_grad[0]:
                with plan.timed("input_grad"):
                    grad_x = plan.gemms.dgrad(grad, weight)
            return grad_x, *_now_or_later(ctx, grad, grads[0], tuple(x)), None, None


Trained = tuple[Tensor | None, Tensor | None]
"""Weight and bias, each None where it wants no gradient; or their gradients."""


def _now_or_later(ctx: Any, grad: Packed, bias_grad: Tensor, x: Packed | Callable[[], Packed]) -> Trained:
    """Gradients of weight and bias; (None, None) where a `WeightGradStore` has put them off.

    bias_grad: gradient of the tensor that the bias was added to. x: the whole input, or a function that gathers it.
    """
    plan, (weight, bias), wants = ctx.plan, ctx.parameters, ctx.needs_input_grad
    trained = weight if wants[1] else None, bias if wants[2] else None
    if not is_collecting():
        return _parameter_gradients(plan, trained, grad, bias_grad, x)
    kept = plan.gemms.for_wgrad(grad)
    later = deferred(trained, lambda: _parameter_gradients(plan, trained, kept, bias_grad, x))
    return (None, None) if later else _parameter_gradients(plan, trained, kept, bias_grad, x)


def _parameter_gradients(
    plan: LinearPlan, trained: Trained, grad: Packed, bias_grad: Tensor, x: Packed | Callable[[], Packed]
) -> Trained:
    """Gradients of weight and bias where they are wanted."""
    weight, bias = trained
    x = x if isinstance(x, tuple) else x()
    grad_weight = grad_bias = None
    with plan.timed("weight_grad"):
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
    if plan.group.size == 1:
        return _LocalLinear.apply(x, weight, bias, plan, torch.is_grad_enabled(), False)  # type: ignore[no-any-return]
    return _ColumnLinear.apply(x, weight, bias, plan, torch.is_grad_enabled())  # type: ignore[no-any-return]


def row_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan) -> Tensor:
    """The function behind `RowParallelLinear`."""
    if plan.group.size == 1:
        return _LocalLinear.apply(x, weight, bias, plan, torch.is_grad_enabled(), True)  # type: ignore[no-any-return]
    return _RowLinear.apply(x, weight, bias, plan, torch.is_grad_enabled())  # type: ignore[no-any-return]
