"""DeepSpeed: the JSON file of an engine, which describes the training and no model.

Source: deepspeed/runtime/config.py, zero/config.py, precision_config.py and lr_schedules.py of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.config.errors import shown
from labkit.config.foreign.conversion import (
    LACKS,
    NOTHING,
    YOURS,
    Conversion,
    Row,
    Stack,
    differs,
    flat,
    lacks,
    pick,
    rows,
)

OWN_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization")
"""Keys of which every configuration of DeepSpeed has one."""
RATE = "scheduler.params"
SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""`scheduler.type` -> `optim.lr_schedule`."""
UNSAID_OF_ADAM = {"optimizer.params.betas": [0.9, 0.999], "optimizer.params.weight_decay": 0.0}
"""Defaults of DeepSpeed's FusedAdam that are not ours."""


def _derive(found: Conversion) -> None:
    """Read what several keys say together."""
    for key in [key for key, value in found.keys.items() if value == "auto"]:
        found.take(key)
        found.note(YOURS, key, "is auto, which the Trainer of Hugging Face fills in")
    for section in [*PRECISIONS, *SWITCHED.split()]:
        if not found.take(f"{section}.enabled", False):
            found.drop(f"{section}.", "not enabled")
        elif section in PRECISIONS:
            found.set("optim.precision", PRECISIONS[section], f"{section}.enabled")
    _batch(found)
    _optimizer(found)
    _schedule(found)
    found.assume({"zero_optimization.overlap_comm": found.keys.get("zero_optimization.stage") == 3}, "DeepSpeed")


def _batch(found: Conversion) -> None:
    """Read two or three of: batch, micro batch, and steps of accumulation; their quotient is data parallelism."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, accumulation = (found.number(name, None) for name in names)
    if whole and micro and accumulation:
        found.head.append(f"Launch {whole // (micro * accumulation)} replicas, each of tp x cp x pp ranks.")
    elif not whole and micro:
        why = "the batch is this times dp; dp is taken as 1 here, so multiply train.global_batch_size by it"
        found.note(YOURS, names[1], why)
    elif whole and not micro:
        found.note(YOURS, names[0], "is shared by data-parallel ranks; divide train.micro_batch_size by dp")
    if whole or micro:
        found.set("train.global_batch_size", whole or micro * (accumulation or 1), names[0] if whole else names[1])
        found.set("train.micro_batch_size", micro or whole // (accumulation or 1), names[1] if micro else names[0])


def _optimizer(found: Conversion) -> None:
    kind = found.word("optimizer.type")
    if kind.lower() in ("", "adam", "adamw"):
        found.assume(UNSAID_OF_ADAM if kind else {}, "DeepSpeed")
        return
    keys = [key for key in found.keys if key.startswith("optimizer.params.")]
    for key in keys:
        found.take(key)
    found.note(LACKS, "optimizer.*", f"labkit has only AdamW, which {kind}'s settings do not fit")


def _schedule(found: Conversion) -> None:
    """Read the warm-up and the decay; only a decay says how many steps there are."""
    kind = found.word("scheduler.type")
    if kind not in ("", *SCHEDULERS):
        found.note(LACKS, "scheduler.type", f"{kind} has no counterpart; the learning rate stays constant")
    if found.keys.get(f"{RATE}.warmup_max_lr") is not None:
        found.take("optimizer.params.lr")
    found.set("optim.lr_schedule", SCHEDULERS.get(kind, "constant"), "scheduler.type")
    steps = found.number(f"{RATE}.total_num_steps", None)
    warmup = found.number(f"{RATE}.warmup_num_steps", 1000 if kind in SCHEDULERS else None)
    if steps:
        found.set("train.steps", steps, f"{RATE}.total_num_steps")
        found.set("optim.warmup_steps", warmup or 0, f"{RATE}.warmup_num_steps")
    elif warmup:
        why = f"set train.steps, which the file does not give, and then optim.warmup_steps to {warmup}"
        found.note(YOURS, f"{RATE}.warmup_num_steps", why)
    if kind in SCHEDULERS:
        found.assume({f"{RATE}.warmup_type": "log"}, "DeepSpeed")
    if kind == "WarmupCosineLR":
        lr = found.number("optimizer.params.lr", 1e-3, keep=True)
        found.set("optim.min_lr", lr * found.number(f"{RATE}.cos_min_ratio", 1e-4), f"{RATE}.cos_min_ratio x lr")


def _betas(found: Conversion, key: str, value: Any) -> None:
    if not isinstance(value, list) or len(value) != 2:
        found.problems.append(f"{key} = {shown(value)}: must be two numbers, as in [0.9, 0.999]")
        return
    for name, beta in zip(("optim.beta1", "optim.beta2"), value):
        found.set(name, beta, key)


def _stage(found: Conversion, key: str, value: Any) -> None:
    if value in (2, 3):
        what = "gradients" if value == 2 else "gradients and parameters"
        found.note(LACKS, f"{key} {value}", f"labkit shards the optimizer's state (ZeRO-1), and replicates {what}")
    if value not in (0, 1, 2, 3):
        found.problems.append(f"{key} = {shown(value)}: must be 0, 1, 2 or 3")
    else:
        found.set("optim.distributed_optimizer", value > 0, key)


def _whole(name: str) -> Row:
    """Return the row of a count that may be written like 5e8."""

    def row(found: Conversion, key: str, value: Any) -> None:
        found.keys[key] = value
        found.set(name, found.number(key), key)

    return row


def _power(found: Conversion, key: str, value: Any) -> None:
    found.keys[key] = value
    found.set("optim.initial_loss_scale", 2.0 ** min(found.number(key, 16), 99), key)


def _loss_scale(found: Conversion, key: str, value: Any) -> None:
    if value != 0:  # 0 adapts it
        found.set("optim.loss_scale", value, key)


def _is_deepspeed(contents: Any) -> bool:
    return isinstance(contents, Mapping) and any(key in contents for key in OWN_KEYS)


PRECISIONS = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
"""Section that may be `enabled` -> `optim.precision`."""
SWITCHED = (
    "torch_autocast tensorboard wandb csv_monitor comet flops_profiler comms_logger elasticity autotuning "
    "data_efficiency curriculum_learning progressive_layer_drop eigenvalue hybrid_engine"
)
"""Other sections that may be `enabled`."""
TABLE: dict[str, Row] = {
    "optimizer.params.lr": "optim.lr",
    "optimizer.params.betas": _betas,
    "optimizer.params.eps": "optim.eps",
    "optimizer.params.weight_decay": "optim.weight_decay",
    "optimizer.params.adam_w_mode": lacks("weight decay is decoupled, as in AdamW", True),
    "optimizer.params.bias_correction": lacks("Adam's moments are bias-corrected", True),
    "optimizer.params.torch_adam": NOTHING,
    f"{RATE}.warmup_type": lacks("the warm-up is linear", "linear"),
    f"{RATE}.warmup_max_lr": "optim.lr",
    **rows(lacks("the warm-up begins at 0", 0, 0.0), f"{RATE}.warmup_min_lr {RATE}.warmup_min_ratio"),
    "gradient_clipping": "optim.clip_grad",
    "fp16.loss_scale": _loss_scale,
    "fp16.initial_scale_power": _power,
    "fp16.loss_scale_window": "optim.loss_scale_window",
    "fp16.hysteresis": "optim.hysteresis",
    "fp16.min_loss_scale": "optim.min_loss_scale",
    **rows(lacks("", False), "fp16.auto_cast fp16.consecutive_hysteresis fp16.fp16_master_weights_and_grads"),
    **rows(lacks("master weights and gradients are fp32", False), "bf16.* bfloat16.*"),
    "data_types.grad_accum_dtype": pick("optim.grad_reduce_in_bf16", {"fp32": False, "bf16": True}),
    "communication_data_type": pick("optim.grad_reduce_in_bf16", {"fp32": False, "bf16": True, "bfp16": True}),
    "zero_optimization.stage": _stage,
    "zero_optimization.overlap_comm": "optim.overlap_grad_reduce",
    "zero_optimization.reduce_bucket_size": _whole("optim.bucket_size"),
    **rows(
        lacks("states stay on their device"),
        "zero_optimization.offload_* zero_optimization.cpu_offload zero_optimization.cpu_offload_params aio.*",
    ),
    **rows(lacks(), "zero_optimization.zenflow.* zero_optimization.zero_quantized_*"),
    "zero_optimization.zero_hpz_partition_size": lacks("", 1),
    **rows(
        NOTHING,
        "zero_optimization.allgather_* zero_optimization.stage3_* zero_optimization.contiguous_gradients "
        "zero_optimization.reduce_scatter zero_optimization.sub_group_size zero_optimization.round_robin_gradients "
        "zero_optimization.ignore_unused_parameters zero_optimization.elastic_checkpoint "
        "zero_optimization.load_from_fp32_weights zero_optimization.gather_16bit_weights_on_model_save "
        "zero_optimization.legacy_stage1 zero_optimization.use_multi_rank_bucket_allreduce "
        "zero_optimization.memory_efficient_linear zero_optimization.leaf_module.*",
    ),
    "prescale_gradients": differs("gradients are scaled once, before their sum", False),
    "gradient_predivide_factor": lacks("gradients are scaled once, before their sum", 1, 1.0),
    "tensor_parallel.autotp_size": "parallel.tp",
    "tensor_parallel.*": NOTHING,
    "sequence_parallel_size": lacks("attention by all-to-all; parallel.cp splits a sequence differently", 1),
    "pipeline.*": lacks("DeepSpeed's pipeline is written in Python; set parallel.pp"),
    "activation_checkpointing.*": differs("set model.recompute_granularity"),
    "steps_per_print": "train.log_interval",
    "wall_clock_breakdown": pick("train.timing_log_level", {True: 1, False: 0}),
    "tensorboard.output_path": "train.tensorboard_dir",
    **rows(
        lacks(),
        "sparse_attention.* compression_training.* data_efficiency.* curriculum_learning.* progressive_layer_drop.* "
        "eigenvalue.* hybrid_engine.* expert_parallel.* quantize_training.* amp.* elasticity.* torch_autocast.*",
    ),
    **rows(
        NOTHING,
        "tensorboard.* wandb.* csv_monitor.* comet.* flops_profiler.* comms_logger.* autotuning.* checkpoint.* "
        "compile.* timers.* nebula.* dump_state memory_breakdown dataloader_drop_last zero_allow_untested_optimizer "
        "zero_force_ds_cpu_optimizer disable_allgather disable_python_gc log_level cuda_visible_devices "
        "steps_per_checkpoint sparse_gradients use_data_before_expert_parallelism",
    ),
}
"""Key -> row, after `_derive`."""

STACK = Stack("DeepSpeed", TABLE, _is_deepspeed, flat, _derive)
