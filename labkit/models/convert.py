"""Full states: whole tensors by `full_name`. Ranks load their parts from them, and Hugging Face checkpoints hold them.

    read = json.loads(Path("config.json").read_text())
    config, moe = model_config_from_hugging_face(read), moe_config_from_hugging_face(read)
    full = full_state_from_hugging_face(config, safetensors.torch.load_file("model.safetensors"), moe)
    load_full_state(chunks, full, groups)             # each rank keeps its slices

    full = gather_full_state(chunks, groups)          # whole tensors of the stage, on each of its ranks
    theirs = full_state_to_hugging_face(config, full, moe)

The formats differ:

- labkit stores linear weights as [output, input], with [q .. q k v] for each key/value head, [gate; up] as one matrix,
  and experts stacked.
- GPT-2 stores linear weights as [input, output], and q, k, v as three blocks.
- Llama stores q, k, v, gate and up apart. Mixtral stores each expert by itself: w1 is its gate, w3 its up, w2 its down.
- transformers 5 stacks Mixtral's experts in memory, as [gate; up]. This module reads both forms; files hold the first.

All rotate features i and i + D/2.

Shapes: H hidden, D head dimension, g key/value heads, r query heads per key/value head, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.config import ModelConfig, MoEConfig
from labkit.parallel.groups import ParallelGroups
from labkit.parallel.parameters.parameter_record import name_of, record_of
from labkit.parallel.parameters.weights import gather_expert_parameter, gather_parameter, tensor_part


def load_full_state(chunks: Sequence[nn.Module], full: Mapping[str, Tensor], groups: ParallelGroups) -> None:
    """Copy whole tensors, by `full_name`, into this rank's parameters: its slice by tp, or by ep and etp.

    Rows that pad the vocabulary become zero.

    Raises:
        ValueError: a tensor that is missing or has another shape than the model's.
    """
    with torch.no_grad():
        for parameter in _parameters(chunks):
            name, shape = name_of(parameter), record_of(parameter).full_shape
            if name not in full or tuple(full[name].shape) != shape:
                found = f"has shape {tuple(full[name].shape)}" if name in full else "is missing"
                raise ValueError(f"{name} {found}; the model needs {shape}")
            parameter.copy_(_local_part(full[name], parameter, groups))


def gather_full_state(chunks: Sequence[nn.Module], groups: ParallelGroups) -> dict[str, Tensor]:
    """The inverse of `load_full_state`: whole tensors of this rank's chunks, by `full_name`, on each rank of the stage.

    All ranks of the stage call this."""
    return {
        name_of(parameter): gather_expert_parameter(parameter, parameter, etp=groups.etp, ep=groups.ep)
        if record_of(parameter).expert_parallel
        else gather_parameter(parameter, parameter, groups.tp)
        for parameter in _parameters(chunks)
    }


def _parameters(chunks: Sequence[nn.Module]) -> Iterable[nn.Parameter]:
    return (parameter for chunk in chunks for parameter in chunk.parameters())


def _local_part(full: Tensor, like: nn.Parameter, groups: ParallelGroups) -> Tensor:
    record, tp = record_of(like), groups.tp
    if record.expert_parallel:
        full, tp = tensor_part(full, groups.ep.rank, groups.ep.size, 0), groups.etp
    dim, replicated = record.partition_dim, record.replicated
    rows = like.shape[0] * (tp.size if dim == 0 else 1)
    if rows > full.shape[0] and replicated is None:  # a vocabulary table: its padding depends on tp
        full = torch.cat([full, full.new_zeros(rows - full.shape[0], *full.shape[1:])])
    if dim < 0:
        return full
    return tensor_part(full, tp.rank, tp.size, dim, record.partition_stride, replicated)


State = dict[str, Tensor]

GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""Hugging Face's `activation_function` -> ours."""

ROPE_THETA = {"llama": 1e4, "mixtral": 1e6}
"""`rope_theta` of a `config.json` that does not give it."""

GATE_UP = ("gate_proj", "up_proj")
"""Llama's names of the halves of fc1."""
EXPERTS = "block_sparse_moe.experts"
"""Mixtral's name of a layer's experts, in files."""
GPT2_PARTS = {
    "attention.norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "mlp.norm": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
"""Our part of a layer -> GPT-2's."""
LLAMA_PARTS = {
    "attention.norm": "input_layernorm",
    "attention.proj": "self_attn.o_proj",
    "mlp.norm": "post_attention_layernorm",
    "mlp.fc2": "mlp.down_proj",
    "mlp.router": "block_sparse_moe.gate",
}
"""Our part of a layer -> Llama's or Mixtral's, for parts with the same tensor."""


def model_config_from_hugging_face(config: Mapping[str, Any]) -> ModelConfig:
    """Our config of the model that a `config.json` of type gpt2, llama or mixtral describes (without dropout).

    Raises:
        ValueError: another type, or an option that our model does not have.
    """
    kind = config.get("model_type")
    if kind == "gpt2":
        return _gpt2_config(config)
    if kind in ("llama", "mixtral"):
        return _llama_config(config)
    raise ValueError(f"model_type is {kind!r}; weights can be converted from gpt2, llama and mixtral")


def moe_config_from_hugging_face(config: Mapping[str, Any]) -> MoEConfig:
    """Our config of its experts: none, or those of type mixtral, without options of its training (losses, jitter)."""
    if config.get("model_type") != "mixtral":
        return MoEConfig()
    return MoEConfig(num_experts=config["num_local_experts"], top_k=config["num_experts_per_tok"])


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
        "sliding_window": (config.get("sliding_window") or math.inf) < config["max_position_embeddings"]
        and config["sliding_window"],
    }
    for name, value in unknown.items():
        if value:
            raise ValueError(
                f"{name} = {value!r} has no counterpart in GPTModel; only plain Llama and Mixtral can be converted"
            )
    return ModelConfig(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads"),
        ffn_hidden=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        seq_length=config["max_position_embeddings"],
        position="rope",
        rope_theta=config.get("rope_theta") or rope.get("rope_theta") or ROPE_THETA[config["model_type"]],
        norm="rmsnorm",
        norm_eps=config["rms_norm_eps"],
        activation="swiglu",
        bias=False,
        untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", False),
    )


def full_state_from_hugging_face(
    config: ModelConfig, state: Mapping[str, Tensor], moe: MoEConfig | None = None
) -> State:
    """The whole model's tensors under our names, from a state dict of `GPT2LMHeadModel` or `LlamaForCausalLM`.

    With `moe` the state dict is that of `MixtralForCausalLM`.

    Raises:
        ValueError: tensors that are missing, or that have no place in our model, by name.
    """
    source = _Source(state)
    is_gpt2 = "wte.weight" in source.state
    full = _from_gpt2(config, source) if is_gpt2 else _from_llama(config, source, moe or MoEConfig())
    if source.unused():
        raise ValueError(
            f"no place for the tensors {', '.join(source.unused()[:5])}; is the model config the right one?"
        )
    return full


class _Source:
    """A state dict without its outer prefix; it remembers the tensors that were taken."""

    IGNORED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        short = {
            name.removeprefix("transformer.").removeprefix("model.").replace(".block_sparse_moe.", ".mlp."): value
            for name, value in state.items()
        }
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
    """[r g D, ..], [g D, ..], [g D, ..] -> [g (r + 2) D, ..]: queries, key and value of each key/value head."""
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
        for name, layer in GPT2_PARTS.items():
            weight = source.take(f"{theirs}.{layer}.weight")
            full[f"{ours}.{name}.weight"] = weight.t() if weight.dim() == 2 else weight
            full[f"{ours}.{name}.bias"] = source.take(f"{theirs}.{layer}.bias")
        for part in ("weight", "bias"):
            name = f"{ours}.attention.qkv.{part}"
            q, k, v = full[name].chunk(3)
            full[name] = interleave_heads(q, k, v, config.heads)
    return full


def _from_llama(config: ModelConfig, source: _Source, moe: MoEConfig) -> State:
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
        full[f"{ours}.attention.norm.weight"] = source.take(f"{theirs}.input_layernorm.weight")
        full[f"{ours}.attention.qkv.weight"] = interleave_heads(q, k, v, config.kv_heads or config.heads)
        full[f"{ours}.attention.proj.weight"] = source.take(f"{theirs}.self_attn.o_proj.weight")
        full[f"{ours}.mlp.norm.weight"] = source.take(f"{theirs}.post_attention_layernorm.weight")
        if moe.is_moe_layer(i):
            full |= _from_mixtral_experts(f"{ours}.mlp", source, moe.num_experts)
        else:
            full[f"{ours}.mlp.fc1.weight"] = torch.cat([source.take(f"{theirs}.mlp.{part}.weight") for part in GATE_UP])
            full[f"{ours}.mlp.fc2.weight"] = source.take(f"{theirs}.mlp.down_proj.weight")
    return full


def _from_mixtral_experts(name: str, source: _Source, experts: int) -> State:
    """Router and experts of one layer, stacked or each by itself."""
    full = {f"{name}.router.weight": source.take(f"{name}.gate.weight")}
    if f"{name}.experts.gate_up_proj" in source.state:
        full[f"{name}.experts.fc1.weight"] = source.take(f"{name}.experts.gate_up_proj")
        full[f"{name}.experts.fc2.weight"] = source.take(f"{name}.experts.down_proj")
        return full
    w1, w2, w3 = (
        torch.stack([source.take(f"{name}.experts.{e}.{part}.weight") for e in range(experts)])
        for part in ("w1", "w2", "w3")
    )
    return full | {f"{name}.experts.fc1.weight": torch.cat([w1, w3], dim=1), f"{name}.experts.fc2.weight": w2}


# ---- the other way ----


def full_state_to_hugging_face(config: ModelConfig, full: Mapping[str, Tensor], moe: MoEConfig | None = None) -> State:
    """The inverse of `full_state_from_hugging_face`, under the names in a checkpoint's files.

    `full` may be a part of the model, as a pipeline stage holds it.

    Raises:
        ValueError: a model of another family, or a tensor that has no place in the family.
    """
    shape = (config.position, config.norm, config.bias)
    is_gpt2 = shape == ("learned", "layernorm", True) and config.activation in GPT2_ACTIVATIONS.values()
    is_llama = shape == ("rope", "rmsnorm", False) and config.activation == "swiglu"
    if not is_gpt2 and not is_llama:
        raise ValueError(
            f"a model with position {config.position}, norm {config.norm}, activation {config.activation} and bias "
            f"{config.bias} is neither a GPT-2 nor a Llama"
        )
    if moe is not None and moe.num_experts:
        _check_mixtral(moe, is_llama)
    theirs: State = {}
    for name, tensor in full.items():
        theirs |= _to_gpt2(config, name, tensor) if is_gpt2 else _to_llama(config, name, tensor)
    return theirs


def _check_mixtral(moe: MoEConfig, is_llama: bool) -> None:
    plain = ("score_function", "pre_softmax", "num_groups", "topk_scaling_factor", "expert_bias", "capacity_factor",
             "shared_expert_ffn_hidden")  # fmt: skip
    other = [name for name in plain if getattr(moe, name) != getattr(MoEConfig(), name)]
    if moe.load_balancing == "sinkhorn":
        other.append("load_balancing")
    if 0 in moe.layer_freq:
        other.append("layer_freq")
    if other or not is_llama:
        raise ValueError(
            "Mixtral is a Llama with experts in every layer and a softmax over the chosen ones; here "
            + (f"{', '.join(f'moe.{name} = {getattr(moe, name)}' for name in other)}" if other else "it is a GPT-2")
        )


def split_heads(mixed: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """[g (r + 2) D, ..] -> [r g D, ..], [g D, ..], [g D, ..]: the inverse of `interleave_heads`."""
    kv_heads = config.kv_heads or config.heads
    r = config.heads // kv_heads
    q, k, v = mixed.unflatten(0, (kv_heads, r + 2, -1)).split((r, 1, 1), dim=1)
    return q.flatten(0, 2), k.flatten(0, 2), v.flatten(0, 2)


def _to_gpt2(config: ModelConfig, name: str, tensor: Tensor) -> State:
    ends = {"embedding.word": "wte", "embedding.position": "wpe", "final_norm": "ln_f"}
    layer, part = name.rsplit(".", 1)
    if layer in ends:
        return {f"transformer.{ends[layer]}.{part}": tensor.contiguous()}
    _, index, module = layer.split(".", 2)
    if module == "attention.qkv":
        tensor = torch.cat(split_heads(tensor, config))
    is_linear = tensor.dim() == 2
    return {f"transformer.h.{index}.{GPT2_PARTS[module]}.{part}": (tensor.t() if is_linear else tensor).contiguous()}


def _to_llama(config: ModelConfig, name: str, tensor: Tensor) -> State:
    ends = {"embedding.word": "model.embed_tokens", "final_norm": "model.norm", "output": "lm_head"}
    module = name.removesuffix(".weight")
    if module in ends:
        return {f"{ends[module]}.weight": tensor.contiguous()}
    _, index, module = module.split(".", 2)
    parts: State
    if module == "attention.qkv":
        parts = dict(zip(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), split_heads(tensor, config)))
    elif module == "mlp.fc1":
        parts = dict(zip((f"mlp.{half}" for half in GATE_UP), tensor.chunk(2)))
    elif module == "mlp.experts.fc1":
        halves = zip(("w1", "w3"), tensor.chunk(2, dim=1))
        parts = {f"{EXPERTS}.{e}.{w}": one for w, half in halves for e, one in enumerate(half)}
    elif module == "mlp.experts.fc2":
        parts = {f"{EXPERTS}.{e}.w2": one for e, one in enumerate(tensor)}
    else:
        parts = {LLAMA_PARTS[module]: tensor}
    return {f"model.layers.{index}.{part}.weight": value.contiguous() for part, value in parts.items()}
