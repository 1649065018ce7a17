"""nanotron: the YAML file of a run, with a model of its classes LlamaConfig or Qwen2Config.

Source: src/nanotron/config and src/nanotron/helpers.py of nanotron 0.4 and of its main branch in 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.config.foreign.conversion import (
    NOTHING,
    YOURS,
    Conversion,
    Note,
    Row,
    Stack,
    above_zero,
    differs,
    flat,
    lacks,
    pick,
    rows,
)

MODEL, RATES = "model.model_config", "optimizer.learning_rate_scheduler"
KNOWN_MODELS = ("is_llama_config", "is_qwen2_config")
MEANINGLESS = (
    "general data data_stages checkpoints logging tokenizer lighteval s3_upload metrics_logging experiment_logger"
)
"""Sections without a counterpart, but for the keys that have rows of their own."""
UNSAID = {
    "general.seed": 42,
    f"{MODEL}.rms_norm_eps": 1e-6,
    f"{MODEL}.tie_word_embeddings": False,
    "model.make_vocab_size_divisible_by": 1,
    "model.dtype": "bfloat16",
    "parallelism.pp_engine": "afab",
}
"""Defaults of nanotron that are not ours."""
UNSAID_OF_EXPERTS = {
    f"{MODEL}.moe_config.num_experts": 8,
    f"{MODEL}.moe_config.moe_intermediate_size": 1408,
}


def _derive(found: Conversion) -> None:
    """Read what several keys say together."""
    kind = next((key for key in KNOWN_MODELS if found.take(f"{MODEL}.{key}")), None)
    if kind is None:
        found.problems.append(f"{MODEL}: only models with is_llama_config or is_qwen2_config can be converted")
        return
    for name, value in (("position", "rope"), ("norm", "rmsnorm"), ("bias", False)):
        found.set(f"model.{name}", value, f"{MODEL}.{kind}")
    _batch(found)
    _rates(found)
    unsaid = UNSAID
    if any(key.startswith(f"{MODEL}.moe_config.") for key in found.keys):
        unsaid = UNSAID | UNSAID_OF_EXPERTS
        _experts(found)
    found.assume(unsaid, "nanotron")


def _batch(found: Conversion) -> None:
    dp, accumulation = (found.number(key, 1) for key in ("parallelism.dp", "tokens.batch_accumulation_per_replica"))
    micro = found.number("tokens.micro_batch_size", 1, keep=True)
    world = dp
    for axis in ("tp", "pp", "context_parallel_size"):
        world *= found.number(f"parallelism.{axis}", 1, keep=True)
    found.head.append(f"Launch {world} ranks (--nproc {world}), which gives data parallelism of {dp}.")
    found.set("train.global_batch_size", micro * accumulation * dp, "micro batch x accumulation x dp")


def _rates(found: Conversion) -> None:
    """Read the phases of the learning rate: nanotron counts the steps of the decay from its start, we to its end."""
    warmup = found.number(f"{RATES}.lr_warmup_steps", keep=True)
    steps = found.number("tokens.train_steps", 1, keep=True)
    start = found.number(f"{RATES}.lr_decay_starting_step", warmup)
    length = found.number(f"{RATES}.lr_decay_steps", steps - start)
    style = found.word(f"{RATES}.lr_decay_style", "linear")
    if start > warmup or style == "1-sqrt":
        found.set("optim.lr_schedule", "wsd", f"{RATES}.lr_decay_starting_step")
        found.set("optim.wsd_decay_style", "minus-sqrt" if style == "1-sqrt" else style, f"{RATES}.lr_decay_style")
        found.set("optim.wsd_decay_steps", length, f"{RATES}.lr_decay_steps")
    else:
        found.set("optim.lr_schedule", style, f"{RATES}.lr_decay_style")
    if start + length != steps:
        found.set("optim.decay_steps", start + length, "start of the decay + lr_decay_steps")
    found.assume({f"{RATES}.min_decay_lr": found.keys.get(f"{RATES}.learning_rate")}, "nanotron")


def _experts(found: Conversion) -> None:
    """Read the layers with experts, and what nanotron's Qwen2MoELayer always does."""
    key, depth = f"{MODEL}.moe_config.layers", found.number(f"{MODEL}.num_hidden_layers", keep=True)
    layers = found.take(key, [-1])
    if isinstance(layers, list) and layers != [-1]:
        found.set("moe.layer_freq", [int(index in layers) for index in range(depth)], key)
    found.set("moe.pre_softmax", True, "nanotron's Router")
    shared, width = (
        found.take(f"{MODEL}.moe_config.{name}") for name in ("enable_shared_expert", "shared_expert_intermediate_size")
    )
    if shared:
        found.set("moe.shared_expert_ffn_hidden", width or 5632, f"{MODEL}.moe_config.shared_expert_intermediate_size")
        found.set("moe.shared_expert_gate", True, f"{MODEL}.moe_config.enable_shared_expert")


def _is_nanotron(contents: Any) -> bool:
    return isinstance(contents, Mapping) and "parallelism" in contents and "tokens" in contents


TABLE: dict[str, Row] = {
    "general.seed": "train.seed",
    "tokens.sequence_length": "model.seq_length",
    "tokens.train_steps": "train.steps",
    "tokens.micro_batch_size": "train.micro_batch_size",
    "tokens.val_check_interval": above_zero("train.eval_interval"),
    "tokens.limit_val_batches": "train.eval_steps",
    "tokens.limit_test_batches": NOTHING,
    f"{MODEL}.hidden_act": pick("model.activation", {"silu": "swiglu"}),
    f"{MODEL}.hidden_size": "model.hidden",
    f"{MODEL}.intermediate_size": "model.ffn_hidden",
    f"{MODEL}.num_attention_heads": "model.heads",
    f"{MODEL}.num_hidden_layers": "model.layers",
    f"{MODEL}.num_key_value_heads": "model.kv_heads",
    f"{MODEL}.rms_norm_eps": "model.norm_eps",
    f"{MODEL}.rope_theta": "model.rope_theta",
    f"{MODEL}.tie_word_embeddings": pick("model.untie_embeddings_and_output_weights", {True: False, False: True}),
    f"{MODEL}.vocab_size": "model.vocab_size",
    f"{MODEL}.moe_config.num_experts": "moe.num_experts",
    f"{MODEL}.moe_config.top_k": "moe.top_k",
    f"{MODEL}.moe_config.moe_intermediate_size": "moe.ffn_hidden",
    f"{MODEL}.moe_config.token_dispatcher_type": "moe.dispatcher",
    f"{MODEL}.moe_config.router_aux_loss_coef": differs("nanotron never reads it; here it is moe.aux_loss_coeff"),
    f"{MODEL}.attention_bias": lacks("either all linear layers have a bias (model.bias), or none", False),
    f"{MODEL}.rope_interleaved": lacks("rotary embeddings rotate the halves of a head", False),
    f"{MODEL}._use_doc_masking": lacks("a sample attends across its documents", False),
    f"{MODEL}.z_loss_enabled": lacks("a z-loss on the model's logits; moe.z_loss_coeff is the router's", False),
    f"{MODEL}.moe_config": NOTHING,
    **rows(
        lacks("every layer computes plain attention with unscaled rotary embeddings"),
        "sliding_window_size flex_attention_mask no_rope_layer rope_scaling rope_scaling.* "
        "rope_seq_len_interpolation_factor",
        f"{MODEL}.{{}}",
    ),
    **rows(
        NOTHING,
        "bos_token_id eos_token_id pad_token_id initializer_range max_position_embeddings pretraining_tp use_cache "
        "z_loss_coefficient log_attn_probs ring_attn_heads_k_stride _attn_implementation _fused_* _use_qkv_packed",
        f"{MODEL}.{{}}",
    ),
    "model.init_method.std": "model.init_std",
    "model.init_method.scaling_method": lacks("residual projections are scaled by the number of layers", "NUM_LAYERS"),
    "model.init_method.use_mup": lacks("a parametrisation that depends on the width"),
    "model.init_method.path": differs("labkit starts from weights that labkit checkpoint import wrote"),
    "model.dtype": "optim.precision",
    "model.make_vocab_size_divisible_by": "model.make_vocab_size_divisible_by",
    "model.ddp_bucket_cap_mb": differs("optim.bucket_size counts elements"),
    "optimizer.accumulate_grad_in_fp32": pick("optim.grad_reduce_in_bf16", {True: False, False: True}),
    "optimizer.clip_grad": "optim.clip_grad",
    "optimizer.weight_decay": "optim.weight_decay",
    "optimizer.weight_decay_exclude_named_params": differs("biases and norms have no weight decay, all others have it"),
    "optimizer.zero_stage": pick("optim.distributed_optimizer", {0: False, 1: True}),
    "optimizer.optimizer_factory.name": lacks("labkit has only AdamW", "adamW"),
    **{
        f"optimizer{place}.adam_{ours}": f"optim.{ours}"
        for place in ("", ".optimizer_factory")
        for ours in ("beta1", "beta2", "eps")
    },
    **rows(NOTHING, "torch_adam_is_fused optimizer_factory.torch_adam_is_fused", "optimizer.{}"),
    f"{RATES}.learning_rate": "optim.lr",
    f"{RATES}.lr_warmup_steps": "optim.warmup_steps",
    f"{RATES}.lr_warmup_style": lacks("the warm-up is linear", "linear"),
    f"{RATES}.min_decay_lr": "optim.min_lr",
    "parallelism.tp": "parallel.tp",
    "parallelism.pp": "parallel.pp",
    "parallelism.context_parallel_size": "parallel.cp",
    "parallelism.expert_parallel_size": "parallel.ep",
    "parallelism.pp_engine": pick("schedule.name", {"1f1b": "1f1b", "afab": "gpipe"}),
    "parallelism.recompute_layer": pick("model.recompute_granularity", {True: "full", False: "none"}),
    "parallelism.tp_mode": pick(
        "parallel.sequence_parallel",
        {"REDUCE_SCATTER": True, "reduce_scatter": True, "ALL_REDUCE": False, "all_reduce": False},
    ),
    "parallelism.tp_recompute_allgather": lacks("the gathered sequence is gathered again in backward", True),
    "parallelism.tp_linear_async_communication": NOTHING,
    "checkpoints.checkpoints_path": "checkpoint.dir",
    "checkpoints.checkpoint_interval": "checkpoint.interval",
    "checkpoints.resume_checkpoint_path": differs("labkit reads no checkpoints of nanotron; see checkpoint.load"),
    "tokenizer.tokenizer_name_or_path": Note(YOURS, "name a tokenizer file in data.tokenizer"),
    "profiler.*": differs("set train.profile and train.output_dir"),
    **dict.fromkeys(
        ("*.dataset_folder", "*.dataset_weights", "*.hf_dataset_or_datasets"),
        Note(YOURS, "set data.path, or data.blend for several"),
    ),
    "data_stages.1.*": lacks("the data stay the same during a run"),
    "doremi.*": lacks("learned weights of the data sets"),
    "logging.iteration_step_info_interval": "train.log_interval",
    **{f"{section}.*": NOTHING for section in MEANINGLESS.split()},
}
"""Key -> row."""

STACK = Stack("nanotron", TABLE, _is_nanotron, flat, _derive)
