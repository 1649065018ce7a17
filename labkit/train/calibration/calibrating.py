"""Measure this machine's ranks, work out what a step costs beyond its arithmetic, write the machine's file.

The part for GPUs has never run on a GPU.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from labkit.config.errors import counted
from labkit.launch import Ranks, run
from labkit.launch.available_memory import host_memory
from labkit.launch.machine import usable_cores
from labkit.output_files import appearing
from labkit.plan.machine import Machine, machine_of
from labkit.train.calibration.machine_values import Host, machine_values, text_of, typical_spreads
from labkit.train.calibration.rank import Samples, Types, measure, of_all_ranks
from labkit.train.calibration.small_steps import measured_steps, middle_step, overhead, product_rate

QUIET_LOAD = 0.5
"""Load average per core above which others compute here, too."""
QUIET_SPREADS = {"products": 0.15, "transfers": 0.30}
"""Kind of measurement -> typical spread above which the machine was not quiet. Transfers wait for sleepers."""
_GPU_GAP = 1.5e-6
Say = Callable[[str], None]


@dataclass(frozen=True)
class Calibration:
    """A measured machine."""

    values: dict[str, Any]
    """The mapping of its file."""
    notes: list[str]
    """What a reader of the file should know: when, with what, and how busy the machine was."""
    seconds: float
    """How long it took."""

    @property
    def machine(self) -> Machine:
        """The machine, for `labkit.plan`."""
        return machine_of(self.values, "labkit calibrate")

    @property
    def doubts(self) -> list[str]:
        """The notes that say why the numbers may be too slow; empty for a quiet machine."""
        return [note for note in self.notes if note.startswith("busy: ")]

    def write(self, path: Path) -> None:
        """Write the machine's file; an OSError names it."""
        with appearing(path) as draft:
            draft.write_text(text_of(self.values, self.notes), encoding="utf-8")


def calibrate(device: str = "auto", say: Say = print) -> Calibration:
    """Measure this machine: two ranks on its CPU, or one for each GPU.

    device: cpu, cuda, or auto, which takes GPUs where torch sees any. say: gets a line for each part that begins.
    """
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    start, load_before = time.monotonic(), os.getloadavg()[0]
    host = host_of(device)
    types = Types(("bf16", "fp16", "fp32") if device == "cuda" else ("fp32", "fp64", "bf16"))
    say(f"{host.processor}, {counted(host.ranks, 'rank')}")
    samples = of_all_ranks(run(measure, host.ranks, types, device=device, progress=lambda told: say(told["message"])))
    source = f"labkit calibrate, {date.today().isoformat()}"
    busy = _doubts(load_before, samples)
    source += ", on a busy machine" if busy else ""
    values = machine_values(host, samples, source)
    say("small steps")
    _add_overhead(values, host, types, source)
    notes = [
        f"{host.processor}: measured by labkit calibrate on {date.today().isoformat()} with torch {torch.__version__}",
        f"{counted(host.ranks, 'rank')}, one thread each; load average {load_before:.2f} before",
        *busy,
    ]
    return Calibration(values, notes, time.monotonic() - start)


def quick_machine(ranks: Ranks, device: str, most: int = 512) -> Machine:
    """Measure the machine of these ranks in some seconds, without the costs beyond arithmetic, which are 0.

    device: cpu or cuda. most: the largest m, n or k of a product. For experiments; `calibrate` is for plans.
    """
    types = Types(("bf16",) if device == "cuda" else ("fp32",))
    found = ranks.run(measure, types, most, 0.02)
    host = replace(host_of(device), ranks=len(found))
    return machine_of(machine_values(host, of_all_ranks(found), "a quick measurement"), "a quick measurement")


def _add_overhead(values: dict[str, Any], host: Host, types: Types, source: str) -> None:
    """Add the costs of kernels and steps beyond their arithmetic, which need the machine without them."""
    on_gpu = host.device == "cuda"
    machine = machine_of(values, "labkit calibrate")
    found = overhead(machine, types.main, measured_steps(types.main, host.device), hides_arithmetic=on_gpu)

    def constant(sample: Any, what: str) -> dict[str, Any]:
        return {"value": float(f"{sample.value:.4g}"), "spread": float(f"{sample.spread:.4g}"),
                "source": f"{source}, {what}"}  # fmt: skip

    kernel = constant(found.kernel, "8 layers less 2")
    values["host_launch" if on_gpu else "kernel_launch"] = kernel
    if on_gpu:
        values["kernel_launch"] = {"value": _GPU_GAP, "source": "assumed, as of the A100"}
    values["software"]["default host"] = constant(found.step, "a small step without its kernels")
    if not on_gpu:  # a GPU's rate is that of its software, fitted to runs that are larger than these
        step = middle_step(types.main, host.device)
        rate = product_rate(machine_of(values, "labkit calibrate"), types.main, step)
        values["software"]["default"] = constant(rate, "products in a step over those in a loop")


def _doubts(load_before: float, samples: Samples) -> list[str]:
    """Return why the machine was too busy to be measured, each as a note; empty for a quiet one."""
    cores, found = usable_cores(), []
    if load_before > QUIET_LOAD * cores:
        found.append(f"busy: the load average was {load_before:.1f} on {counted(cores, 'core')} before it began")
    spreads = typical_spreads(samples)
    for kind, limit in QUIET_SPREADS.items():
        if spreads.get(kind, 0.0) > limit:
            found.append(f"busy: times of {kind} spread by {spreads[kind]:.0%}")
    return found


def host_of(device: str) -> Host:
    """Return what this machine is."""
    node = platform.node() or "this machine"
    if device == "cuda":
        ranks = min(8, torch.cuda.device_count())
        gpu = torch.cuda.get_device_properties(0)
        memory, units, backend = gpu.total_memory, gpu.multi_processor_count, "NCCL"
        return Host(node, gpu.name, units, memory, device, ranks, backend)
    ranks = min(2, usable_cores())
    return Host(node, processor(), 1, host_memory().total // ranks, device, ranks, "gloo")


def processor(root: Path = Path("/")) -> str:
    """Return the model of the CPU, as Linux names it, or as Python does."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", (root / "proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine() or "CPU"
