"""Linear layers cut by columns or by rows over the tensor-parallel group (arXiv 1909.08053, section 3).

"Column" and "row" refer to the paper's A in Y = XA. Weights are stored as torch stores them, [output, input], which is
A's transpose. A column-parallel layer followed by a row-parallel one needs one all-reduce forward (g, after the second)
and one backward (f, before the first). The dimension that is cut never has to be whole in between.

f and g could wrap a plain linear function (`mappings.py`). Here they are inside it, so that f's all-reduce overlaps
with the product that makes the weight gradient. The file goes from the inside out: the three products (`Gemms`), the
autograd functions that add communication, the layers that hold the weights.

Shapes: S sequence, B batch, I input size, O output size; t = size of the group; N = S x B.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Required

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.compiler import is_compiling

from labkit.comm import collectives
from labkit.comm.groups import Group
from labkit.comm.ledger import comm_scope, current_scope
from labkit.events import span, watchers
from labkit.parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from labkit.parallel.opaque_linear import numbered, opaque_linear
from labkit.parallel.parameters.parameter_record import Replicated, record_of, weight_gradient
from labkit.parallel.parameters.weights import Seed, WeightOptions, make_parameter
from labkit.parallel.weight_grad_store import deferred, is_collecting

# ---- products ----

Packed = tuple[Tensor, ...]
"""The operand of a product: a tensor alone, or under fp8 the tensor in eight bits and its scales."""


class Gemms:
    """The three products of one linear layer, in the type of its tensors. `labkit.fp8` has another kind."""

    def pack(self, x: Tensor, kind: str, gathered_over: Group | None, *, trains: bool) -> Packed:
        """Turn x into the form that the products take; here x has that form already.

        kind: `input`, or `grad` for the gradient of the output.
        gathered_over: the group whose parts of the sequence are joined before the product; None where x is whole.
        trains: a backward can follow.
        """
        return (x,)

    def for_wgrad(self, packed: Packed) -> Packed:
        """Return the part of a packed tensor that `wgrad` reads, because backward keeps no more of an input."""
        return packed

    def fprop(self, x: Packed, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + b: [.., I] -> [.., O]."""
        return F.linear(x[0], weight, bias)

    def dgrad(self, grad: Packed, weight: Tensor) -> Tensor:
        """Return dy W: [.., O] -> [.., I]."""
        return grad[0] @ weight

    def wgrad(
        self, grad: Packed, x: Packed, weight: Tensor, main_grad: Tensor | None, *, replace: bool = False
    ) -> Tensor | None:
        """Return dy^T x, [O, I]. With `main_grad` add it there, or with `replace` write it there, and return None."""
        grad_NO, x_NI = grad[0].reshape(-1, grad[0].shape[-1]), x[0].reshape(-1, x[0].shape[-1])
        return weight_gradient(grad_NO, x_NI, main_grad, replace=replace)


class Precision:
    """Gives each linear layer of a model chunk its products. This one leaves them in the type of the tensors."""

    region: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)
    """Makes the context in which the forward of all layers of one microbatch runs."""

    def gemms(self, name: str) -> Gemms:
        """Return the products of the layer `name`."""
        return Gemms()

    def end_step(self) -> None:
        """End a step, after its last backward; all ranks of tp_dp_cp call this. fp8 agrees on its scales here."""


NATIVE = Precision()
"""The precision of layers that are given no other: products in the type of the tensors."""


# ---- functions ----

_UNOBSERVED = nullcontext()


@dataclass(frozen=True)
class LinearPlan:
    """The settings of one linear layer, for its forward and backward."""

    name: str
    """Name of the layer, for the ledger and for Events."""
    group: Group
    """Tensor-parallel group."""
    sequence_parallel: bool = False
    """Between tensor-parallel regions each rank holds its part of the sequence."""
    accumulate: bool = False
    """Add the weight gradient to `weight.main_grad` where it exists."""
    gemms: Gemms = field(default_factory=Gemms)
    """The products, in the type of the tensors or in another."""
    number: Tensor | None = None
    """Number of the layer, by which a compiled region finds it (`opaque_linear.py`)."""

    @property
    def gathered_over(self) -> Group | None:
        """The group that joins the sequence; None where nothing is cut."""
        return self.group if self.sequence_parallel else None

    @property
    def parts(self) -> int:
        """The ranks over which the sequence is cut; 1 where nothing is cut."""
        return self.group.size if self.sequence_parallel else 1

    def booked(self, phase: str | None = None) -> AbstractContextManager[Any]:
        """Book the block's communication under this layer and `phase`; None is the phase already set, or `forward`."""
        if not watchers and not is_collecting():  # a weight gradient put off may be observed
            return _UNOBSERVED
        return comm_scope(self.name, phase or current_scope().phase or "forward")

    def timed(self, kind: str) -> AbstractContextManager[None]:
        """Record the block as an Event if somebody is recording."""
        return span(f"{self.name} {kind}", kind) if watchers else _UNOBSERVED


class _LocalLinear(Function):
    """y = x W^T + b on a rank that is alone in its group, so there is neither f nor g.

    forward   y = x W^T + b              [S, B, I] x [O, I] -> [S, B, O]
    dgrad     dx = dy W                  [S, B, O] x [O, I] -> [S, B, I]
    wgrad     dW = dy^T x, db = sum dy   [O, N] x [N, I] -> [O, I]

    `bias_apart` adds the bias to the finished product, as a row-parallel layer does, so that both round alike.
    While a `WeightGradStore` collects, wgrad waits for W, the second action of a split backward.
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
        return grad_x, *_parameter_gradients(ctx, grad, grads[0], tuple(x)), None, None, None


class _ColumnLinear(Function):
    """y = x W^T + b with f inside, so that its all-reduce overlaps with a GEMM.

    forward   y_r = x W_r^T + b_r            [S, B, I] x [O/t, I] -> [S, B, O/t]
    dgrad     dx = sum_r dy_r W_r            [S, B, O/t] x [O/t, I] -> [S, B, I], all-reduce started, not awaited
    wgrad     dW_r = dy_r^T x, db_r = sum dy [O/t, N] x [N, I] -> [O/t, I], while the all-reduce runs

    Under sequence parallelism forward gathers x from [S/t, B, I] and backward gathers it again. dx is reduce-scattered.

    While a `WeightGradStore` collects, wgrad waits for W, and the second gather of x waits too: only wgrad needs it.
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
        regathering = pending = None  # the second gather of x, the sum of dx

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
                pending = start(grad_x, plan.group)  # this is f; wgrad hides it
            parameter_gradients = _parameter_gradients(ctx, grad, grads[0], whole)
            return None if pending is None else pending.wait(), *parameter_gradients, None, None


class _RowLinear(Function):
    """y = x W^T + b with g inside: the sum needs no buffer of its own, and the bias is added in place, once.

    forward   y = (sum_r x_r W_r^T) + b      [S, B, I/t] x [O, I/t] -> [S, B, O], all-reduced
    dgrad     dx_r = dy W_r                  [S, B, O] x [O, I/t] -> [S, B, I/t]
    wgrad     dW_r = dy^T x_r, db = sum dy   [O, N] x [N, I/t] -> [O, I/t]

    Under sequence parallelism y is reduce-scattered to [S/t, B, O], dy is gathered, and db sums over this rank's part.

    While a `WeightGradStore` collects, wgrad waits for W and keeps the gathered dy, which dgrad needed at once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan, trains: bool) -> Tensor:
        ctx.plan, ctx.parameters = plan, (weight, bias)
        with plan.booked():
            packed = plan.gemms.pack(x, "input", None, trains=trains)
            ctx.save_for_backward(weight, *plan.gemms.for_wgrad(packed))
            partial = plan.gemms.fprop(packed, weight, None)
            reduce = collectives.reduce_scatter if plan.sequence_parallel else collectives.all_reduce  # g
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
            return grad_x, *_parameter_gradients(ctx, grad, grads[0], tuple(x)), None, None


Trained = tuple[Tensor | None, Tensor | None]
"""Weight and bias, or their gradients; None for one that needs no gradient."""


def _parameter_gradients(ctx: Any, grad: Packed, bias_grad: Tensor, x: Packed | Callable[[], Packed]) -> Trained:
    """Return the gradients of weight and bias, or (None, None) if a `WeightGradStore` has postponed them.

    bias_grad: gradient of the tensor that the bias was added to. x: the whole input, or a function that gathers it.
    """
    plan, (weight, bias), (_, wants_weight, wants_bias, *_) = ctx.plan, ctx.parameters, ctx.needs_input_grad
    weight, bias = weight if wants_weight else None, bias if wants_bias else None
    grad = plan.gemms.for_wgrad(grad) if is_collecting() else grad

    def compute() -> Trained:
        whole = x if isinstance(x, tuple) else x()
        grad_weight = grad_bias = None
        with plan.timed("weight_grad"):
            if weight is not None:
                main_grad = getattr(weight, "main_grad", None) if plan.accumulate else None
                if main_grad is None:
                    grad_weight = plan.gemms.wgrad(grad, whole, weight, None)
                else:
                    record = record_of(weight)
                    plan.gemms.wgrad(grad, whole, weight, main_grad, replace=not record.has_gradient)
                    record.has_gradient = True
            if bias is not None:
                grad_bias = bias_grad.reshape(-1, bias_grad.shape[-1]).sum(0)
        return grad_weight, grad_bias

    return (None, None) if deferred((weight, bias), compute) else compute()


def column_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan) -> Tensor:
    """Return y = x W^T + b cut by columns, for `ColumnParallelLinear` or a weight held elsewhere (a tied output)."""
    if plan.number is not None and is_compiling():
        return opaque_linear(x, weight, bias, plan, x.shape[0] * plan.parts)
    trains = torch.is_grad_enabled()
    if plan.group.size == 1:
        if not trains:  # no node of autograd's graph, which a pass of a single token would pay for
            return plan.gemms.fprop(plan.gemms.pack(x, "input", None, trains=False), weight, bias)
        return _LocalLinear.apply(x, weight, bias, plan, trains, False)  # type: ignore[no-any-return]
    return _ColumnLinear.apply(x, weight, bias, plan, trains)  # type: ignore[no-any-return]


def row_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan) -> Tensor:
    """Return y = x W^T + b cut by rows, for `RowParallelLinear`."""
    if plan.number is not None and is_compiling():
        return opaque_linear(x, weight, bias, plan, x.shape[0] // plan.parts)
    trains = torch.is_grad_enabled()
    if plan.group.size == 1:
        if not trains:
            y = plan.gemms.fprop(plan.gemms.pack(x, "input", None, trains=False), weight, None)
            return y if bias is None else y.add_(bias)
        return _LocalLinear.apply(x, weight, bias, plan, trains, True)  # type: ignore[no-any-return]
    return _RowLinear.apply(x, weight, bias, plan, trains)  # type: ignore[no-any-return]


# ---- layers ----


class _Linear(nn.Module):
    """What both kinds of layers have: a name, a plan, and functions for them in a compiled region."""

    plan: LinearPlan
    group: Group
    over_ranks: ClassVar[type[Function]]
    """The function that computes on several ranks."""

    def be_opaque(self) -> None:
        """Prepare for a forward that is compiled: the compiler will not look into this layer (`opaque_linear.py`)."""
        self.plan = replace(self.plan, number=numbered(self))

    def products(self) -> type[Function]:
        """Return the function that computes this layer."""
        return _LocalLinear if self.group.size == 1 else self.over_ranks


class LinearOptions(WeightOptions, total=False):
    """The options that all linear layers of a model share, as `ColumnParallelLinear` explains them."""

    group: Required[Group]
    bias: bool
    sequence_parallel: bool
    gradient_accumulation_fusion: bool
    precision: Precision


def _check_divides(name: str, what: str, size: int, group: Group, stride: int = 1) -> None:
    if size % (group.size * stride):
        raise ValueError(
            f"{name}: {what} {size} cannot be cut over tp={group.size}"
            + (f" in {stride} blocks" if stride > 1 else "")
            + f"; it must be a multiple of {group.size * stride}"
        )


class ColumnParallelLinear(_Linear):
    """y = x A + b with A cut by columns and f inside, so every rank sees all of x and makes its part of y.

    Holds `weight` [O/t, I] and `bias` [O/t].

    Args:
        name: name in the whole model; parameters are `<name>.weight` and `<name>.bias`.
        input_size: I.
        output_size: O; must be a multiple of t x partition_stride.
        group: tensor-parallel group.
        bias: whether the layer has a bias, which starts at 0.
        gather_output: return the whole output, [S, B, O], on every rank.
        skip_bias_add: return the bias instead of adding it, so that the caller can fuse it with what follows.
        sequence_parallel: x is this rank's part of the sequence, [S/t, B, I].
        gradient_accumulation_fusion: add the weight gradient to `weight.main_grad` where it exists.
        precision: gives the three products (`Gemms`).
        seed, std: seed and standard deviation of the initial weight: it is drawn from N(0, std) by (seed, name).
        partition_stride: number of blocks of the output, each split separately (2 for [gate; up]).
        replicated: columns of the output that neighbouring ranks share, such as a key and a value. y and the
            parameters then have these columns besides this rank's own, so more than O/t.

    Raises:
        ValueError: sizes that do not divide, or options that exclude each other.
    """

    over_ranks = _ColumnLinear

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
        precision: Precision = NATIVE,
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
        self.plan = LinearPlan(name, group, sequence_parallel, gradient_accumulation_fusion, precision.gemms(name))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [S, B, I] -> (y [S, B, O/t] or [S, B, O], the bias if it was skipped, else None)."""
        y = column_parallel_linear(x, self.weight, None if self.skip_bias_add else self.bias, self.plan)
        if self.gather_output:
            with comm_scope(layer=self.name):
                y = gather_from_tensor_model_parallel_region(y, self.group)
        return y, self.bias if self.skip_bias_add else None


class RowParallelLinear(_Linear):
    """y = x A + b with A cut by rows and g inside, so every rank has its part of x and makes a partial sum.

    Holds `weight` [O, I/t] and `bias` [O]. The bias is whole and equal on every rank, and is added once, after the sum.

    Args: those of `ColumnParallelLinear`, except
        input_size: I; must be a multiple of t. The output size may be any.
        input_is_parallel: x is already this rank's part, [S, B, I/t]; if False it is cut here.
        sequence_parallel: return this rank's part of the sequence, [S/t, B, O]; g is then a reduce-scatter.

    Raises:
        ValueError: t does not divide the input size, or sequence_parallel without input_is_parallel.
    """

    over_ranks = _RowLinear

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
        precision: Precision = NATIVE,
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
        made: dict[str, Any] = {"dtype": dtype, "device": device}
        cut: dict[str, Any] = {"group": group, "partition_dim": 1, **made}
        self.weight = make_parameter(f"{name}.weight", (output_size, input_size), seed=seed, std=std, **cut)
        self.bias = make_parameter(f"{name}.bias", (output_size,), fill=0.0, **made) if bias else None
        if self.bias is not None:
            record_of(self.bias).sequence_parallel = sequence_parallel
        self.plan = LinearPlan(name, group, sequence_parallel, gradient_accumulation_fusion, precision.gemms(name))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [S, B, I/t] (or [S, B, I]) -> (y [S, B, O], the bias if it was skipped, else None).

        Under sequence parallelism y is [S/t, B, O].
        """
        if not self.input_is_parallel:
            with comm_scope(layer=self.name):
                x = scatter_to_tensor_model_parallel_region(x, self.group)
        y = row_parallel_linear(x, self.weight, None if self.skip_bias_add else self.bias, self.plan)
        return y, self.bias if self.skip_bias_add else None
