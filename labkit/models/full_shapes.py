"""Names and shapes of a whole model's tensors, without building it, and the fields of `config.json` that fix them."""

from __future__ import annotations

from labkit.config import ModelConfig, MoEConfig
from labkit.models.bert.hugging_face_bert import bert_end_shapes
from labkit.models.hugging_face_config import SAME_FIELDS, config_to_hugging_face
from labkit.models.mamba.hugging_face_mamba import mamba_layer_shapes
from labkit.models.t5.hugging_face_t5 import t5_shapes
from labkit.plan.sizes import expert_width, fc1_width, ffn_width, gate_and_up, qkv_width

SHAPED_BY = {
    "word.": ("vocab_size", "hidden_size"),
    "output.": ("vocab_size", "hidden_size"),
    "lm_head.bias": ("vocab_size",),
    "position.": ("max_position_embeddings", "hidden_size"),
    "relative_bias.": ("relative_attention_num_buckets", "num_attention_heads"),
    ".experts.": ("num_local_experts", "intermediate_size", "hidden_size"),
    ".router.": ("num_local_experts", "hidden_size"),
    ".fc": ("intermediate_size", "hidden_size"),
    ".norm.": ("hidden_size",),
    "attention.": ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    ".mamba.": ("hidden_size", "num_attention_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
}
"""Part of our name of a tensor -> fields of its shape, by the first names in `SAME_FIELDS`; the rest: `hidden_size`."""


def full_shapes(config: ModelConfig, moe: MoEConfig | None = None) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of each tensor of a whole GPT-2, Llama, Mixtral, BERT, Mamba-2 or T5."""
    if config.family == "t5":
        return t5_shapes(config)
    moe, hidden, vocabulary = moe or MoEConfig(), config.hidden, (config.vocab_size, config.hidden)
    shapes: dict[str, tuple[int, ...]] = {"embedding.word.weight": vocabulary}
    if config.position == "learned":
        shapes["embedding.position.weight"] = (config.seq_length, hidden)
    linear = {"attention.qkv": (qkv_width(config), hidden), "attention.proj": (hidden, hidden)}
    dense = {"mlp.fc1": (fc1_width(config), hidden), "mlp.fc2": (hidden, ffn_width(config))}
    experts, width = moe.num_experts, expert_width(config, moe)
    routed = {
        "mlp.router": (experts, hidden),
        "mlp.experts.fc1": (experts, width * gate_and_up(config), hidden),
        "mlp.experts.fc2": (experts, hidden, width),
    }
    layers = range(config.layers)
    if config.family == "mamba":
        shapes, layers = shapes | mamba_layer_shapes(config), range(0)
    for i in layers:
        matrices = linear | (routed if moe.is_moe_layer(i) else dense)
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"layers.{i}.{name}.bias": shape[:1] for name, shape in matrices.items() if config.bias}
        shapes |= _norm_shapes(f"layers.{i}.attention.norm", config) | _norm_shapes(f"layers.{i}.mlp.norm", config)
    shapes |= _norm_shapes("final_norm" if config.norm_placement == "pre" else "embedding.norm", config)
    if config.family == "bert":
        shapes |= bert_end_shapes(config) | _norm_shapes("lm_head.norm", config)
    return shapes | ({"output.weight": vocabulary} if config.untie_embeddings_and_output_weights else {})


def _norm_shapes(name: str, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    parts = ("weight", "bias") if config.norm == "layernorm" else ("weight",)
    return {f"{name}.{part}": (config.hidden,) for part in parts}


def shape_fields(config: ModelConfig, moe: MoEConfig | None, name: str) -> str:
    """Return the fields of a `config.json` that fix the shape of a tensor (our name), with their values, as text."""
    wanted = next((fields for part, fields in SHAPED_BY.items() if part in name), ("hidden_size",))
    names = {each for field in wanted for each in next((same for same in SAME_FIELDS if field in same), (field,))}
    fields = config_to_hugging_face(config, moe)
    return ", ".join(f"{field} = {fields[field]!r}" for field in fields if field in names)
