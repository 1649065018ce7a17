"""The feed-forward block of a transformer layer: column-parallel, activation, row-parallel.

A first matrix cut by rows would need a synchronisation before the activation, because the activation is not linear:
GeLU(X1 A1 + X2 A2) is not GeLU(X1 A1) + GeLU(X2 A2). With a cut by columns, each rank applies the activation to its own
columns, and the second matrix, cut by rows, takes these columns directly. So the block needs only one all-reduce
forward and one backward (arXiv 1909.08053, section 3).

Shapes: S sequence, B batch, H hidden, F ffn_hidden; t = size of the tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Unpack

import torch.nn.functional as F
from torch import Tensor, nn

from labkit.parallel.layers import ColumnParallelLinear, LinearOptions, RowParallelLinear


def gated(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return activation(gate) * up of x = [gate, up] along the last dim, [.., 2F] -> [.., F] (arXiv 2002.05202)."""
    gate, up = x.chunk(2, dim=-1)
    return activation(gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "swiglu": partial(gated, F.silu),
    "relu": F.relu,
    "geglu": partial(gated, partial(F.gelu, approximate="tanh")),
}


class ParallelMLP(nn.Module):
    """fc2(activation(fc1(x))), cut over the tensor-parallel group.

    Args:
        name: name in the whole model; the layers are `<name>.fc1` and `<name>.fc2`.
        hidden: H.
        ffn_hidden: F; for `swiglu` and `geglu`, fc1 makes 2F columns, gate and up, and cuts each over the group.
        activation: `gelu` (erf), `gelu_tanh`, `swiglu`, `relu` or `geglu` (a gate with `gelu_tanh`).
        output_std: standard deviation of fc2's initial weight (residual projections start smaller); None means std.
        column, row: constructors of the two layers.
        linear: the other arguments of both layers, as in `ColumnParallelLinear`; `group` is required.

    Raises:
        ValueError: unknown activation, or F not a multiple of t.
    """

    def __init__(
        self,
        name: str,
        hidden: int,
        ffn_hidden: int,
        *,
        activation: str = "gelu_tanh",
        output_std: float | None = None,
        column: Callable[..., nn.Module] = ColumnParallelLinear,
        row: Callable[..., nn.Module] = RowParallelLinear,
        **linear: Unpack[LinearOptions],
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"{name}: activation {activation!r} is unknown; choose one of {', '.join(ACTIVATIONS)}")
        blocks = 2 if activation in ("swiglu", "geglu") else 1
        self.activation = ACTIVATIONS[activation]
        self.fc1 = column(f"{name}.fc1", hidden, blocks * ffn_hidden, partition_stride=blocks, **linear)
        if output_std is not None:
            linear["std"] = output_std
        self.fc2 = row(f"{name}.fc2", ffn_hidden, hidden, **linear)

    def forward(self, x_SBH: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, H], the bias of fc2 included."""
        inner_SBF, _ = self.fc1(x_SBH)
        output_SBH, _ = self.fc2(self.activation(inner_SBF))
        return output_SBH
