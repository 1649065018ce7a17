"""Rules of a sound configuration; each broken one becomes a sentence of field, value, rule and way out.

`Findings` looks at single fields first. Here follow the rules between fields that every run has: model, layout, batch.
The rules of a topic have a module of their own. `problems` asks them where the configuration uses the topic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from labkit.config.errors import nearest, shown
from labkit.config.field_spec import SIZE
from labkit.config.findings import Findings, divisors, up
from labkit.config.graph_rules import graph_rules
from labkit.config.moe_rules import moe_rules
from labkit.config.pipeline_rules import pipeline_rules, split_rules
from labkit.config.sections import ParallelConfig, ScheduleConfig, Sections
from labkit.config.training_rules import data_rules, optimizer_rules, training_rules

AXES = ("tp", "cp", "ep", "dp", "pp")
"""Axes that an order string may name."""
TOPICS: dict[Callable[[Findings], None], tuple[str, ...]] = {
    pipeline_rules: (
        "parallel.pp", "parallel.vpp", "parallel.pipeline_layout", "parallel.standalone_embedding_stage",
        *(f"schedule.{name}" for name in vars(ScheduleConfig())),
    ),
    moe_rules: ("moe.num_experts", "parallel.ep", "parallel.etp", "model.recompute_modules"),
    graph_rules: ("graph.cuda_graph_impl", "graph.cuda_graph_scope"),
    optimizer_rules: (
        "optim.min_lr", "optim.min_loss_scale", "optim.initial_loss_scale", "optim.warmup_steps", "optim.lr_schedule",
    ),
    training_rules: (
        "model.recompute_granularity", "model.transformer_impl", "model.attention_dropout", "optim.fp8",
        "optim.average_in_collective",
    ),
    data_rules: ("data.split", "train.output_dir"),
}  # fmt: skip
"""Rules of a topic -> the fields that use it. With all of these at their defaults no such rule is broken."""


def problems(config: Sections, world_size: int | None = None) -> list[str]:
    """Every broken rule of `config`, for `world_size` ranks where that is given."""
    found = Findings(config)
    _model(found)
    _layout(found, world_size)
    _batch(found, world_size)
    for rules, fields in TOPICS.items():
        if any(map(found.changed, fields)):
            rules(found)
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
    if world_size is not None and (problem := SIZE.broken(world_size)):
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
    if found.changed("parallel.split_rank"):
        split_rules(found)


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


def _batch(found: Findings, world_size: int | None) -> None:
    """The global batch is cut evenly into micro batches, and these over data-parallel ranks."""
    p, t, batch = found.config.parallel, found.config.train, "train.global_batch_size"
    if not found.sound("train.micro_batch_size"):
        return
    found.multiple(batch, t.micro_batch_size, "train.micro_batch_size")
    if world_size is not None and found.sound("world_size", *_DENSE, batch):
        if (dp := world_size // (p.tp * p.cp * p.pp)) == 0:
            return  # another field of the layout is bad, so the world size has not been checked
        step = t.micro_batch_size * dp
        found.multiple(batch, step, f"micro_batch_size x dp = {t.micro_batch_size} x {dp}")
        found.microbatches = t.global_batch_size // step if found.sound(batch) else None
