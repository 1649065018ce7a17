"""T5 in Hugging Face's names: the tensors, and the fields of `config.json`.

`T5ForConditionalGeneration` has the form with relative positions alone. T5 1.0 ties its output layer to the words and
scales the layer's input by 1 / sqrt(hidden). T5 1.1 has an output layer of its own and does not scale.

`labkit.models.convert` reads and writes states by `t5_names`, and `hugging_face_config` the other functions.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from labkit.config import ModelConfig
from labkit.plan.sizes import decoder_layers, fc1_width, ffn_width, gate_and_up

ACTIVATIONS = {"relu": "relu", "gated-gelu": "geglu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gated-silu": "swiglu"}
"""`feed_forward_proj` -> `model.activation`."""
WORDS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
"""Two further copies of the word embedding, which some files have."""
UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
"""A table that the oldest files have and no layer reads."""


def t5_kind(config: ModelConfig) -> str:
    """Return `t5`, if transformers' class can hold the model.

    Raises:
        ValueError: a model that transformers' class cannot hold.
    """
    for name, value in {"position": "relative", "norm": "rmsnorm", "bias": False}.items():
        if getattr(config, name) != value:
            raise ValueError(f"model.{name} is {getattr(config, name)}, and Hugging Face's T5 has {value}")
    return "t5"


def t5_names(config: ModelConfig, theirs: Container[str] | None = None) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (our name, their names) of every tensor; several names for a matrix that they store in parts.

    theirs: the names in a file. A T5 1.1 that transformers 5 wrote may have no `lm_head.weight`; its output layer is
        then the word embedding, not scaled.
    """
    yield "embedding.word.weight", ("shared.weight",)
    for half, depth in (("encoder", config.layers), ("decoder", decoder_layers(config))):
        first = f"{half}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield f"{half}.relative_bias.weight", (first,)
        for index in range(depth):
            yield from _layer(f"{half}.layers.{index}", f"{half}.block.{index}.layer", config)
        yield f"{half}.final_norm.weight", (f"{half}.final_layer_norm.weight",)
    if config.untie_embeddings_and_output_weights:
        has_own = theirs is None or "lm_head.weight" in theirs
        yield "output.weight", ("lm_head.weight" if has_own else "shared.weight",)


def _layer(ours: str, theirs: str, config: ModelConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    parts: dict[str, tuple[str, ...]] = {"attention.norm": ("0.layer_norm",), "attention.proj": ("0.SelfAttention.o",)}
    parts["attention.qkv"] = tuple(f"0.SelfAttention.{each}" for each in "qkv")
    mlp = 1
    if ours.startswith("decoder"):
        mlp, cross = 2, "1.EncDecAttention"
        parts |= {"cross_attention.norm": ("1.layer_norm",), "cross_attention.q": (f"{cross}.q",)}
        parts |= {"cross_attention.kv": (f"{cross}.k", f"{cross}.v"), "cross_attention.proj": (f"{cross}.o",)}
    inner = ("wi_0", "wi_1") if gate_and_up(config) == 2 else ("wi",)
    parts |= {"mlp.norm": (f"{mlp}.layer_norm",), "mlp.fc2": (f"{mlp}.DenseReluDense.wo",)}
    parts["mlp.fc1"] = tuple(f"{mlp}.DenseReluDense.{each}" for each in inner)
    for name, each in parts.items():
        yield f"{ours}.{name}.weight", tuple(f"{theirs}.{part}.weight" for part in each)


def t5_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of each tensor of a whole T5, in either form."""
    h, words = config.hidden, (config.vocab_size, config.hidden)
    attention = {"attention": {"qkv": (3 * h, h), "proj": (h, h)}}
    cross = attention | {"cross_attention": {"q": (h, h), "kv": (2 * h, h), "proj": (h, h)}}
    matrices: dict[str, tuple[int, ...]] = {}
    norms = [f"{half}.final_norm" for half in ("encoder", "decoder")]
    for half, depth, parts in (("encoder", config.layers, attention), ("decoder", decoder_layers(config), cross)):
        for layer in (f"{half}.layers.{index}" for index in range(depth)):
            matrices |= {f"{layer}.{part}.{name}": shape for part, of in parts.items() for name, shape in of.items()}
            matrices |= {f"{layer}.mlp.fc1": (fc1_width(config), h), f"{layer}.mlp.fc2": (h, ffn_width(config))}
            norms += [f"{layer}.{part}.norm" for part in (*parts, "mlp")]
    shapes = {"embedding.word.weight": words} | {f"{name}.weight": shape for name, shape in matrices.items()}
    shapes |= {f"{name}.weight": (h,) for name in norms}
    if config.bias:
        shapes |= {f"{name}.bias": shape[:1] for name, shape in matrices.items()}
        shapes["output_bias"] = words[:1]
    if config.norm == "layernorm":
        shapes |= {f"{name}.bias": (h,) for name in norms}
    if config.position == "learned":
        shapes["embedding.position.weight"] = (config.seq_length, h)
    else:
        table = (config.relative_buckets, config.heads)
        shapes |= {f"{half}.relative_bias.weight": table for half in ("encoder", "decoder")}
    return shapes | ({"output.weight": words} if config.untie_embeddings_and_output_weights else {})


def t5_config(config: Mapping[str, Any]) -> tuple[ModelConfig, dict[str, Any]]:
    """Return our config of the model in a `config.json`, and option -> the values our model has, default first."""
    activation, width, heads = str(config.get("feed_forward_proj", "relu")), config["d_model"], config["num_heads"]
    tied, head = config.get("tie_word_embeddings", True), config["d_kv"]
    allowed = {"feed_forward_proj": [*ACTIVATIONS], "d_kv": [head if head * heads == width else None]}
    depth, length = config.get("num_decoder_layers"), config.get("n_positions") or 512
    model = ModelConfig(
        family="t5",
        layers=config["num_layers"],
        decoder_layers=None if depth == config["num_layers"] else depth,
        hidden=width,
        heads=heads,
        ffn_hidden=config["d_ff"],
        vocab_size=config["vocab_size"],
        seq_length=length,
        position="relative",
        relative_buckets=config.get("relative_attention_num_buckets", 32),
        relative_max_distance=config.get("relative_attention_max_distance", 128),
        norm="rmsnorm",
        norm_eps=config.get("layer_norm_epsilon", 1e-6),
        activation=ACTIVATIONS.get(activation, "gelu"),
        bias=False,
        untie_embeddings_and_output_weights=not config.get("scale_decoder_outputs", tied),
    )
    return model, allowed


def t5_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of `config.json` that other families name otherwise; one dropout there is three of ours."""
    activation = {ours: theirs for theirs, ours in ACTIVATIONS.items()}[config.activation]
    return {
        "num_layers": config.layers,
        "num_decoder_layers": decoder_layers(config),
        "d_model": config.hidden,
        "d_kv": config.hidden // config.heads,
        "d_ff": ffn_width(config),
        "num_heads": config.heads,
        "n_positions": config.seq_length,
        "relative_attention_num_buckets": config.relative_buckets,
        "relative_attention_max_distance": config.relative_max_distance,
        "layer_norm_epsilon": config.norm_eps,
        "feed_forward_proj": activation,
        "dropout_rate": config.hidden_dropout,
        "is_encoder_decoder": True,
        "pad_token_id": None,
    }
