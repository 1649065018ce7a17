"""Whether a layout fits the memory of one GPU of a machine, and what its fullest rank holds. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal, NamedTuple

from labkit.plan.device_memory import gpu_memory
from labkit.plan.machine import Machine
from labkit.plan.memory import rank_memory
from labkit.plan.memory_need import CUDA_BYTES, TORCH_BYTES
from labkit.plan.workload import Gpu, Workload
from labkit.schedules import Schedule

RESERVE = CUDA_BYTES + (1536 << 20)
"""Bytes of a GPU that a plan leaves free: a CUDA context, and 1.5 GiB for NCCL's buffers and for what the allocator
holds but cannot use. The second number is assumed, not measured."""
_GPUS: dict[str, Gpu] = {"V100": "v100", "A100": "a100", "H100": "h100", "H200": "h100", "B200": "b200", "B300": "b200"}
"""Word in `Machine.gpu` -> the generation whose libraries it runs; GB200 and GB300 contain the last two."""
_MAKERS = ("NVIDIA", "Tesla", "AMD Instinct")
"""How the names of other GPUs begin; anything else is a CPU."""


class Fullest(NamedTuple):
    """The rank that needs most memory."""

    bytes: int
    """Its peak."""
    place: int
    """Its place in the pipeline."""


def generation(machine: Machine) -> Gpu | None:
    """Return the generation of a machine's GPUs; None for a CPU, and for GPUs that are not known."""
    return next((gpu for word, gpu in _GPUS.items() if word in machine.gpu), None)


def device_of(machine: Machine) -> Literal["cpu", "cuda"]:
    """Return the device whose bytes count."""
    return "cuda" if generation(machine) or machine.gpu.startswith(_MAKERS) else "cpu"


def on_machine(workload: Workload, machine: Machine) -> Workload:
    """Return the workload with the libraries that a machine's GPUs run."""
    gpu = generation(machine)
    return workload if gpu is None else replace(workload, libraries=replace(workload.libraries, gpu=gpu))


def memory_terms(workload: Workload, machine: Machine, schedule: Schedule, place: int) -> dict[str, int]:
    """Return what a rank at a place needs at its peak, by name."""
    if device_of(machine) == "cpu":
        found = rank_memory(workload.config, workload.world_size, schedule, place, "cpu")
        return {name: size for name, size in vars(found).items() if size} | {"torch": TORCH_BYTES}
    memory = gpu_memory(workload, place, schedule)
    return {term.name: term.bytes for term in (*memory.held, *memory.above) if term.bytes}


def fullest(workload: Workload, machine: Machine, schedule: Schedule, places: Iterable[int] | None = None) -> Fullest:
    """Return the rank of these places, or of all, that needs most."""
    each = range(schedule.pp) if places is None else places
    needs = {place: sum(memory_terms(workload, machine, schedule, place).values()) for place in each}
    place = max(needs, key=needs.__getitem__)
    return Fullest(needs[place], place)


def ends_first(schedule: Schedule) -> tuple[int, ...]:
    """Return the two places that usually need most: the first keeps most microbatches, and one has the loss."""
    return tuple(dict.fromkeys((0, schedule.pp - 1)))
