"""Parameters and saved activations of multi-token prediction (arXiv 2412.19437, section 2.2) in Megatron-LM. No torch.

Each depth is one more layer, of the kind of the last, on the stage with the loss. Before it a matrix makes h columns of
2h: the hidden state and the embedding of the next token, each after a norm of its own; after it there is a norm. The
stage needs the word embedding for that, and computes one more loss for each depth.

Source: megatron/core/transformer/multi_token_prediction.py.
"""

from __future__ import annotations

from typing import NamedTuple

from labkit.config import RunConfig
from labkit.plan.activations import Share, end_activation_bytes, layers_activation_bytes, norm_bytes
from labkit.plan.engine_activations import extra_bytes, extra_parameters
from labkit.plan.float8 import is_float8, saved_bytes
from labkit.plan.parameters import expert_parameters, layer_parameters, norm_parameters
from labkit.plan.sizes import padded_vocab
from labkit.plan.stage_activations import most_that_is_kept
from labkit.plan.stages import StageContents
from labkit.plan.workload import Workload

NORMS = 3


class Depths(NamedTuple):
    """Parameters of all depths on one rank."""

    dense: int
    experts: int


def depth_parameters(workload: Workload, holds: StageContents) -> Depths:
    """Return the parameters that a stage has in addition; none without the loss."""
    config, depths = workload.config, workload.extras.depths
    if not holds.loss or not depths:
        return Depths(0, 0)
    model, parallel, last = config.model, config.parallel, _last(config)
    layer = layer_parameters(
        model, parallel.tp, moe=config.moe, index=last.start, ep=parallel.ep, etp=parallel.expert_tp
    )
    layer += extra_parameters(model, workload.extras, parallel.tp, last, embedding=False)
    experts = 0
    if config.moe.is_moe_layer(last.start):
        experts = config.moe.num_experts // parallel.ep * expert_parameters(model, config.moe) // parallel.expert_tp
    joined = 2 * model.hidden * model.hidden // parallel.tp
    table = 0 if holds.embedding else padded_vocab(model, parallel.tp) // parallel.tp * model.hidden
    each = layer - experts + joined + NORMS * norm_parameters(model)
    return Depths(depths * each + table, depths * experts)


def depth_bytes(workload: Workload, config: RunConfig, share: Share, holds: StageContents) -> int:
    """Return the bytes that a stage keeps of a microbatch in addition; none without the loss."""
    if not holds.loss or not workload.extras.depths:
        return 0
    model, last = config.model, _last(config)
    layer = layers_activation_bytes(model, share, last, most_that_is_kept(config.moe))
    layer += extra_bytes(model, share, workload.extras, last, config.moe, megatron=workload.libraries.megatron)
    layer += saved_bytes(workload, config, share, last)
    width = 1 if is_float8(config) else share.element_bytes
    joined = 2 * norm_bytes(model, share) + 2 * share.tokens_between(model) * model.hidden * width
    loss = end_activation_bytes(model, share, pre_process=False)
    return workload.extras.depths * (layer + joined + loss)


def _last(config: RunConfig) -> range:
    return range(config.model.layers - 1, config.model.layers)
