"""Bytes that a microbatch keeps on a stage, and those that its backward needs beside them. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from labkit.config import MoEConfig, RunConfig
from labkit.plan.activations import (
    Share,
    end_activation_bytes,
    layer_saved,
    layers_activation_bytes,
    recomputed_at_once_bytes,
)
from labkit.plan.stages import StageContents, stage_contents
from labkit.plan.t5_activations import t5_beside_bytes, t5_stage_bytes
from labkit.plan.zero_stages import ELEMENT_BYTES
from labkit.schedules import Schedule
from labkit.schedules.simulator import kept_whole


def share_of(config: RunConfig, device: Literal["cpu", "cuda"] = "cpu", expert_load: float = 1.0) -> Share:
    """Return the share of each layer that a rank computes for a microbatch.

    expert_load: rows that the rank's experts get, relative to the mean over ranks.
    """
    parallel = config.parallel
    share = Share(
        samples=config.train.micro_batch_size,
        tp=parallel.tp,
        cp=parallel.cp,
        sequence_parallel=parallel.sequence_parallel,
        etp=parallel.expert_tp,
        element_bytes=ELEMENT_BYTES[config.optim.precision],
        device=device,
    )
    if expert_load == 1.0:
        return share
    mean = share.tokens_between(config.model) * config.moe.top_k * share.etp
    return replace(share, expert_rows=round(mean * expert_load))


def stage_bytes(config: RunConfig, share: Share, holds: StageContents) -> int:
    """Return the bytes that one microbatch keeps on a stage. Of experts with a capacity it is at most this much."""
    if config.model.family == "t5":
        return t5_stage_bytes(config.model, share, holds)
    layers = layers_activation_bytes(config.model, share, holds.layers, most_that_is_kept(config.moe))
    return layers + end_activation_bytes(config.model, share, pre_process=holds.embedding, post_process=holds.loss)


def most_that_is_kept(moe: MoEConfig) -> MoEConfig:
    """Remove a capacity without padding: only the routing decides its bytes, which are at most those without it."""
    return moe if moe.pad_to_capacity else replace(moe, capacity_factor=None)


def backward_bytes(config: RunConfig, share: Share, holds: StageContents, tensors: int = 3) -> int:
    """Return the bytes of the temporaries in a stage's backward: a recomputed piece, and the widest operation's.

    tensors: how many of its largest size that operation needs: its gradients, and with three a copy.
    """
    if not holds.layers:
        return 0
    if config.model.family == "t5":
        return t5_beside_bytes(config.model, share, holds.layers, tensors)
    model, moe = config.model, most_that_is_kept(config.moe)
    kinds = {(moe.is_moe_layer(index), model.parts_of_layer(index)) for index in holds.layers}
    each = [layer_saved(model, share, moe if experts else None, parts) for experts, parts in kinds]
    widest = max(size for saved in each for size in saved.values())
    return tensors * widest + recomputed_at_once_bytes(model, share, holds.layers, moe)


def held_stages(config: RunConfig, schedule: Schedule, pp_rank: int) -> dict[int, StageContents]:
    """Return stage -> its contents, of the stages on a rank."""
    contents = stage_contents(config, schedule.num_stages)
    return {stage: contents[stage] for stage in schedule.stages_of(pp_rank)}


def action_bytes(
    config: RunConfig, schedule: Schedule, pp_rank: int, kept: np.ndarray, whole: np.ndarray
) -> np.ndarray:
    """Return (A,), for each action of a rank the bytes by which it changes what is kept.

    F keeps the activations of its stage. B frees them, or W of a split backward.

    kept: (S,), the bytes that a microbatch keeps on each stage. whole: the same for those microbatches that keep
    everything (`model.num_microbatches_with_partial_activation_checkpoints`).
    """
    row = slice(schedule.offsets[pp_rank], schedule.offsets[pp_rank + 1])
    kinds, stages = schedule.kinds[row], schedule.stages[row]
    sizes = kept[stages]
    if count := config.model.num_microbatches_with_partial_activation_checkpoints:
        keeps_all = kept_whole(schedule, pp_rank, count)
        is_whole = np.array([(a.stage, a.microbatch) in keeps_all for a in schedule.actions(pp_rank)])
        sizes = np.where(is_whole, whole[stages], sizes)
    return np.array([1, -1, 0, -1])[kinds] * sizes
