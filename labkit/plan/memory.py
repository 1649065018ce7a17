"""Bytes that a rank needs to train, in closed form: weights, gradients, optimizer state and activations in flight.

The sum is the peak of a rank in a training step, without the memory of the process itself. `parameters.py` counts the
parameters, and `zero_stages.py` the bytes of each. `activations.py` counts the activations that a forward keeps, and
the schedule says how many microbatches are in flight. Numbers only, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from labkit.config import MoEConfig, RunConfig
from labkit.parallel.data_parallel.bucket_layout import default_bucket_size
from labkit.plan.activations import (
    Share,
    end_activation_bytes,
    layer_saved,
    layers_activation_bytes,
    recomputed_at_once_bytes,
)
from labkit.plan.parameters import expert_parameters, rank_parameters
from labkit.plan.sizes import moe_layers
from labkit.plan.stages import StageContents, stage_contents
from labkit.plan.t5_activations import t5_beside_bytes, t5_stage_bytes
from labkit.plan.zero_stages import ELEMENT_BYTES, bytes_per_parameter
from labkit.schedules import Schedule
from labkit.schedules.simulator import kept_whole


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at the peak of a training step."""

    weights: int
    """Weights in the model's precision."""
    gradients: int
    """`main_grad`: float32 for 16-bit weights, unless `optim.grad_reduce_in_bf16`."""
    optimizer: int
    """Adam's two moments, and float32 masters of 16-bit weights; a rank's share of both if they are sharded."""
    activations: int
    """Tensors that forwards keep for all microbatches in flight, and the temporaries of one backward. It is at least
    the temporaries of the update, which comes when no activations are left."""
    checkpoint: int = 0
    """Copy of the state that an asynchronous save writes during the next steps; it stays for later saves."""

    @property
    def total(self) -> int:
        """Sum of all."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.checkpoint


def rank_memory(
    config: RunConfig, world_size: int, schedule: Schedule, pp_rank: int = 0, device: Literal["cpu", "cuda"] = "cpu"
) -> RankMemory:
    """Return the bytes of a rank at place `pp_rank` of the pipeline, on its device.

    The formula takes the mean load of experts. It leaves out padding of buffers, messages in transit, the training
    text, and tables of positions (rotary angles, T5's buckets). The copy for a checkpoint is in host memory, so it
    counts only if the device is the CPU.

    schedule: the schedule of the run, such as `configured_schedule(config, world_size)`.
    """
    weights, gradients, optimizer, update = _state(config, world_size, schedule, pp_rank)
    activations = max(update, _activations(config, schedule, pp_rank, device))
    if device == "cpu" and config.optim.distributed_optimizer:
        activations = max(activations, _scattered_copy(config, world_size, gradients))
    copies = device == "cpu" and config.checkpoint.asynchronous
    saved = checkpoint_bytes(config, world_size, schedule, pp_rank) if copies else 0
    return RankMemory(weights, gradients, optimizer, activations, saved)


def checkpoint_bytes(config: RunConfig, world_size: int, schedule: Schedule, pp_rank: int = 0) -> int:
    """Return the bytes that a rank writes into a checkpoint: for each weight the updated copy and two moments.

    Replicas share this work, so the result is the mean over them. Random states and other small tensors are left out.
    """
    each = 3 * max(4, ELEMENT_BYTES[config.optim.precision])
    shares = _parameters_and_replicas(config, world_size, schedule, pp_rank)
    return sum(parameters * each // replicas for parameters, replicas in shares)


def _parameters_and_replicas(
    config: RunConfig, world_size: int, schedule: Schedule, pp_rank: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (parameters on a rank, ranks that hold the same) for dense layers and for routed experts."""
    parallel = config.parallel
    etp = parallel.tp if parallel.etp is None else parallel.etp
    experts = _expert_parameters(config, schedule, pp_rank, etp)
    dense = rank_parameters(config, pp_rank=pp_rank, schedule=schedule) - experts
    replicas = config.data_parallel_size(world_size) * parallel.cp
    return (dense, replicas), (experts, world_size // (etp * parallel.ep * parallel.pp))


def _state(config: RunConfig, world_size: int, schedule: Schedule, pp_rank: int) -> tuple[int, int, int, int]:
    """Return the bytes of weights, gradients, optimizer state and, during the update, of widened gradients.

    edp ranks share experts; dp x cp ranks share everything else.
    """
    optim, precision = config.optim, config.optim.precision
    weights = gradients = optimizer = update = 0
    for parameters, ranks in _parameters_and_replicas(config, world_size, schedule, pp_rank):
        each = bytes_per_parameter(
            param_dtype=precision,
            grad_dtype="fp32" if ELEMENT_BYTES[precision] < 4 and not optim.grad_reduce_in_bf16 else precision,
            dp=max(1, ranks // optim.num_distributed_optimizer_instances),
            stage=1 if optim.distributed_optimizer else 0,
        )
        weights += int(parameters * each.weight)
        gradients += int(parameters * each.gradient)
        optimizer += int(parameters * (each.master + each.moments))
        update += int(parameters * each.update_gradient)
    return weights, gradients, optimizer, update


def _scattered_copy(config: RunConfig, world_size: int, gradients: int) -> int:
    """Return the bytes of a bucket's gradients, which gloo copies for the reduce-scatter.

    The first bucket closes late in a backward, when few activations are left, so the copy is not added to their peak.
    """
    replicas, optim = config.data_parallel_size(world_size) * config.parallel.cp, config.optim
    if replicas == 1:
        return 0
    elements = (optim.bucket_size or default_bucket_size(replicas)) if optim.overlap_grad_reduce else gradients
    return min(gradients, elements * (2 if optim.grad_reduce_in_bf16 else max(4, ELEMENT_BYTES[optim.precision])))


def _expert_parameters(config: RunConfig, schedule: Schedule, pp_rank: int, etp: int) -> int:
    """Return the parameters of the routed experts on one rank."""
    if not config.moe.num_experts:
        return 0
    contents = stage_contents(config, schedule.num_stages)
    layers = sum(moe_layers(config.model, config.moe, contents[s].layers) for s in schedule.stages_of(pp_rank))
    each = expert_parameters(config.model, config.moe) // etp
    return layers * (config.moe.num_experts // config.parallel.ep) * each


def share_of(config: RunConfig, device: Literal["cpu", "cuda"] = "cpu") -> Share:
    """Return the share of each layer that a rank computes for a microbatch."""
    parallel = config.parallel
    return Share(
        samples=config.train.micro_batch_size,
        tp=parallel.tp,
        cp=parallel.cp,
        sequence_parallel=parallel.sequence_parallel,
        etp=parallel.tp if parallel.etp is None else parallel.etp,
        element_bytes=ELEMENT_BYTES[config.optim.precision],
        device=device,
    )


def _activations(config: RunConfig, schedule: Schedule, pp_rank: int, device: Literal["cpu", "cuda"]) -> int:
    """Return the most bytes that microbatches in flight keep on the rank, plus the temporaries of one backward."""
    share, contents = share_of(config, device), stage_contents(config, schedule.num_stages)
    held = {stage: contents[stage] for stage in schedule.stages_of(pp_rank)}
    moe = _most_that_is_kept(config.moe)
    row = slice(schedule.offsets[pp_rank], schedule.offsets[pp_rank + 1])
    kinds, stages = schedule.kinds[row], schedule.stages[row]
    sizes = _kept_on(held, config, share, moe, schedule.num_stages)[stages]
    if count := config.model.num_microbatches_with_partial_activation_checkpoints:
        keeps_all = config.replaced({"model.recompute_granularity": "none"})
        whole = kept_whole(schedule, pp_rank, count)
        is_whole = np.array([(a.stage, a.microbatch) in whole for a in schedule.actions(pp_rank)])
        sizes = np.where(is_whole, _kept_on(held, keeps_all, share, moe, schedule.num_stages)[stages], sizes)
    signs = np.array([1, -1, 0, -1])[kinds]  # F keeps activations; B frees them, or W of a split backward
    peak = int(np.cumsum(signs * sizes).max())
    return peak + max(_beside(config, share, holds, moe) for holds in held.values())


def _kept_on(
    held: dict[int, StageContents], config: RunConfig, share: Share, moe: MoEConfig, num_stages: int
) -> np.ndarray:
    """Return (S,): the bytes that one microbatch keeps on each stage of the rank, 0 for the stages of other ranks."""
    kept = np.zeros(num_stages)
    for stage, holds in held.items():
        kept[stage] = _stage_bytes(config, share, holds, moe)
    return kept


def _most_that_is_kept(moe: MoEConfig) -> MoEConfig:
    """Remove a capacity without padding: only the routing decides its bytes, which are at most those without it."""
    return moe if moe.pad_to_capacity else replace(moe, capacity_factor=None)


def _stage_bytes(config: RunConfig, share: Share, holds: StageContents, moe: MoEConfig) -> int:
    """Return the bytes that one microbatch keeps on a stage."""
    if config.model.family == "t5":
        return t5_stage_bytes(config.model, share, holds)
    layers = layers_activation_bytes(config.model, share, holds.layers, moe)
    return layers + end_activation_bytes(config.model, share, pre_process=holds.embedding, post_process=holds.loss)


def _beside(config: RunConfig, share: Share, holds: StageContents, moe: MoEConfig) -> int:
    """Return the bytes of the temporaries in a stage's backward: a recomputed piece, and the widest operation's.

    The widest operation needs three times its largest tensor, because of its gradients and a copy.
    """
    if not holds.layers:
        return 0
    if config.model.family == "t5":
        return t5_beside_bytes(config.model, share, holds.layers)
    model = config.model
    kinds = {(moe.is_moe_layer(index), model.parts_of_layer(index)) for index in holds.layers}
    each = [layer_saved(model, share, moe if experts else None, parts) for experts, parts in kinds]
    widest = max(size for saved in each for size in saved.values())
    return 3 * widest + recomputed_at_once_bytes(config.model, share, holds.layers, moe)
