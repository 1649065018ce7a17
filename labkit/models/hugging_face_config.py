"""Hugging Face's `config.json` and our configuration of a model, both ways: GPT-2, Llama, Mixtral, BERT, Mamba-2, T5.

    read = json.loads(Path("config.json").read_text())
    config, moe = model_config_from_hugging_face(read), moe_config_from_hugging_face(read)
    config_to_hugging_face(config, moe)     # the inverse, as far as our configuration knows the fields

`family_of` names the family of a configuration. A model that no family can compute is refused, with the field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from labkit.config import ModelConfig, MoEConfig
from labkit.models.bert.hugging_face_bert import KINDS, bert_config, bert_fields, bert_kind
from labkit.models.counts import expert_width
from labkit.models.mamba.hugging_face_mamba import check_mamba2, mamba_config, mamba_fields
from labkit.models.t5.hugging_face_t5 import t5_config, t5_fields, t5_kind

GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""Hugging Face's `activation_function` -> ours."""
ROPE_THETA = {"llama": 1e4, "mixtral": 1e6}
"""`rope_theta` of a `config.json` that does not give it."""
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "bert": "BertForPreTraining",
    "megatron-bert": "MegatronBertForPreTraining",
    "mamba2": "Mamba2ForCausalLM",
    "t5": "T5ForConditionalGeneration",
}
"""Family -> transformers' class of its language model."""


def family_of(config: ModelConfig, moe: MoEConfig | None = None) -> str:
    """The family of a model: `gpt2`, `llama`, `mixtral`, `bert`, `megatron-bert`, `mamba2` or `t5`.

    Raises:
        ValueError: a model of no such family.
    """
    if config.family == "bert":
        return bert_kind(config)
    if config.family == "mamba":
        check_mamba2(config)
        return "mamba2"
    if config.family == "t5":
        return t5_kind(config)
    shape = (config.position, config.norm, config.bias)
    is_gpt2 = shape == ("learned", "layernorm", True) and config.activation in GPT2_ACTIVATIONS.values()
    is_llama = shape == ("rope", "rmsnorm", False) and config.activation == "swiglu"
    if not is_gpt2 and not is_llama:
        raise ValueError(
            f"a model with position {config.position}, norm {config.norm}, activation {config.activation} and bias "
            f"{config.bias} is neither a GPT-2 nor a Llama"
        )
    if is_gpt2 and config.kv_heads not in (None, config.heads):
        raise ValueError(
            f"a GPT-2 has as many key/value heads as query heads; here model.kv_heads = {config.kv_heads} and "
            f"model.heads = {config.heads}"
        )
    if moe is None or not moe.num_experts:
        return "gpt2" if is_gpt2 else "llama"
    _check_mixtral(moe, is_llama)
    return "mixtral"


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


# ---- theirs to ours ----


def model_config_from_hugging_face(config: Mapping[str, Any]) -> ModelConfig:
    """Our config of the model that a `config.json` of one of these types describes (without dropout).

    Raises:
        ValueError: another type, or an option that our model does not have.
    """
    kind = config.get("model_type")
    if kind == "gpt2":
        return _gpt2_config(config)
    if kind in ("llama", "mixtral"):
        return _llama_config(config)
    if kind in KINDS.values() or kind in ("mamba2", "t5"):
        model, other = {"mamba2": mamba_config, "t5": t5_config}.get(str(kind), bert_config)(config)
        _refuse(other)
        return model
    raise ValueError(f"model_type is {kind!r}; weights can be converted from {', '.join(ARCHITECTURES)}")


def moe_config_from_hugging_face(config: Mapping[str, Any]) -> MoEConfig:
    """Our config of its experts: none, or those of type mixtral, without options of its training (losses, jitter)."""
    if config.get("model_type") != "mixtral":
        return MoEConfig()
    return MoEConfig(num_experts=config["num_local_experts"], top_k=config["num_experts_per_tok"])


def _gpt2_config(config: Mapping[str, Any]) -> ModelConfig:
    activation = config.get("activation_function", "gelu_new")
    if activation not in GPT2_ACTIVATIONS:
        raise ValueError(f"activation_function is {activation!r}; choose one of {', '.join(GPT2_ACTIVATIONS)}")
    _refuse({
        "scale_attn_weights": "false" if config.get("scale_attn_weights") is False else None,
        "scale_attn_by_inverse_layer_idx": config.get("scale_attn_by_inverse_layer_idx"),
        "add_cross_attention": config.get("add_cross_attention"),
    })  # fmt: skip
    return ModelConfig(
        layers=config["n_layer"],
        hidden=config["n_embd"],
        heads=config["n_head"],
        ffn_hidden=config.get("n_inner") or None,
        vocab_size=config["vocab_size"],
        seq_length=config["n_positions"],
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        activation=GPT2_ACTIVATIONS[activation],
        untie_embeddings_and_output_weights=config.get("tie_word_embeddings") is False,
    )


def _llama_config(config: Mapping[str, Any]) -> ModelConfig:
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    _refuse({
        "rope_type": kind not in ("default", None) and kind,
        "attention_bias": config.get("attention_bias", False),
        "mlp_bias": config.get("mlp_bias", False),
        "hidden_act": config.get("hidden_act", "silu") != "silu" and config["hidden_act"],
        "head_dim": head_dim * config["num_attention_heads"] != config["hidden_size"] and head_dim,
        "sliding_window": (config.get("sliding_window") or math.inf) < config["max_position_embeddings"]
        and config["sliding_window"],
    })  # fmt: skip
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


def _refuse(options: Mapping[str, Any]) -> None:
    """ValueError for the first option that has a value."""
    for name, value in options.items():
        if value:
            raise ValueError(
                f"{name} = {value!r} has no counterpart in labkit's models; only plain GPT-2, Llama, Mixtral, BERT, "
                "Mamba-2 and T5 can be converted"
            )


# ---- ours to theirs ----


def config_to_hugging_face(
    config: ModelConfig, moe: MoEConfig | None = None, *, dtype: str = "float32"
) -> dict[str, Any]:
    """The `config.json` of a model, from which transformers builds it. dtype: of the weights, in torch's word.

    It names no token that begins or ends a text, since a checkpoint knows no tokenizer.

    Raises:
        ValueError: a model of another family.
    """
    kind = family_of(config, moe)
    shared = {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "initializer_range": config.init_std,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if kind == "gpt2":
        return shared | _gpt2_fields(config)
    if config.family == "bert":
        return shared | bert_fields(config)
    if kind == "mamba2":
        return shared | mamba_fields(config)
    if config.family == "t5":
        return shared | t5_fields(config)
    return shared | _llama_fields(config, moe or MoEConfig())


def _gpt2_fields(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": config.layers,
        "n_embd": config.hidden,
        "n_head": config.heads,
        "n_inner": config.ffn_hidden,
        "n_positions": config.seq_length,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu" if config.activation == "gelu" else "gelu_new",
        "embd_pdrop": config.embedding_dropout,
        "attn_pdrop": config.attention_dropout,
        "resid_pdrop": config.hidden_dropout,
    }


def _llama_fields(config: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    fields = {
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads or config.heads,
        "intermediate_size": expert_width(config, moe),
        "max_position_embeddings": config.seq_length,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_dropout": config.attention_dropout,
    }
    experts = {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.aux_loss_coeff,
        "sliding_window": None,
    }
    return fields | (experts if moe.num_experts else {})
