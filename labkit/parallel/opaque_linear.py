"""Linear layers inside a compiled region: one node of its graph each, which torch.compile does not look into.

The compiler would have to trace what a linear layer does besides its products: collectives that overlap with a product,
weight gradients that go straight into `main_grad`, the ledger, Events. Here the graph holds operators of labkit's own
instead, and these call the autograd functions of `layers.py` when the graph runs. The compiler fuses what lies between.

Nothing in the graph says which layer an operator belongs to: it finds the layer by a number in a tensor, an input like
the weights. So all layers of one shape share one graph, and compile once.

A rank that is alone in its group multiplies in the graph itself, in forward. Bias and its gradient are always in the
graph, where they join what comes before and after them.

Shapes: S sequence, B batch, I input size, O output size; t = size of the group.
"""

from __future__ import annotations

from functools import cache
from itertools import count
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

_layers: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
_numbers = count()


def numbered(layer: nn.Module) -> Tensor:
    """Return a new number of `layer`, in a tensor on the host, by which the operators find it while it lives."""
    _registered()
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number)


def _layer(number: Tensor) -> Any:
    return _layers[int(number)]


# ---- the operators, as they run ----


def _forward(x: Tensor, weight: Tensor, number: Tensor, length: int) -> Tensor:
    layer = _layer(number)
    kept = SimpleNamespace(save_for_backward=lambda *tensors: None)  # the graph keeps x
    return layer.products().forward(kept, x, layer.weight, None, layer.plan, True)


def _backward(grad: Tensor, x: Tensor, weight: Tensor, number: Tensor, returns_weight: bool) -> tuple[Tensor, Tensor]:
    layer = _layer(number)
    own: Tensor = layer.weight
    wants = (True, own.requires_grad, False)
    kept = SimpleNamespace(plan=layer.plan, parameters=(own, None), saved_tensors=(own, x), needs_input_grad=wants)
    grad_x, grad_weight, *_ = layer.products().backward(kept, grad)
    assert returns_weight == (grad_weight is not None), f"{layer.name}: compiled for weights with main_grad, or without"
    return grad_x, grad.new_empty(0) if grad_weight is None else grad_weight


# ---- the operators, as the compiler sees them ----


def _shape_of_forward(x: Tensor, weight: Tensor, number: Tensor, length: int) -> Tensor:
    return x.new_empty(length, *x.shape[1:-1], weight.shape[0])


def _shapes_of_backward(
    grad: Tensor, x: Tensor, weight: Tensor, number: Tensor, returns_weight: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight) if returns_weight else grad.new_empty(0)


@cache
def _registered() -> torch.library.Library:
    """Make the operators known to torch, once in a process that compiles, and return their library."""
    library = torch.library.Library("labkit", "FRAGMENT")
    library.define("linear(Tensor x, Tensor weight, Tensor number, int length) -> Tensor")
    library.define(
        "linear_backward(Tensor grad, Tensor x, Tensor weight, Tensor number, bool returns_weight) -> (Tensor, Tensor)"
    )
    library.impl("linear", _forward, "CompositeExplicitAutograd")
    library.impl("linear_backward", _backward, "CompositeExplicitAutograd")
    torch.library.register_fake("labkit::linear", _shape_of_forward, lib=library)
    torch.library.register_fake("labkit::linear_backward", _shapes_of_backward, lib=library)
    return library


class _OpaqueLinear(Function):
    """y = x W^T as the functions of `layers.py` compute it, f and g included.

    forward   one operator, or a product of the graph         [.., I] x [O, I] -> [.., O]
    backward  one operator for dx and dW. dW is a tensor only without `main_grad`
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, number: Tensor, length: int, alone: bool, accumulates: bool
    ) -> Any:
        ctx.save_for_backward(x, weight, number)
        ctx.returns_weight = weight.requires_grad and not accumulates
        return F.linear(x, weight) if alone else torch.ops.labkit.linear(x, weight, number, length)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, number = ctx.saved_tensors
        grad_x, grad_weight = torch.ops.labkit.linear_backward(
            grads[0].contiguous(), x, weight, number, ctx.returns_weight
        )
        return grad_x, grad_weight if ctx.returns_weight else None, None, None, None, None


def opaque_linear(x: Tensor, weight: Tensor, bias: Tensor | None, plan: Any, length: int) -> Tensor:
    """Return y = x W^T + b in a region that is being compiled, for the layer that `plan.number` names.

    length: S of the result, which differs from that of x under sequence parallelism.
    """
    y: Tensor = _OpaqueLinear.apply(x, weight, plan.number, length, plan.group.size == 1, plan.accumulate)
    return y if bias is None else y + bias
