"""Look at the machine before a run starts: can it train this configuration?

`labkit train` and `labkit.launch.run(pretrain, ...)` call `problems` in the launching process. It returns all problems
at once, a sentence for each, and needs torch only on a machine with a GPU. The ranks look again together
(`check_machines`), because torchrun or a function of the user may have started them.

Each rule has its place elsewhere: `labkit.config` has those between fields, `run_schedule.py` those of the schedule,
`device_rules.py` those of devices. `labkit.plan.memory_need` computes the memory that the run needs.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.config import ConfigError, RunConfig
from labkit.config.errors import shown
from labkit.launch import available_memory, info
from labkit.launch.launcher import MOST_RANKS
from labkit.plan.memory import RankMemory, rank_memory
from labkit.plan.memory_need import CUDA_BYTES, TORCH_BYTES, host_copies, rank_memories, shortage
from labkit.plan.stages import configured_schedule
from labkit.schedules import Schedule
from labkit.train.checkpoint import resume
from labkit.train.device_rules import device_problems, machine_problems
from labkit.train.reporting.loggers import logger_problems
from labkit.train.run_folder.claim import folder_problems
from labkit.train.run_folder.contents import saves_into
from labkit.train.run_schedule import checked_schedule

if TYPE_CHECKING:
    import torch

    from labkit.comm.groups import ParallelGroups

# ---- in the launching process ----


def problems(
    config: RunConfig,
    world_size: int,
    device: str = "auto",
    *,
    schedule: Schedule | None = None,
    own_model: bool = False,
) -> list[str]:
    """Return why `config` cannot be trained on `world_size` ranks of this machine; empty if it can.

    device: cpu, cuda or auto, as in `labkit.launch.run`.
    schedule: used instead of the configured schedule.
    own_model: true for a model that labkit did not build, whose memory it cannot predict.
    """
    if broken := config.problems(world_size):
        return broken  # the other checks need valid sizes
    schedule, problem = checked_schedule(config, world_size, schedule)
    found = [problem, *model_problems(config, own_model), *machine_problems(config, world_size, device)]
    if not info.under_torchrun():  # under torchrun each rank checks its machine, and rank 0 the folder
        found += [*folder_problems(config), *logger_problems(config.train), *resume.problems(config)]
        if not own_model and schedule is not None:
            found.append(memory_problem(config, world_size, device, schedule=schedule))
    return [problem for problem in found if problem]


def model_problems(config: RunConfig, own_model: bool) -> list[str]:
    """Return what labkit's own model cannot be, and fields of a script in a run that no script reads."""
    unread = () if config.extra_specs else vars(config.extra).items()
    rule = "not a field of labkit; run the script that declares it (extra_args_provider), or leave it out"
    found = [f"extra.{name} = {shown(value)}: {rule}" for name, value in unread]
    model = config.model
    if model.has_two_halves and model.family != "t5" and not own_model:
        rule = f"model.family = {model.family} has no decoder after an encoder; give a model_provider, or leave it out"
        found.append(f"model.model_type = {shown(model.model_type)}: {rule}")
    return found


def memory_problem(
    config: RunConfig, world_size: int, device: str = "auto", *, schedule: Schedule | None = None
) -> str:
    """Return why `world_size` ranks do not fit the memory of this machine, or an empty string. Ranks of torchrun may be
    on several machines, so they check their memory themselves. The launcher rejects more ranks than it can start."""
    if config.train.allow_oversubscription or info.under_torchrun() or world_size > MOST_RANKS:
        return ""
    schedule, kind = schedule or configured_schedule(config, world_size), info.device_kind(device)
    ranks, host = rank_memories(config, world_size, schedule, kind), available_memory.host_memory()
    saves = saves_into(config) is not None
    in_host = ranks if kind == "cpu" else host_copies(config, world_size, schedule, saves=saves)
    found = shortage(config, in_host, TORCH_BYTES, host.available, host.words)
    if kind == "cpu":
        return found
    free = available_memory.free_gpu_memory()
    for gpu, available in enumerate(free):
        if on_gpu := ranks[gpu :: len(free)]:  # rank r is on GPU r % count
            found = found or shortage(config, on_gpu, CUDA_BYTES, available, f"GPU {gpu}")
    return found


# ---- on the ranks, together ----


class _Seen(NamedTuple):
    """The findings of one rank."""

    problems: list[str]
    place: tuple[str, str]
    """Machine and GPU, whose memory the rank shares with other ranks; unused if `memory` is None."""
    available: int
    """Bytes available there."""
    memory: RankMemory | None
    """The rank's need beside its process, which runs already; None if the need is unknown or not checked."""


def check_machines(config: RunConfig, groups: ParallelGroups, schedule: Schedule, *, own_model: bool) -> None:
    """Check need and machine of all ranks together, before any rank allocates. All ranks call this.

    All ranks see all findings, so no rank allocates before the last one has checked. Raises ConfigError on all ranks
    for what the device cannot do, a folder that cannot be written, or too little memory.
    """
    found = [*model_problems(config, own_model), *device_problems(config, groups.device.type)]
    if groups.world.rank == 0:
        found += [*folder_problems(config), *logger_problems(config.train)]
    skipped = own_model or config.train.allow_oversubscription
    kind = "cuda" if groups.device.type == "cuda" else "cpu"
    memory = None if skipped else rank_memory(config, groups.world.size, schedule, groups.pp.rank, kind)
    here = (("", ""), 0) if memory is None else _memory_here(groups.device)
    seen = _exchanged(_Seen([p for p in found if p], *here, memory), groups)
    refuse([problem for one in seen for problem in one.problems] + _places_too_small(config, seen))


def _memory_here(device: torch.device) -> tuple[tuple[str, str], int]:
    """Return ((host name, its memory or GPU), bytes available there). Each container has its own host name."""
    host = socket.gethostname()
    if device.type != "cuda":
        memory = available_memory.host_memory()
        return (host, memory.words), memory.available
    import torch

    gpu = torch.cuda.get_device_properties(device).uuid
    return (host, f"GPU {gpu}"), torch.cuda.mem_get_info(device)[0]


def _places_too_small(config: RunConfig, seen: list[_Seen]) -> list[str]:
    """Return a sentence for each place whose ranks need more memory than is available there."""
    problems = []
    for place in dict.fromkeys(one.place for one in seen):
        there = [one for one in seen if one.place == place]
        if needed := [one.memory for one in there if one.memory is not None]:
            where = place[1] if len({one.place[0] for one in seen}) == 1 else " of ".join(place[::-1])
            available = min(one.available for one in there)
            problems.append(shortage(config, needed, 0, available, where))
    return [problem for problem in problems if problem]


def _exchanged(own: Any, groups: ParallelGroups) -> list[Any]:
    from labkit.comm.collectives import gather_objects
    from labkit.comm.ledger import comm_scope

    with comm_scope(layer="preflight", phase="start"):
        return gather_objects(own, groups.world)


def refuse(problems: Iterable[str]) -> None:
    """Raise ConfigError with every problem once, if there is any."""
    if found := list(dict.fromkeys(problems)):
        raise ConfigError(found, source="the run")
