"""Plan of a comparison of layouts: the configuration that its runs share, the one process, each layout, a fault.

This module rejects a comparison without meaning before anything runs. It imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit.comm.group_plan import GROUP_KINDS
from labkit.config import ConfigError, RunConfig
from labkit.config.errors import nearest, shown
from labkit.config.fields import SPECS
from labkit.graphs.scope import captures_layers, layer_scope
from labkit.train.run_schedule import schedule_problem

PRECISIONS = {"float64": ("fp64", 1e-10), "float32": ("fp32", 1e-5)}
"""dtype -> (optim.precision, largest difference that is equal)."""


def shared_config(config: RunConfig, steps: int, dtype: str) -> RunConfig:
    """Return the configuration that every run of a comparison shares."""
    if dtype not in PRECISIONS:
        raise _refusal(f"dtype is {dtype!r}; parity is defined for {' and '.join(PRECISIONS)}")
    if steps < 1:
        raise _refusal(f"steps is {steps}; at least one optimizer step is needed to compare parameters")
    if problem := _incomparable(config, dtype):
        raise _refusal(problem)
    return config.replaced(_common(config, steps, dtype))


def _common(config: RunConfig, steps: int, dtype: str) -> dict[str, Any]:
    """Return the fields that the comparison sets in every run. Fields without effect get their defaults."""
    optim = config.optim
    scales = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    reports = (
        "eval_interval",
        "eval_steps",
        "keep_event_steps",
        "timing_log_level",
        "profile",
        "profile_step_start",
        "profile_step_end",
        "profile_ranks",
        "output_dir",
        "loggers",
        "tensorboard_dir",
        "overwrite",
        "write_events",
        "event_interval",
    )
    checkpoints = ("dir", "interval", "keep", "asynchronous", "load")
    return {
        **_usual(
            "optim.grad_reduce_in_bf16", *(f"optim.{name}" for name in scales), *(f"train.{name}" for name in reports)
        ),
        **_usual(*(f"checkpoint.{name}" for name in checkpoints)),
        "optim.precision": PRECISIONS[dtype][0],
        "optim.eps": max(optim.eps, 1e-5),
        "optim.lr": min(optim.lr, 1e-3),
        "optim.min_lr": min(optim.min_lr, 1e-3),
        "optim.decay_steps": None if optim.lr_schedule == "constant" else optim.decay_steps or config.train.steps,
        "graph.cuda_graph_warmup_steps": max(1, min(config.graph.cuda_graph_warmup_steps, steps - 1)),
        "train.steps": steps,
        "train.record_events": False,
    }


def _usual(*names: str) -> dict[str, Any]:
    """Return fields at their defaults."""
    return {name: SPECS[name].default for name in names}


def _incomparable(config: RunConfig, dtype: str) -> str:
    """Return the reason why `config` cannot be compared in `dtype`, or an empty string."""
    model = config.model
    for name in ("embedding_dropout", "attention_dropout", "hidden_dropout"):
        if getattr(model, name) > 0:
            return f"model.{name} is {getattr(model, name)}; masks differ between layouts by design, so set it to 0"
    if not model.use_cpu_initialization:
        return (
            f"model.use_cpu_initialization is {model.use_cpu_initialization}; layouts then start from different "
            "weights by design, so set it to true"
        )
    if model.transformer_impl == "transformer_engine" and dtype == "float64":
        return (
            "model.transformer_impl is 'transformer_engine', which has no float64; compare in float32, or set it to "
            "local"
        )
    if model.attention_backend == "cudnn" or (model.attention_backend == "efficient" and dtype == "float64"):
        return f"model.attention_backend is {model.attention_backend!r}, which has no {dtype}; set it to fused"
    if config.moe.input_jitter > 0:
        return (
            f"moe.input_jitter is {config.moe.input_jitter}; each rank draws its own factors by design, so set it to 0"
        )
    return ""


@dataclass(frozen=True)
class Placement:
    """The spread of a global batch's tokens over a layout."""

    parts: int
    """Ranks that share the tokens of one micro batch: cp, times tp under sequence parallelism."""
    replicas: int
    """Micro batches that run at once: dp."""


def placement(config: RunConfig, world_size: int) -> Placement:
    """Return the placement of tokens in a layout."""
    parallel = config.parallel
    parts = parallel.cp * (parallel.tp if parallel.sequence_parallel else 1)
    return Placement(parts, config.data_parallel_size(world_size))


def _depends_on_placement(config: RunConfig, world_size: int, held_against: Placement) -> str:
    """Return the reason why two runs route differently, because they place tokens differently, or an empty string."""
    moe, here = config.moe, placement(config, world_size)
    if moe.num_experts == 0:
        return ""
    if here.parts != held_against.parts:
        why = (
            f"depends on the tokens that one rank holds, 1/{here.parts} of a micro batch here and "
            f"1/{held_against.parts} in the reference; leave it out, or compare layouts of equal tp x cp"
        )
        if moe.capacity_factor is not None:
            return f"moe.capacity_factor = {moe.capacity_factor}: {why}"
        if moe.load_balancing == "sinkhorn":
            return f"moe.load_balancing = 'sinkhorn': {why}"
    if moe.load_balancing == "global_aux_loss" and here.replicas != held_against.replicas:
        return (
            f"moe.load_balancing = 'global_aux_loss': depends on the micro batches seen so far, {here.replicas} at "
            f"once here and {held_against.replicas} in the reference; choose aux_loss, or layouts of equal dp"
        )
    return ""


def _refusal(problem: str) -> ConfigError:
    return ConfigError([problem], source="the comparison")


def alone(base: RunConfig) -> RunConfig:
    """Return the reference: one process, one stage, no CUDA graphs, and every activation kept.

    Gradients are in the one buffer of `NaiveDataParallel`. Experts run one after the other, except in fp8, and no
    tokens travel.
    """
    sections = ("parallel", "schedule", "graph")
    kept = ("parallel.distributed_backend", "parallel.distributed_timeout_minutes")
    layout = [n for n, spec in SPECS.items() if spec.section in sections and n not in kept]
    plain = _usual(*layout, *_PLAIN) | {"optim.data_parallel": "naive"}
    if base.moe.num_experts:
        plain |= {"moe.dispatcher": "local", "moe.grouped_gemm": base.optim.fp8 != "none"}
    return base.replaced(plain).validate(1)


_PLAIN = (
    "model.compile",
    "model.recompute_granularity",
    "model.recompute_method",
    "model.recompute_num_layers",
    "model.recompute_modules",
    "model.num_microbatches_with_partial_activation_checkpoints",
    "moe.pad_to_capacity",
    "moe.shared_expert_overlap",
    "optim.bucket_size",
    "optim.overlap_grad_reduce",
    "optim.average_in_collective",
    "optim.distributed_optimizer",
    "optim.overlap_param_gather",
    "optim.num_distributed_optimizer_instances",
)
"""Fields that the reference leaves at their defaults, besides those of layout and schedule."""


def plan_layout(
    base: RunConfig, layout: Mapping[str, Any], dtype: str, held_against: Placement | None
) -> tuple[RunConfig, int]:
    """Return a layout's configuration and number of ranks, checked before any launch.

    held_against: placement of the tokens in the reference; None for the reference itself.
    """
    changed = base.override({key: value for key, value in layout.items() if key != "world_size"})
    world_size = int(layout.get("world_size", changed.parallel.smallest_world_size))
    problems = _decided_by_the_comparison(base, changed, dtype) or list(filter(None, [_incomparable(changed, dtype)]))
    if changed.graph.cuda_graph_impl == "none":
        changed = changed.replaced(_usual("graph.cuda_graph_warmup_steps"))
    problems = problems or changed.problems(world_size)
    if not problems and (problem := schedule_problem(changed, world_size)):
        problems = [problem]
    if not problems and (problem := _graphs(changed, dtype)):
        problems = [problem]
    if not problems and held_against and (problem := _depends_on_placement(changed, world_size, held_against)):
        problems = [problem]
    if problems:
        raise ConfigError(problems, source=f"layout {dict(layout)}")
    return changed, world_size


def _graphs(config: RunConfig, dtype: str) -> str:
    """Return the reason why these CUDA graphs hide compared tensors, or an empty string."""
    graph = config.graph
    if graph.cuda_graph_impl == "none":
        return ""
    if config.train.steps < 2:
        return (
            f"graph.cuda_graph_impl = {graph.cuda_graph_impl!r}: block outputs are compared in the first step, which "
            "runs eagerly, and graphs run from the second step on; compare at least 2 steps"
        )
    holds_router = not captures_layers(graph) or layer_scope(graph, has_experts=True).router
    if dtype == "float32" and config.moe.num_experts and holds_router:
        named = f"graph.cuda_graph_modules = {graph.cuda_graph_modules}"
        if graph.cuda_graph_impl == "full_iteration":
            named = "graph.cuda_graph_impl = 'full_iteration'"
        return (
            f"{named}: in float32 layouts replay the choice of experts of "
            "one process, and a graph that holds the router would repeat the choice of its capture at every "
            "replay; compare in float64, or capture only attn"
        )
    return ""


def _decided_by_the_comparison(base: RunConfig, changed: RunConfig, dtype: str) -> list[str]:
    """Return a sentence for each shared field that a layout changes."""
    before, after = base.to_dict(), changed.to_dict()
    problems = []
    for name in _common(base, 1, dtype):
        section, _, field = name.partition(".")
        if (given := after[section][field]) != before[section][field]:
            rule = "is the same in every run of a comparison, or they would train differently; leave it out of layouts"
            if name == "optim.precision":
                rule = f"dtype = {dtype} decides the precision of every run of a comparison; leave it out of layouts"
            problems.append(f"{name} = {given!r}: {rule}")
    return problems


KNOWN: dict[str, tuple[str, ...] | None] = {
    "operation": ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"),
    "group": (*GROUP_KINDS, "pp_half", "world"),
    "phase": (
        *("start", "forward", "backward", "recompute", "gradients", "parameters", "amax", "expert bias", "report"),
        "capture",
    ),
    "layer": None,
}
"""Kinds of names in a fault -> the allowed words; None allows any."""


def fault_problems(fault: Mapping[str, str]) -> list[str]:
    """Return a sentence for each unknown name in `fault` (arguments of `labkit.comm.fault_injection.dropped`)."""
    if not fault:
        return ["a fault must name an operation, group, phase or layer"]
    problems = []
    for key, value in fault.items():
        if key not in KNOWN:
            problems.append(f"a fault has no {shown(key)}; it names {', '.join(KNOWN)}{nearest(key, KNOWN)}")
        elif (known := KNOWN[key]) is not None and value not in known:
            problems.append(f"{key} {shown(value)} is not known; choose from {', '.join(known)}{nearest(value, known)}")
    return problems


def fault_words(fault: Mapping[str, str]) -> str:
    """Return the fault as `operation=all_reduce,group=tp`."""
    return ",".join(f"{key}={value}" for key, value in fault.items())
