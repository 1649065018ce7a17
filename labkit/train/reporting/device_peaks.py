"""Peak rates of known GPUs, and the share of a peak that a run reaches (MFU and HFU).

MFU, the model FLOPs utilisation of arXiv 2204.02311 (appendix B), is the rate of the model's operations over the peak
of the devices. The operations are those of `labkit.models.counts.step_flops`. Both count attention over all pairs of
positions and no operation that recomputation repeats. HFU, the hardware FLOPs utilisation of arXiv 2205.05198, counts
these, too (`hardware_flops`); the 52 % of arXiv 2104.04473 are such. The GPU benchmarks have the same MFU.

The table has TFLOP/s of dense products by NVIDIA's documents, by the name that `torch.cuda.get_device_name` gives. A
data sheet of Hopper or Ada prints its tensor cores with sparsity; a dense product reaches half of that.

    H100, H200, GH200, A100, A10, A30, A40, L4, L40S    the data sheet of each
    B200, GB200                                         data sheets "HGX B200" and "GB200 NVL72", of one GPU
    GeForce RTX                                         appendices of the whitepapers on GA102, Ada and RTX Blackwell,
                                                        with sums in float32

The whole name must fit, so a slice of a GPU (MIG) or a laptop's variant is unknown. A run on an unknown device, such as
a CPU, has neither.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from typing import NamedTuple

import torch

from labkit.comm.collectives import comm_scope, gather_objects
from labkit.comm.groups import ParallelGroups
from labkit.config import OptimConfig
from labkit.events import not_recording


class Peak(NamedTuple):
    """Dense TFLOP/s of one GPU."""

    half: float
    """bf16 and fp16 on tensor cores."""
    fp8: float | None
    """None on a GPU whose tensor cores have no fp8."""
    tf32: float
    """fp32 operands that tensor cores round to TF32; torch does so only if it is told to."""
    fp32: float
    """fp32 outside tensor cores."""


_HOPPER, _HOPPER_NVL = Peak(989.5, 1979.0, 494.5, 67.0), Peak(835.5, 1670.5, 417.5, 60.0)
PEAKS = {
    r"H100 80GB HBM3": _HOPPER,
    r"H100 PCIe": Peak(756.5, 1513.0, 378.0, 51.0),
    r"H100 NVL": _HOPPER_NVL,
    r"H200": _HOPPER,
    r"H200 NVL": _HOPPER_NVL,
    r"GH200 (96GB|120GB|480GB|144G HBM3e)": _HOPPER,
    r"B200": Peak(2250.0, 4500.0, 1100.0, 75.0),
    r"GB200": Peak(2500.0, 5000.0, 1250.0, 80.0),
    r"A100(-SXM4-40GB|-SXM4-80GB|-PCIE-40GB|-PCIE-80GB| 80GB PCIe)": Peak(312.0, None, 156.0, 19.5),
    r"A10": Peak(125.0, None, 62.5, 31.2),
    r"A30": Peak(165.0, None, 82.0, 10.3),
    r"A40": Peak(149.7, None, 74.8, 37.4),
    r"L4": Peak(121.0, 242.5, 60.0, 30.3),
    r"L40S": Peak(362.0, 733.0, 183.0, 91.6),
    r"GeForce RTX 3090": Peak(71.0, None, 35.6, 35.6),
    r"GeForce RTX 4090": Peak(165.2, 330.3, 82.6, 82.6),
    r"GeForce RTX 5090": Peak(209.5, 419.0, 104.8, 104.8),
}
"""Name without the word NVIDIA, as a pattern of all of it -> peak."""


def known_peak(name: str) -> Peak | None:
    """Return the peak of the GPU with this name, or None if the table does not have it."""
    return next((peak for pattern, peak in PEAKS.items() if re.fullmatch(f"(NVIDIA )?{pattern}", name)), None)


def peak_of(name: str, optim: OptimConfig) -> float | None:
    """Return TFLOP/s of the GPU with this name in the precision of a run, or None if the table has no such number.

    A run with fp8 is held against the peak of fp8, although attention and the output layer multiply in bf16. The recipe
    `blockwise` has no peak: labkit simulates it, with products in float32. The table has no peak for fp64, which serves
    comparisons.
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
    """Return the peaks of all GPUs over the number of ranks, or None if one of the peaks is unknown.

    gpus: the GPU of each rank. Ranks that share a GPU share its peak.
    """
    peaks = [peak_of(gpu.name, optim) for gpu in set(gpus)]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) / len(gpus) if len(known) == len(peaks) else None
