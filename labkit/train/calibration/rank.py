"""What each rank measures: its kernels, while the other ranks measure theirs, and then the transfers between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labkit.comm import collectives
from labkit.comm.groups import initialize_model_parallel
from labkit.config import ParallelConfig
from labkit.launch.info import report_progress
from labkit.train.calibration import kernels
from labkit.train.calibration.timing import Sample, Stopwatch, joined, nothing
from labkit.train.calibration.transfers import transfers

Key = tuple[str | int, ...]
"""What was measured: `("products", "fp32", 128, 512, 128)`, `("memory", "norm")`, `("transfers", "p2p", 4096)`, ..."""
Samples = dict[Key, Sample]
GRADIENTS = {"cpu": ((512, 512, 512), (512, 128, 512), (2048, 512, 512)), "cuda": ((4096, 4096, 4096),)}
"""Shapes of weight gradients, m and n of the weight and k tokens; the products of these shapes are measured too."""
LENGTHS = {"cpu": (128, 256, 512), "cuda": (1024, 4096)}
"""Sequences whose attention is measured."""


@dataclass(frozen=True)
class Types:
    """Types of tensors that are measured."""

    products: tuple[str, ...]
    """Those of products; the first one is that of the other kernels, too."""

    @property
    def main(self) -> str:
        """The type of activations."""
        return self.products[0]


def measure(types: Types, most: int | None = None, budget: float = Stopwatch.budget) -> Samples:
    """Return what one rank measures; every rank of the world calls this.

    most: the largest m, n or k of a product, but for those of `GRADIENTS`; None is no limit. budget: seconds of a call.
    """
    world = torch.distributed.get_world_size()
    with initialize_model_parallel(ParallelConfig(tp=world)) as groups, torch.no_grad():
        device = groups.device
        watch = Stopwatch(wait=torch.cuda.synchronize if device.type == "cuda" else nothing, budget=budget)
        found: Samples = {}
        collectives.barrier(groups.tp)
        for dtype in types.products:
            report_progress({"message": f"products in {dtype}"})
            for shape in kernels.shapes(device.type, dtype):
                if most is not None and max(shape) > most and shape not in GRADIENTS[device.type]:
                    continue
                found["products", dtype, *shape] = kernels.product(device, dtype, shape, watch)
        report_progress({"message": "memory-bound kernels"})
        found |= _kernels(device, types.main, watch, found)
        collectives.barrier(groups.tp)
        if world > 1:
            report_progress({"message": f"collectives between {world} ranks"})
            found |= {("transfers", kind, size): sample for kind, size, sample in transfers(groups.tp, device, watch)}
    return found


def _kernels(device: torch.device, dtype: str, watch: Stopwatch, products: Samples) -> Samples:
    """Return weight gradients over products of the same shape, attention, and kernels that move bytes."""
    found: Samples = {}
    ratios = []
    for m, n, k in GRADIENTS[device.type]:
        rate = kernels.weight_gradient(device, dtype, (m, n, k), watch)
        plain = products["products", dtype, m, n, k]
        ratios.append(Sample(rate.value / plain.value, rate.spread + plain.spread))
    found["weight gradient",] = joined(ratios)
    with torch.enable_grad():
        attention = [kernels.attention(device, dtype, length, watch) for length in LENGTHS[device.type]]
        found["attention", "forward"] = joined([forward for forward, _ in attention])
        found["attention", "backward"] = joined([backward for _, backward in attention])
        rates: dict[str, list[Sample]] = {}
        for kind, sample in kernels.memory_kernels(device, dtype, watch):
            rates.setdefault(kind, []).append(sample)
    return found | {("memory", kind): joined(samples) for kind, samples in rates.items()}


def of_all_ranks(ranks: list[Samples]) -> Samples:
    """Return what the ranks found together: the faster rate, because what slows one rank alone is not the machine.

    A transfer is as long as its slowest rank takes.
    """
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}
