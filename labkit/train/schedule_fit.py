"""Whether a pipeline schedule can drive a configuration, found before any process starts. Imports no torch."""

from __future__ import annotations

from labkit.config import RunConfig
from labkit.graphs.orders import capture_order
from labkit.graphs.scope import captures_layers
from labkit.models.placement import stage_contents
from labkit.schedules.builders import build_schedule, without_backward
from labkit.schedules.ir import KINDS, Schedule
from labkit.schedules.lowering import Transport
from labkit.schedules.verifier import verify

TRANSPORTS: dict[bool | None, Transport] = {None: "posted", True: "batched", False: "even_odd"}
"""`schedule.batch_p2p_comm` -> how the runtime moves tensors between stages, as the entry points read it."""


def transport_of(config: RunConfig) -> Transport:
    """How tensors move between stages; `overlap_p2p_comm` asks for what overlaps."""
    return "posted" if config.schedule.overlap_p2p_comm else TRANSPORTS[config.schedule.batch_p2p_comm]


def schedule_of(config: RunConfig, world_size: int) -> Schedule:
    """The schedule that a configuration names, for `world_size` ranks.

    Raises ValueError where it cannot be built, ScheduleError for a file that is none.
    """
    microbatches, parallel = config.num_microbatches(world_size), config.parallel
    return build_schedule(config.schedule, pp=parallel.pp, vpp=parallel.vpp, microbatches=microbatches)


def check_schedule(schedule: Schedule, config: RunConfig, world_size: int) -> None:
    """ValueError where the schedule does not fit batch, stages or layers of the run."""
    microbatches, parallel = config.num_microbatches(world_size), config.parallel
    if schedule.pp != parallel.pp:
        raise ValueError(f"{schedule.name} is for {schedule.pp} pipeline ranks, but parallel.pp is {parallel.pp}")
    if schedule.num_microbatches != microbatches:
        raise ValueError(
            f"{schedule.name} is for {schedule.num_microbatches} microbatches, but global_batch_size "
            f"{config.train.global_batch_size} makes {microbatches} on each data-parallel rank"
        )
    if schedule.forward_only:
        raise ValueError(f"{schedule.name} has no backward, so there would be nothing to learn from")
    held = {len(schedule.stages_of(rank)) for rank in range(schedule.pp)}
    if 0 in held:
        raise ValueError(f"{schedule.name} leaves a pipeline rank without a stage; give every rank at least one")
    if parallel.vpp > 1 and held != {parallel.vpp}:
        words = " or ".join(str(number) for number in sorted(held)) + (" stage" if held == {1} else " stages")
        raise ValueError(
            f"{schedule.name} has {words} a rank, but parallel.vpp is {parallel.vpp}; leave vpp at 1, and the "
            "schedule alone says how many model chunks there are"
        )
    if config.model.transformer_impl == "transformer_engine" and (schedule.kinds == KINDS.index("W")).any():
        raise ValueError(
            f"{schedule.name} puts weight gradients into actions of their own, and Transformer Engine's layers compute "
            "them with the input gradients; choose another schedule, or set model.transformer_impl to local"
        )
    if captures_layers(config.graph):
        for rank in range(schedule.pp):
            split = config.graph.cuda_graph_impl != "transformer_engine"
            capture_order(schedule, rank, weight_gradients=split)
    stage_contents(config, schedule.num_stages)


def schedule_problem(config: RunConfig, world_size: int) -> str:
    """Why the schedule of the configuration cannot drive it on `world_size` ranks, or an empty string.

    A file is verified over the transport of the run, and so is a named schedule where a transport could hang it.
    """
    own = config.schedule
    named = f"schedule.name = {own.name!r}" if own.path is None else f"schedule.path = {own.path!r}"
    try:
        schedule = schedule_of(config, world_size)
        check_schedule(schedule, config, world_size)
        transport = transport_of(config)
        if own.path is not None or transport == "even_odd":
            verify(schedule, transport)
            verify(without_backward(schedule), transport)  # what a validation runs
    except (ValueError, OSError) as error:
        return f"{named}: {error}"
    return ""
