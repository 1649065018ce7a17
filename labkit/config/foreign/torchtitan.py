"""torchtitan: the TOML file of a job, as its releases up to 0.2.2 read it; later ones are configured in Python.

Source: torchtitan/config/job_config.py, components/lr_scheduler.py and models/llama3 of torchtitan 0.2.2.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from labkit.config.foreign.conversion import (
    DIFFERS,
    LACKS,
    NOTHING,
    YOURS,
    Conversion,
    Note,
    Row,
    Stack,
    differs,
    flat,
    lacks,
    pick,
)


class Flavor(NamedTuple):
    """Sizes of a Llama 3 in torchtitan/models/llama3/__init__.py."""

    dim: int
    layers: int
    heads: int
    kv_heads: int | None = None
    ffn_multiplier: float = 1.0
    multiple_of: int = 256
    vocab_size: int = 128256

    @property
    def ffn_hidden(self) -> int:
        """Width of the MLP: two thirds of 4 dim, times the multiplier, up to the next multiple."""
        width = int(self.ffn_multiplier * int(2 * 4 * self.dim / 3))
        return -(-width // self.multiple_of) * self.multiple_of


FLAVORS = {
    "debugmodel": Flavor(256, 6, 16, vocab_size=2048),
    "8B": Flavor(4096, 32, 32, 8, 1.3, 1024),
    "70B": Flavor(8192, 80, 64, 8, 1.3, 4096),
    "405B": Flavor(16384, 126, 128, 8, 1.2, 4096),
}
"""`model.flavor` of `model.name = "llama3"`."""
SCHEDULES = {
    "1F1B": ("1f1b", 1),
    "GPipe": ("gpipe", 1),
    "Interleaved1F1B": ("interleaved", 2),
    "ZBVZeroBubble": ("zbv", 1),
    "DualPipeV": ("dualpipe_v", 1),
}
"""`parallelism.pipeline_parallel_schedule` -> `schedule.name`, and `parallel.vpp` where nothing gives the stages."""
UNSAID: dict[str, Any] = {
    "optimizer.lr": 8e-4,
    "optimizer.weight_decay": 0.1,
    "lr_scheduler.warmup_steps": 200,
    "training.mixed_precision_param": "bfloat16",
    "training.seq_len": 2048,
    "training.steps": 10000,
    "metrics.log_freq": 10,
}
"""Defaults of torchtitan that are not ours."""


def _derive(found: Conversion) -> None:
    """Read what several keys say together."""
    _model(found)
    _layout(found)
    _pipeline(found)
    _rates(found)
    _files(found)
    _fp8(found)
    for section, switch in SWITCHES.items():
        if not found.take(f"{section}.{switch}", False):
            found.drop(f"{section}.", "switched off")
    cp = found.number("parallelism.context_parallel_degree", 1, keep=True)
    unsaid = UNSAID | ({"parallelism.context_parallel_rotate_method": "allgather"} if cp > 1 else {})
    found.assume(unsaid, "torchtitan")


def _model(found: Conversion) -> None:
    name, flavor = found.word("model.name", "llama3"), found.word("model.flavor", "debugmodel")
    if name != "llama3" or flavor not in FLAVORS:
        known = ", ".join(FLAVORS)
        found.problems.append(f"model.flavor = {flavor!r} of {name!r}: labkit has llama3 with one of {known}")
        return
    sizes, origin = FLAVORS[flavor], f"model.flavor {flavor} of llama3"
    shape = {"layers": sizes.layers, "hidden": sizes.dim, "heads": sizes.heads, "kv_heads": sizes.kv_heads}
    shape |= {"ffn_hidden": sizes.ffn_hidden, "vocab_size": sizes.vocab_size, "rope_theta": 500000.0}
    shape |= {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
    for field, value in (shape | {"untie_embeddings_and_output_weights": True}).items():
        found.set(f"model.{field}", value, origin)
    found.note(LACKS, origin, "torchtitan scales the rotary frequencies as Llama 3.1 does, labkit does not")


def _layout(found: Conversion) -> None:
    """Read data parallelism and the batch, which are counted in ranks that the file may not know."""
    shard, copies = (found.number(f"parallelism.data_parallel_{kind}_degree", default)
                     for kind, default in (("shard", -1), ("replicate", 1)))  # fmt: skip
    if shard != 1:
        origin = "parallelism.data_parallel_shard_degree"
        found.set("optim.distributed_optimizer", True, origin)
        found.note(DIFFERS, origin, "FSDP also shards parameters and gradients; labkit shards optimizer state (ZeRO-1)")
        found.set("optim.num_distributed_optimizer_instances", copies, "parallelism.data_parallel_replicate_degree")
    tp, pp, cp = (
        found.number(f"parallelism.{axis}_parallel_degree", 1, keep=True) for axis in ("tensor", "pipeline", "context")
    )
    if tp > 1:
        found.set("parallel.sequence_parallel", True, "parallelism.tensor_parallel_degree")
    dp = copies * max(1, shard)
    if shard > 0:
        found.head.append(f"Launch {tp * pp * cp * dp} ranks, which gives data parallelism of {dp}.")
    local, size = found.number("training.local_batch_size", 8), found.number("training.global_batch_size", -1)
    found.set("train.global_batch_size", size if size > 0 else local * dp, "training.local_batch_size x dp")
    if size <= 0 and shard <= 0:
        why = f"it is {local} per data-parallel rank, and dp is taken as {dp}; multiply train.global_batch_size"
        found.note(YOURS, "training.local_batch_size", why)
    micro = found.number("parallelism.pipeline_parallel_microbatch_size", 1)
    found.set("train.micro_batch_size", micro if pp > 1 else local, "training.local_batch_size")


def _pipeline(found: Conversion) -> None:
    pp = found.number("parallelism.pipeline_parallel_degree", 1, keep=True)
    if pp == 1:
        found.take("parallelism.pipeline_parallel_degree")
        found.drop("parallelism.pipeline_parallel_", "the pipeline has one stage")
        return
    key = "parallelism.pipeline_parallel_schedule"
    name = found.word(key, "1F1B")
    if name not in SCHEDULES:
        found.problems.append(f"{key} = {name!r}: has no counterpart here; choose from {', '.join(SCHEDULES)}")
        return
    schedule, vpp = SCHEDULES[name]
    first, last = (
        found.number(f"parallelism.pipeline_parallel_{end}_stage_less_layers", 1) for end in ("first", "last")
    )
    layers = found.values.get("model.layers", 0) + first + last
    if (each := found.number("parallelism.pipeline_parallel_layers_per_stage")) and vpp > 1:
        vpp = -(-layers // each) // pp
    found.set("schedule.name", schedule, key)
    found.set("parallel.vpp", vpp, key)
    if first or last:
        why = "labkit gives every stage the same number; other numbers go into parallel.pipeline_layout"
        found.note(DIFFERS, "parallelism.pipeline_parallel_*_stage_less_layers", why)


def _rates(found: Conversion) -> None:
    """Read the decay: to the end after the warm-up, or over the last `decay_ratio` of the steps."""
    steps = found.number(
        "lr_scheduler.total_steps", found.number("training.steps", UNSAID["training.steps"], keep=True)
    )
    warmup = found.number("lr_scheduler.warmup_steps", UNSAID["lr_scheduler.warmup_steps"], keep=True)
    ratio, style = found.number("lr_scheduler.decay_ratio", None), found.word("lr_scheduler.decay_type", "linear")
    length = steps - warmup if ratio is None else min(round(steps * ratio), steps - warmup)
    if ratio == 0:
        found.set("optim.lr_schedule", "constant", "lr_scheduler.decay_ratio")
    elif length < steps - warmup or style == "sqrt":
        found.set("optim.lr_schedule", "wsd", "lr_scheduler.decay_ratio")
        found.set("optim.wsd_decay_steps", length, "lr_scheduler.decay_ratio")
        found.set("optim.wsd_decay_style", "minus-sqrt" if style == "sqrt" else style, "lr_scheduler.decay_type")
    else:
        found.set("optim.lr_schedule", style, "lr_scheduler.decay_type")
    if steps != found.number("training.steps", UNSAID["training.steps"], keep=True):
        found.set("optim.decay_steps", steps, "lr_scheduler.total_steps")
    lowest = found.number("lr_scheduler.min_lr_factor") * found.number(
        "optimizer.lr", UNSAID["optimizer.lr"], keep=True
    )
    found.set("optim.min_lr", lowest, "lr_scheduler.min_lr_factor x optimizer.lr")


def _files(found: Conversion) -> None:
    """Read the folders, which torchtitan counts from `job.dump_folder`."""
    folder = str(found.keys.get("job.dump_folder") or "./outputs")
    for section, switch, key, default, field in (
        ("checkpoint", "enable", "folder", "checkpoint", "checkpoint.dir"),
        ("metrics", "enable_tensorboard", "save_tb_folder", "tb", "train.tensorboard_dir"),
    ):
        if found.keys.get(f"{section}.{switch}"):
            name = found.word(f"{section}.{key}", default)
            found.set(field, os.path.join(folder, name), f"{section}.{key} in job.dump_folder")


def _fp8(found: Conversion) -> None:
    converters = list(map(str, found.take("model.converters", [])))
    recipe = found.word("quantize.linear.float8.recipe_name", "tensorwise")
    if "float8" in converters and recipe == "tensorwise":
        found.set("optim.fp8", "hybrid", "model.converters")  # torchao: e4m3, and e5m2 for gradients
        found.set("optim.fp8_recipe", "current", "quantize.linear.float8.recipe_name")
    elif converters:
        found.note(LACKS, "model.converters", f"{', '.join(converters)}: labkit has only float8 with tensorwise scales")
    else:
        found.drop("quantize.", "no converter is named")


def _timeout(found: Conversion, key: str, value: Any) -> None:
    found.keys[key] = value
    found.set("parallel.distributed_timeout_minutes", found.number(key, 1) / 60, key)


def _is_torchtitan(contents: Any) -> bool:
    return (
        isinstance(contents, Mapping) and isinstance(contents.get("model"), Mapping) and "flavor" in contents["model"]
    )


SWITCHES = {
    "checkpoint": "enable",
    "validation": "enable",
    "compile": "enable",
    "memory_estimation": "enable",
    "fault_tolerance": "enable",
    "profiling": "enable_profiling",
}
"""Section -> the key without which torchtitan reads no other of it."""
_SELECTIVE = "labkit's selective recomputes the parts in model.recompute_modules, torchtitan's single operations"


def _recompute(found: Conversion, key: str, value: Any) -> None:
    if value in ("selective", "memory_budget"):
        found.note(DIFFERS, key, f"{_SELECTIVE}; nothing is recomputed until model.recompute_granularity is set")
    else:
        found.set("model.recompute_granularity", value, key)


TABLE: dict[str, Row] = {
    "job.dump_folder": "train.output_dir",
    "metrics.log_freq": "train.log_interval",
    "metrics.*": NOTHING,
    "model.hf_assets_path": Note(YOURS, "name a tokenizer file in data.tokenizer"),
    "model.tokenizer_path": Note(YOURS, "name a tokenizer file in data.tokenizer"),
    "model.print_after_conversion": NOTHING,
    "optimizer.name": lacks("labkit has only AdamW", "AdamW"),
    "optimizer.lr": "optim.lr",
    "optimizer.beta1": "optim.beta1",
    "optimizer.beta2": "optim.beta2",
    "optimizer.eps": "optim.eps",
    "optimizer.weight_decay": "optim.weight_decay",
    "optimizer.implementation": NOTHING,
    "optimizer.early_step_in_backward": lacks("", False),
    "lr_scheduler.warmup_steps": "optim.warmup_steps",
    "training.seq_len": "model.seq_length",
    "training.max_norm": "optim.clip_grad",
    "training.steps": "train.steps",
    "training.dtype": lacks("the optimizer updates fp32 weights", "float32"),
    "training.mixed_precision_param": "optim.precision",
    "training.mixed_precision_reduce": lacks("", "float32"),
    "training.enable_cpu_offload": lacks("", False),
    "training.dataset": Note(YOURS, "set data.path, or data.blend for several"),
    "training.dataset_path": Note(YOURS, "set data.path, or data.blend for several"),
    **{f"training.{name}": NOTHING for name in ("gc_freq", "gc_debug", "dataloader.*")},
    "parallelism.tensor_parallel_degree": "parallel.tp",
    "parallelism.pipeline_parallel_degree": "parallel.pp",
    "parallelism.context_parallel_degree": "parallel.cp",
    "parallelism.context_parallel_rotate_method": pick("parallel.cp_comm_type", {"allgather": "all_gather"}),
    "parallelism.context_parallel_load_balancer": lacks("a rank has a chunk from both ends of a sequence", "headtail"),
    "parallelism.expert_parallel_degree": "parallel.ep",
    "parallelism.expert_tensor_parallel_degree": "parallel.etp",
    "parallelism.expert_parallel_comm_backend": lacks("", "standard"),
    "parallelism.disable_loss_parallel": lacks("the logits stay sharded over tp ranks", False),
    "parallelism.enable_async_tensor_parallel": lacks("products that start before all input has arrived", False),
    "parallelism.fsdp_reshard_after_forward": NOTHING,
    "parallelism.pipeline_parallel_schedule_csv": differs("write the schedule as labkit's, and set schedule.path", ""),
    "parallelism.module_fqns_per_model_part": differs("name the layers of each stage in parallel.pipeline_layout"),
    "parallelism.pipeline_parallel_expert_parallel_overlap": NOTHING,
    "activation_checkpoint.mode": _recompute,
    "activation_checkpoint.*": NOTHING,
    "checkpoint.interval": "checkpoint.interval",
    "checkpoint.keep_latest_k": "checkpoint.keep",
    "checkpoint.async_mode": pick(
        "checkpoint.asynchronous", {"disabled": False, "async": True, "async_with_pinned_mem": True}
    ),
    "checkpoint.initial_load_path": differs("labkit reads no checkpoints of torchtitan; see checkpoint.load"),
    "checkpoint.*": NOTHING,
    "validation.freq": "train.eval_interval",
    "validation.steps": "train.eval_steps",
    "validation.*": Note(YOURS, "data.split takes a share of the text for validation"),
    "compile.*": differs("set model.compile to layers; the loss is never compiled"),
    "quantize.*": lacks("either all linear layers of a layer compute in fp8, or none", "", [], False),
    "profiling.*": differs("set train.profile and train.output_dir"),
    "comm.train_timeout_seconds": _timeout,
    "debug.seed": "train.seed",
    "debug.*": NOTHING,
    **{f"{section}.*": NOTHING for section in ("job", "comm", "experimental", "memory_estimation")},
    "fault_tolerance.*": lacks(),
}
"""Key -> row, after `_derive`."""

STACK = Stack("torchtitan", TABLE, _is_torchtitan, flat, _derive)
