"""Linear layers cut by columns or by rows over the tensor-parallel group (arXiv 1909.08053, section 3).

Weights are stored as torch stores them, [output, input]; "column" and "row" speak of the paper's A in Y = XA, which is
the transpose. A column-parallel layer followed by a row-parallel one needs one all-reduce forward (g, after the second)
and one backward (f, before the first), because the split dimension never has to be whole in between. Both, with their
equations, are in `linear_functions.py`.

Shapes: S sequence, B batch, I input size, O output size; t = size of the group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from labkit.parallel.groups import Group
from labkit.parallel.ledger import comm_scope
from labkit.parallel.linear_functions import LinearPlan, column_parallel_linear, row_parallel_linear
from labkit.parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from labkit.parallel.parameters.parameter_record import Replicated, record_of
from labkit.parallel.parameters.weights import Seed, make_parameter
from labkit.parallel.precision import NATIVE, Precision


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
        precision: gives the products; by default they are in the type of the tensors.
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
        precision: gives the products; by default they are in the type of the tensors.
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
        cut: dict[str, Any] = {"group": group, "partition_dim": 1}
        made: dict[str, Any] = {"dtype": dtype, "device": device}
        self.weight = make_parameter(f"{name}.weight", (output_size, input_size), seed=seed, std=std, **cut, **made)
        self.bias = make_parameter(f"{name}.bias", (output_size,), fill=0.0, **made) if bias else None
        if self.bias is not None:
            record_of(self.bias).sequence_parallel = sequence_parallel
        self.plan = LinearPlan(name, group, sequence_parallel, gradient_accumulation_fusion, precision.gemms(name))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [S, B, I/t] (or [S, B, I]) -> (y [S, B, O], the bias if it was skipped, else None)."""
        if not self.input_is_parallel:
            with comm_scope(layer=self.name):
                x = scatter_to_tensor_model_parallel_region(x, self.group)
        y = row_parallel_linear(x, self.weight, None if self.skip_bias_add else self.bias, self.plan)
        return y, self.bias if self.skip_bias_add else None
