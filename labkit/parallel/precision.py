"""The products of linear layers as a strategy: `Precision` gives every linear layer of a model chunk its `Gemms`.

The strategies here compute in the type of the tensors. `labkit.fp8` brings others, which a model is given from outside.

Shapes: N rows (sequence x batch), I input size, O output size.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.parallel.groups import Group
from labkit.parallel.parameters.parameter_record import put_gradient

Packed = tuple[Tensor, ...]
"""An input or an output's gradient as it is kept and gathered: the first tensor has its rows, the others its scales."""


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


class Gemms:
    """The three products of one linear layer, in the type of its tensors."""

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
        grad_NO, x_NI = grad[0].reshape(-1, grad[0].shape[-1]), x[0].reshape(-1, x[0].shape[-1])
        return weight_gradient(grad_NO, x_NI, main_grad, replace=replace)


IN_OWN_TYPE = Gemms()
"""The products of every layer that is given no other."""


class Precision:
    """How the linear layers of one model chunk compute. This one lets them compute in the type of their tensors."""

    def gemms(self, name: str) -> Gemms:
        """The products of the layer `name`."""
        return IN_OWN_TYPE

    def region(self) -> AbstractContextManager[None]:
        """The forward of all layers of one microbatch runs inside."""
        return nullcontext()

    def end_step(self) -> None:
        """Called after the last backward of a step, by all ranks of tp_dp_cp: weights are about to change."""


NATIVE = Precision()
"""The precision of a model that is given no other."""
