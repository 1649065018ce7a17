"""Rules of a sound configuration; each broken one becomes a sentence of field, value, rule and way out.

`Findings` looks at single fields first. Here and in the modules of rules follow those between fields, concern by
concern: the model, the layout, the pipeline, experts, graphs, training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from labkit.config.errors import nearest, shown
from labkit.config.field_spec import SIZE
from labkit.config.findings import Findings, divisors, up
from labkit.config.graph_rules import graph_rules
from labkit.config.moe_rules import moe_rules
from labkit.config.pipeline_rules import microbatch_rules, pipeline_rules, split_rules
from labkit.config.sections import ParallelConfig, Sections
from labkit.config.training_rules import batch_rule, data_rules, optimizer_rules, training_rules

AXES = ("tp", "cp", "ep", "dp", "pp")
"""Axes that an order string may name."""


def problems(config: Sections, world_size: int | None = None) -> list[str]:
    """Every broken rule of `config`, for `world_size` ranks where that is given."""
    found = Findings(config)
    _model(found)
    _layout(found, world_size)
    pipeline_rules(found)
    moe_rules(found)
    graph_rules(found)
    optimizer_rules(found)
    training_rules(found)
    if batch_rule(found) and world_size is not None and found.sound("world_size", *_DENSE):
        _microbatches(found, world_size)
    data_rules(found)
    return found.problems


def layout_problems(parallel: ParallelConfig, world_size: int | None = None) -> list[str]:
    """Every broken rule of a layout by itself, without a model."""
    found = Findings(Sections(parallel=parallel))
    _layout(found, world_size)
    return found.problems


_DENSE = ("parallel.tp", "parallel.cp", "parallel.pp")


def _model(found: Findings) -> None:
    """Heads divide the width, and everything that tensor parallelism splits is a multiple of tp, or copied evenly."""
    m, tp = found.config.model, found.config.parallel.tp
    if found.sound("model.heads"):
        found.multiple("model.hidden", m.heads, "model.heads")
        found.divisor("model.kv_heads", m.heads, "model.heads")
        if found.sound("model.hidden") and m.position == "rope" and m.hidden // m.heads % 2:
            rule = f"rotary position encoding turns pairs, so hidden / heads = {m.hidden // m.heads} must be even"
            found.add("model.position", f"{rule}; change model.heads or model.hidden")
    if not found.sound("parallel.tp"):
        return
    for name, value in (("model.heads", m.heads), ("model.ffn_hidden", m.ffn_hidden)):
        advice = f"choose tp from {divisors(value)}, or {name} = {{up}}" if found.sound(name) and value else ""
        found.multiple(name, tp, "parallel.tp", why=", which splits it over ranks", advice=advice)
    # The MLP's usual width, 4 x hidden, follows: heads divides hidden and tp divides heads.
    if found.sound("model.heads", "model.kv_heads") and m.kv_heads is not None and m.kv_heads % tp and tp % m.kv_heads:
        rule = f"must be a multiple or a divisor of parallel.tp = {tp}: each rank has whole key/value heads, its own or"
        advice = f"choose kv_heads from {divisors(tp)}, or tp from {divisors(m.kv_heads)}"
        found.add("model.kv_heads", f"{rule} a copy of one; {advice}")
    if found.sound("model.seq_length", "parallel.cp", "parallel.sequence_parallel"):
        _sequence(found, m.seq_length, found.config.parallel)


def _sequence(found: Findings, length: int, p: ParallelConfig) -> None:
    """Context parallelism and sequence parallelism cut a sequence evenly."""
    if p.cp > 1:
        why = ": context parallelism cuts a sequence into 2 x cp chunks"
        found.multiple("model.seq_length", 2 * p.cp, "2 x cp", why=why)
    if found.sound("model.seq_length") and p.sequence_parallel and length // p.cp % p.tp:
        part = f"seq_length / cp = {length // p.cp}" if p.cp > 1 else "it"
        rule = f"with parallel.sequence_parallel {part} must be a multiple of parallel.tp = {p.tp}"
        step = math.lcm(2 * p.cp, p.cp * p.tp) if p.cp > 1 else p.tp
        found.add("model.seq_length", f"{rule}; try {up(length, step)}")


def order_problem(order: str, sizes: Mapping[str, int]) -> str:
    """The rule that an order string breaks for these axis sizes (1 where an axis is not in use), or nothing."""
    axes = order.lower().split("-")
    allowed = f"name each of {', '.join(AXES)} at most once, joined by -, as in tp-cp-ep-dp-pp"
    for axis in axes:
        if axis not in AXES:
            reason = f"{shown(axis)} is no axis" if axis else "an axis is empty"
            return f"{reason}; {allowed}{nearest(axis, AXES)}"
        if axes.count(axis) > 1:
            return f"{axis} is named {axes.count(axis)} times; {allowed}"
    missing = [axis for axis, size in sizes.items() if size > 1 and axis not in axes]
    return f"{missing[0]} is missing although its size is {sizes[missing[0]]}; add it or make it 1" if missing else ""


def _layout(found: Findings, world_size: int | None) -> None:
    """The world factors into both generators' sizes, and the order string names every axis in use."""
    p = found.config.parallel
    if problem := world_size_problem(world_size):
        found.add("world_size", problem, value=world_size)
    if not found.sound(*_DENSE, "parallel.ep", "parallel.etp"):
        return
    etp, dp, edp = p.expert_tp, 1, 1
    dense, expert = p.tp * p.cp * p.pp, etp * p.ep * p.pp
    if world_size is not None and found.sound("world_size"):
        words_of = {
            expert: f"etp x ep x pp = {etp} x {p.ep} x {p.pp}",
            dense: f"tp x cp x pp = {p.tp} x {p.cp} x {p.pp}",
        }
        for product, words in words_of.items():
            if world_size % product:
                step = p.smallest_world_size
                rule = f"must be a multiple of {words} = {product}; launch {step}, {2 * step} or {3 * step} ranks"
                found.add("world_size", rule, value=world_size)
        if found.sound("world_size"):
            dp, edp = world_size // dense, world_size // expert
            _instances(found, dp * p.cp, edp)
    if found.sound("parallel.order"):
        used = {"tp": max(p.tp, etp), "cp": p.cp, "ep": p.ep, "dp": max(dp, edp), "pp": p.pp}
        if problem := order_problem(p.order, used):
            found.add("parallel.order", problem)
        elif world_size is not None and found.sound("world_size") and p.pp > 1:
            sizes = {"tp": p.tp, "cp": p.cp, "dp": dp}, {"tp": etp, "ep": p.ep, "dp": edp}
            _same_pipelines(found, p.order.lower(), *sizes)
    split_rules(found, p.pp)


def _instances(found: Findings, dp_cp: int, edp: int) -> None:
    """Instances of the distributed optimizer cut the replicas of every parameter into equal groups."""
    found.divisor("optim.num_distributed_optimizer_instances", dp_cp, "dp x cp")
    if found.config.moe.num_experts:
        words, why = "edp = world size / (etp x ep x pp)", ", the replicas of an expert"
        found.divisor("optim.num_distributed_optimizer_instances", edp, words, why=why)


def _same_pipelines(found: Findings, order: str, dense: dict[str, int], expert: dict[str, int]) -> None:
    """Both generators must give the same pipeline groups. For pp > 1 they do exactly if pp has one stride in both:
    a rank's group is then fixed by (rank // (stride pp), rank % stride)."""
    faster = order.split("-")[: order.split("-").index("pp")]
    stride, expert_stride = (math.prod(sizes.get(axis, 1) for axis in faster) for sizes in (dense, expert))
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
    return SIZE.broken(world_size)


def _microbatches(found: Findings, world_size: int) -> None:
    """The global batch is cut evenly over data-parallel ranks and their microbatches."""
    p, t = found.config.parallel, found.config.train
    dp = world_size // (p.tp * p.cp * p.pp)
    if dp == 0:
        return  # another field of the layout is bad, so the world size has not been checked
    step = t.micro_batch_size * dp
    found.multiple("train.global_batch_size", step, f"micro_batch_size x dp = {t.micro_batch_size} x {dp}")
    if found.sound("train.global_batch_size"):
        microbatch_rules(found, t.global_batch_size // step)


_LATER: dict[str, tuple[Any, str]] = {
    "parallel.rank_offset": (0, "has no layout that does not start at rank 0"),
    "parallel.split_rank": (None, "has no encoder to split off from a GPT"),
    "model.family": ("gpt", "does not run this model family"),
}
"""Sound fields -> the only value that the training loop carries out yet, and what is missing."""


def not_yet_trainable(config: Sections) -> list[str]:
    """One sentence for each sound option that the training loop does not carry out yet."""
    values = Findings(config).values
    return [
        f"{name} = {shown(values[name])}: the training loop {missing} yet; leave it at {shown(usual)}"
        for name, (usual, missing) in _LATER.items()
        if values[name] != usual
    ]
