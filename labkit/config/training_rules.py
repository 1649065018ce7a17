"""Rules between the fields of recomputation, the optimizer and data."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from labkit.config.choices import FAMILIES, LOGGERS, RECOMPUTED_PARTS
from labkit.config.errors import nearest, shown
from labkit.config.findings import Findings


def training_rules(found: Findings) -> None:
    """Reject parts of layers that cannot be recomputed."""
    m, name, parts = found.config.model, "model.recompute_modules", ", ".join(RECOMPUTED_PARTS)
    if m.recompute_granularity == "selective":
        modules = m.recompute_modules
        if unknown := [module for module in modules if module not in RECOMPUTED_PARTS]:
            rule = f"{shown(unknown[0])} is not a part that can be recomputed; choose from {parts}"
            found.add(name, f"{rule}{nearest(unknown[0], RECOMPUTED_PARTS)}")
        elif not modules or len(set(modules)) < len(modules):
            found.add(name, f"name one or more of {parts}, each once")
        elif "layernorm" in modules and m.transformer_impl == "transformer_engine":
            rule = "layernorm is part of Transformer Engine's linear layers and has no output to drop"
            found.add(name, f"{rule}; leave it out, or set local layers")
        elif "layernorm" in modules and m.norm_placement == "post":
            rule = "with model.norm_placement = post the output of a norm is read again by the next residual addition"
            found.add(name, f"{rule}; leave layernorm out")
        elif m.compile == "layers" and (inside := sorted({"core_attn", "layernorm", "mlp"} & set(modules))):
            rule = f"{inside[0]} is in a region of model.compile = layers, whose compiler decides what it recomputes"
            found.add(name, f"{rule}; set that to none, or model.recompute_granularity to full or none")


def optimizer_rules(found: Findings) -> None:
    """Require that warm-up and decay of the learning rate fit into the run."""
    o, steps = found.config.optim, found.config.train.steps
    end, words = (steps, "train.steps") if o.decay_steps is None else (o.decay_steps, "optim.decay_steps")
    left = end - o.warmup_steps
    if left <= 0:
        rule = f"must be below {words} = {end}, where the decay ends"
        found.add("optim.warmup_steps", f"{rule}; warm up for fewer steps")
    elif o.lr_schedule == "wsd":
        length = max(1, end // 10) if o.wsd_decay_steps is None else o.wsd_decay_steps
        if length > left:
            usual = f" (None means a tenth of the decay, {length} steps)" if o.wsd_decay_steps is None else ""
            rule = f"must be at most {left}: {words} = {end} minus {o.warmup_steps} steps of warm-up{usual}"
            found.add("optim.wsd_decay_steps", f"{rule}; shorten the tail")


def profile_rules(found: Findings) -> None:
    """Require that a profile has steps and ranks, and a folder for its traces."""
    t, world, name = found.config.train, found.values["world_size"], "train.profile_step_start"
    if t.profile == "none":
        return
    if t.profile == "pytorch" and t.output_dir is None:
        found.add("train.profile", "pytorch writes traces into train.output_dir; set train.output_dir")
    for other in ("train.profile_step_end", "train.steps"):
        if t.profile_step_start >= found.value(other):
            found.add(name, f"no step would be profiled; it must be below {other} = {found.value(other)}")
            break
    if bad := [rank for rank in t.profile_ranks if rank < 0 or (world is not None and rank >= world)]:
        end = "" if world is None else f" to {world - 1}"
        found.add("train.profile_ranks", f"there is no rank {bad[0]}; name ranks from 0{end}, or none for all")


def logger_rules(found: Findings) -> None:
    """Reject unknown loggers, and require a folder for TensorBoard's files."""
    t = found.config.train
    if unknown := [name for name in t.loggers if name not in LOGGERS]:
        rule = f"there is no logger {shown(unknown[0])}; choose from {', '.join(LOGGERS)}"
        found.add("train.loggers", f"{rule}{nearest(unknown[0], LOGGERS)}")
    elif "tensorboard" in t.loggers and t.tensorboard_dir is None and t.output_dir is None:
        found.add("train.loggers", "tensorboard writes files; set train.output_dir or train.tensorboard_dir")


def data_rules(found: Findings) -> None:
    """Check the names of indexed datasets, and the shares of the text."""
    found.check(_indexed, _shares)


def _indexed(found: Findings) -> None:
    """Require prefixes for indexed datasets, and such datasets for the fields that are read only with them."""
    data = found.config.data
    prefix, ending = os.path.splitext(data.path or "")
    if data.blend and data.path is not None:
        found.add("data.blend", "excludes data.path; leave one of them out")
    elif data.weighted and (len(data.blend) % 2 or not _weights(data.sources)):
        rule = "must be weights above 0 and prefixes in turn, as in 0.3,books,0.7,news"
        found.add("data.blend", f"{rule}, or prefixes alone")
    elif missing := [name for _, name in data.sources if not os.path.isfile(f"{name}.idx")]:
        found.add("data.blend", f"there is no {missing[0]}.idx; give the prefixes of indexed datasets")
    elif ending in (".bin", ".idx") and os.path.isfile(f"{prefix}.idx"):
        found.add("data.path", f"is one of the two files of an indexed dataset; give their prefix {prefix}")
    elif not data.blend and not os.path.isfile(f"{data.path}.idx"):
        windows = FAMILIES[found.config.model.family].reads_windows
        idle = ("data.num_samples", "data.cache") if windows else ("data.cache",)
        for name in filter(found.changed, idle):
            found.add(name, "has no effect on a text; give an indexed dataset in data.path, or leave this out")


def _weights(sources: Sequence[tuple[float | None, str]]) -> bool:
    """Return True if all weights are positive numbers with a finite sum."""
    weights = [weight or 0.0 for weight, _ in sources]
    return min(weights) > 0 and sum(weights) < math.inf


def _shares(found: Findings) -> None:
    name, eval_steps = "data.split", found.config.train.eval_steps
    try:
        shares = found.config.data.shares
    except ValueError:
        found.add(name, "must be three shares that are not negative, as in 90,5,5")
        return
    if shares[0] == 0:
        found.add(name, "the first share is the training text and must be above 0")
    elif eval_steps and shares[1] == 0:
        rule = f"the second share feeds the validations that train.eval_steps = {eval_steps} asks for"
        found.add(name, f"{rule}; raise it, or set train.eval_steps to 0")
