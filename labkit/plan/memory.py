"""Bytes that a rank needs to train, in closed form: weights, gradients, optimizer state and activations in flight.

The sum is the peak of a rank in a training step, without the memory of the process itself. `state_bytes.py` counts what
stays from step to step, `stage_activations.py` what a microbatch keeps, and the schedule says how many microbatches are
in flight. `cpu_peak.py` finds the peak of a step on a CPU, `device_memory.py` that on a GPU, with what libraries and
the allocator take there. Numbers only, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from labkit.config import RunConfig
from labkit.parallel.data_parallel.bucket_layout import default_bucket_size
from labkit.plan.cpu_peak import activation_peak
from labkit.plan.device_memory import gpu_memory
from labkit.plan.state_bytes import dense_and_experts, state_bytes
from labkit.plan.workload import Workload
from labkit.plan.zero_stages import ELEMENT_BYTES
from labkit.schedules import Schedule

HEAP_SHARE = 0.2
"""Memory that malloc holds on a CPU beyond the tensors, and packed operands of products, over the activations. Eleven
configurations of `tests/parallel/test_memory_measured.py` took 0.05 to 0.35 on Linux."""


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
    """Tensors that forwards keep for all microbatches in flight, the temporaries of one backward, and on a CPU the
    messages of the pipeline. It is at least the temporaries of the update, when no activations are left."""
    checkpoint: int = 0
    """Copy of the state that an asynchronous save writes during the next steps; it stays for later saves."""
    workspaces: int = 0
    """Workspaces of libraries, and memory that the allocator holds and cannot use."""

    @property
    def total(self) -> int:
        """Sum of all."""
        return sum(vars(self).values())


def rank_memory(
    config: RunConfig, world_size: int, schedule: Schedule, pp_rank: int = 0, device: Literal["cpu", "cuda"] = "cpu"
) -> RankMemory:
    """Return the bytes of a rank at place `pp_rank` of the pipeline, on its device.

    The formula takes the mean load of experts. It leaves out padding of buffers, the training text, and tables of
    positions (rotary angles, T5's buckets). The copy for a checkpoint is in host memory, so it counts only if the
    device is the CPU.

    schedule: the schedule of the run, such as `configured_schedule(config, world_size)`.
    """
    if device == "cuda":
        found = gpu_memory(Workload(config, world_size), pp_rank, schedule)
        weights, narrow, gradients, optimizer = found.bytes_of("weights", "fp8 weights", "gradients", "optimizer")
        weights += narrow
        activations = found.peak - weights - gradients - optimizer - found.workspaces
        return RankMemory(weights, gradients, optimizer, activations, workspaces=found.workspaces)
    state = state_bytes(config, dense_and_experts(config, world_size, schedule, pp_rank))
    activations = max(state.update, activation_peak(config, schedule, pp_rank))
    if config.optim.distributed_optimizer:
        activations = max(activations, _scattered_copy(config, world_size, state.gradients))
    saved = checkpoint_bytes(config, world_size, schedule, pp_rank) if config.checkpoint.asynchronous else 0
    heap = int(HEAP_SHARE * activations)
    return RankMemory(state.weights, state.gradients, state.optimizer, activations, saved, heap)


def checkpoint_bytes(config: RunConfig, world_size: int, schedule: Schedule, pp_rank: int = 0) -> int:
    """Return the bytes that a rank writes into a checkpoint: for each weight the updated copy and two moments.

    Replicas share this work, so the result is the mean over them. Random states and other small tensors are left out.
    """
    each = 3 * max(4, ELEMENT_BYTES[config.optim.precision])
    shares = dense_and_experts(config, world_size, schedule, pp_rank)
    return sum(parameters * each // replicas for parameters, replicas in shares)


def _scattered_copy(config: RunConfig, world_size: int, gradients: int) -> int:
    """Return the bytes of a bucket's gradients, which gloo copies for the reduce-scatter.

    The first bucket closes late in a backward, when few activations are left, so the copy is not added to their peak.
    """
    replicas, optim = config.data_parallel_size(world_size) * config.parallel.cp, config.optim
    if replicas == 1:
        return 0
    elements = (optim.bucket_size or default_bucket_size(replicas)) if optim.overlap_grad_reduce else gradients
    return min(gradients, elements * (2 if optim.grad_reduce_in_bf16 else max(4, ELEMENT_BYTES[optim.precision])))
