"""Peak rates of known GPUs, by the name that `torch.cuda.get_device_name` gives. No torch.

The table has TFLOP/s of dense products from NVIDIA's documents. The data sheets of Hopper and Ada give tensor cores
with sparsity; a dense product reaches half of that.

    H100, H200, GH200, A100, A10, A30, A40, L4, L40S    the data sheet of each
    B200, GB200                                         data sheets "HGX B200" and "GB200 NVL72", of one GPU
    GeForce RTX                                         appendices of the whitepapers on GA102, Ada and RTX Blackwell,
                                                        with sums in float32

The whole name must match, so a slice of a GPU (MIG) or a laptop's variant is unknown.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Peak(NamedTuple):
    """Dense TFLOP/s of one GPU."""

    half: float
    """bf16 and fp16 in tensor cores."""
    fp8: float | None
    """fp8 in tensor cores; None if they have no fp8."""
    tf32: float
    """fp32 operands that tensor cores round to TF32, which torch does only if you ask for it."""
    fp32: float
    """fp32 outside of tensor cores."""


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
"""Name without the word NVIDIA, as a pattern that must match all of it -> peak."""


def known_peak(name: str) -> Peak | None:
    """Return the peak of the GPU with this name, or None if the table does not have it."""
    return next((peak for pattern, peak in PEAKS.items() if re.fullmatch(f"(NVIDIA )?{pattern}", name)), None)
