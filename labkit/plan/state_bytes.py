"""Bytes of weights, gradients and optimizer state on a rank, in closed form. No torch.

`parameters.py` counts the parameters, and `zero_stages.py` the bytes of each.
"""

from __future__ import annotations

from typing import NamedTuple

from labkit.config import RunConfig
from labkit.plan.parameters import expert_parameters, rank_parameters
from labkit.plan.sizes import moe_layers
from labkit.plan.stages import stage_contents
from labkit.plan.zero_stages import ELEMENT_BYTES, bytes_per_parameter
from labkit.schedules import Schedule


class Held(NamedTuple):
    """Parameters on a rank, and the number of ranks that hold the same."""

    parameters: int
    replicas: int


class State(NamedTuple):
    """Bytes that a rank keeps from step to step, and those that its update adds."""

    weights: int
    gradients: int
    optimizer: int
    update: int
    """Gradients in the precision of the masters, during the update."""


def dense_and_experts(config: RunConfig, world_size: int, schedule: Schedule, pp_rank: int) -> tuple[Held, Held]:
    """Return what a rank holds of dense layers and of routed experts.

    edp ranks share experts; dp x cp ranks share everything else.
    """
    parallel = config.parallel
    experts = _expert_parameters(config, schedule, pp_rank)
    dense = rank_parameters(config, pp_rank=pp_rank, schedule=schedule) - experts
    replicas = config.data_parallel_size(world_size) * parallel.cp
    return Held(dense, replicas), Held(experts, world_size // (parallel.expert_tp * parallel.ep * parallel.pp))


def _expert_parameters(config: RunConfig, schedule: Schedule, pp_rank: int) -> int:
    """Return the parameters of the routed experts on one rank."""
    if not config.moe.num_experts:
        return 0
    contents = stage_contents(config, schedule.num_stages)
    layers = sum(moe_layers(config.model, config.moe, contents[s].layers) for s in schedule.stages_of(pp_rank))
    each = expert_parameters(config.model, config.moe) // config.parallel.expert_tp
    return layers * (config.moe.num_experts // config.parallel.ep) * each


def state_bytes(config: RunConfig, held: tuple[Held, ...], *, fsdp: bool = False) -> State:
    """Return the bytes of parameters that a rank holds. fsdp: weights and gradients are sharded, too."""
    optim, precision = config.optim, config.optim.precision
    weights = gradients = optimizer = update = 0
    for parameters, ranks in held:
        each = bytes_per_parameter(
            param_dtype=precision,
            grad_dtype="fp32" if ELEMENT_BYTES[precision] < 4 and not optim.grad_reduce_in_bf16 else precision,
            dp=max(1, ranks // optim.num_distributed_optimizer_instances),
            stage=3 if fsdp else 1 if optim.distributed_optimizer else 0,
        )
        weights += int(parameters * each.weight)
        gradients += int(parameters * each.gradient)
        optimizer += int(parameters * (each.master + each.moments))
        update += int(parameters * each.update_gradient)
    return State(weights, gradients, optimizer, update)
