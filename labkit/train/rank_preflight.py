"""The same looks as `preflight.py`, taken by the ranks together before they allocate anything.

Ranks that torchrun started have no launching process, and a function of the user's own may call `pretrain` where no
launcher knew of it. Each rank says what it needs and what its machine has; all of them see all answers and raise the
same ConfigError. The exchange is also a barrier: no rank allocates before the last one has looked.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from labkit.config import ConfigError, RunConfig
from labkit.launch import machine
from labkit.models.memory.memory_bytes import RankMemory, rank_memory
from labkit.parallel.collectives import comm_scope, gather_objects
from labkit.parallel.groups import ParallelGroups
from labkit.schedules.ir import Schedule
from labkit.train.preflight import Need, graph_problem, too_much
from labkit.train.reporting.output_folder import RunFolder, folder_problem


class _Seen(NamedTuple):
    """What one rank found."""

    problems: list[str]
    place: tuple[str, str]
    """Machine and GPU, whose memory it shares with the other ranks there; not looked at where `memory` is None."""
    available: int
    """Bytes there."""
    memory: RankMemory | None
    """What it needs; None where nobody knows, or nobody wants to. Its process has taken its own share already."""


def look(config: RunConfig, groups: ParallelGroups, schedule: Schedule, *, own_model: bool) -> None:
    """Called by all ranks. ConfigError on all of them for graphs that this machine cannot capture, a folder that cannot
    be written, and memory that does not suffice."""
    found = [graph_problem(config, groups.device.type)]
    if groups.world.rank == 0 and config.train.output_dir is not None:
        found.append(folder_problem(config.train))
    skipped = own_model or config.train.allow_oversubscription
    kind = "cuda" if groups.device.type == "cuda" else "cpu"
    memory = None if skipped else rank_memory(config, groups.world.size, schedule, groups.pp.rank, kind)
    here = (("", ""), 0) if memory is None else _memory_here(groups.device)
    seen = _exchanged(_Seen([p for p in found if p], *here, memory), groups)
    refuse([problem for one in seen for problem in one.problems] + _too_much(config, seen))


def _memory_here(device: torch.device) -> tuple[tuple[str, str], int]:
    """(machine and GPU, bytes available there). Hosts go by name: containers see what they may take."""
    host = socket.gethostname()
    if device.type != "cuda":
        memory = machine.host_memory()
        return (host, memory.words), memory.available
    gpu = torch.cuda.get_device_properties(device).uuid
    return (host, f"GPU {gpu}"), torch.cuda.mem_get_info(device)[0]


def _too_much(config: RunConfig, seen: list[_Seen]) -> list[str]:
    """A sentence for each place whose ranks need more than is available there."""
    problems = []
    for place in dict.fromkeys(one.place for one in seen):
        there = [one for one in seen if one.place == place]
        if needed := [one.memory for one in there if one.memory is not None]:
            where = place[1] if len({one.place[0] for one in seen}) == 1 else " of ".join(place[::-1])
            available = min(one.available for one in there)
            problems.append(too_much(config, Need(needed, torch_bytes=0), available, where))
    return [problem for problem in problems if problem]


@contextmanager
def run_folder(config: RunConfig, groups: ParallelGroups) -> Iterator[None]:
    """Called by all ranks; inside the block rank 0 holds `train.output_dir` for this run, if there is one. ConfigError
    on all ranks where it cannot. A block that ends without an exception marks the run as finished."""
    if config.train.output_dir is None:
        yield
        return
    folder, problems = RunFolder(config, groups.world.size) if groups.world.rank == 0 else None, []
    try:
        if folder is not None:
            folder.claim()
    except ConfigError as error:
        problems = error.problems
    refuse(problem for found in _exchanged(problems, groups) for problem in found)
    try:
        yield
        if folder is not None:
            folder.finish()
    finally:
        if folder is not None:
            folder.let_go()


def _exchanged(own: Any, groups: ParallelGroups) -> list[Any]:
    with comm_scope(layer="preflight", phase="start"):
        return gather_objects(own, groups.world)


def refuse(problems: Iterable[str]) -> None:
    """ConfigError with every problem once, if there is any."""
    if found := list(dict.fromkeys(problems)):
        raise ConfigError(found, source="the run")
