"""Bytes that Megatron-LM's layers on Transformer Engine keep beyond `activations.py`, in closed form. No torch.

FlashAttention takes [B, S, heads, D]. The engine's layers pass [S, B, heads, D], so it converts queries, keys and
values, which it keeps in place of the projection's output. It also keeps its result, in addition to the copy that the
next layer reads. With one sample both orders are the same. cuDNN's kernel takes the layers' order and needs no copy.

Megatron's fused SwiGLU keeps its input, gate and up; labkit's own layers keep the activated gate, too. Mamba's fused
mixer keeps less than labkit's, which is made of separate operations.
"""

from __future__ import annotations

from labkit.config import ModelConfig, MoEConfig
from labkit.plan.activations import Share, layer_saved
from labkit.plan.latent_attention import latent_parameters, latent_saved
from labkit.plan.mamba import mamba_sizes, mixer_saved
from labkit.plan.parameters import attention_parameters
from labkit.plan.sizes import ffn_width, gate_and_up, kv_width
from labkit.plan.workload import Extras

STATISTIC_BYTES = 4
"""Bytes of a norm's mean, or of its deviation: float32."""


def extra_parameters(model: ModelConfig, extras: Extras, tp: int, layers: range, *, embedding: bool) -> int:
    """Return the parameters on one rank that `extras` adds to a stage."""
    rows = (extras.position_rows or model.seq_length) - model.seq_length
    positions = rows * model.hidden if embedding and model.position == "learned" else 0
    return positions + _attentions(model, layers) * _more_of_attention(model, extras, tp)


def _more_of_attention(model: ModelConfig, extras: Extras, tp: int) -> int:
    """Return how many parameters one attention has beyond `attention_parameters`."""
    if extras.latent:
        latent = latent_parameters(model, extras.latent, tp, norms=extras.qk_norm)
        return latent - attention_parameters(model, tp)
    per_norm = model.hidden // model.heads * (2 if model.norm == "layernorm" else 1)
    return 2 * per_norm if extras.qk_norm else 0


def extra_bytes(
    model: ModelConfig, share: Share, extras: Extras, layers: range, moe: MoEConfig, *, megatron: bool
) -> int:
    """Return the bytes that layers keep of a microbatch beyond `layers_activation_bytes`; negative if they keep less.

    megatron: the layers are Megatron-LM's and not labkit's.
    """
    if model.recompute_granularity == "full":
        return 0
    total = _attentions(model, layers) * sum(_of_attention(model, share, extras).values())
    if megatron:
        dense = sum("-" in model.parts_of_layer(index) and not moe.is_moe_layer(index) for index in layers)
        total -= dense * _activated_gate(model, share)
        total -= sum("M" in model.parts_of_layer(index) for index in layers) * _more_than_fused_mixer(model, share)
    return total


def _attentions(model: ModelConfig, layers: range) -> int:
    """Return how many of the layers have attention."""
    return sum("*" in model.parts_of_layer(index) for index in layers)


def _of_attention(model: ModelConfig, share: Share, extras: Extras) -> dict[str, int]:
    """Return tensor -> bytes that one attention keeps in addition."""
    if extras.latent:
        plain = layer_saved(model, share, parts="*")
        replaced = sum(plain[name] for name in ("attention q, k, v", "attention proj input"))
        return latent_saved(model, share, extras.latent, norms=extras.qk_norm) | {"plain attention": -replaced}
    tokens, t = share.tokens(model), share.tp
    heads = (model.heads + max(1, model.kv_heads or model.heads)) // t
    columns = model.hidden // t + kv_width(model, t)
    statistics = 2 if model.norm == "layernorm" else 1
    copied = model.transformer_impl == "transformer_engine" and model.attention_backend == "flash" and share.samples > 1
    return {
        "result of FlashAttention": tokens * model.hidden // t * share.element_bytes if copied else 0,
        "inputs of q and k norms": tokens * columns * share.element_bytes if extras.qk_norm else 0,
        "statistics of q and k norms": tokens * heads * statistics * STATISTIC_BYTES if extras.qk_norm else 0,
    }


def _activated_gate(model: ModelConfig, share: Share) -> int:
    """Return the bytes of an MLP's activated gate, which a fused SwiGLU does not keep."""
    recomputed = model.recompute_granularity == "selective" and "mlp" in model.recompute_modules
    if gate_and_up(model) == 1 or recomputed:
        return 0
    return share.tokens(model) * ffn_width(model) // share.tp * share.element_bytes


def _more_than_fused_mixer(model: ModelConfig, share: Share) -> int:
    """Return the bytes that labkit's mixer keeps beyond the fused one.

    `mamba_split_conv1d_scan_combined` of mamba_ssm keeps its input, the output of the projection, and the scan's result
    before the gate; the norm after it keeps its own input.
    """
    sizes = mamba_sizes(model, share.tp)
    fused = sizes.groups * (sizes.projected + 2 * sizes.inner) * share.tokens(model) * share.element_bytes
    return sum(mixer_saved(model, share.samples, share.tp).values()) * share.wide - fused
