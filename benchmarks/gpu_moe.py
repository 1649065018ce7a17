"""Part of the GPU benchmark: products of experts (row G5).

Grouped against a loop and against one dense GEMM of the same operations, by torch and by Transformer Engine, with even
and uneven loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from gpu_steps import DEVICE, ON_DEVICE, Step, rates, timed
from harness import Comparison
from torch import Tensor, nn

from labkit.launch.transformer_engine import why_no_transformer_engine
from labkit.moe.experts import StackedLinear
from labkit.moe.grouped_gemm import Segments
from labkit.parallel import single_process_groups
from labkit.te.linear import GroupedLinear

ROWS = 16384
"""Tokens x experts of theirs on the rank."""
SHAPES = {8: (4096, 14336), 64: (2048, 2816)}
"""Experts -> input and output width of their first projection: Mixtral 8x7B's over etp 2, and DeepSeekMoE 16B's."""


def even(experts: int, rows: int = ROWS) -> Tensor:
    """As many rows for each: torch's batched product."""
    return torch.full((experts,), rows // experts)


def nearly_even(experts: int, rows: int = ROWS) -> Tensor:
    """What a trained router gives: each expert within a tenth of its share."""
    counts = even(experts, rows)
    counts[::2] += rows // experts // 10
    counts[1::2] -= rows // experts // 10
    return counts


def skewed(experts: int, rows: int = ROWS) -> Tensor:
    """Half of the rows for the first expert, the rest spread evenly; one expert has none."""
    counts = torch.full((experts,), rows // 2 // (experts - 2))
    counts[0], counts[-1] = rows // 2, 0
    counts[1] += rows - counts.sum()
    return counts


LOADS = {"even": even, "nearly even": nearly_even, "skewed": skewed}

# ---- rates of the products ----


class Loop(nn.Module):
    """One product for each expert, in plain autograd."""

    def __init__(self, weight_EOI: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight_EOI

    def forward(self, x_NI: Tensor, segments: Segments) -> Tensor:
        """[N, I] -> [N, O]."""
        rows = x_NI.split(segments.counts)
        return torch.cat([x @ weight.t() for x, weight in zip(rows, self.weight.unbind(), strict=True)])


def projections(experts: int, inputs: int, outputs: int, device: torch.device) -> dict[str, nn.Module]:
    """The first projection of all experts in bf16, by everyone who computes it."""
    groups = single_process_groups(device=device)
    made: dict[str, Any] = {"ep": groups.ep, "etp": groups.etp, "partition_dim": 1, "seed": ON_DEVICE}
    made |= {"dtype": torch.bfloat16, "device": device}
    shape = (experts, outputs, inputs)
    ours = StackedLinear("experts", "fc1", shape, **made)
    found: dict[str, nn.Module] = {"labkit, grouped": ours, "loop over experts": Loop(ours.weight)}
    if why_no_transformer_engine() is None:
        found["Transformer Engine"] = GroupedLinear("experts", "fc1", shape, **made)
    return found


def product_step(
    module: nn.Module, rows: int, inputs: int, outputs: int, device: torch.device, counts: Tensor | None = None
) -> Step:
    """Forward and backward: three products for each expert, or with one weight for all rows without `counts`."""
    x_NI = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad_NO = torch.randn(rows, outputs, device=device, dtype=torch.bfloat16)

    def step() -> None:
        x_NI.grad = None
        module.zero_grad(set_to_none=True)
        given = () if counts is None else (Segments(counts),)
        module(x_NI, *given).backward(grad_NO)

    return step


def grouped_gemm(
    shapes: Mapping[int, tuple[int, int]] = MappingProxyType(SHAPES), rows: int = ROWS, *, device: torch.device = DEVICE
) -> Iterator[Comparison]:
    """G5: aim at 1.4 of a loop's rate with 64 experts and at no less than a loop's with 8."""
    for experts, (inputs, outputs) in shapes.items():
        modules, sizes = projections(experts, inputs, outputs, device), (rows, inputs, outputs, device)
        dense = nn.Linear(inputs, outputs, bias=False, device=device, dtype=torch.bfloat16)
        operations = 3 * 2 * rows * inputs * outputs
        for load, spread in LOADS.items():
            counts = spread(experts, rows)
            steps = {name: product_step(one, *sizes, counts) for name, one in modules.items()}
            steps["one dense GEMM"] = product_step(dense, *sizes)
            case = f"G5: {experts} experts, {inputs} to {outputs}, {rows} rows, {load}: products forward and backward"
            found = timed(case, steps, device=device)
            yield rates(found, operations, device, share="share_of_peak")
            del steps
        del modules, dense
        torch.cuda.empty_cache()
