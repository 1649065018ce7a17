"""What one choice costs or saves on a cluster: the same run with each of its values, on several numbers of GPUs.

    at_scale("gpt3_175b", {"parallel.sequence_parallel": [False, True]}, layout="tp=8")

The rest of the layout is either the same for all values, so that the difference is that of the choice alone, or for
each value the best that goes with it, so that the difference is what the choice is worth. Both are found by
`labkit.plan.search`. Times and bytes are predictions of the step (`predict_step`) and of the fullest rank. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from labkit.config import ConfigError, RunConfig, presets
from labkit.config.errors import shown
from labkit.config.fields import SPECS, resolve
from labkit.plan.choice_table import AtScale, Point, Rest
from labkit.plan.collectives import Group
from labkit.plan.fitting import fullest
from labkit.plan.layout import layout_of
from labkit.plan.layout_pieces import distinct
from labkit.plan.layouts import COLUMNS, FIELDS, in_words, matching, parse_words, pinned, workload_of
from labkit.plan.machine import Machine, load_machine
from labkit.plan.search import Search
from labkit.plan.step_time import StepPrediction, predict_step, schedule_of
from labkit.plan.workload import Workload
from labkit.schedules import simulate

CARRIERS = {
    "parallel.tp": "tp", "parallel.sequence_parallel": "tp", "parallel.cp": "cp", "parallel.cp_comm_type": "cp",
    "parallel.pp": "pp", "parallel.vpp": "pp", "schedule.name": "pp", "parallel.ep": "ep", "parallel.etp": "ep",
    "moe.dispatcher": "ep", "optim.distributed_optimizer": "dp", "optim.overlap_grad_reduce": "dp",
    "optim.grad_reduce_in_bf16": "dp",
}  # fmt: skip
"""Field -> the group of ranks that carries what it changes; other fields change no message."""
_FOLLOWING = {"tp": ("dp", "microbatches", "etp"), "cp": ("dp", "microbatches"), "pp": ("dp", "microbatches"),
              "micro_batch": ("microbatches",)}  # fmt: skip
"""Column of a choice -> the columns that change with it."""


def at_scale(
    model: str | RunConfig,
    choice: Mapping[str, Sequence[Any]],
    *,
    gpus: Sequence[int] = (8, 512),
    machine: str = "h100",
    layout: str = "",
    rest: Rest = "same",
) -> AtScale:
    """Return step time, memory and GPU-hours of a run for each value of a choice, on each number of GPUs.

    **Arguments**: `model` is a preset or a configuration, whose own layout does not matter. `choice` maps a field to
    its values. Several fields change together, as in `{"parallel.vpp": [1, 4], "schedule.name": ["1f1b",
    "interleaved"]}`. `layout` fixes a part of the layout, in the words of `labkit plan`, such as `tp=8,pp=4`. `rest`
    says how the search finds the other parts: `same` takes the fastest layout that is legal with every value and gives
    it to all of them; `best` takes the fastest layout of each value. The number of GPUs decides dp.

    A value that does not fit is in the table, with what it lacks and with the time that a step would take with more
    memory. If no value fits, the layout is the smallest one.

    Raises ConfigError for an unknown preset, field, value or machine, for a field that is in `choice` and in `layout`,
    and if no layout is legal with every value.
    """
    base = presets.get(model) if isinstance(model, str) else model
    target, fixed = load_machine(machine), parse_words(layout)
    choice = {_field(name): values for name, values in choice.items()}
    variants = _variants(choice, fixed, gpus, rest)
    points: list[Point] = []
    for count in gpus:
        searches: dict[RunConfig, Search] = {}
        tried = [_Tried(variant, base, count, target, fixed, searches) for variant in variants]
        rows = _same_rows(tried) if rest == "same" else [each.fastest(each.mask) for each in tried]
        points += [each.point(row) for each, row in zip(tried, rows, strict=True)]
    width = target.interval.get(target.default_software, target.interval.get("default", 0.0))
    return AtScale(tuple(choice), _title(base, target), rest, (np.exp(-width), np.exp(width)), points)


def _field(name: str) -> str:
    """Return the whole name of a field. Raises ConfigError, with the nearest name, if there is none."""
    dotted, why = resolve(name)
    if dotted is None:
        raise ConfigError([why], source="at_scale")
    return dotted


def _variants(choice: Mapping[str, Sequence[Any]], fixed: Mapping[str, int], gpus: Sequence[int],
              rest: str) -> list[dict[str, Any]]:  # fmt: skip
    """Return the fields of each value. Raises ConfigError with every problem of a call."""
    problems = [
        f"{name}: is in the choice and in the layout; name it once" for name in choice if FIELDS.get(name) in fixed
    ]
    lengths = {len(values) if isinstance(values, list | tuple) else 0 for values in choice.values()}
    if len(lengths) != 1 or 0 in lengths:
        given = ", ".join(f"{name}: {shown(values)}" for name, values in choice.items()) or "empty"
        problems.append(f"the choice is {given}; give lists of one length, as in {{'parallel.cp': [1, 2]}}")
    if rest not in ("same", "best"):
        problems.append(f"rest is {shown(rest)}; choose one of same, best")
    if not gpus or any(not isinstance(count, int) or count < 1 for count in gpus):
        problems.append(f"gpus is {shown(gpus)}; give whole numbers from 1, as in (8, 512)")
    if problems:
        raise ConfigError(problems, source="at_scale")
    return [dict(zip(choice, values, strict=True)) for values in zip(*choice.values(), strict=True)]


class _Tried:
    """One value on a number of GPUs: its search, and the mask (N,) of the layouts that have it."""

    def __init__(self, variant: dict[str, Any], base: RunConfig, gpus: int, machine: Machine, fixed: Mapping[str, int],
                 searches: dict[RunConfig, Search]) -> None:  # fmt: skip
        self.variant, self.gpus = variant, gpus
        config = base.override({name: value for name, value in variant.items() if name not in FIELDS})
        self.columns, problems = pinned(variant)
        rules = [(name, value, SPECS[name].broken(value)) for name, value in variant.items() if name in SPECS]
        problems += [f"{name} = {shown(value)}: {rule}" for name, value, rule in rules if rule]
        if problems:
            raise ConfigError(problems, source="at_scale")
        if config not in searches:
            searches[config] = Search(Workload(config, gpus, software=machine.default_software), machine, fixed=fixed)
        self.search = searches[config]
        self.mask = matching(self.search.rows, self.columns)

    def fastest(self, mask: np.ndarray) -> np.void | None:
        """Return the fastest layout of a mask that fits, else the smallest one; None for an empty mask."""
        found = self.search.best(1, mask)
        if found:
            return found[0].row
        return self.search.smallest(mask)[0] if mask.any() else None

    def point(self, row: np.void | None) -> Point:
        """Return the numbers of a layout."""
        words = [(FIELDS.get(name, name.rpartition(".")[2]), str(value)) for name, value in self.variant.items()]
        value = words[0][1] if len(words) == 1 else ", ".join(" ".join(pair) for pair in words)
        if row is None:
            nan = float("nan")
            return Point(self.gpus, value, "", nan, nan, self.search.available, nan, "", nan)
        workload, machine = workload_of(self.search.base, row), self.search.machine
        step = predict_step(workload, machine)
        need = fullest(workload, machine, schedule_of(workload.config, workload.microbatches)).bytes
        hours = step.seconds * workload.config.train.steps * self.gpus / 3600
        link, waits = _link(list(self.variant), workload, machine, step)
        return Point(self.gpus, value, in_words(row), step.seconds, need, self.search.available, hours, link, waits)


def _same_rows(tried: Sequence[_Tried]) -> list[np.void | None]:
    """Return for each value the layout whose rest all values share: the fastest with one of them.

    Raises ConfigError if the values share none.
    """
    legal = [each for each in tried if each.mask.any()]
    if not legal:
        return [None] * len(tried)
    keys = _rests(legal)
    shared = set.intersection(*(set(key[each.mask].tolist()) for each, key in zip(legal, keys, strict=True)))
    if not shared:
        rule = "give rest='best', or fields that change together, such as parallel.vpp and schedule.name"
        raise ConfigError([f"on {tried[0].gpus} GPUs no layout is legal with every value; {rule}"], source="at_scale")
    masks = [each.mask & np.isin(key, list(shared)) for each, key in zip(legal, keys, strict=True)]
    fastest = [each.search.best(1, mask) for each, mask in zip(legal, masks, strict=True)]
    fitting = [(found[0].prediction.seconds, place) for place, found in enumerate(fastest) if found]
    place = min(fitting)[1] if fitting else len(legal) - 1
    row = legal[place].fastest(masks[place])
    common = keys[place][np.flatnonzero(legal[place].search.rows == row)[0]]
    rows: dict[int, Any] = {
        id(each): each.search.rows[np.flatnonzero(mask & (key == common))[0]]
        for each, mask, key in zip(legal, masks, keys, strict=True)
    }
    return [rows.get(id(each)) for each in tried]


def _rests(tried: Sequence[_Tried]) -> list[np.ndarray]:
    """Return for each value a number of every layout (N,), the same for layouts that differ only by the choice.

    A choice also changes what follows from it, such as dp from tp.
    """
    columns = {name for each in tried for name in each.columns}
    columns |= {name for column in columns for name in _FOLLOWING.get(column, ())}
    every = np.concatenate([each.search.rows for each in tried])
    _, keys = distinct(every[name] for name in COLUMNS.names or () if name not in columns)
    return np.split(keys, np.cumsum([len(each.search.rows) for each in tried])[:-1])


def _link(fields: Sequence[str], workload: Workload, machine: Machine, step: StepPrediction) -> tuple[str, float]:
    """Return which ranks carry what the fields change, over which link, and the seconds that computation waits."""
    axis = next((CARRIERS[name] for name in fields if name in CARRIERS), None)
    if axis is None:
        return "", 0.0
    layout = layout_of(workload)
    groups = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": Group(min(2, layout.pp.size), layout.pp.stride)}
    experts = Group(layout.ep.size * layout.etp.size, min(layout.ep.stride, layout.etp.stride))
    group = groups.get(axis, experts)
    if group.size == 1:
        return "", 0.0
    level = machine.node if group.nodes(machine) == 1 else machine.levels[-1]
    ranks = layout.pp.size if axis == "pp" else group.size
    waits = _sends(step) if axis == "pp" else step.parts.get(axis, 0.0)
    return f"{ranks} {axis} ranks over {level.name}", waits


def _sends(step: StepPrediction) -> float:
    """Return by how much the messages between stages lengthen a step, those that overlap included.

    Any rank may wait for a message that another one sends, so the table is simulated once more without them.
    """
    timed = step.timeline.costs
    silent = {
        name: [seconds - getattr(stage, name).by_kind.get("pp", 0.0)
               for seconds, stage in zip(getattr(timed, name), step.stages, strict=True)]
        for name in ("forward", "input_grad", "weight_grad")
    }  # fmt: skip
    shorter = simulate(step.timeline.schedule, replace(timed, latency=0.0, **silent)).makespan
    return step.timeline.makespan - shorter + sum(term.seconds for term in step.after if term.kind == "pp")


def _title(config: RunConfig, machine: Machine) -> str:
    model, train, moe = config.model, config.train, config.moe
    experts = f", {moe.num_experts} experts" if moe.num_experts else ""
    return (
        f"{model.layers} layers, hidden {model.hidden:,}{experts}, sequence {model.seq_length:,}, global batch "
        f"{train.global_batch_size:,}, {train.steps:,} steps on {machine.name}"
    )
