"""The activation of experts times the routing weight of each row, as one node of autograd's graph.

In plain autograd silu(gate) * up * p keeps four tensors as wide as the activation. Its backward writes five more before
it joins the two halves. This function keeps only the projection's output and p, and backward writes both halves of its
result in place. On a CPU a large new tensor costs more than its arithmetic, so this saves about a tenth of a layer.

Shapes: N rows, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from labkit.parallel.mlp import ACTIVATIONS


class _WeightedSwiGLU(Function):
    """y = silu(a) * b * p of x = [a, b].

    forward   y = silu(a) b p                                   [N, 2F], [N] -> [N, F]
    backward  da = dy p b silu'(a), db = dy p silu(a)           [N, F] -> [N, 2F]
              dp = sum over F of dy silu(a) b                   [N, F] -> [N]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, probs_N: Tensor) -> Tensor:
        ctx.save_for_backward(x, probs_N)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up).mul_(probs_N.unsqueeze(-1))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, probs_N = ctx.saved_tensors
        (gate, up), grad, weight = x.chunk(2, dim=-1), grads[0], probs_N.unsqueeze(-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)  # each half also holds its intermediate values
        torch.ops.aten.silu.out(gate, out=grad_up)
        grad_up.mul_(grad)
        grad_probs = torch.mul(grad_up, up, out=grad_gate).sum(-1, dtype=probs_N.dtype)
        grad_up.mul_(weight)
        torch.mul(grad, up, out=grad_gate).mul_(weight)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_x, grad_probs


def weighted_swiglu(x: Tensor, probs_N: Tensor) -> Tensor:
    """Return silu(gate) * up * p of x = [gate, up], [N, 2F] and [N] -> [N, F], in the type of x."""
    return _WeightedSwiGLU.apply(x, probs_N)  # type: ignore[no-any-return]


def weighted_activation(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function (x, p) -> activation(x) * p, in the type of x; `name` as in `model.activation`."""
    if name == "swiglu":
        return weighted_swiglu
    activation = ACTIVATIONS[name]
    return lambda x, probs_N: weighted(activation(x), probs_N)


def weighted(inner_NF: Tensor, probs_N: Tensor) -> Tensor:
    """Multiply each row by its weight, in the type of the rows."""
    return (inner_NF * probs_N.unsqueeze(-1)).to(inner_NF.dtype)
