"""Hugging Face's `config.json` and our configuration of a model, both ways: GPT-2, Llama, Mixtral, BERT, Mamba-2, T5.

    read = json.loads(Path("config.json").read_text())
    config, moe = model_config_from_hugging_face(read), moe_config_from_hugging_face(read)
    config_to_hugging_face(config, moe)     # the inverse, as far as our configuration knows the fields

`family_of` names the family of a configuration. A model that no family can compute is rejected with an error that names
the field. So is a `config.json` that gives one value twice and differently, because transformers and others would each
pick another one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from labkit.config import ModelConfig, MoEConfig
from labkit.config.errors import shown
from labkit.config.field_spec import FieldSpec
from labkit.models.bert.hugging_face_bert import bert_config, bert_fields, bert_kind
from labkit.models.mamba.hugging_face_mamba import check_mamba2, mamba_config, mamba_fields
from labkit.models.t5.hugging_face_t5 import t5_config, t5_fields, t5_kind
from labkit.plan.sizes import expert_width

GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""Hugging Face's `activation_function` -> ours."""
ROPE_THETA = {"llama": 1e4, "mixtral": 1e6}
"""`rope_theta` of a `config.json` that does not give it."""
MIXTRAL_KV_HEADS = 8
"""`num_key_value_heads` of a Mixtral that does not give it; of a Llama it is the number of heads."""
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
SAME_SIZES = (
    ("hidden_size", "n_embd", "d_model"),
    ("num_hidden_layers", "n_layer", "num_layers"),
    ("num_attention_heads", "n_head", "num_heads"),
    ("head_dim", "d_kv"),
    ("intermediate_size", "n_inner", "d_ff"),
    ("max_position_embeddings", "n_positions", "n_ctx"),
    ("num_local_experts", "num_experts"),
)
SAME_FIELDS = (
    *SAME_SIZES,
    ("hidden_act", "activation_function"),
    ("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps"),
    ("dtype", "torch_dtype"),
)
"""Names of one field: those of the families, of transformers' `attribute_map` and of older files."""
TYPES = {
    "int": "vocab_size type_vocab_size num_key_value_heads num_experts_per_tok num_decoder_layers sliding_window "
    "relative_attention_num_buckets relative_attention_max_distance state_size n_groups conv_kernel expand",
    "float": "layer_norm_epsilon layer_norm_eps rms_norm_eps rope_theta partial_rotary_factor factor",
    "bool": "tie_word_embeddings scale_decoder_outputs attention_bias mlp_bias use_bias use_conv_bias "
    "scale_attn_weights scale_attn_by_inverse_layer_idx add_cross_attention is_decoder",
    "str": "rope_type type",
}
FIELDS = {
    name: FieldSpec(name, kind, gt=0 if kind in ("int", "float") else None)
    for kind, names in TYPES.items()
    for name in names.split()
} | {name: FieldSpec(name, "int", gt=0) for names in SAME_SIZES for name in names}
"""Types of fields of `config.json`, as transformers checks them; sizes and epsilons are above 0."""
_LLAMA_NULL = ("head_dim", "sliding_window", "partial_rotary_factor", "factor")
MAY_BE_NULL = {
    "gpt2": ("n_inner",),
    "llama": (*_LLAMA_NULL, "num_key_value_heads"),
    "mixtral": _LLAMA_NULL,
    "t5": ("num_decoder_layers", "n_positions"),
    "mamba2": ("max_position_embeddings",),
}
"""Fields that may be null, which says nothing; transformers rejects any other null."""


def family_of(config: ModelConfig, moe: MoEConfig | None = None) -> str:
    """Return the family of a model: `gpt2`, `llama`, `mixtral`, `bert`, `megatron-bert`, `mamba2` or `t5`.

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
    """Return our config of the model that a `config.json` of one of these types describes (without dropout).

    Raises:
        ValueError: another type, an option that our model does not have, or two fields that contradict each other.
    """
    kind = str(config.get("model_type"))
    if kind not in ARCHITECTURES:
        raise ValueError(f"model_type is {kind!r}; weights can be converted from {', '.join(ARCHITECTURES)}")
    _check_types(kind, config)
    for said in _said_twice(kind, config):
        _agreed(said)
    _refuse(config, {"quantization_config": [None]})
    if kind in ("gpt2", "llama", "mixtral"):
        model = _gpt2_config(config) if kind == "gpt2" else _llama_config(config)
    else:
        model, allowed = {"mamba2": mamba_config, "t5": t5_config}.get(kind, bert_config)(config)
        _refuse(config, allowed)
    for name, value, part, size in (
        ("hidden size", model.hidden, "attention heads", model.heads),
        ("attention heads", model.heads, "num_key_value_heads", model.kv_heads or model.heads),
        ("num_heads", model.mamba_heads, "n_groups", model.mamba_num_groups if kind == "mamba2" else 1),
    ):
        if value % size:
            raise ValueError(f"{name} = {value} cannot be divided among {part} = {size}")
    return model


def moe_config_from_hugging_face(config: Mapping[str, Any]) -> MoEConfig:
    """Return our config of its experts: none, or a Mixtral's, without options of its training (losses, jitter)."""
    if config.get("model_type") != "mixtral":
        return MoEConfig()
    return MoEConfig(num_experts=config["num_local_experts"], top_k=config["num_experts_per_tok"])


def _gpt2_config(config: Mapping[str, Any]) -> ModelConfig:
    _refuse(config, {
        "activation_function": [*GPT2_ACTIVATIONS],
        "scale_attn_weights": [True],
        "scale_attn_by_inverse_layer_idx": [False],
        "add_cross_attention": [False],
    })  # fmt: skip
    return ModelConfig(
        layers=config["n_layer"],
        hidden=config["n_embd"],
        heads=config["n_head"],
        ffn_hidden=config.get("n_inner"),
        vocab_size=config["vocab_size"],
        seq_length=config["n_positions"],
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        activation=GPT2_ACTIVATIONS[config.get("activation_function", "gelu_new")],
        untie_embeddings_and_output_weights=config.get("tie_word_embeddings") is False,
    )


def _llama_config(config: Mapping[str, Any]) -> ModelConfig:
    rope, window = _rope(config), config.get("sliding_window")
    reaches_all = window is None or window >= config["max_position_embeddings"]
    _refuse(rope, {"rope_type": [None, "default"], "factor": [None, 1], "partial_rotary_factor": [None, 1]})
    _refuse(config, {
        "attention_bias": [False],
        "mlp_bias": [False],
        "hidden_act": ["silu"],
        "head_dim": [None, config["hidden_size"] // config["num_attention_heads"]],
        "sliding_window": [window if reaches_all else None],
    })  # fmt: skip
    return ModelConfig(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads", MIXTRAL_KV_HEADS if config["model_type"] == "mixtral" else None),
        ffn_hidden=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        seq_length=config["max_position_embeddings"],
        position="rope",
        rope_theta=rope["rope_theta"] or ROPE_THETA[config["model_type"]],
        norm="rmsnorm",
        norm_eps=config["rms_norm_eps"],
        activation="swiglu",
        bias=False,
        untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", False),
    )


def _said_twice(kind: str, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield groups of fields, or of values that follow from them, that must agree: name -> value; None says nothing."""
    get = config.get
    yield from ({name: get(name) for name in names} for names in SAME_FIELDS)
    given = get("architectures")
    classes = given if isinstance(given, list) else [given]
    if classes and not any(str(each).lower().startswith(kind.replace("-", "")) for each in classes):
        yield {"model_type": kind, "architectures": given}
    if kind == "t5":
        scaled, act = get("scale_decoder_outputs"), get("feed_forward_proj", "relu")
        yield {"tie_word_embeddings": scaled and get("tie_word_embeddings"), "scale_decoder_outputs": scaled}
        dense = "gelu_new" if act == "gated-gelu" else str(act).removeprefix("gated-")
        meant = {"is_gated_act": str(act).startswith("gated-"), "dense_act_fn": dense}
        yield from ({f"{name} of feed_forward_proj {act!r}": x, name: get(name)} for name, x in meant.items())
    if kind == "mamba2":
        width = {"num_heads * head_dim": config["num_heads"] * config["head_dim"]}
        width["expand * hidden_size"] = get("expand") and get("expand") * config["hidden_size"]
        yield width | {"intermediate_size": get("intermediate_size")}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the rotary embedding, which a `config.json` may give in several places.

    Raises:
        ValueError: two places contradict each other.
    """
    places = {f"{name}.": config.get(name) or {} for name in ("rope_parameters", "rope_scaling")}
    for name, options in list(places.items()):  # transformers 5 may nest them by type of layer
        _refuse(config, {name[:-1]: [None, options] if isinstance(options, Mapping) else [None]})
        places |= {f"{name}{each}.": nested for each, nested in options.items() if isinstance(nested, Mapping)}
    for name, options in places.items():
        _check_types(config["model_type"], options, name)

    def said(places: Mapping[str, Mapping[str, Any]], *fields: str) -> Any:
        return _agreed({name + field: at.get(field) for name, at in places.items() for field in fields})

    everywhere = {"": config} | places
    return {"rope_type": said(places, "rope_type", "type"), "factor": said(places, "factor")} | {
        field: said(everywhere, field) for field in ("rope_theta", "partial_rotary_factor")
    }


def _agreed(said: Mapping[str, Any]) -> Any:
    """Return the value of all fields that are not None. Raises ValueError, with their names, if two differ."""
    given = [(name, value) for name, value in said.items() if value is not None]
    for name, value in given[1:]:
        if value != given[0][1]:
            raise ValueError(
                f"{given[0][0]} = {given[0][1]!r} and {name} = {value!r} contradict each other; correct one of them, "
                "or remove it"
            )
    return given[0][1] if given else None


def _check_types(kind: str, config: Mapping[str, Any], place: str = "") -> None:
    """Raise ValueError for the first field whose value has not its type."""
    for name, value in config.items():
        says_nothing = value is None and name in MAY_BE_NULL.get(kind, ())
        if name in FIELDS and not says_nothing and (rule := FIELDS[name].broken(value)):
            raise ValueError(f"{place}{name} = {shown(value)} {rule}")


def _refuse(config: Mapping[str, Any], allowed: Mapping[str, Collection[Any]]) -> None:
    """Raise ValueError for the first option with a value that our models do not have.

    allowed: option -> the values that they have, the first of which is transformers' default.
    """
    for name, values in allowed.items():
        value = config.get(name, next(iter(values)))
        if value not in values:
            raise ValueError(
                f"{name} = {shown(value)} has no counterpart in labkit's models; only plain GPT-2, Llama, Mixtral, "
                "BERT, Mamba-2 and T5 can be converted"
            )


# ---- ours to theirs ----


def config_to_hugging_face(
    config: ModelConfig, moe: MoEConfig | None = None, *, dtype: str = "float32"
) -> dict[str, Any]:
    """Return the `config.json` of a model, from which transformers builds it.

    It names no token that begins or ends a text, since a checkpoint knows no tokenizer. dtype: type of the weights, by
    torch's name.

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
