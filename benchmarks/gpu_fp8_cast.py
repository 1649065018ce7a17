"""A part of the GPU benchmark: making an fp8 operand and its transpose, by our Triton kernels, by torch, and by
Transformer Engine where it is installed.

Each reads a bf16 tensor once at least, and writes its fp8 values, the transposed ones, and the amax: 4 bytes a value.
The rate is this traffic over the time, and stands beside the rate of a copy in the same run. Every operand of a
repetition has memory of its own for input and result, so that no L2 cache (50 MiB on an H100) holds what is read next:
the smallest row moves 640 MiB before it reads the same tensor again.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from gpu_steps import DEVICE, timed
from harness import Comparison
from torch import Tensor

from labkit.fp8 import operands as fp8_operands
from labkit.fp8.casting import E4M3
from labkit.launch.transformer_engine import why_no_transformer_engine

SIZES = {
    "input of a layer at h4096, s2048 b8": (16384, 4096),
    "activation of its MLP": (16384, 16384),
    "weight of its queries, keys and values": (12288, 4096),
    "input of a layer at h1024, s2048 b8": (16384, 1024),
}
Make = Callable[[Tensor], Any]
BYTES_A_VALUE = 2 + 1 + 1
"""bf16 read, fp8 written twice."""


def makers(device: torch.device) -> tuple[dict[str, Make], dict[str, str]]:
    """What makes the operand of a tensor, by name, ours first; and why others are missing."""
    scale, so_far = torch.ones((), device=device), torch.zeros((), device=device)
    found: dict[str, Make] = {}
    missing: dict[str, str] = {}

    def ours(x: Tensor) -> fp8_operands.Operand:
        return fp8_operands.operand_by_history(x, scale, E4M3, transposed=True, so_far=so_far)

    def by_torch(x: Tensor) -> tuple[Tensor, Tensor]:
        with fp8_operands.torch_alone():
            values, _, _ = fp8_operands.operand_by_history(x, scale, E4M3, transposed=False, so_far=so_far)
        return values, values.t().contiguous()

    if ours(torch.ones(16, 16, dtype=torch.bfloat16, device=device))[2] is None:
        missing["labkit, Triton"] = "its kernels do not run here"
    else:
        found["labkit, Triton"] = ours
    found["labkit, torch"] = by_torch
    reason = why_no_transformer_engine() if device.type == "cuda" else "it needs a tensor on a GPU"
    if reason is not None:
        missing["Transformer Engine"] = reason
    else:
        found["Transformer Engine"] = _by_transformer_engine(scale, so_far.view(1).clone())
    return found, missing


def _by_transformer_engine(scale: Tensor, amax: Tensor) -> Make:
    engine = importlib.import_module("transformer_engine_torch")
    tensors = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
    return tensors.Float8Quantizer(scale.view(1), amax, engine.DType.kFloat8E4M3, rowwise=True, columnwise=True)


def fp8_cast(
    *,
    sizes: Mapping[str, tuple[int, int]] = SIZES,
    device: torch.device = DEVICE,
    at_once: int = 10,
    repetitions: int = 15,
    copied_bytes: int = 2**30,
) -> Iterator[Comparison]:
    """One comparison for each size: `at_once` operands made one after the other, of as many tensors.

    copied_bytes: size of each of as many copies, whose rate is the most that memory gives.
    """
    how: dict[str, Any] = {"repetitions": repetitions, "device": device}
    found, missing = makers(device)
    copy_rate = _copy_rate(copied_bytes, at_once, how)
    for name, (rows, columns) in sizes.items():
        tensors = [torch.randn(rows, columns, dtype=torch.bfloat16, device=device) for _ in range(at_once)]
        steps = {maker: _each(make, tensors) for maker, make in found.items()}
        case = f"fp8 operand and its transpose: {name}, {rows} x {columns}, {at_once} at once"
        compared = timed(case, steps, **how)
        yield _rates(compared, rows * columns * BYTES_A_VALUE * at_once, copy_rate, missing)
        del tensors, steps


def _copy_rate(size: int, at_once: int, how: dict[str, Any]) -> float:
    """Bytes a second, read and written, of copies of `size` bytes."""
    source = torch.randint(256, (size,), dtype=torch.uint8, device=how["device"])
    target = torch.empty_like(source)
    copies = timed("copy", {"copy": lambda: [target.copy_(source) for _ in range(at_once)]}, **how)
    return 2 * size * at_once / copies.median("copy")


def _each(make: Make, tensors: Sequence[Tensor]) -> Callable[[], None]:
    """A step that makes the operands of all tensors, and lets those of the step before go first."""
    made: list[Any] = []

    def step() -> None:
        made.clear()
        made.extend(make(x) for x in tensors)

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
