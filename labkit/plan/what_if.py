"""What if one constant of a machine were another: bits for bytes, a data sheet's sparse peak, no NVLS. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from labkit.plan.machine import Level, Machine


def scaled(machine: Machine, constant: str, factor: float) -> Machine:
    """Return the machine with one of `CONSTANTS` multiplied by `factor`.

    Raises ValueError for another constant, and for a factor that is not above 0.
    """
    if constant not in CONSTANTS:
        raise ValueError(f"constant = {constant!r}: choose one of {', '.join(CONSTANTS)}")
    if not factor > 0:
        raise ValueError(f"factor = {factor}: give a number above 0")
    return CONSTANTS[constant](machine, factor)


def without_nvls(machine: Machine) -> Machine:
    """Return the machine with switches that don't add: an all-reduce takes the ring, as with `NCCL_NVLS_ENABLE=0`."""
    return replace(machine, levels=tuple(replace(each, all_reduce_bandwidth=each.bandwidth) for each in machine.levels))


def _peak(machine: Machine, factor: float) -> Machine:
    return replace(machine, peak_flops={dtype: factor * peak for dtype, peak in machine.peak_flops.items()})


def _memory(machine: Machine, factor: float) -> Machine:
    return replace(machine, memory_bandwidth=factor * machine.memory_bandwidth)


def _host(machine: Machine, factor: float) -> Machine:
    times = {name: value * (factor if name.endswith(" host") else 1) for name, value in machine.software.items()}
    return replace(machine, software=times)


def _node(machine: Machine, factor: float) -> Machine:
    return replace(machine, levels=(_faster(machine.levels[0], factor), *machine.levels[1:]))


def _network(machine: Machine, factor: float) -> Machine:
    return replace(machine, levels=(*machine.levels[:-1], _faster(machine.levels[-1], factor)))


def _faster(level: Level, factor: float) -> Level:
    all_reduce = factor * level.all_reduce_bandwidth
    return replace(level, bandwidth=factor * level.bandwidth, all_reduce_bandwidth=all_reduce)


CONSTANTS: Mapping[str, Callable[[Machine, float], Machine]] = {
    "peak": _peak,
    "memory": _memory,
    "node": _node,
    "network": _network,
    "host": _host,
}
"""FLOP/s of GEMMs, bandwidth of the memory, of the innermost and of the outermost level of the network, and seconds of
a step in which no kernel runs -> how they change. Measured tables stay as they are."""
