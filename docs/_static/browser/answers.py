"""What the page "labkit in the browser" asks of labkit, with plain values in and out.

The page runs this file and labkit's own packages under Pyodide; tests run the same file under CPython. A wrong setting
comes back as `{"problem": sentence}`, and the page leaves its last picture where it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, get_args

from labkit.comm.rank_generator import RankGenerator, rank_generators
from labkit.config import ParallelConfig, ScheduleConfig, presets
from labkit.config.choices import SCHEDULES
from labkit.config.rules import layout_problems
from labkit.schedules import Costs, Schedule, ScheduleError, build_schedule, simulate, verify
from labkit.schedules.bubble import split_timeline
from labkit.schedules.lowering import Transport
from labkit.schedules.verifier import interleaving_rules

MOST_ACTIONS = 4000
"""Cells of a table that a page can still draw at once."""
MOST_RANKS = 1024
"""Cells of a grid of ranks, likewise."""
TRAFFIC_MODELS = ("table1_8_3b", "gpt3_175b", "llama3_70b", "mixtral_8x7b")
"""Presets whose sizes the volume model takes."""


def answer(kind: str, request: str) -> str:
    """Return the answer to a request, both as JSON; `kind` is a key of `ANSWERS`."""
    try:
        return json.dumps(ANSWERS[kind](**json.loads(request)))
    except ValueError as problem:
        return json.dumps({"problem": str(problem)})


def choices() -> dict[str, list[str]]:
    """Return what the page's lists offer."""
    from labkit.plan.machine import known_machines

    sized = [name for name in presets.names() if presets.get(name).model.family == "gpt" and "tiny" not in name]
    return {"preset": list(SCHEDULES), "model": list(TRAFFIC_MODELS), "plan_preset": sized, "machine": known_machines()}


# ---- schedules ----
def schedule(*, preset: str, pp: Any, microbatches: Any, chunks: Any, forward: Any, input_grad: Any, weight_grad: Any,
             rows: Sequence[Sequence[str]] | None = None) -> dict[str, Any]:  # fmt: skip
    """Return the times, memory and verdict of a schedule that labkit builds, or of the table `rows`.

    Costs are those of a rank's whole share of the model: its stages divide them, so all schedules do the same work.
    """
    made = _edited(rows) if rows else _built(preset, _whole("pp", pp), _whole("m", microbatches), _whole("v", chunks))
    if len(made) > MOST_ACTIONS:
        raise ValueError(f"{len(made):,} actions are more than this page draws: {MOST_ACTIONS:,}; take fewer")
    verify(made, "posted")  # a schedule that fails over posted transfers runs over none
    share = made.pp / made.num_stages
    given = {"forward": forward, "input_grad": input_grad, "weight_grad": weight_grad}
    costs = {name: share * _number(name, value) for name, value in given.items()}
    timeline = simulate(made, Costs(**costs, activation=share))
    ends = made.offsets.tolist()
    times = list(zip(timeline.start.tolist(), timeline.end.tolist(), strict=True))
    return {
        "rows": [[str(action) for action in made.actions(rank)] for rank in range(made.pp)],
        "times": [times[first:last] for first, last in pairwise(ends)],
        "pp": made.pp,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble_fraction,
        "peaks": timeline.peak_memory,
        "split": str(split_timeline(timeline)),
        "verdicts": [_verdict(made, transport) for transport in get_args(Transport)],
        "megatron": _megatron(made),
    }


def _built(preset: str, pp: int, microbatches: int, chunks: int) -> Schedule:
    if pp * microbatches * chunks > MOST_ACTIONS:  # before it is built
        raise ValueError(f"pp {pp} x m {microbatches} are more than this page draws; take fewer")
    vpp = chunks if SCHEDULES[preset].chunks is None else 1
    return build_schedule(ScheduleConfig(name=preset), pp=pp, vpp=vpp, microbatches=microbatches)


def _edited(rows: Sequence[Sequence[str]]) -> Schedule:
    """Return the schedule of a table; blank cells are left out, and `F3` means the only stage of its rank."""
    lines = []
    for rank, row in enumerate(rows):
        cells = " ".join(row).upper().split()
        own = sorted({match[1] for cell in cells if (match := re.fullmatch(r"(\d+)[FBIW]\d+", cell))}) or [str(rank)]
        for position, cell in enumerate(cells):
            if re.fullmatch(r"[FBIW]\d+", cell):
                if len(own) > 1:
                    words = " or ".join(f"{stage}{cell}" for stage in own)
                    raise ScheduleError(f"rank {rank}, position {position}: {cell} names no stage; write {words}")
                cells[position] = own[0] + cell
        if not cells:
            raise ScheduleError(f"rank {rank} has no action: give every rank at least one stage to run")
        lines.append(",".join(cells))
    return Schedule.from_csv("\n".join(lines), "your table")


def _verdict(made: Schedule, transport: Transport) -> tuple[str, bool, str]:
    """Return the transport, whether the schedule runs over it, and the verifier's words if not."""
    try:
        verify(made, transport)
    except ScheduleError as error:
        return transport, False, str(error)
    return transport, True, ""


def _megatron(made: Schedule) -> str:
    """Return the rule of interleaving that Megatron would reject it by; empty if there is none."""
    try:
        interleaving_rules(made)
    except ScheduleError as error:
        return str(error)
    return ""


# ---- groups ----
def groups(*, order: str, world_size: Any, gpus_per_node: Any, model: str, batch: Any, **given: Any) -> dict[str, Any]:
    """Return the groups of each axis of a layout, and the bytes of a step inside and between nodes by kind of group."""
    from labkit.plan.node_traffic import TransformerTraffic, bytes_between_nodes, order_traffic

    world, node = _whole("GPUs", world_size), _whole("GPUs per node", gpus_per_node)
    sizes: dict[str, Any] = {axis: _whole(axis, size) for axis, size in given.items()}
    if world > MOST_RANKS:
        raise ValueError(f"{world:,} GPUs are more than this page draws: {MOST_RANKS:,}; labkit groups lists them")
    if problems := layout_problems(ParallelConfig(**sizes), world):
        raise ValueError("; ".join(problems))
    config = presets.get(model)
    counted = TransformerTraffic(
        layers=config.model.layers,
        hidden=config.model.hidden,
        seq_length=config.model.seq_length,
        global_batch_size=_whole("global batch", batch),
        num_experts=config.moe.num_experts,
        top_k=config.moe.top_k,
    )
    layout = {**sizes, "order": order}
    between = bytes_between_nodes(counted, layout, world_size=world, gpus_per_node=node)
    everywhere = bytes_between_nodes(counted, layout, world_size=world, gpus_per_node=1)
    orders = order_traffic(counted, sizes, world_size=world, gpus_per_node=node)
    best = next(iter(orders), order)
    return {
        "world": world,
        "node": node,
        "groups": _groups(layout, world, bool(counted.num_experts)),
        "bytes": {kind: (everywhere[kind] - between[kind], between[kind]) for kind in between if everywhere[kind]},
        "orders": len(orders),
        "best": best,
        "best_bytes": sum(orders[best].values()) if orders else 0.0,
    }


def _groups(layout: Mapping[str, Any], world: int, experts: bool) -> dict[str, list[list[int]]]:
    """Return axis -> its groups. Without experts there is one generator, so every order of its axes is allowed."""
    dense = {name: layout[name] for name in ("tp", "cp", "pp")}
    if not experts:
        size = rank_generators(world_size=world, **dense)[0].sizes["dp"]
        generator = RankGenerator(**dense, dp=size, order=layout["order"])
        return {axis: generator.get_ranks(axis) for axis in ("tp", "cp", "dp", "pp")}
    attention, expert = rank_generators(world_size=world, **layout)
    of_experts = {name: expert.get_ranks(axis) for name, axis in (("etp", "tp"), ("ep", "ep"), ("edp", "dp"))}
    return {axis: attention.get_ranks(axis) for axis in ("tp", "cp", "dp", "pp")} | of_experts


# ---- plans ----
def plan(*, preset: str, machine: str, gpus: Any, batch: Any) -> dict[str, Any]:
    """Return the fastest layouts of a preset on a machine, each with the parts of its step."""
    from labkit.plan import Workload, model_parameters
    from labkit.plan.layouts import in_words
    from labkit.plan.machine import load_machine
    from labkit.plan.ranking import GB
    from labkit.plan.search import Search
    from labkit.plan.terms import KINDS

    config = presets.get(preset).override({"train.global_batch_size": _whole("global batch", batch)})
    chosen = load_machine(machine)
    search = Search(Workload(config, _whole("GPUs", gpus), software=chosen.default_software), chosen)
    best = search.best()
    if not best:
        row, need = search.smallest()
        lacking = (need.bytes - search.available) / GB
        raise ValueError(f"nothing fits: the smallest layout, {in_words(row)}, lacks {lacking:,.1f} GB on a GPU")
    return {
        "parameters": model_parameters(config.model, config.moe),
        "machine": chosen.name,
        "usable": search.available / GB,
        "counts": search.counts.line(),
        "kinds": KINDS,
        "best": [
            {"layout": in_words(each.row), "seconds": each.prediction.seconds, "low": each.prediction.low,
             "high": each.prediction.high, "mfu": each.mfu, "gb": each.memory.bytes / GB,
             "parts": {kind: max(0.0, value) for kind, value in each.prediction.parts.items()}}
            for each in best
        ],
    }  # fmt: skip


# ---- numbers that a reader typed ----
def _whole(name: str, value: Any) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError(f"{name} is {value!r}; give a whole number, at least 1")
    return number


def _number(name: str, value: Any) -> float:
    try:
        return float(str(value))
    except ValueError:
        raise ValueError(f"{name} is {value!r}; give a number") from None


ANSWERS = {"choices": choices, "schedule": schedule, "groups": groups, "plan": plan}
