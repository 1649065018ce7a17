"""Rules between the fields of recomputation, the optimizer, precision and data."""

from __future__ import annotations

import math
import os

from labkit.config.errors import nearest, shown
from labkit.config.findings import Findings

RECOMPUTE_MODULES = ("core_attn", "mlp", "layernorm", "moe", "shared_experts")
"""Parts of a layer that `model.recompute_modules` may name."""


def training_rules(found: Findings) -> None:
    """Recomputation, precision, Transformer Engine, context parallelism."""
    c = found.config
    _recompute(found)
    if c.optim.average_in_collective is True and c.optim.calculate_per_token_loss is True:
        rule = "excludes optim.calculate_per_token_loss, which divides once by tokens"
        found.add("optim.average_in_collective", f"{rule}; set one of them to false")
    if found.sound("optim.fp8", "optim.precision") and c.optim.fp8 != "none" and c.optim.precision == "fp16":
        found.add("optim.fp8", "fp8 goes with optim.precision bf16, fp32 or (for parity) fp64, not fp16")
    if c.model.transformer_impl == "transformer_engine":
        _transformer_engine(found)
    cp = c.parallel.cp
    if found.sound("model.attention_dropout", "parallel.cp") and c.model.attention_dropout and cp > 1:
        rule = f"must be 0 with parallel.cp = {cp}: blocks of a ring are joined by log-sum-exps, and the kernels that"
        found.add("model.attention_dropout", f"{rule} give those drop nothing; set it to 0, or parallel.cp = 1")


def _recompute(found: Findings) -> None:
    """Layers and parts of layers that are computed again."""
    m, name, parts = found.config.model, "model.recompute_modules", ", ".join(RECOMPUTE_MODULES)
    if m.recompute_granularity == "full":
        found.at_most("model.recompute_num_layers", "model.layers", "; recompute fewer")
    if found.sound(name) and m.recompute_granularity == "selective":
        if unknown := [module for module in m.recompute_modules if module not in RECOMPUTE_MODULES]:
            rule = f"{shown(unknown[0])} is no part that can be recomputed; choose from {parts}"
            found.add(name, f"{rule}{nearest(unknown[0], RECOMPUTE_MODULES)}")
        elif not m.recompute_modules or len(set(m.recompute_modules)) < len(m.recompute_modules):
            found.add(name, f"name one or more of {parts}, each once")


def _transformer_engine(found: Findings) -> None:
    """Options of labkit's own layers that Transformer Engine's do not have."""
    c = found.config
    if c.optim.precision == "fp64":
        found.add("model.transformer_impl", "Transformer Engine has no fp64; set optim.precision, or local layers")
    if c.model.attention_backend == "unfused":
        found.add("model.attention_backend", "Transformer Engine chooses its kernels; set it to fused, or local layers")
    if found.sound("model.recompute_modules") and "layernorm" in c.model.recompute_modules:
        rule = "layernorm is part of Transformer Engine's linear layers and has no output to drop"
        found.add("model.recompute_modules", f"{rule}; leave it out, or set local layers")


def optimizer_rules(found: Findings) -> None:
    """The learning rate's schedule and the adaptive loss scale."""
    o, steps = found.config.optim, found.config.train.steps
    found.at_most("optim.min_lr", "optim.lr", ", from which the rate decays; lower it")
    found.at_most("optim.min_loss_scale", "optim.initial_loss_scale", "; lower it")
    if not found.sound("optim.warmup_steps", "optim.decay_steps", "train.steps"):
        return
    end, words = (steps, "train.steps") if o.decay_steps is None else (o.decay_steps, "optim.decay_steps")
    left = end - o.warmup_steps
    if left <= 0:
        rule = f"must be below {words} = {end}, where the decay ends"
        found.add("optim.warmup_steps", f"{rule}; warm up for fewer steps")
    elif found.sound("optim.wsd_decay_steps") and o.lr_schedule == "wsd":
        length = max(1, end // 10) if o.wsd_decay_steps is None else o.wsd_decay_steps
        if length > left:
            usual = f" (None means a tenth of the decay, {length} steps)" if o.wsd_decay_steps is None else ""
            rule = f"must be at most {left}: {words} = {end} less {o.warmup_steps} steps of warm-up{usual}"
            found.add("optim.wsd_decay_steps", f"{rule}; shorten the tail")


def data_rules(found: Findings) -> None:
    """Shares of the text, and the folder of the results."""
    split, t = found.config.data.split, found.config.train
    if found.sound("data.split", "train.eval_steps"):
        try:
            shares = [float(part) for part in split.split(",")]
        except ValueError:
            shares = []
        if len(shares) != 3 or not all(math.isfinite(s) and s >= 0 for s in shares) or not sum(shares) > 0:
            found.add("data.split", "must be three shares that are not negative, as in 90,5,5")
        elif shares[0] == 0:
            found.add("data.split", "the first share is the training text and must be above 0")
        elif t.eval_steps and shares[1] == 0:
            rule = f"the second share feeds the validations that train.eval_steps = {t.eval_steps} asks for"
            found.add("data.split", f"{rule}; raise it, or set train.eval_steps to 0")
    folder = t.output_dir if found.sound("train.output_dir") else None
    if folder and os.path.exists(folder) and not os.path.isdir(folder):
        found.add("train.output_dir", "is a file; name a folder")
