"""Weights of Hugging Face checkpoints in our names and order, for any layout.

    config = model_config_from_hugging_face(json.loads(Path("config.json").read_text()))
    full = full_state_from_hugging_face(config, safetensors.torch.load_file("model.safetensors"))
    load_full_state(chunks, full, groups.tp)          # each rank keeps its slices

What differs: GPT-2 stores linear weights as [input, output] and q, k, v as three blocks; Llama stores q, k, v, gate and
up apart. Ours are [output, input], with [q .. q k v] per key/value head and [gate; up] as one matrix. Both families
rotate features i and i + D/2, as we do.

Shapes: H hidden, D head dimension, g key/value heads, r query heads per key/value head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.config import ModelConfig
from labkit.parallel.groups import Group
from labkit.parallel.weights import tensor_part

State = dict[str, Tensor]

GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""Hugging Face's `activation_function` -> ours."""


def model_config_from_hugging_face(config: Mapping[str, Any]) -> ModelConfig:
    """Our shape of the model that a `config.json` of type gpt2 or llama describes (without dropout).

    Raises:
        ValueError: another type, or an option that our model does not have.
    """
    kind = config.get("model_type")
    if kind == "gpt2":
        return _gpt2_config(config)
    if kind == "llama":
        return _llama_config(config)
    raise ValueError(f"model_type is {kind!r}; weights can be converted from gpt2 and llama")


def _gpt2_config(config: Mapping[str, Any]) -> ModelConfig:
    activation = config.get("activation_function", "gelu_new")
    if activation not in GPT2_ACTIVATIONS:
        raise ValueError(f"activation_function is {activation!r}; choose one of {', '.join(GPT2_ACTIVATIONS)}")
    return ModelConfig(
        layers=config["n_layer"],
        hidden=config["n_embd"],
        heads=config["n_head"],
        ffn_hidden=config.get("n_inner") or None,
        vocab_size=config["vocab_size"],
        seq_length=config["n_positions"],
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        activation=GPT2_ACTIVATIONS[activation],
    )


def _llama_config(config: Mapping[str, Any]) -> ModelConfig:
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    unknown = {
        "rope_type": kind not in ("default", None) and kind,
        "attention_bias": config.get("attention_bias", False),
        "mlp_bias": config.get("mlp_bias", False),
        "hidden_act": config.get("hidden_act", "silu") != "silu" and config["hidden_act"],
        "head_dim": head_dim * config["num_attention_heads"] != config["hidden_size"] and head_dim,
    }
    for name, value in unknown.items():
        if value:
            raise ValueError(f"{name} = {value!r} has no counterpart in GPTModel; only plain Llama can be converted")
    return ModelConfig(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads"),
        ffn_hidden=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        seq_length=config["max_position_embeddings"],
        position="rope",
        rope_theta=config.get("rope_theta") or rope.get("rope_theta", 10000.0),
        norm="rmsnorm",
        norm_eps=config["rms_norm_eps"],
        activation="swiglu",
        bias=False,
        untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", False),
    )


def full_state_from_hugging_face(config: ModelConfig, state: Mapping[str, Tensor]) -> State:
    """The whole model's tensors under our names, from a `GPT2LMHeadModel` or `LlamaForCausalLM` state dict.

    Raises:
        ValueError: names tensors that are missing or that have no place in our model.
    """
    source = _Source(state)
    is_gpt2 = "wte.weight" in source.state
    full = _from_gpt2(config, source) if is_gpt2 else _from_llama(config, source)
    if source.unused():
        raise ValueError(
            f"no place for the tensors {', '.join(source.unused()[:5])}; is the model config the right one?"
        )
    return full


class _Source:
    """A state dict without its outer prefix, that knows which tensors were taken."""

    IGNORED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        short = {name.removeprefix("transformer.").removeprefix("model."): value for name, value in state.items()}
        self.state = {name: value for name, value in short.items() if not name.endswith(self.IGNORED)}
        self.taken: set[str] = set()

    def take(self, name: str) -> Tensor:
        if name not in self.state:
            raise ValueError(f"the checkpoint has no tensor {name!r}; it holds {len(self.state)}, such as "
                             f"{', '.join(list(self.state)[:3])}")  # fmt: skip
        self.taken.add(name)
        return self.state[name]

    def unused(self) -> list[str]:
        return [name for name in self.state if name not in self.taken]


def interleave_heads(q: Tensor, k: Tensor, v: Tensor, kv_heads: int) -> Tensor:
    """[r g D, ..], [g D, ..], [g D, ..] -> [g (r + 2) D, ..]: per key/value head its queries, its key, its value."""
    groups = [x.reshape(kv_heads, -1, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(groups, dim=1).flatten(0, 1)


def _from_gpt2(config: ModelConfig, source: _Source) -> State:
    full = {
        "embedding.word.weight": source.take("wte.weight"),
        "embedding.position.weight": source.take("wpe.weight"),
        "final_norm.weight": source.take("ln_f.weight"),
        "final_norm.bias": source.take("ln_f.bias"),
    }
    source.taken.add("lm_head.weight")  # the embedding once more
    for i in range(config.layers):
        theirs, ours = f"h.{i}", f"layers.{i}"
        for norm, name in (("ln_1", "attention.norm"), ("ln_2", "mlp.norm")):
            for part in ("weight", "bias"):
                full[f"{ours}.{name}.{part}"] = source.take(f"{theirs}.{norm}.{part}")
        linear = {"attn.c_attn": "attention.qkv", "attn.c_proj": "attention.proj", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}  # fmt: skip # noqa: E501
        for layer, name in linear.items():
            full[f"{ours}.{name}.weight"] = source.take(f"{theirs}.{layer}.weight").t()
            full[f"{ours}.{name}.bias"] = source.take(f"{theirs}.{layer}.bias")
        for part in ("weight", "bias"):
            name = f"{ours}.attention.qkv.{part}"
            q, k, v = full[name].chunk(3)
            full[name] = interleave_heads(q, k, v, config.heads)
    return full


def _from_llama(config: ModelConfig, source: _Source) -> State:
    full = {
        "embedding.word.weight": source.take("embed_tokens.weight"),
        "final_norm.weight": source.take("norm.weight"),
    }
    if config.untie_embeddings_and_output_weights:
        full["output.weight"] = source.take("lm_head.weight")
    source.taken.add("lm_head.weight")
    for i in range(config.layers):
        theirs, ours = f"layers.{i}", f"layers.{i}"
        q, k, v = (source.take(f"{theirs}.self_attn.{part}_proj.weight") for part in "qkv")
        gate, up = (source.take(f"{theirs}.mlp.{part}_proj.weight") for part in ("gate", "up"))
        full[f"{ours}.attention.norm.weight"] = source.take(f"{theirs}.input_layernorm.weight")
        full[f"{ours}.attention.qkv.weight"] = interleave_heads(q, k, v, config.kv_heads or config.heads)
        full[f"{ours}.attention.proj.weight"] = source.take(f"{theirs}.self_attn.o_proj.weight")
        full[f"{ours}.mlp.norm.weight"] = source.take(f"{theirs}.post_attention_layernorm.weight")
        full[f"{ours}.mlp.fc1.weight"] = torch.cat([gate, up])
        full[f"{ours}.mlp.fc2.weight"] = source.take(f"{theirs}.mlp.down_proj.weight")
    return full


def load_full_state(chunks: Sequence[nn.Module], full: Mapping[str, Tensor], tp: Group) -> None:
    """Copy whole tensors, by `full_name`, into this rank's parameters: slices by tp, padding rows zero.

    Raises:
        ValueError: a tensor that is missing or has another shape than the model's.
    """
    with torch.no_grad():
        for parameter in _parameters(chunks):
            name, shape = parameter.full_name, parameter.full_shape  # type: ignore[attr-defined]
            if name not in full or tuple(full[name].shape) != shape:
                found = f"has shape {tuple(full[name].shape)}" if name in full else "is missing"
                raise ValueError(f"{name} {found}; the model needs {shape}")
            parameter.copy_(_local_part(full[name], parameter, tp))


def _parameters(chunks: Sequence[nn.Module]) -> Iterable[nn.Parameter]:
    return (parameter for chunk in chunks for parameter in chunk.parameters())


def _local_part(full: Tensor, like: nn.Parameter, tp: Group) -> Tensor:
    dim: int = like.partition_dim  # type: ignore[attr-defined]
    rows = like.shape[0] * (tp.size if dim == 0 else 1)
    if rows > full.shape[0]:  # a vocabulary table: its padding depends on tp
        full = torch.cat([full, full.new_zeros(rows - full.shape[0], *full.shape[1:])])
    if dim < 0:
        return full
    return tensor_part(full, tp.rank, tp.size, dim, like.partition_stride)  # type: ignore[attr-defined]
