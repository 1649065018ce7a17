"""The published run nearest to one of ours: GPUs of the same family, about its size, about as many. No torch."""

from __future__ import annotations

import math
from importlib.resources import files
from typing import NamedTuple

from labkit.config import RunConfig
from labkit.plan.flops import step_flops
from labkit.plan.machine import Machine, load_machine
from labkit.plan.parameters import model_parameters
from labkit.plan.published_rows import RULES, read_published
from labkit.plan.rows import PlannedRow
from labkit.plan.workload import Workload

FURTHEST = 3.0
"""Distance beyond which a published run says nothing about ours; see `distance`."""
_TABLE = "published.csv"
_FAMILIES = {
    "V100": "Volta", "A100": "Ampere", "H100": "Hopper", "H200": "Hopper", "B200": "Blackwell", "B300": "Blackwell",
    "GB200": "Blackwell", "GB300": "Blackwell",
}  # fmt: skip
"""First word of `Machine.gpu` -> family."""


class NearRun(NamedTuple):
    """A published run."""

    row: PlannedRow
    distance: float
    flops_per_gpu: float
    """Its model FLOP/s for each GPU, counted as ours are."""

    @property
    def not_stated(self) -> list[str]:
        """What its source does not say, and how it was filled in."""
        return [f"{rule}: {RULES[rule]}" for rule in dict.fromkeys(self.row.filled)]


def family(machine: Machine) -> str | None:
    """Return the family of a machine's GPU, such as `Hopper`; None for a CPU and for a GPU without published runs."""
    return _FAMILIES.get(machine.gpu.split()[0]) if machine.gpu else None


def nearest_run(workload: Workload, machine: Machine) -> NearRun | None:
    """Return the nearest published run on GPUs of the same family, or None if none is within `FURTHEST`."""
    wanted, found = family(machine), []
    for row in read_published(str(files("labkit.plan") / "tables" / _TABLE)) if wanted else ():
        if row.workload is None or row.machine is None or not row.measured_seconds:
            continue
        theirs = load_machine(row.machine)
        if family(theirs) == wanted:
            far = distance(workload, row.workload) + (theirs.gpu.split()[0] != machine.gpu.split()[0])
            found.append(NearRun(row, far, _rate(row.workload, row.measured_seconds)))
    nearest = min(found, key=lambda run: (run.distance, run.row.id), default=None)
    return nearest if nearest is not None and nearest.distance <= FURTHEST else None


def distance(ours: Workload, theirs: Workload) -> float:
    """Return how often one must double to come from one run to the other: |log2| of the ratios of parameters, of GPUs
    and of the sequence length, added up; and 1 if only one of them has experts. `nearest_run` adds 1 for another GPU of
    the family."""
    configs = ours.config, theirs.config
    sizes = [
        (model_parameters(config.model, config.moe), float(work.world_size), float(config.model.seq_length))
        for config, work in zip(configs, (ours, theirs), strict=True)
    ]
    doublings = sum(abs(math.log2(here / there)) for here, there in zip(*sizes, strict=True))
    return doublings + (bool(configs[0].moe.num_experts) != bool(configs[1].moe.num_experts))


def _rate(workload: Workload, seconds: float) -> float:
    config: RunConfig = workload.config
    flops = step_flops(config.model, samples=config.train.global_batch_size, moe=config.moe).total
    return flops / seconds / workload.world_size
