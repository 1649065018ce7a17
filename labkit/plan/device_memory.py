"""Bytes that a rank allocates on its GPU, as `torch.cuda.memory_allocated` and `max_memory_allocated` count them.

After a step a rank holds weights, gradients and optimizer state, and in addition:

| term                 | bytes                                                                                     |
|----------------------|-------------------------------------------------------------------------------------------|
| cuBLAS               | a workspace for each of two threads: that of forwards, and autograd's                     |
| Transformer Engine   | 4 MiB up to Ampere, 32 MiB from Hopper                                                    |
| fp8 weights          | copies of weights for fp8 products, or less where they replace them (`float8.py`)         |
| placeholders         | of weight gradients that products add up themselves (`weight_gradients.py`)               |
| stage inputs         | for each stage but the first, its last input and the gradient of it: 2 s b h e            |
| masters' gradients   | float32 copies of 16-bit gradients, until the next step begins                            |
| global buffer        | Megatron-LM's, for scores or tokens of one layer (`device_libraries.py`)                  |
| unused remainders    | what the allocator cannot use behind large tensors (`allocator.py`)                       |

At the peak there are also the activations of the microbatches in flight, whose inputs have replaced those of all stages
but one, and the temporaries of the action that runs. A loss needs 6 bytes per logit, of which a microbatch keeps 4, the
exponentials. The 16-bit logits are alive while these are computed, and 16-bit gradients while they are freed.

What this leaves out: tables of rotary positions, and what Python has not collected yet. In about one of thirty recorded
runs of Megatron-LM the batches of the last step are still there, m (b s^2 + 12 b s) bytes of masks and labels.
Numbers only, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.config import RunConfig
from labkit.plan.activations import Share
from labkit.plan.allocator import unused_bytes
from labkit.plan.device_libraries import Term, global_buffer, workspaces
from labkit.plan.device_peak import peak_terms
from labkit.plan.engine_activations import extra_parameters
from labkit.plan.float8 import fp8_weights
from labkit.plan.multi_token import depth_parameters
from labkit.plan.stage_activations import held_stages, share_of
from labkit.plan.stages import StageContents, configured_schedule
from labkit.plan.state_bytes import Held, dense_and_experts, state_bytes
from labkit.plan.state_tensors import second_moments, state_tensors
from labkit.plan.weight_gradients import placeholders
from labkit.plan.workload import Workload
from labkit.schedules import Schedule


@dataclass(frozen=True)
class DeviceMemory:
    """What a rank allocates on its GPU."""

    held: tuple[Term, ...]
    """What is allocated after a step."""
    above: tuple[Term, ...]
    """What is allocated in addition at the peak."""

    @property
    def allocated(self) -> int:
        """Bytes after a step."""
        return sum(term.bytes for term in self.held)

    @property
    def peak(self) -> int:
        """Most bytes in a step."""
        return self.allocated + sum(term.bytes for term in self.above)

    @property
    def workspaces(self) -> int:
        """Bytes of libraries and of remainders that the allocator cannot use."""
        names = ("cuBLAS", "Transformer Engine", "placeholders", "global buffer", "unused remainders")
        return sum(self.bytes_of(*names))

    def bytes_of(self, *names: str) -> list[int]:
        """Return the bytes of terms by name, of those that stay after a step."""
        return [next(term.bytes for term in self.held if term.name == name) for name in names]


def gpu_memory(workload: Workload, pp_rank: int | None = None, schedule: Schedule | None = None) -> DeviceMemory:
    """Return what a rank at place `pp_rank` of the pipeline allocates; None is the last place.

    schedule: the schedule of the run; None builds the configured one.
    """
    config = workload.config
    if schedule is None:
        schedule = configured_schedule(config, workload.world_size)
    place = schedule.pp - 1 if pp_rank is None else pp_rank
    stages, share = held_stages(config, schedule, place), share_of(config, "cuda", workload.expert_load)
    dense, experts = _parameters(workload, stages, dense_and_experts(config, workload.world_size, schedule, place))
    state = state_bytes(config, (dense, experts), fsdp=workload.fsdp)
    optimizer = state.optimizer - (second_moments(config, list(stages.values())) if workload.extras.muon else 0)
    inputs = _stage_inputs(config, share, stages)
    held = (
        Term("weights", state.weights, _state_text("weights", state.weights, dense, experts)),
        Term("gradients", state.gradients, _state_text("gradients", state.gradients, dense, experts)),
        Term("optimizer", optimizer, _state_text("optimizer", optimizer, dense, experts)),
        fp8_weights(workload, list(stages.values())),
        placeholders(workload, list(stages.values())),
        *workspaces(config, workload.libraries),
        Term("masters' gradients", state.update, "float32 copies of narrower gradients, until the next step begins"),
        global_buffer(workload, share),
        inputs,
        _remainders(workload, stages, (dense.replicas, experts.replicas)),
    )
    return DeviceMemory(
        held, _above(peak_terms(workload, share, stages, schedule, place), stages, inputs, state.update)
    )


def _parameters(workload: Workload, stages: dict[int, StageContents], plain: tuple[Held, Held]) -> tuple[Held, Held]:
    """Return `plain` with what `extras` adds to the stages."""
    (dense, replicas), (experts, expert_replicas) = plain
    model, tp = workload.config.model, workload.config.parallel.tp
    for holds in stages.values():
        depths = depth_parameters(workload, holds)
        dense += extra_parameters(model, workload.extras, tp, holds.layers, embedding=holds.embedding) + depths.dense
        experts += depths.experts
    return Held(dense, replicas), Held(experts, expert_replicas)


def _state_text(name: str, size: int, dense: Held, experts: Held) -> str:
    shares = f"{dense.parameters:,} parameters on {dense.replicas} replicas"
    if experts.parameters:
        shares += f", {experts.parameters:,} of experts on {experts.replicas}"
    total = dense.parameters + experts.parameters
    return f"{name}: {shares}; {size / max(1, total):.3g} bytes each"


def _stage_inputs(config: RunConfig, share: Share, stages: dict[int, StageContents]) -> Term:
    """Return the last input of each stage and its gradient, which the model's `input_tensor` keeps alive.

    Source: `set_input_tensor` in megatron/core/transformer/transformer_block.py.
    """
    tokens, later = share.tokens_between(config.model), sum(stage > 0 for stage in stages)
    size = 2 * later * tokens * config.model.hidden * share.element_bytes
    formula = f"2 x {later} stages x {tokens:,} tokens x {config.model.hidden} x {share.element_bytes} bytes"
    return Term("stage inputs", size, formula)


def _remainders(workload: Workload, stages: dict[int, StageContents], replicas: tuple[int, int]) -> Term:
    if workload.libraries.expandable_segments or workload.fsdp:
        return Term("unused remainders", 0, "none with expandable segments, and left out with sharded weights")
    tensors = state_tensors(workload.config, list(stages.values()), replicas)
    return Term("unused remainders", unused_bytes(tensors), f"after the large ones of {len(tensors)} tensors")


def _above(peak: tuple[Term, ...], stages: dict[int, StageContents], inputs: Term, update: int) -> tuple[Term, ...]:
    """Return the terms of the peak. By then new stage inputs replace old ones, and masters' gradients are gone."""
    later = sum(stage > 0 for stage in stages)
    replaced = inputs.bytes * max(0, later - 1) // max(1, later)
    if sum(term.bytes for term in peak) <= replaced + update:
        return ()
    formula = f"{replaced:,} bytes of stage inputs, {update:,} of masters' gradients"
    return (*peak, Term("released", -replaced - update, formula))
