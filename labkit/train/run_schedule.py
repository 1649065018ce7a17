"""Does a schedule fit the run that has to follow it?

A schedule fits if it is for the run's pipeline ranks and microbatches, goes backward, and places stages such that the
model can be divided over them. `labkit.config` has checked the named schedules; a file or a schedule of the user's own
can break each of these rules.
"""

from __future__ import annotations

from labkit.config import RunConfig
from labkit.config.errors import counted
from labkit.config.graph_rules import defers_weight_gradients
from labkit.graphs.order_table import capture_order, merged_capture_order
from labkit.graphs.scope import captures_layers
from labkit.plan.stages import configured_schedule, stage_contents
from labkit.schedules.builders import without_backward
from labkit.schedules.ir import KINDS, Schedule
from labkit.schedules.lowering import DEFAULT_TRANSPORT, Transport
from labkit.schedules.verifier import verify

TRANSPORTS: dict[bool | None, Transport] = {None: DEFAULT_TRANSPORT, True: "batched", False: "even_odd"}
"""`schedule.batch_p2p_comm` -> the transport by which the runtime moves tensors between stages."""


def transport_of(config: RunConfig) -> Transport:
    """Return the transport between stages. `overlap_p2p_comm` needs `posted`, which overlaps."""
    return "posted" if config.schedule.overlap_p2p_comm else TRANSPORTS[config.schedule.batch_p2p_comm]


def check_schedule(schedule: Schedule, config: RunConfig, world_size: int) -> None:
    """Raise ValueError if the schedule does not fit batch, stages or layers of the run."""
    microbatches, parallel = config.num_microbatches(world_size), config.parallel
    schedule.check_pp(parallel.pp)
    if schedule.num_microbatches != microbatches:
        batch = config.train.global_batch_size
        fitting = batch * schedule.num_microbatches // microbatches
        raise ValueError(
            f"{schedule.name} is for {counted(schedule.num_microbatches, 'microbatch')}, but global_batch_size {batch} "
            f"makes {microbatches} on each data-parallel rank; set it to {fitting}"
        )
    if schedule.forward_only:
        raise ValueError(f"{schedule.name} has no backward, so the model would not learn")
    held = {len(schedule.stages_of(rank)) for rank in range(schedule.pp)}
    if 0 in held:
        raise ValueError(f"{schedule.name} leaves a pipeline rank without a stage; give every rank at least one")
    if parallel.vpp > 1 and held != {parallel.vpp}:
        words = " or ".join(str(number) for number in sorted(held)) + (" stage" if held == {1} else " stages")
        raise ValueError(
            f"{schedule.name} has {words} per rank, but parallel.vpp is {parallel.vpp}; set vpp to 1: then "
            "the schedule decides the number of model chunks"
        )
    if config.model.transformer_impl == "transformer_engine" and (schedule.kinds == KINDS.index("W")).any():
        raise ValueError(
            f"{schedule.name} puts weight gradients into actions of their own, but Transformer Engine's layers compute "
            "them with the input gradients; choose another schedule, or set model.transformer_impl to local"
        )
    if config.model.compile != "none" and (schedule.kinds == KINDS.index("W")).any():
        raise ValueError(
            f"{schedule.name} puts weight gradients into actions of their own, but compiled layers compute them with "
            "the input gradients; choose another schedule, or set model.compile to none"
        )
    if config.graph.cuda_graph_impl != "none" and captures_layers(config.graph):
        for rank in range(schedule.pp):
            split = config.graph.cuda_graph_impl != "transformer_engine"
            if schedule.has_pairs:
                _check_order_of_pairs(schedule, rank, config)
            else:
                capture_order(schedule, rank, weight_gradients=split)
    stage_contents(config, schedule.num_stages)


def _check_order_of_pairs(schedule: Schedule, rank: int, config: RunConfig) -> None:
    defers = defers_weight_gradients(config.graph.cuda_graph_modules, config.moe.shared_expert_ffn_hidden)
    delay, of_no_layers = config.schedule.delay_wgrad_compute, [()] * len(schedule.stages_of(rank))
    merged_capture_order(schedule, rank, of_no_layers, weight_gradients=defers, delay_wgrad=delay)


def schedule_problem(config: RunConfig, world_size: int) -> str:
    """Return why the configured schedule cannot run on `world_size` ranks, or an empty string."""
    return checked_schedule(config, world_size)[1]


def checked_schedule(
    config: RunConfig, world_size: int, schedule: Schedule | None = None
) -> tuple[Schedule | None, str]:
    """Return the given or else the configured schedule, and why it cannot drive the run (an empty string if it can).

    A schedule file and a named schedule are verified over the transport of the run. The runtime verifies a given one.
    """
    own, given = config.schedule, schedule is not None
    named = f"schedule.name = {own.name!r}: " if own.path is None else f"schedule.path = {own.path!r}: "
    try:
        schedule = schedule or configured_schedule(config, world_size)
        check_schedule(schedule, config, world_size)
        transport = transport_of(config)
        if not given:
            verify(schedule, transport)
            verify(without_backward(schedule), transport)  # validations run it
    except (ValueError, OSError) as error:
        return None, f"{'' if given else named}{error}"
    return schedule, ""
