"""The most bytes that tensors of a step take on a CPU rank beyond its state. No torch.

A backward begins with everything that its microbatch and the others in flight keep. It then needs, besides,

    the loss       gradients of a chunk of logits, and the gradient of the output layer's input
    a layer        the gradient of the residual stream, and the gradients in and out of the operation that needs most,
                   less what the loss and later operations of the layer have freed by then

Full recomputation adds what the layer had dropped, and its output. A backward in two parts (I and W) frees less, as
W still needs the inputs of the products. Between stages there are also the receives that the rank has opened early,
and outputs that it has sent, until their gradient proves that they have arrived.

Numbers of gradients were read from the tensors that are alive at the peak (`tests/parallel/test_memory_measured.py`).
"""

from __future__ import annotations

import numpy as np

from labkit.config import ModelConfig, MoEConfig, RunConfig
from labkit.plan.activations import (
    Share,
    end_activation_bytes,
    is_one_kernel,
    layer_saved,
    norm_bytes,
    recomputed_at_once_bytes,
)
from labkit.plan.sizes import fc1_width, ffn_width, kv_width, padded_vocab
from labkit.plan.stage_activations import (
    action_bytes,
    backward_bytes,
    held_stages,
    most_that_is_kept,
    share_of,
    stage_bytes,
)
from labkit.plan.stages import StageContents
from labkit.schedules import Schedule
from labkit.schedules.ir import KINDS

LOGITS_AT_ONCE = 1 << 22
"""Logits whose gradients exist at once: `CHUNKS["cpu"].gradient` of `labkit.parallel.vocab.cross_entropy`."""
RECEIVES_AHEAD = 4
"""Receives from one rank that are open beyond the next: `receives_ahead` of `labkit.schedules.lowering.lower`."""


def activation_peak(config: RunConfig, schedule: Schedule, pp_rank: int) -> int:
    """Return the most bytes that a CPU rank's activations, temporaries and messages take at once."""
    share, stages = share_of(config), held_stages(config, schedule, pp_rank)
    keeps_all = config.replaced({"model.recompute_granularity": "none"})
    kept, whole, during = np.zeros((3, schedule.num_stages))
    row = slice(schedule.offsets[pp_rank], schedule.offsets[pp_rank + 1])
    kinds, on = schedule.kinds[row], schedule.stages[row]
    split = bool((kinds == KINDS.index("W")).any())
    for stage, holds in stages.items():
        sent = _stream(config.model, share) if _sends(config, schedule, stage) else 0
        kept[stage], whole[stage] = (stage_bytes(c, share, holds) + sent for c in (config, keeps_all))
        during[stage] = _backward(config, share, holds, split)
    changes = action_bytes(config, schedule, pp_rank, kept, whole)
    before = np.cumsum(changes) - np.where(kinds == KINDS.index("F"), 0, changes)
    runs_backward = (kinds == KINDS.index("B")) | (kinds == KINDS.index("I"))
    return int((before + np.where(runs_backward, during[on], 0)).max()) + _open_receives(
        config, share, schedule, stages
    )


def _stream(model: ModelConfig, share: Share) -> int:
    """Return the bytes of the residual stream of a microbatch."""
    return share.tokens_between(model) * model.hidden * share.element_bytes


# ---- messages ----


def _posted(config: RunConfig) -> bool:
    """Return True if receives are opened early, and sent outputs stay until their gradient comes."""
    return (
        config.parallel.pp > 1 and config.schedule.batch_p2p_comm is None and not config.schedule.variable_seq_lengths
    )


def _sends(config: RunConfig, schedule: Schedule, stage: int) -> bool:
    """Return True if a stage's output travels to another rank and stays here meanwhile."""
    last = stage == schedule.num_stages - 1
    return _posted(config) and not last and schedule.placement(stage + 1) != schedule.placement(stage)


def _open_receives(config: RunConfig, share: Share, schedule: Schedule, stages: dict[int, StageContents]) -> int:
    """Return the bytes of open receives: activations of the stages before, and gradients of those after."""
    if not _posted(config):
        return 0
    own = schedule.placement(min(stages))
    neighbours = {
        schedule.placement(s + step) for s in stages for step in (-1, 1) if 0 <= s + step < schedule.num_stages
    }
    ahead = min(RECEIVES_AHEAD, schedule.num_microbatches - 1)
    return len(neighbours - {own}) * ahead * _stream(config.model, share)


# ---- one backward ----


def _backward(config: RunConfig, share: Share, holds: StageContents, split: bool) -> int:
    """Return the bytes that a stage's backward needs beside everything that is kept when it begins."""
    model = config.model
    if model.family == "t5":
        return backward_bytes(config, share, holds)
    freed = 0
    if holds.loss:
        freed = norm_bytes(model, share) if split else end_activation_bytes(model, share, pre_process=False)
    moe = most_that_is_kept(config.moe)
    kinds = {(moe.is_moe_layer(index), model.parts_of_layer(index)) for index in holds.layers}
    layers = [_layer(model, share, moe if experts else None, parts, split) for experts, parts in kinds]
    if model.recompute_granularity == "full" and layers:
        layers = [max(layers) + recomputed_at_once_bytes(model, share, holds.layers, moe) + _stream(model, share)]
    return max(_loss(model, share) if holds.loss else 0, max(layers, default=0) - freed)


def _loss(model: ModelConfig, share: Share) -> int:
    """Return the bytes of gradients of logits, also in 16 bits, and of the output layer's input, whole on each rank."""
    tokens, e = share.tokens(model), share.element_bytes
    logits = min(tokens * padded_vocab(model, share.tp) // share.tp, LOGITS_AT_ONCE)
    inputs = 2 if share.sequence_parallel and share.tp > 1 else 1  # sequence parallelism gathers the input again
    return logits * (share.wide + (e if e < share.wide else 0)) + inputs * tokens * model.hidden * e


def _layer(model: ModelConfig, share: Share, moe: MoEConfig | None, parts: str, split: bool) -> int:
    """Return the bytes of gradients at the operation of a layer's backward that needs most."""
    saved = layer_saved(model, share, moe, parts)
    stream = _stream(model, share)
    if "M" in parts:
        return 3 * max(saved.values())
    if share.sequence_parallel and share.tp > 1:
        stream += share.tokens(model) * model.hidden * share.element_bytes  # gathered, for the weight gradient
    needs = []
    if "-" in parts:
        needs.append(_mlp(model, share, split) if moe is None else _experts(saved, split))
    if "*" in parts:
        later = 0 if split else sum(size for name, size in saved.items() if name.startswith("mlp"))
        needs.append(_attention(model, share) - later)
    return stream + max(needs)


def _mlp(model: ModelConfig, share: Share, split: bool) -> int:
    """Return the bytes of gradients at the activation: of its output and its input, less the freed input of fc2."""
    columns = fc1_width(model) + (ffn_width(model) if split else 0)
    return share.tokens(model) * columns // share.tp * share.element_bytes


def _experts(saved: dict[str, int], split: bool) -> int:
    """Return the same for the rows of experts, whose activation is multiplied by the router's weights."""
    return (2 + split) * saved["mlp experts fc2 input"]


def _attention(model: ModelConfig, share: Share) -> int:
    """Return the bytes of gradients at core attention: of queries, keys, values and output, and of the maps."""
    tokens, e, t = share.tokens(model), share.element_bytes, share.tp
    width = tokens * model.hidden // t * e
    if share.cp > 1:  # keys and values travel with their gradients: four pairs, beside those of queries and outputs
        return 8 * width + 8 * tokens * kv_width(model, t) * e
    if is_one_kernel(model, share, biased=model.position == "relative"):
        return 7 * width  # that of the output, and those of q, k and v, apart and joined
    maps = tokens * model.seq_length * model.heads // t
    if model.attention_backend == "unfused":
        return width + 2 * maps * e
    return 4 * width + (1 if model.attention_dropout else 2) * maps * share.wide
