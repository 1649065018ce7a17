"""What configuration, device, memory and folders already tell of a run, said before any process starts.

`labkit train` asks `problems`, and so does `labkit.launch.run(pretrain, ...)` in the process that launches. Everything
wrong comes at once, a sentence for each. Ranks look again (`rank_preflight.py`), because torchrun may have started
them, or a function of the user's own calls `pretrain`. Needs no torch, unless the machine has a GPU.
"""

from __future__ import annotations

from labkit.config import RunConfig
from labkit.launch import info, torchrun
from labkit.launch.machine import why_no_transformer_engine
from labkit.schedules.ir import Schedule
from labkit.train.memory_fit import memory_problem
from labkit.train.output_folder import folder_problem
from labkit.train.schedule_fit import check_schedule, schedule_problem


def problems(
    config: RunConfig,
    world_size: int,
    device: str = "auto",
    *,
    schedule: Schedule | None = None,
    own_model: bool = False,
) -> list[str]:
    """Why `config` cannot be trained on `world_size` ranks of this machine; empty where nothing speaks against it.

    device: cpu, cuda or auto, as in `labkit.launch.run`.
    schedule: takes the place of the configured one.
    own_model: the model is not labkit's, so that nobody knows what it needs.
    """
    if broken := [*config.problems(world_size), *config.not_yet_trainable()]:
        return broken  # the rest goes by sizes that are sound
    found = machine_problems(config, world_size, device, schedule=schedule)
    if torchrun.started_us():  # its ranks may be on several machines: each looks at its own, the first at the folder
        return found
    found.append(folder_problem(config.train))
    if not own_model and not _schedule_problem(config, world_size, schedule):
        found.append(memory_problem(config, world_size, device, schedule=schedule))
    return [problem for problem in found if problem]


def machine_problems(config: RunConfig, world_size: int, device: str, *, schedule: Schedule | None = None) -> list[str]:
    """What is wrong with schedule, layers, graphs or device of a configuration whose rules all hold."""
    found = (
        device_problem(device, config.parallel.distributed_backend, world_size),
        _schedule_problem(config, world_size, schedule),
        layer_problem(config),
        graph_problem(config, device),
    )
    return [problem for problem in found if problem]


def _schedule_problem(config: RunConfig, world_size: int, schedule: Schedule | None) -> str:
    if schedule is None:
        return schedule_problem(config, world_size)
    try:
        check_schedule(schedule, config, world_size)
    except ValueError as error:
        return str(error)
    return ""


def device_problem(device: str, backend: str, world_size: int) -> str:
    """Why ranks of this machine could not have the GPUs that are asked for by name, or an empty string.

    Ranks of torchrun exist already, and those of one machine are not all: each of them says it for itself.
    """
    if (device != "cuda" and backend != "nccl") or torchrun.started_us():
        return ""
    try:
        info.choose_backend(backend, info.choose_device(device, 0, 0), world_size)
    except ValueError as error:
        return str(error)
    return ""


def layer_problem(config: RunConfig) -> str:
    """Why the chosen layers cannot run here, or an empty string."""
    if config.model.transformer_impl == "local":
        return ""
    missing = why_no_transformer_engine()
    return f"model.transformer_impl = 'transformer_engine': {missing}; or set it to local" if missing else ""


def graph_problem(config: RunConfig, device: str) -> str:
    """Why the chosen CUDA graphs cannot be captured on `device`, or an empty string."""
    impl = config.graph.cuda_graph_impl
    if impl == "none":
        return ""
    kind, needed = info.device_kind(device), "cpu" if impl == "emulated" else "cuda"
    missing = why_no_transformer_engine() if impl == "transformer_engine" and kind == "cuda" else None
    if kind != needed:
        fitting = "local" if kind == "cuda" else "emulated"
        missing = f"it captures on {needed}, and this run is on {kind}; set it to {fitting} or none"
    return f"graph.cuda_graph_impl = {impl}: {missing}" if missing is not None else ""
