"""Bytes that a stage of a T5 keeps for its backward, in closed form: both halves by `activations.py`, and the
cross-attention and masks between them. Numbers only, no torch.

The layers of a half keep what a GPT's layers keep. Relative biases need a gradient, which no fused kernel of a CPU
computes, so there the probabilities of every layer are kept. The mask that contains the biases is kept only if
attention is recomputed.
"""

from __future__ import annotations

from dataclasses import replace

from labkit.config import ModelConfig
from labkit.plan.activations import (
    Share,
    end_activation_bytes,
    is_one_kernel,
    layer_saved,
    layers_activation_bytes,
    math_bytes,
    norm_bytes,
    recomputed_at_once_bytes,
)
from labkit.plan.sizes import decoder_layers, decoder_length
from labkit.plan.stages import StageContents


def _halves(model: ModelConfig, indices: range) -> list[tuple[ModelConfig, int]]:
    """Return (the half as a GPT, its layers among `indices`) of each half that has some; the decoder is last."""
    plain = {"family": "gpt", "decoder_layers": None, "decoder_seq_length": None}
    encoder = replace(model, **plain)  # pyright: ignore[reportArgumentType]
    decoder = replace(encoder, layers=decoder_layers(model), seq_length=decoder_length(model))
    before = len([index for index in indices if index < model.layers])
    return [(half, count) for half, count in ((encoder, before), (decoder, len(indices) - before)) if count]


def t5_stage_bytes(model: ModelConfig, share: Share, holds: StageContents) -> int:
    """Return the bytes that one microbatch keeps on a stage."""
    halves, total = _halves(model, holds.layers), 0
    for half, count in halves:
        total += layers_activation_bytes(half, share, count) + _biases(half, share)
        if holds.embedding:
            total += end_activation_bytes(half, share, post_process=False)
    if holds.layers.start < model.layers <= holds.layers.stop:
        total += norm_bytes(halves[0][0], share)  # the encoder's final norm
    if holds.layers.stop > model.layers:
        decoder, count = halves[-1]
        total += share.tokens_between(model) * model.hidden * share.element_bytes  # the encoder's output
        total += _unrecomputed(model, count) * sum(_cross(model, decoder, share).values())
    if holds.loss:
        total += end_activation_bytes(halves[-1][0], share, pre_process=False)
    return total + _padding(model, share, len(halves) == 2 or holds.layers.stop > model.layers)


def _unrecomputed(model: ModelConfig, layers: int) -> int:
    """Return how many of the layers keep everything."""
    if model.recompute_granularity != "full":
        return layers
    return max(0, layers - model.recompute_num_layers) if model.recompute_method == "block" else 0


def _recomputes_core(model: ModelConfig) -> bool:
    modules = model.recompute_modules if model.recompute_granularity == "selective" else ()
    return model.recompute_granularity == "full" or "core_attn" in modules


def _biases(half: ModelConfig, share: Share) -> int:
    """Return the bytes of the mask with the biases, which is kept if attention runs a second time and reads it."""
    if half.position != "relative" or not _recomputes_core(half):
        return 0
    return share.samples * half.heads // share.tp * half.seq_length**2 * share.element_bytes


def _padding(model: ModelConfig, share: Share, crosses: bool) -> int:
    """Return the bytes of the encoder's padding mask, a row of scores for each sample and head.

    A stage without cross-attention does not count it if there are relative biases, because their mask includes it.
    """
    kept = is_one_kernel(model, share) or _recomputes_core(model)
    read = crosses or model.position != "relative"
    return share.tokens(model) * model.heads // share.tp * share.element_bytes if kept and read else 0


def _cross(model: ModelConfig, decoder: ModelConfig, share: Share) -> dict[str, int]:
    """Return tensor -> bytes that the cross-attention of one layer keeps, without the encoder's output."""
    e, t, h, tokens = share.element_bytes, share.tp, model.hidden, share.tokens(decoder)
    modules = model.recompute_modules if model.recompute_granularity == "selective" else ()
    core, p = "core_attn" in modules, model.attention_dropout
    q, kv = tokens * h // t, share.tokens(model) * 2 * h // t
    probabilities = tokens * model.seq_length * model.heads // t
    sizes, scores = (q + kv) * e, tokens * model.heads // t * share.wide
    if model.attention_backend == "unfused":
        scores = probabilities * (2 * e + 1 if p else e)
    elif not is_one_kernel(model, share):
        sizes = (q + kv) * share.wide + (kv // 2 * e if e >= 4 else 0)  # and a scaled copy of k
        scores = probabilities * math_bytes(model, share)
    return {
        "cross norm": norm_bytes(decoder, share),
        "cross q input": 0 if "layernorm" in modules else share.tokens_between(decoder) * h * e,
        "cross q, k, v": (q + kv) * e if core else sizes,
        "cross scores": 0 if core else scores,
        "cross proj input": q * e,
        "cross dropout mask": share.tokens_between(decoder) * h if model.hidden_dropout else 0,
    }


def t5_beside_bytes(model: ModelConfig, share: Share, indices: range, tensors: int = 3) -> int:
    """Return the bytes of a stage's temporaries in backward: a recomputed piece, and `tensors` times its widest."""
    most = 0
    for half, count in _halves(model, indices):
        is_decoder = indices.stop > model.layers and half.seq_length == decoder_length(model)
        cross = _cross(model, half, share) if is_decoder else {}
        widest = max((layer_saved(half, share) | cross).values())
        again = recomputed_at_once_bytes(half, share, count)
        if again and cross:
            again += min(count, model.recompute_num_layers) * sum(cross.values())
        most = max(most, tensors * widest + again)
    return most
