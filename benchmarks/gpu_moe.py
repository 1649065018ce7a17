"""Part of the GPU benchmark: products of experts (row G5).

Grouped against a loop and against one dense GEMM of the same operations, by torch and by Transformer Engine, with even
and uneven loads; and how long a GPU waits between them and before the activation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from gpu_steps import DEVICE, Step, gemm_rate, peak_rate, rates, synchronize, timed
from harness import Comparison
from torch import Tensor, nn

from labkit.config import ModelConfig, MoEConfig
from labkit.launch.machine import why_no_transformer_engine
from labkit.moe.experts import Experts, GroupedExperts, StackedLinear
from labkit.moe.grouped_gemm import Segments
from labkit.parallel import single_process_groups
from labkit.te.linear import GroupedLinear

ROWS = 16384
"""Tokens x experts of theirs on the rank."""
SHAPES = {8: (4096, 14336), 64: (2048, 2816)}
"""Experts -> input and output width of their first projection: Mixtral 8x7B's over etp 2, and DeepSeekMoE 16B's."""
STREAMS = 4
"""Of the loop on streams."""


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
    made: dict[str, Any] = {"ep": groups.ep, "etp": groups.etp, "partition_dim": 1}
    made |= {"dtype": torch.bfloat16, "device": device}
    shape = (experts, outputs, inputs)
    ours = StackedLinear("experts", "fc1", shape, **made)
    found: dict[str, nn.Module] = {"labkit, grouped": ours, "loop over experts": Loop(ours.weight)}
    if why_no_transformer_engine() is None:
        found["Transformer Engine"] = GroupedLinear("experts", "fc1", shape, **made)
    return found


def projection_step(projection: nn.Module, counts: Tensor, inputs: int, outputs: int, device: torch.device) -> Step:
    """Forward and backward: three products for each expert."""
    rows = int(counts.sum())
    x_NI = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad_NO = torch.randn(rows, outputs, device=device, dtype=torch.bfloat16)

    def step() -> None:
        x_NI.grad = None
        projection.zero_grad(set_to_none=True)
        projection(x_NI, Segments(counts)).backward(grad_NO)

    return step


def dense_step(rows: int, inputs: int, outputs: int, device: torch.device) -> Step:
    """The same operations as one dense layer of all rows: what the hardware gives at best."""
    dense = nn.Linear(inputs, outputs, bias=False, device=device, dtype=torch.bfloat16)
    x_NI = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad_NO = torch.randn(rows, outputs, device=device, dtype=torch.bfloat16)

    def step() -> None:
        x_NI.grad = None
        dense.zero_grad(set_to_none=True)
        dense(x_NI).backward(grad_NO)

    return step


def grouped_gemm(
    shapes: Mapping[int, tuple[int, int]] = MappingProxyType(SHAPES), rows: int = ROWS, *, device: torch.device = DEVICE
) -> Iterator[Comparison]:
    """G5: aim at 1.4 of a loop's rate with 64 experts and at no less than a loop's with 8."""
    for experts, (inputs, outputs) in shapes.items():
        modules, dense = projections(experts, inputs, outputs, device), dense_step(rows, inputs, outputs, device)
        operations = 3 * 2 * rows * inputs * outputs
        for load, spread in LOADS.items():
            counts = spread(experts, rows)
            steps = {name: projection_step(one, counts, inputs, outputs, device) for name, one in modules.items()}
            case = f"G5: {experts} experts, {inputs} to {outputs}, {rows} rows, {load}: products forward and backward"
            found = timed(case, steps | {"one dense GEMM": dense}, device=device)
            yield with_rates(rates(found, operations, gemm_rate(device), peak_rate(device)), operations)
            del steps
        del modules, dense
        torch.cuda.empty_cache()


def with_rates(found: Comparison, operations: float) -> Comparison:
    """The comparison with everyone's TFLOP/s."""
    if found.rejected:
        return found
    by_name = {name: round(operations / found.median(name) / 1e12, 1) for name in found.seconds}
    return replace(found, facts=found.facts | {"tflop_per_s_by_name": by_name})


# ---- what the GPU waits for ----


@dataclass(frozen=True)
class Kernel:
    """One kernel as the profiler saw it; microseconds."""

    name: str
    start: float
    end: float


def before_activation(kernels: Sequence[Kernel], activation: str = "silu") -> dict[str, Any]:
    """Kernels up to the first whose name contains `activation`, how long the GPU idled between them, and how long it
    idled right before that one, in microseconds.

    Raises:
        ValueError: no such kernel.
    """
    in_order = sorted(kernels, key=lambda kernel: kernel.start)
    chosen = next((index for index, kernel in enumerate(in_order) if activation in kernel.name), None)
    if chosen is None:
        raise ValueError(f"no kernel is named like {activation}: {sorted({kernel.name for kernel in kernels})}")
    before, busy_until, idle = in_order[:chosen], in_order[0].start, 0.0
    for kernel in before:
        idle += max(0.0, kernel.start - busy_until)
        busy_until = max(busy_until, kernel.end)
    gap = max(0.0, in_order[chosen].start - busy_until) if before else 0.0
    return {"launches": len(before), "idle_us_between": round(idle, 1), "idle_us_before_activation": round(gap, 1)}


def profiled(step: Step, device: torch.device) -> list[Kernel]:
    """The kernels of one step, warmed up before; on a CPU, its operators."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        step()
    synchronize(device)
    kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    ) as seen:
        step()
        synchronize(device)
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in seen.events() or []
        if event.device_type == kind and "Memcpy" not in event.name and "Memset" not in event.name
    ]


def loop_on_streams(experts: Experts, tokens_NH: Tensor, counts: Tensor, probs_N: Tensor) -> Step:
    """The forward as a loop whose products are spread over streams, joined before the activation."""
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    first, rows = experts.fc1.weight.detach().unbind(), tokens_NH.split(counts.tolist())
    outputs = torch.empty(len(tokens_NH), experts.fc1.weight.shape[1], device=tokens_NH.device, dtype=tokens_NH.dtype)
    places = outputs.split(counts.tolist())

    def step() -> None:
        current = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(current)
        for index, (x, weight, place) in enumerate(zip(rows, first, places, strict=True)):
            with torch.cuda.stream(streams[index % STREAMS]):
                torch.mm(x, weight.t(), out=place)
        for stream in streams:
            current.wait_stream(stream)
        experts.weighted_activation(outputs, probs_N)

    return step


def one_kernel(experts: Experts, tokens_NH: Tensor, counts: Tensor, probs_N: Tensor) -> Step:
    """The same as one grouped product."""
    return lambda: experts.weighted_activation(experts.fc1(tokens_NH, Segments(counts)), probs_N)


WAYS = {"one grouped product": one_kernel, f"loop on {STREAMS} streams": loop_on_streams}


def launches(
    shapes: Mapping[int, tuple[int, int]] = MappingProxyType(SHAPES),
    rows: int = ROWS,
    ways: Sequence[str] = tuple(WAYS),
    *,
    device: torch.device = DEVICE,
) -> Iterator[dict[str, Any]]:
    """Kernels and idle time up to the activation: one grouped product, and a loop on streams."""
    for count, (hidden, width) in shapes.items():
        model = ModelConfig(hidden=hidden, heads=16, activation="swiglu", use_cpu_initialization=False)
        moe, groups = MoEConfig(num_experts=count, ffn_hidden=width // 2), single_process_groups(device=device)
        experts = GroupedExperts("experts", model, moe, groups, dtype=torch.bfloat16, device=device)
        tokens_NH = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16)
        probs_N = torch.rand(rows, device=device)
        for name in ways:
            with torch.no_grad():
                step = WAYS[name](experts, tokens_NH, nearly_even(count, rows), probs_N)
                found = before_activation(profiled(step, device))
            yield {"case": f"{count} experts, first projection and activation, {name}"} | found
        del experts
        torch.cuda.empty_cache()
