"""Whether a pipeline schedule can drive a configuration, found before any process starts. Imports no torch."""

from __future__ import annotations

from labkit.config import RunConfig
from labkit.schedules.builders import build_schedule
from labkit.schedules.ir import Schedule
from labkit.schedules.simulator import simulate


def check_schedule(schedule: Schedule, config: RunConfig, world_size: int) -> None:
    """ValueError where the schedule does not fit batch, stages or layers of the run."""
    microbatches, pp = config.num_microbatches(world_size), config.parallel.pp
    if schedule.pp != pp:
        raise ValueError(f"{schedule.name} is for {schedule.pp} pipeline ranks, but parallel.pp is {pp}")
    if schedule.num_microbatches != microbatches:
        raise ValueError(
            f"{schedule.name} is for {schedule.num_microbatches} microbatches, but global_batch_size "
            f"{config.train.global_batch_size} makes {microbatches} on each data-parallel rank"
        )
    moved = [stage for stage in range(schedule.num_stages) if schedule.placement(stage) != stage % pp]
    if moved:
        raise ValueError(
            f"{schedule.name} runs stage {moved[0]} on pipeline rank {schedule.placement(moved[0])}, but its "
            f"layers are on rank {moved[0] % pp}: stage s belongs to rank s mod pp"
        )
    if schedule.num_stages != pp * config.parallel.vpp:
        raise ValueError(
            f"{schedule.name} has {schedule.num_stages} stages, but the model has pp x vpp = {pp} x "
            f"{config.parallel.vpp} = {pp * config.parallel.vpp}"
        )


def schedule_problem(config: RunConfig, world_size: int) -> str:
    """Why the file at `schedule.path` cannot drive this run on `world_size` ranks, or an empty string."""
    if config.schedule.path is None:
        return ""
    try:
        microbatches = config.num_microbatches(world_size)
        schedule = build_schedule(config.schedule, pp=config.parallel.pp, microbatches=microbatches)
        check_schedule(schedule, config, world_size)
        simulate(schedule)
    except (ValueError, OSError) as error:
        return f"schedule.path = {config.schedule.path!r}: {error}"
    return ""
