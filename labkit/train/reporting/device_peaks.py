"""The share of a GPU's peak that a run reaches (MFU and HFU), and the peak of its ranks.

MFU, the model FLOPs utilisation of arXiv 2204.02311 (appendix B), is the rate of the model's operations over the peak
of the devices (`labkit.plan.peaks`). The operations are those of `labkit.plan.flops.step_flops`. Both count attention
over all pairs of positions and no operation that recomputation repeats. HFU, the hardware FLOPs utilisation of arXiv
2205.05198, counts these too (`hardware_flops`), as the 52 % of arXiv 2104.04473 do. The GPU benchmarks have the same
MFU. A run on an unknown device, such as a CPU, has neither.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import NamedTuple

import torch

from labkit.comm.collectives import gather_objects
from labkit.comm.groups import ParallelGroups
from labkit.comm.ledger import comm_scope
from labkit.config import OptimConfig
from labkit.events import not_recording
from labkit.plan.peaks import known_peak


def peak_of(name: str, optim: OptimConfig) -> float | None:
    """Return TFLOP/s of the GPU with this name in the precision of a run, or None if the table has no such number.

    A run with fp8 is compared with the peak of fp8, although attention and the output layer multiply in bf16. The
    recipe `blockwise` has no peak, because labkit simulates it with products in float32. The table has no peak for
    fp64, which serves comparisons.
    """
    peak = known_peak(name)
    if peak is None or optim.precision == "fp64":
        return None
    if optim.fp8 != "none":
        return None if optim.fp8_recipe == "blockwise" else peak.fp8
    if optim.precision == "fp32":
        return peak.tf32 if torch.backends.cuda.matmul.fp32_precision == "tf32" else peak.fp32
    return peak.half


class Gpu(NamedTuple):
    """The GPU of a rank."""

    host: str
    uuid: str
    name: str


def peak_of_a_rank(groups: ParallelGroups, optim: OptimConfig) -> float | None:
    """Return the TFLOP/s that a rank can reach, the mean over the ranks. All ranks call this, each with its GPU."""
    own = torch.cuda.get_device_properties(groups.device)
    with not_recording(), comm_scope(layer="device", phase="start"):
        gpus = gather_objects(Gpu(socket.gethostname(), str(own.uuid), own.name), groups.world)
    return mean_peak(gpus, optim)


def mean_peak(gpus: Sequence[Gpu], optim: OptimConfig) -> float | None:
    """Return the sum of the peaks of all GPUs, divided by the number of ranks, or None if one of them is unknown.

    gpus: the GPU of each rank. Ranks that share a GPU share its peak.
    """
    peaks = [peak_of(gpu.name, optim) for gpu in set(gpus)]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) / len(gpus) if len(known) == len(peaks) else None
