"""What goes wrong on a cluster during a run, and what a checkpoint costs there. No torch.

Failures are independent, and each GPU fails at a constant rate; a failure of anything around it (host, network,
software) counts for its GPUs. One failure stops all ranks, so a run on n GPUs is interrupted every MTBF / n.

    MTBF of a GPU    54 days x 16,384 GPUs / 419 interruptions = 50,680 hours    (arXiv 2407.21783, section 3.3.4)
    MTBF of a run    MTBF of a GPU / GPUs
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from labkit.config import ConfigError
from labkit.config.errors import nearest, shown
from labkit.plan.memory import checkpoint_bytes
from labkit.plan.step_time import schedule_of
from labkit.plan.workload import Workload

CAUSES: Mapping[str, int] = {
    "GPU": 148,
    "HBM3 of a GPU": 72,
    "software": 54,
    "network switch or cable": 35,
    "unplanned maintenance of a host": 32,
    "SRAM of a GPU": 19,
    "system processor of a GPU": 17,
    "network adapter": 7,
    "timeout of NCCL's watchdog": 7,
    "silent data corruption": 6,
    "thermal interface or sensor of a GPU": 6,
    "SSD": 3,
    "power supply": 3,
    "server chassis": 2,
    "IO expansion board": 2,
    "dependency": 2,
    "CPU": 2,
    "system memory": 2,
}
"""Cause -> unexpected interruptions of Llama 3 405B in 54 days on 16,384 H100 (arXiv 2407.21783, table 5). The paper
prints 30.1 % for the first row, but 148 of 419 are 35.3 %."""
_GPU_HOURS = 54 * 24 * 16384
"""GPU-hours in which they happened."""
STORAGE_GB_S_PER_GPU = 2000 / 16384
"""GB/s of storage for each GPU: 2 TB/s sustained for 16,384 (arXiv 2407.21783, section 3.3.1)."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What fails, stalls and stores on a cluster, and how a run saves.

    Raises ConfigError for impossible values, with all problems at once.
    """

    gpu_mtbf_hours: float = _GPU_HOURS / sum(CAUSES.values())
    """Mean hours between two failures of one GPU, everything around it included."""
    restart_seconds: float = 600.0
    """From a failure until the ranks load their checkpoint: detection, a spare node, a new start. Assumed; Llama 3's
    466 interruptions (47 of them planned) and more than 90 % effective training time leave at most 1,000 s for each,
    lost work included."""
    storage_gb_s: float | None = None
    """GB/s that all ranks together write and read; None is `STORAGE_GB_S_PER_GPU` for each GPU."""
    copy_gb_s: float = 25.0
    """GB/s from a GPU to its host; assumed, half of PCIe 5."""
    asynchronous: bool = False
    """Saves block training only for the copy to the host, and write while it goes on."""
    interval_minutes: float | None = None
    """Minutes of training between two checkpoints; None is the best."""
    straggler_share: float = 1e-4
    """Share of GPUs that are slow at any time; assumed."""
    straggler_factor: float = 1.05
    """How many times as long a slow GPU computes; assumed. Of healthy GPUs of one kind some differ by 8 %, and a few
    take 1.5 times as long (arXiv 2208.11035)."""
    jitter: float = 0.05
    """Spread of the communication of one rank in one step: standard deviation of its logarithm; assumed."""
    days: float = 14.0
    """Length of the run."""

    def __post_init__(self) -> None:
        if problems := [text for name, value in vars(self).items() if (text := _problem(name, value))]:
            raise ConfigError(problems, source="the cluster")

    def mtbf(self, gpus: int) -> float:
        """Return the mean seconds between two failures of a run: the minimum of n exponential times has 1/n of their
        mean."""
        return self.gpu_mtbf_hours * 3600 / gpus

    def storage_bytes_per_second(self, gpus: int) -> float:
        """Return the bytes per second that a run on this many GPUs writes."""
        return 1e9 * (self.storage_gb_s or STORAGE_GB_S_PER_GPU * gpus)


_LIMITS: Mapping[str, tuple[float, float]] = {
    "restart_seconds": (0.0, math.inf),
    "straggler_share": (0.0, 1.0),
    "straggler_factor": (1.0, math.inf),
    "jitter": (0.0, 2.0),
    "days": (0.0, 365.0),
}
"""Field -> its least and its largest value; the others are at least 0."""
_MAY_BE_ZERO = ("restart_seconds", "straggler_share", "jitter")


def _problem(name: str, value: Any) -> str:
    """Return what is wrong with a value; an empty string for nothing."""
    if value is None or isinstance(value, bool):
        return ""
    low, high = _LIMITS.get(name, (0.0, math.inf))
    if low <= value <= high and math.isfinite(value) and (value > 0 or name in _MAY_BE_ZERO):
        return ""
    least = f"at least {low:g}" if low or name in _MAY_BE_ZERO else "above 0"
    return f"{name} = {value:g}: give a number {least}" + (f" and at most {high:g}" if math.isfinite(high) else "")


def parse_cluster(text: str) -> Cluster:
    """Return the cluster of a text such as `gpu_mtbf_hours=20000,asynchronous`; what it leaves out has its default.

    Raises ConfigError with all problems.
    """
    names = [each.name for each in fields(Cluster)]
    found: dict[str, Any] = {}
    problems = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, word = item.partition("=")
        if name not in names:
            problems.append(f"{shown(name)} is unknown; give one of {', '.join(names)}{nearest(name, names)}")
        elif name == "asynchronous":
            found[name] = word != "false"
            problems += [] if word in ("", "true", "false") else [f"{item}: give true or false"]
        else:
            try:
                found[name] = float(word)
            except ValueError:
                problems.append(f"{item}: give a number, as in {name}=10")
    if problems:
        raise ConfigError(problems, source="the cluster")
    return Cluster(**found)


@dataclass(frozen=True)
class Checkpoint:
    """Seconds of one checkpoint."""

    blocking: float
    """Training stands still."""
    background: float = 0.0
    """From there until the checkpoint is complete, while training goes on."""
    load: float = 0.0
    """Reading it after a failure."""
    bytes: float = 0.0
    """Its size."""


def checkpoint_of(workload: Workload, cluster: Cluster) -> Checkpoint:
    """Return what a checkpoint of a workload costs.

        bytes   12 for each parameter of the model: its updated fp32 copy and Adam's two moments (`checkpoint_bytes`)
        write   bytes / storage bandwidth
        copy    bytes of the fullest rank / bandwidth to the host

    A save blocks for copy + write; an asynchronous one blocks for the copy.
    """
    schedule = schedule_of(workload.config, workload.microbatches)
    sizes = [checkpoint_bytes(workload.config, workload.world_size, schedule, place) for place in range(schedule.pp)]
    total = sum(sizes) * workload.world_size / schedule.pp
    write = total / cluster.storage_bytes_per_second(workload.world_size)
    copy = max(sizes) / (cluster.copy_gb_s * 1e9)
    if cluster.asynchronous:
        return Checkpoint(copy, write, write, total)
    return Checkpoint(copy + write, 0.0, write, total)
