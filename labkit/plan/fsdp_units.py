"""Bytes of the weights and gradients that fully sharded data parallelism makes whole for a while. No torch.

A unit is a layer, or everything outside of layers. Its weights are gathered before it computes, and those of the next
layer during that; its gradients are whole until they are scattered. What is outside of layers stays gathered, because
the embedding and the output layer share a table. Source: Megatron FSDP, and arXiv 2304.11277, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.config import RunConfig
from labkit.plan.parameters import layer_parameters, stage_parameters
from labkit.plan.stages import StageContents
from labkit.plan.zero_stages import ELEMENT_BYTES

UNITS_AT_ONCE = 2
"""Layers that are whole at the same time: the one that computes, and the one that is being gathered or scattered."""


def gathered_bytes(config: RunConfig, stages: Sequence[StageContents]) -> int:
    """Return the bytes of weights that are whole at the same time."""
    width, parallel = ELEMENT_BYTES[config.optim.precision], config.parallel
    outside = sum(
        stage_parameters(
            config.model, layers=range(0), pre_process=holds.embedding, post_process=holds.loss, tp=parallel.tp
        )
        for holds in stages
    )
    return (outside + max((_layers_at_once(config, holds) for holds in stages), default=0)) * width


def unsharded_gradients(config: RunConfig, holds: StageContents) -> int:
    """Return the bytes of gradients that are whole at the same time while layers of a stage run backward."""
    return _layers_at_once(config, holds) * ELEMENT_BYTES[config.optim.precision]


def _layers_at_once(config: RunConfig, holds: StageContents) -> int:
    """Return the parameters of the largest layers that are whole at the same time."""
    parallel = config.parallel
    sizes = (
        layer_parameters(config.model, parallel.tp, moe=config.moe, index=index, ep=parallel.ep, etp=parallel.expert_tp)
        for index in holds.layers
    )
    return sum(sorted(sizes)[-UNITS_AT_ONCE:])
