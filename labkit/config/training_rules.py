"""Rules between the fields of recomputation, data parallelism and precision."""

from __future__ import annotations

from labkit.config.errors import nearest, shown
from labkit.config.fields import SPECS
from labkit.config.findings import Findings, divisors
from labkit.config.limits import RECOMPUTE_MODULES


def training_rules(found: Findings) -> None:
    """Those that need no world size."""
    _recompute(found)
    _data_parallel(found)
    _precision(found)
    _fp8(found)
    _transformer_engine(found)
    _context_parallel(found)


def instance_rule(found: Findings, dp_cp: int) -> None:
    """The data-parallel ranks are cut into equal groups."""
    name = "optim.num_distributed_optimizer_instances"
    if found.sound(name) and dp_cp % found.values[name]:
        found.add(name, f"must divide dp x cp = {dp_cp}; choose {divisors(dp_cp)}")


_RECOMPUTE_FIELDS = {
    "model.recompute_method": "full",
    "model.recompute_num_layers": "full",
    "model.recompute_modules": "selective",
}
"""Fields that only one granularity reads, and which."""


def _recompute(found: Findings) -> None:
    granularity = found.values["model.recompute_granularity"]
    if not found.sound("model.recompute_granularity"):
        return
    partial = "model.num_microbatches_with_partial_activation_checkpoints"
    if granularity == "none" and found.values[partial] is not None:
        found.add(partial, "nothing is recomputed; set model.recompute_granularity to selective or full")
    got = found.get("model.recompute_num_layers", "model.layers")
    if granularity == "full" and got and got[0] > got[1]:
        found.add("model.recompute_num_layers", f"must be at most model.layers = {got[1]}")
    modules = found.values["model.recompute_modules"]
    if granularity == "selective" and found.sound("model.recompute_modules"):
        unknown = [module for module in modules if module not in RECOMPUTE_MODULES]
        if unknown:
            rule = f"{shown(unknown[0])} is no part that can be recomputed; choose from {', '.join(RECOMPUTE_MODULES)}"
            found.add("model.recompute_modules", f"{rule}{nearest(unknown[0], RECOMPUTE_MODULES)}")
        elif not modules or len(set(modules)) < len(modules):
            found.add("model.recompute_modules", f"name one or more of {', '.join(RECOMPUTE_MODULES)}, each once")
    for name, reader in _RECOMPUTE_FIELDS.items():
        if granularity != reader:
            found.no_effect([name], f"with model.recompute_granularity = {granularity}; set that to {reader}")


def _data_parallel(found: Findings) -> None:
    if found.values["optim.data_parallel"] == "naive":
        for name in ("optim.distributed_optimizer", "optim.average_in_collective"):
            if found.values[name] is True:
                found.add(name, "needs gradient buckets; set optim.data_parallel to bucketed")
        found.no_effect(["optim.bucket_size"], "on the naive form; set optim.data_parallel to bucketed")
    elif found.values["optim.overlap_grad_reduce"] is False:
        why = "without overlap, where all is one bucket; set optim.overlap_grad_reduce to true"
        found.no_effect(["optim.bucket_size"], why)
    if found.values["optim.distributed_optimizer"] is False:
        if found.values["optim.overlap_param_gather"] is True:
            found.add("optim.overlap_param_gather", "only the distributed optimizer gathers parameters; turn it on")
        instances = found.values["optim.num_distributed_optimizer_instances"]
        if found.sound("optim.num_distributed_optimizer_instances") and instances > 1:
            found.add("optim.num_distributed_optimizer_instances", "needs optim.distributed_optimizer = true")
    if found.values["optim.average_in_collective"] is True and found.values["optim.calculate_per_token_loss"] is True:
        found.add(
            "optim.average_in_collective", "excludes optim.calculate_per_token_loss, which divides once by tokens"
        )


def _precision(found: Findings) -> None:
    precision = found.values["optim.precision"]
    if not found.sound("optim.precision"):
        return
    if precision != "fp16" and found.values["optim.loss_scale"] is not None:
        found.add("optim.loss_scale", f"only fp16 scales the loss, and optim.precision = {precision}; leave it out")
    if (got := found.get("optim.min_loss_scale", "optim.initial_loss_scale")) and got[0] > got[1]:
        found.add("optim.min_loss_scale", f"must be at most optim.initial_loss_scale = {got[1]:g}")
    adaptive = [f"optim.{name}" for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")]
    if precision != "fp16":
        found.no_effect(adaptive, f"with optim.precision = {precision}, which scales no loss; set that to fp16")
    elif found.values["optim.loss_scale"] is not None:
        found.no_effect(adaptive, "on a constant scale; set optim.loss_scale to null")


def _fp8(found: Findings) -> None:
    got = found.get("optim.fp8", "optim.precision")
    if got and got[0] != "none" and got[1] == "fp16":
        found.add("optim.fp8", "fp8 goes with optim.precision bf16, fp32 or (for parity) fp64, not fp16")
    if got and got[0] == "none":
        names = [name for name in SPECS if name.startswith("optim.fp8_")]
        found.no_effect(names, "with optim.fp8 = none; set that to e4m3 or hybrid")
    got = found.get("optim.fp8", "optim.fp8_recipe")
    if got and got[0] != "none" and got[1] != "delayed":
        names = ("optim.fp8_amax_history_len", "optim.fp8_amax_compute_algo", "optim.fp8_margin")
        found.no_effect(names, f"with optim.fp8_recipe = {got[1]}; set that to delayed")
    elif got and got[0] != "none" and found.values["optim.fp8_amax_compute_algo"] == "most_recent":
        why = "with optim.fp8_amax_compute_algo = most_recent; set that to max"
        found.no_effect(["optim.fp8_amax_history_len"], why)


def _transformer_engine(found: Findings) -> None:
    """What labkit's own layers can do and Transformer Engine's cannot."""
    name = "model.transformer_impl"
    if not found.sound(name) or found.values[name] != "transformer_engine":
        return
    if found.values["optim.precision"] == "fp64":
        found.add(name, "Transformer Engine has no fp64; set optim.precision, or local layers")
    if found.values["model.attention_backend"] == "unfused":
        found.add("model.attention_backend", "Transformer Engine chooses its kernels; set it to fused, or local layers")
    if "layernorm" in (found.values["model.recompute_modules"] or ()):
        rule = "layernorm is part of Transformer Engine's linear layers and has no output to drop"
        found.add("model.recompute_modules", f"{rule}; leave it out, or set local layers")


def _context_parallel(found: Findings) -> None:
    got = found.get("model.attention_dropout", "parallel.cp")
    if got and got[0] and got[1] > 1:
        rule = (
            f"must be 0 with parallel.cp = {got[1]}: blocks of a ring are joined by log-sum-exps, and the kernels that"
        )
        found.add("model.attention_dropout", f"{rule} give those drop nothing; set it to 0, or parallel.cp = 1")
