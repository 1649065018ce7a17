"""Sizes of a model that follow from its configuration: widths, layers of both halves, the padded vocabulary. No torch.

H is the hidden size, F ffn_hidden, V the vocabulary, D = H / heads; t is the tensor-parallel size, G an expert's width.
"""

from __future__ import annotations

from labkit.config import ModelConfig, MoEConfig

DENSE = MoEConfig()
"""A configuration in which no layer has experts."""
NUM_TOKENTYPES = 2
"""Token types of a BERT with the sentence-order head: those of the first sentence, and those of the second."""


def decoder_layers(model: ModelConfig) -> int:
    """Return the number of layers of the decoder after an encoder; 0 without a decoder."""
    return (model.decoder_layers or model.layers) if model.has_two_halves else 0


def decoder_length(model: ModelConfig) -> int:
    """Return the number of tokens that the decoder after an encoder reads; 0 without a decoder."""
    return (model.decoder_seq_length or model.seq_length) if model.has_two_halves else 0


def all_layers(model: ModelConfig) -> int:
    """Return the number of layers of the whole model, with both halves of a T5."""
    return model.layers + decoder_layers(model)


def kv_width(model: ModelConfig, tp: int = 1) -> int:
    """Return the columns of the keys (or of the values) on one rank: kv_heads x D / t, but at least D, one head."""
    return max(1, (model.kv_heads or model.heads) // tp) * (model.hidden // model.heads)


def qkv_width(model: ModelConfig, tp: int = 1) -> int:
    """Return the columns of queries, keys and values on one rank."""
    return model.hidden // tp + 2 * kv_width(model, tp)


def ffn_width(model: ModelConfig) -> int:
    """Return F, the width inside the MLP; 4H by default."""
    return model.ffn_hidden or 4 * model.hidden


def fc1_width(model: ModelConfig) -> int:
    """Return the columns of the first matrix of the MLP: F, or 2F with a gate (SwiGLU, GeGLU)."""
    return ffn_width(model) * gate_and_up(model)


def gate_and_up(model: ModelConfig) -> int:
    """Return 2 for SwiGLU and GeGLU, whose gate doubles the columns of an MLP's or expert's first matrix; else 1."""
    return 2 if model.activation in ("swiglu", "geglu") else 1


def expert_width(model: ModelConfig, moe: MoEConfig) -> int:
    """Return G, the width inside an expert; F by default."""
    return moe.ffn_hidden or ffn_width(model)


def moe_layers(model: ModelConfig, moe: MoEConfig, layers: int | range | None = None) -> int:
    """Return the number of layers with experts among `layers`: a range, how many from the first, or all (None)."""
    return sum(map(moe.is_moe_layer, layer_indices(model, layers)))


def layer_indices(model: ModelConfig, layers: int | range | None) -> range:
    """Return the indices of `layers`: a range, how many from the first, or all (None)."""
    if isinstance(layers, range):
        return layers
    return range(all_layers(model) if layers is None else layers)


def padded_vocab(model: ModelConfig, tp: int = 1) -> int:
    """Return the rows of the vocabulary tables over all ranks: V up to the next multiple of divisible_by x t."""
    multiple = model.make_vocab_size_divisible_by * tp
    return -(-model.vocab_size // multiple) * multiple
