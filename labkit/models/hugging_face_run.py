"""Hugging Face's `config.json` for `labkit config convert`: the model, its dropouts, and the type of its weights.

`hugging_face_config` reads the model. This adds the key that each field comes from, and what else a run needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.config.foreign.conversion import ALREADY, DIFFERS, NOTHING, YOURS, Conversion, Row, Stack, rows
from labkit.config.sections import ModelConfig, MoEConfig

ORIGINS = {
    "layers": "num_hidden_layers n_layer num_layers",
    "decoder_layers": "num_decoder_layers",
    "hidden": "hidden_size n_embd d_model",
    "heads": "num_attention_heads n_head num_heads",
    "kv_heads": "num_key_value_heads",
    "ffn_hidden": "intermediate_size n_inner d_ff",
    "vocab_size": "vocab_size",
    "seq_length": "max_position_embeddings n_positions",
    "activation": "hidden_act activation_function feed_forward_proj",
    "norm_eps": "rms_norm_eps layer_norm_epsilon layer_norm_eps",
    "rope_theta": "rope_theta rope_parameters",
    "bias": "use_bias",
    "untie_embeddings_and_output_weights": "tie_word_embeddings scale_decoder_outputs",
    "relative_buckets": "relative_attention_num_buckets",
    "relative_max_distance": "relative_attention_max_distance",
    "mamba_state_dim": "state_size",
    "mamba_head_dim": "head_dim",
    "mamba_num_groups": "n_groups",
    "mamba_num_heads": "num_heads",
    "mamba_conv_width": "conv_kernel",
    "num_experts": "num_local_experts",
    "top_k": "num_experts_per_tok",
}
"""Field of a model or of its experts -> the keys that give it; all others follow from `model_type`."""
UNSAID: dict[str, dict[str, float]] = {
    "gpt2": {"embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1},
    "bert": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    "megatron-bert": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    "t5": {"dropout_rate": 0.1},
    "mixtral": {"router_aux_loss_coef": 0.001},
}
"""model_type -> defaults of transformers that are not ours."""


def _derive(found: Conversion) -> None:
    """Read the model, and mark every key as read that its reader has checked."""
    from labkit.models.hugging_face_config import model_config_from_hugging_face, moe_config_from_hugging_face

    given = dict(found.keys)
    try:
        model, moe = model_config_from_hugging_face(given), moe_config_from_hugging_face(given)
    except KeyError as error:
        found.problems.append(f"there is no key {error}; fetch the model's config.json again")
        return
    except (ValueError, TypeError, ArithmeticError) as error:
        found.problems.append(f"describes a model that labkit does not have: {error}")
        return
    for section, config, default in (("model", model, ModelConfig()), ("moe", moe, MoEConfig())):
        for name, value in vars(config).items():
            if value != getattr(default, name):
                key = next((key for key in ORIGINS.get(name, "").split() if given.get(key) is not None), "model_type")
                found.set(f"{section}.{name}", list(value) if isinstance(value, tuple) else value, key)
    if model.vocab_size % model.make_vocab_size_divisible_by:
        found.note(DIFFERS, "vocab_size", "labkit pads the tables by model.make_vocab_size_divisible_by")
    if model.position == "rope":
        found.note(YOURS, "max_position_embeddings", "the longest text of the model; shorten model.seq_length to train")
    for key in " ".join(ORIGINS.values()).split():
        found.take(key)
    found.assume(UNSAID.get(given["model_type"], {}), "transformers")


def _is_model(contents: Any) -> bool:
    return isinstance(contents, Mapping) and "model_type" in contents


TABLE: dict[str, Row] = {
    "embd_pdrop": "model.embedding_dropout",
    "resid_pdrop": "model.hidden_dropout",
    "hidden_dropout_prob": "model.hidden_dropout model.embedding_dropout",
    "dropout_rate": "model.hidden_dropout model.embedding_dropout model.attention_dropout",
    **rows("model.attention_dropout", "attn_pdrop attention_dropout attention_probs_dropout_prob"),
    "initializer_range": "model.init_std",
    "router_aux_loss_coef": "moe.aux_loss_coeff",
    "router_jitter_noise": "moe.input_jitter",
    **rows("optim.precision", "dtype torch_dtype"),
    # the reader has rejected every value of these that labkit's models do not have
    **rows(
        ALREADY,
        "model_type architectures attention_bias mlp_bias rope_scaling partial_rotary_factor sliding_window head_dim "
        "scale_attn_weights scale_attn_by_inverse_layer_idx add_cross_attention is_decoder type_vocab_size d_kv "
        "position_embedding_type use_conv_bias time_step_limit expand quantization_config is_gated_act dense_act_fn "
        "is_encoder_decoder n_ctx",
    ),
    **rows(
        NOTHING,
        "bos_token_id eos_token_id pad_token_id decoder_start_token_id use_cache transformers_version _name_or_path "
        "task_specific_params summary_* gradient_checkpointing id2label label2id output_* return_dict pretraining_tp "
        "tokenizer_class classifier_dropout reorder_and_upcast_attn chunk_size residual_in_fp32 rms_norm rescale_* "
        "time_step_* classifier_* initializer_factor directionality pooler_* _attn_implementation* unk_token_id",
    ),
}
"""Key -> row, after `_derive` has read the model."""

STACK = Stack("Hugging Face", TABLE, _is_model, dict, _derive)
