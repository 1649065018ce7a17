"""A part of the GPU benchmark: making an fp8 operand and its transpose, by our Triton kernels, by torch, and by
Transformer Engine where it is installed.

Each reads a bf16 tensor once at least, and writes its fp8 values, the transposed ones, and the amax: 4 bytes a value.
The rate is this traffic over the time, and stands beside the rate of a copy in the same run.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from harness import Comparison, interleave
from torch import Tensor

from labkit.fp8 import operands as fp8_operands
from labkit.fp8.casting import E4M3
from labkit.launch.machine import why_no_transformer_engine

SIZES = {
    "input of a layer at h4096, s2048 b8": (16384, 4096),
    "activation of its MLP": (16384, 16384),
    "weight of its queries, keys and values": (12288, 4096),
    "input of a layer at h1024, s2048 b8": (16384, 1024),
}
BYTES_A_VALUE = 2 + 1 + 1
"""bf16 read, fp8 written twice."""


def makers(x: Tensor) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """What makes the operand, by name, ours first; and why others are missing."""
    scale, so_far = torch.ones((), device=x.device), torch.zeros((), device=x.device)
    found: dict[str, Callable[[], Any]] = {}
    missing: dict[str, str] = {}

    def made(transposed: bool) -> fp8_operands.Operand:
        return fp8_operands.operand_by_history(x, scale, E4M3, transposed=transposed, so_far=so_far)

    def by_torch() -> tuple[Tensor, Tensor]:
        with fp8_operands.torch_alone():
            values, _, _ = made(False)
        return values, values.t().contiguous()

    if made(True)[2] is None:
        missing["labkit, Triton"] = "its kernels do not run here"
    else:
        found["labkit, Triton"] = lambda: made(True)
    found["labkit, torch"] = by_torch
    reason = why_no_transformer_engine() if x.is_cuda else "it needs a tensor on a GPU"
    if reason is not None:
        missing["Transformer Engine"] = reason
    else:
        found["Transformer Engine"] = _by_transformer_engine(x, scale, so_far.view(1).clone())
    return found, missing


def _by_transformer_engine(x: Tensor, scale: Tensor, amax: Tensor) -> Callable[[], Any]:
    engine = importlib.import_module("transformer_engine_torch")
    tensors = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
    quantizer = tensors.Float8Quantizer(scale.view(1), amax, engine.DType.kFloat8E4M3, rowwise=True, columnwise=True)
    return lambda: quantizer(x)


def fp8_cast(
    *,
    sizes: Mapping[str, tuple[int, int]] = SIZES,
    device: str = "cuda",
    at_once: int = 10,
    repetitions: int = 15,
    copied_bytes: int = 2**30,
) -> Iterator[Comparison]:
    """One comparison for each size: `at_once` operands made one after the other.

    copied_bytes: size of the copy whose rate is the most that memory gives.
    """
    on_gpu = torch.device(device).type == "cuda"
    how: dict[str, Any] = {"repetitions": repetitions, "max_load": float(os.cpu_count() or 1)}
    how["synchronize"] = torch.cuda.synchronize if on_gpu else None
    copy_rate = _copy_rate(copied_bytes, device, how)
    for name, (rows, columns) in sizes.items():
        x = torch.randn(rows, columns, dtype=torch.bfloat16, device=device)
        found, missing = makers(x)
        steps = {maker: _again(make, at_once) for maker, make in found.items()}
        compared = interleave(
            f"fp8 operand and its transpose: {name}, {rows} x {columns}, {at_once} at once", steps, **how
        )
        yield _rates(compared, x.numel() * BYTES_A_VALUE * at_once, copy_rate, missing)


def _copy_rate(size: int, device: str, how: dict[str, Any]) -> float:
    """Bytes a second, read and written, of a copy of `size` bytes."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / interleave("copy", {"copy": lambda: target.copy_(source)}, **how).median("copy")


def _again(make: Callable[[], Any], times: int) -> Callable[[], None]:
    def step() -> None:
        for _ in range(times):
            make()

    return step


def _rates(compared: Comparison, moved: int, copy_rate: float, missing: dict[str, str]) -> Comparison:
    """The comparison with GB/s of the least traffic, and its share of a copy's; without them where it was rejected."""
    facts: dict[str, Any] = {"copy_gb_per_s": round(copy_rate / 1e9, 1)} | ({"missing": missing} if missing else {})
    if not compared.rejected:
        rates = {name: moved / compared.median(name) for name in compared.seconds}
        facts["gb_per_s"] = {name: round(rate / 1e9, 1) for name, rate in rates.items()}
        facts["share_of_copy"] = {name: round(rate / copy_rate, 3) for name, rate in rates.items()}
    return replace(compared, facts=compared.facts | facts)


if __name__ == "__main__":
    sys.exit("benchmarks/gpu_fp8_cast.py is a part of the GPU benchmark: run benchmarks/gpu.py, which needs a GPU")
