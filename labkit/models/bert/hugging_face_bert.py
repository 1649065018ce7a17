"""BERT in Hugging Face's names: the tensors, and the fields of `config.json`.

transformers has a class for each layout of arXiv 1909.08053, figure 7:

| `model.norm_placement` | `model_type`    | class                        |
|------------------------|-----------------|------------------------------|
| `post`                 | `bert`          | `BertForPreTraining`         |
| `pre`                  | `megatron-bert` | `MegatronBertForPreTraining` |

`labkit.models.convert` reads and writes states by `bert_names`, and `hugging_face_config` the other functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from labkit.config import ModelConfig
from labkit.plan.sizes import NUM_TOKENTYPES, ffn_width

KINDS = {"post": "bert", "pre": "megatron-bert"}
"""`model.norm_placement` -> `model_type`."""
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
"""`hidden_act` -> `model.activation`."""
LINEAR_PARTS = {
    "attention.proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
"""Our part of a layer -> theirs, in both layouts."""
NORM_PARTS = {
    "post": {"attention.norm": "attention.output.LayerNorm", "mlp.norm": "output.LayerNorm"},
    "pre": {"attention.norm": "attention.ln", "mlp.norm": "ln"},
}
"""The norms of a layer by layout."""
END_PARTS = {
    "lm_head.dense": "cls.predictions.transform.dense",
    "lm_head.norm": "cls.predictions.transform.LayerNorm",
    "binary_head.pooler": "bert.pooler.dense",
    "binary_head.dense": "cls.seq_relationship",
}
"""Our part of the heads -> theirs."""
BIAS = "cls.predictions.bias"
DECODER = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
"""The output layer of an untied model. In files of a tied one these repeat the word embedding and `BIAS`."""


def bert_kind(config: ModelConfig) -> str:
    """Return `bert` or `megatron-bert`.

    Raises:
        ValueError: a model that transformers' classes cannot hold.
    """
    needed = {"position": "learned", "norm": "layernorm", "bias": True, "bert_binary_head": True}
    for name, value in needed.items():
        if getattr(config, name) != value:
            raise ValueError(f"model.{name} is {getattr(config, name)}, and Hugging Face's BERT has {value}")
    if config.activation not in ACTIVATIONS.values() or config.kv_heads not in (None, config.heads):
        raise ValueError(
            f"a BERT of Hugging Face has gelu and as many key/value heads as query heads; here model.activation = "
            f"{config.activation} and model.kv_heads = {config.kv_heads}"
        )
    return KINDS[config.norm_placement]


def bert_names(config: ModelConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (our name, their names) of every tensor; three names for a qkv, which they store apart."""
    for name, theirs in (("word", "word"), ("position", "position"), ("tokentype", "token_type")):
        yield f"embedding.{name}.weight", (f"bert.embeddings.{theirs}_embeddings.weight",)
    norms, qkv = NORM_PARTS[config.norm_placement], ("query", "key", "value")
    for index in range(config.layers):
        ours, layer = f"layers.{index}", f"bert.encoder.layer.{index}"
        for part in ("weight", "bias"):
            yield f"{ours}.attention.qkv.{part}", tuple(f"{layer}.attention.self.{each}.{part}" for each in qkv)
            for name, theirs in (LINEAR_PARTS | norms).items():
                yield f"{ours}.{name}.{part}", (f"{layer}.{theirs}.{part}",)
    post = config.norm_placement == "post"
    outer = {"embedding.norm": "bert.embeddings.LayerNorm"} if post else {"final_norm": "bert.encoder.ln"}
    for name, theirs in (outer | END_PARTS).items():
        for part in ("weight", "bias"):
            yield f"{name}.{part}", (f"{theirs}.{part}",)
    untied = config.untie_embeddings_and_output_weights
    yield "lm_head.bias", (DECODER[1] if untied else BIAS,)
    if untied:
        yield "output.weight", DECODER[:1]


def bert_end_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of a BERT's tensors outside its layers, but norms, words, positions and output weight."""
    h = config.hidden
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head.dense.weight": (h, h),
        "lm_head.dense.bias": (h,),
        "lm_head.bias": (config.vocab_size,),
    }
    if config.bert_binary_head:
        shapes["embedding.tokentype.weight"] = (NUM_TOKENTYPES, h)
        for name, size in (("pooler", h), ("dense", 2)):
            shapes |= {f"binary_head.{name}.weight": (size, h), f"binary_head.{name}.bias": (size,)}
    return shapes


def bert_config(config: Mapping[str, Any]) -> tuple[ModelConfig, dict[str, Any]]:
    """Return our config of the model in a `config.json`, and option -> the values our model has, default first."""
    allowed = {
        "hidden_act": [*ACTIVATIONS],
        "type_vocab_size": [NUM_TOKENTYPES],
        "position_embedding_type": ["absolute"],
        "is_decoder": [False],
        "add_cross_attention": [False],
    }
    model = ModelConfig(
        family="bert",
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        ffn_hidden=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        seq_length=config["max_position_embeddings"],
        norm_placement={kind: placement for placement, kind in KINDS.items()}[config["model_type"]],
        norm_eps=config.get("layer_norm_eps", 1e-12),
        activation=ACTIVATIONS.get(str(config.get("hidden_act")), "gelu"),
        untie_embeddings_and_output_weights=config.get("tie_word_embeddings") is False,
    )
    return model, allowed


def bert_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of `config.json` that other families name otherwise; one dropout there is two of ours."""
    return {
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "intermediate_size": ffn_width(config),
        "max_position_embeddings": config.seq_length,
        "type_vocab_size": NUM_TOKENTYPES,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": "gelu" if config.activation == "gelu" else "gelu_new",
        "hidden_dropout_prob": config.hidden_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "pad_token_id": None,
    }
