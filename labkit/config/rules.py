"""What makes a configuration sound: every broken rule as one sentence of field, value, rule and what to do.

Types come first, then ranges and words of single fields, then rules between fields; a rule is skipped where one of
its fields is already known to be bad, so that one mistake is reported once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from labkit.config.errors import nearest, shown
from labkit.config.fields import SPECS, BadValueError, convert
from labkit.config.findings import Findings, divisors, up
from labkit.config.graph_rules import graph_rules
from labkit.config.limits import AXES, CHOICES, COUNT, FILES, RANGES
from labkit.config.moe_rules import expert_instance_rule, moe_rules
from labkit.config.pipeline_rules import microbatch_rules, pipeline_rules, split_rules
from labkit.config.sections import ParallelConfig
from labkit.config.training_rules import instance_rule, training_rules

if TYPE_CHECKING:
    from labkit.config.run_config import RunConfig


def problems(config: RunConfig, world_size: int | None = None) -> list[str]:
    """Every broken rule of `config`, for `world_size` ranks where that is given."""
    found = Findings(_flat(config))
    _single_fields(found)
    _model(found)
    _layout(found, world_size)
    pipeline_rules(found)
    moe_rules(found)
    graph_rules(found)
    _optimizer(found)
    training_rules(found)
    _batches(found, world_size)
    _data(found)
    return found.problems


def layout_problems(parallel: ParallelConfig, world_size: int | None = None) -> list[str]:
    """Every broken rule of a layout by itself, without a model."""
    from labkit.config.run_config import RunConfig

    found = Findings(_flat(RunConfig(parallel=parallel)))
    _single_fields(found)
    _layout(found, world_size)
    return found.problems


def _flat(config: RunConfig) -> dict[str, Any]:
    return {dotted: getattr(getattr(config, spec.section), spec.name) for dotted, spec in SPECS.items()}


def _single_fields(found: Findings) -> None:
    for dotted, spec in SPECS.items():
        value = found.values[dotted]
        try:
            convert(spec, value)
        except BadValueError as rule:
            found.add(dotted, str(rule))
            continue
        if value is None:
            continue
        if dotted in CHOICES and value not in CHOICES[dotted]:
            found.add(dotted, f"must be one of {', '.join(CHOICES[dotted])}{nearest(value, CHOICES[dotted])}")
        elif dotted in RANGES and (rule := RANGES[dotted].broken(value)):
            found.add(dotted, rule)
        elif dotted in FILES and os.path.isdir(value):
            found.add(dotted, "is a directory; give a file")
        elif dotted in FILES and not os.path.isfile(value):
            found.add(dotted, "no such file; give an existing file or leave it out")


def _model(found: Findings) -> None:
    """Heads divide the width, and everything that tensor parallelism splits is a multiple of tp, or copied evenly."""
    if (got := found.get("model.hidden", "model.heads")) and got[0] % got[1]:
        found.add("model.hidden", f"must be a multiple of model.heads = {got[1]}; try {up(got[0], got[1])}")
    elif got and found.values["model.position"] == "rope" and (got[0] // got[1]) % 2:
        rule = f"rotary position encoding turns pairs, so hidden / heads = {got[0] // got[1]} must be even"
        found.add("model.position", f"{rule}; change model.heads or model.hidden")
    if (got := found.get("model.heads", "model.kv_heads")) and got[1] is not None and got[0] % got[1]:
        found.add("model.kv_heads", f"must divide model.heads = {got[0]}; choose {divisors(got[0])}")
    tp = found.values["parallel.tp"]
    if not found.sound("parallel.tp"):
        return
    for name in ("model.heads", "model.ffn_hidden"):
        value = found.values[name]
        if found.sound(name) and value is not None and value % tp:
            rule = f"must be a multiple of parallel.tp = {tp}, which splits it over ranks"
            found.add(name, f"{rule}; choose tp from {divisors(value)}, or {name} = {up(value, tp)}")
    # The MLP's usual width, 4 x hidden, follows: heads divides hidden and tp divides heads.
    got = found.get("model.heads", "model.kv_heads")
    if got and got[1] is not None and got[1] % tp and tp % got[1]:
        rule = f"must be a multiple or a divisor of parallel.tp = {tp}: each rank has whole key/value heads, its own or"
        advice = f"choose kv_heads from {divisors(tp)}, or tp from {divisors(got[1])}"
        found.add("model.kv_heads", f"{rule} a copy of one; {advice}")
    _sequence(found)


def _sequence(found: Findings) -> None:
    got = found.get("model.seq_length", "parallel.cp", "parallel.sequence_parallel", "parallel.tp")
    if got is None:
        return
    length, cp, sequence_parallel, tp = got
    if cp > 1 and length % (2 * cp):
        rule = f"must be a multiple of 2 x cp = {2 * cp}: context parallelism cuts a sequence into 2 x cp chunks"
        found.add("model.seq_length", f"{rule}; try {up(length, 2 * cp)}")
    elif sequence_parallel and (length // cp) % tp:
        part = f"seq_length / cp = {length // cp}" if cp > 1 else "it"
        rule = f"with parallel.sequence_parallel {part} must be a multiple of parallel.tp = {tp}"
        found.add("model.seq_length", f"{rule}; try {up(length, math.lcm(2 * cp, cp * tp) if cp > 1 else tp)}")


def order_problem(order: str, sizes: Mapping[str, int]) -> str:
    """The rule that an order string breaks for these axis sizes (1 where an axis is not in use), or nothing."""
    axes = order.lower().split("-")
    allowed = f"name each of {', '.join(AXES)} at most once, joined by -, as in tp-cp-ep-dp-pp"
    for axis in axes:
        if axis not in AXES:
            what = f"{shown(axis)} is no axis" if axis else "an axis is empty"
            return f"{what}; {allowed}{nearest(axis, AXES)}"
        if axes.count(axis) > 1:
            return f"{axis} is named {axes.count(axis)} times; {allowed}"
    for axis, size in sizes.items():
        if size > 1 and axis not in axes:
            return f"{axis} is missing although its size is {size}; add it or make it 1"
    return ""


def _layout(found: Findings, world_size: int | None) -> None:
    """The world factors into both generators' sizes, and the order string names every axis in use."""
    sizes = found.get("parallel.tp", "parallel.pp", "parallel.cp", "parallel.ep", "parallel.etp")
    world_problem = world_size_problem(world_size)
    if world_problem:
        found.add("world_size", world_problem, value=world_size)
    if sizes is None:
        return
    tp, pp, cp, ep, given_etp = sizes
    etp = tp if given_etp is None else given_etp
    dense, expert = tp * cp * pp, etp * ep * pp
    if world_size is not None and not world_problem:
        step = math.lcm(dense, expert)
        words_of = {expert: f"etp x ep x pp = {etp} x {ep} x {pp}", dense: f"tp x cp x pp = {tp} x {cp} x {pp}"}
        for product, words in words_of.items():
            if world_size % product:
                rule = f"must be a multiple of {words} = {product}; launch {step}, {2 * step} or {3 * step} ranks"
                found.add("world_size", rule, value=world_size)
    dp = edp = 1
    if world_size is not None and found.sound("world_size"):
        dp, edp = world_size // dense, world_size // expert
        instance_rule(found, dp * cp)
        expert_instance_rule(found, edp)
    if found.sound("parallel.order"):
        order = found.values["parallel.order"]
        used = {"tp": max(tp, etp), "cp": cp, "ep": ep, "dp": max(dp, edp), "pp": pp}
        if problem := order_problem(order, used):
            found.add("parallel.order", problem)
        elif world_size is not None and found.sound("world_size") and pp > 1:
            _same_pipelines(found, order.lower(), {"tp": tp, "cp": cp, "dp": dp}, {"tp": etp, "ep": ep, "dp": edp})
    split_rules(found, pp)


def _same_pipelines(found: Findings, order: str, dense: dict[str, int], expert: dict[str, int]) -> None:
    """Both generators must give the same pipeline groups. For pp > 1 they do exactly if pp has one stride in both:
    a rank's group is then fixed by (rank // (stride pp), rank % stride)."""
    faster = order.split("-")[: order.split("-").index("pp")]
    stride = math.prod(dense.get(axis, 1) for axis in faster)
    expert_stride = math.prod(expert.get(axis, 1) for axis in faster)
    if stride != expert_stride:
        rule = "the pipeline groups of dense and expert layers must be the same, but neighbouring stages are"
        advice = "end the order with pp, or choose etp x ep to match"
        found.add("parallel.order", f"{rule} {stride} ranks apart in one and {expert_stride} in the other; {advice}")


def world_size_problem(world_size: object) -> str:
    """The rule that a world size breaks by itself, or an empty string; None is no world size at all."""
    if world_size is None:
        return ""
    if not isinstance(world_size, int) or isinstance(world_size, bool):
        return f"must be an integer, not {type(world_size).__name__}"
    return COUNT.broken(world_size)


def _optimizer(found: Findings) -> None:
    if (got := found.get("optim.min_lr", "optim.lr")) and got[0] > got[1]:
        found.add("optim.min_lr", f"must be at most optim.lr = {got[1]:g}, from which the rate decays")
    if (got := found.get("optim.lr_schedule")) and got[0] != "wsd":
        why = f"with optim.lr_schedule = {got[0]}; set that to wsd"
        found.no_effect(["optim.wsd_decay_steps", "optim.wsd_decay_style"], why)
    got = found.get("optim.warmup_steps", "optim.decay_steps", "train.steps")
    if got is None:
        return
    warmup, decay, steps = got
    end, words = (steps, "train.steps") if decay is None else (decay, "optim.decay_steps")
    if warmup >= end:
        rule = f"must be below {words} = {end}, where the decay ends"
        found.add("optim.warmup_steps", f"{rule}; warm up for fewer steps")
        return
    tail = found.get("optim.lr_schedule", "optim.wsd_decay_steps")
    if tail and tail[0] == "wsd":
        length = max(1, end // 10) if tail[1] is None else tail[1]
        if length > end - warmup:
            default = f" (None means a tenth of the decay, {length} steps)" if tail[1] is None else ""
            rule = f"must be at most {end - warmup}: {words} = {end} less {warmup} steps of warm-up{default}"
            found.add("optim.wsd_decay_steps", f"{rule}; shorten the tail")


def _batches(found: Findings, world_size: int | None) -> None:
    got = found.get("train.global_batch_size", "train.micro_batch_size")
    if got is None:
        return
    batch, micro = got
    if batch % micro:
        rule = f"must be a multiple of train.micro_batch_size = {micro}; try {up(batch, micro)}"
        found.add("train.global_batch_size", rule)
        return
    layout = found.get("parallel.tp", "parallel.cp", "parallel.pp")
    if world_size is None or layout is None or not found.sound("world_size"):
        return
    tp, cp, pp = layout
    dp = world_size // (tp * cp * pp)
    if batch % (micro * dp):
        rule = f"must be a multiple of micro_batch_size x dp = {micro} x {dp} = {micro * dp}"
        found.add("train.global_batch_size", f"{rule}; try {up(batch, micro * dp)}")
    else:
        microbatch_rules(found, batch // (micro * dp))


def _data(found: Findings) -> None:
    if got := found.get("data.split", "train.eval_steps"):
        try:
            shares = [float(part) for part in got[0].split(",")]
        except ValueError:
            shares = []
        if len(shares) != 3 or not all(math.isfinite(s) and s >= 0 for s in shares) or not sum(shares) > 0:
            found.add("data.split", "must be three shares that are not negative, as in 90,5,5")
        elif shares[0] == 0:
            found.add("data.split", "the first share is the training text and must be above 0")
        elif got[1] and shares[1] == 0:
            found.add("data.split", f"the second share feeds the validations that train.eval_steps = {got[1]} asks for")
    folder = found.values["train.output_dir"]
    if found.sound("train.output_dir") and folder is not None and os.path.exists(folder) and not os.path.isdir(folder):
        found.add("train.output_dir", "is a file; name a folder")
    if folder is None and found.values["train.write_events"] is True:
        found.add("train.write_events", "there is no folder for events.jsonl; name one in train.output_dir")
    if folder is None:
        found.no_effect(["train.overwrite"], "without train.output_dir; name a folder")


_LATER: tuple[tuple[str, Any, str], ...] = (
    ("parallel.rank_offset", 0, "layout that does not start at rank 0"),
    ("parallel.split_rank", None, "encoder to split off from a GPT"),
    ("model.family", "gpt", "this model family"),
)


def not_yet_trainable(config: RunConfig) -> list[str]:
    """One sentence for each sound option that the training loop does not carry out yet."""
    values = _flat(config)
    return [
        f"{name} = {shown(values[name])}: the training loop has no {what} yet; leave it at {shown(usual)}"
        if not what.startswith("this")
        else f"{name} = {shown(values[name])}: the training loop does not run {what} yet; leave it at {shown(usual)}"
        for name, usual, what in _LATER
        if values[name] != usual
    ]
