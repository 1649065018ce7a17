"""The machine of a GPU, by the name that `torch.cuda.get_device_name` gives. No torch."""

from __future__ import annotations

import re

MACHINES = {
    r"(Tesla )?V100-SXM[23]-32GB.*": "v100",
    r"A100-SXM4-80GB": "a100",
    r"A100-SXM4-40GB": "a100_40gb",
    r"H100 80GB HBM3": "h100",
    r"H200": "h200",
    r"B200": "b200",
    r"B300.*": "b300",
    r"GB200": "gb200",
    r"GB300": "gb300",
}
"""Name without the word NVIDIA, as a pattern that must match all of it -> machine (`labkit.plan.machine`). The PCIe
versions have other clocks and links, so they have no machine."""


def machine_of_gpu(name: str) -> str | None:
    """Return the name of the machine with this GPU, or None if labkit has none."""
    return next((machine for gpu, machine in MACHINES.items() if re.fullmatch(f"(NVIDIA )?{gpu}", name)), None)
