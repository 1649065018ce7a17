"""What `labkit plan` prints: the table of the best layouts, why others lose, and the explanation of one layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from labkit.cli.output import table
from labkit.config.errors import counted
from labkit.plan.fitting import memory_terms
from labkit.plan.flops import hardware_flops
from labkit.plan.layouts import ALWAYS, AXES, COLUMNS, SHOWN, in_words, matching, rules_broken, workload_of
from labkit.plan.parameters import model_parameters
from labkit.plan.ranking import GB, Loser, changes, compared, milliseconds, word
from labkit.plan.search import DIFFERENCE, Ranked, Search
from labkit.plan.step_time import schedule_of
from labkit.plan.terms import KINDS

_MEASURES = ("s/step", "80 % interval", "TFLOP/s", "MFU", "HFU", "GB", "bubble")
"""Columns of numbers; HFU only if a layout recomputes."""


_MEANINGS = {
    "sharded": "dist-opt: the distributed optimizer (ZeRO-1)",
    "sp": "sp: sequence parallelism",
    "vpp": "vpp: model chunks of a rank",
}
"""Column of a layout whose name says too little -> what it is."""


def report(search: Search, best: Sequence[Ranked], lost: Sequence[Loser], counts: str, seconds: float,
           width: int | None, *, every: bool) -> list[str]:  # fmt: skip
    """Return the lines of a plan; every: say of each value why it loses, and not only of the best one of a column."""
    lines = [title(search), f"{counts}; {seconds:.1f} s", ""]
    lines += _ranking(best, width)
    lines += ["TFLOP/s per GPU and MFU: forward and backward without recomputation; GB: peak of the fullest rank"]
    if _recomputes(best):
        lines += ["HFU: as MFU, but with what is recomputed, as most papers up to 2022 count"]
    if near := sum(each.prediction.seconds < (1 + DIFFERENCE) * best[0].prediction.seconds for each in best) - 1:
        order = "a measurement may order them otherwise" if near > 1 else "a measurement may put it first"
        lines += [f"{counted(near, 'other layout')} within {DIFFERENCE:.0%} of the first: {order}"]
    lines += [
        "; ".join(text for name, text in _MEANINGS.items() if any(_is_told(each.row, name) for each in best)),
        "",
    ]
    if every:
        lines.append("why others lose, by the best layout that was found with this value:")
        return lines + [f"  {each.family}: {each.reason}{_layout_of(each)}" for each in lost]
    lines.append(
        "why others lose: the best other value of each column, what else it changes, and the rest (--all: more)"
    )
    return lines + [f"  {_of_column(name, lost, best[0])}" for name in dict.fromkeys(each.column for each in lost)]


def _of_column(name: str, lost: Sequence[Loser], winner: Ranked) -> str:
    """Return a line on the values of one column: the fastest, what else its layout changes, why it loses, and how much
    slower the others are."""
    of_column = [each for each in lost if each.column == name]
    fitting = [(each.best.prediction.seconds, each) for each in of_column if each.best]
    others = [f"{each.values.replace(', ', '/')} does not fit" for each in of_column if not each.best]
    if not fitting:
        return f"{SHOWN.get(name, name)} {others[0]}"
    (_, first), *rest = sorted(fitting, key=lambda pair: pair[0])
    slower = [
        f"{each.values.replace(', ', '/')} +{milliseconds(seconds - winner.prediction.seconds)}"
        + (" (leaves the node)" if name in _GROUPS and "leaves the node" in each.reason else "")
        for seconds, each in rest
    ]
    if len(slower) > _MOST_VALUES:
        slower = [*slower[: _MOST_VALUES - 1], f"others up to {slower[-1]}"]
    besides = changes(winner, first.best, name) if first.best else ""
    family = f"{first.family}, with {besides}" if besides else first.family
    return "; ".join([f"{family}: {first.reason}", *([", ".join([*slower, *others])] if slower or others else [])])


def _layout_of(lost: Loser) -> str:
    return f"; best: {in_words(lost.best.row)}" if lost.best else ""


_GROUPS = ("tp", "cp", "ep", "etp")
"""Columns that are sizes of groups inside a stage, which may leave the node."""
_MOST_VALUES = 5
"""Other values of a column that are named in its line."""


def _ranking(best: Sequence[Ranked], width: int | None) -> list[str]:
    """Return the table of the best: a column for each field of a layout, or where that is too wide all in words."""
    names = [name for name in AXES if name in ALWAYS or any(_is_told(each.row, name) for each in best)]
    measures = [name for name in _MEASURES if name != "HFU" or _recomputes(best)]
    rows = [["", *(SHOWN.get(name, name) for name in names), *measures]]
    rows += [
        [str(number), *(word(name, each.row[name]) for name in names), *_measures(each, measures)]
        for number, each in enumerate(best, start=1)
    ]
    lines = table(rows, right=range(len(rows[0])))
    if width is None or max(map(len, lines)) <= width:
        return lines
    rows = [["", *measures, "layout"]]
    rows += [
        [str(number), *_measures(each, measures), in_words(each.row).replace(",", " ")]
        for number, each in enumerate(best, start=1)
    ]
    return table(rows, right=range(len(rows[0]) - 1), width=width, below=True)


def _recomputes(best: Sequence[Ranked]) -> bool:
    """Return True if a layout recomputes, so that its GPUs execute more than the model's operations."""
    return any(each.row["recompute"] for each in best)


def _executed(each: Ranked) -> float:
    """Return the FLOP/s of one GPU with recomputation: the hardware FLOPs of arXiv 2205.05198."""
    config = each.workload.config
    flops = hardware_flops(config, schedule_of(config, each.workload.microbatches))
    return flops / each.prediction.seconds / each.workload.world_size


def _measures(each: Ranked, names: Sequence[str]) -> list[str]:
    """Return the cells of these columns of `_MEASURES`."""
    step = each.prediction
    cells = {
        "s/step": f"{step.seconds:.4g}",
        "80 % interval": f"{step.low:.3g} to {step.high:.3g}",
        "TFLOP/s": f"{each.flops_per_gpu / 1e12:.3g}",
        "MFU": f"{each.mfu:.1%}",
        "HFU": f"{_executed(each) / each.peak:.1%}",
        "GB": f"{each.memory.bytes / GB:.1f}",
        "bubble": f"{each.bubble:.1%}",
    }
    return [cells[name] for name in names]


def title(search: Search) -> str:
    """Return lines on what is planned: the model, the machine, and what the plan does not model of it."""
    model, config = search.base.config.model, search.base.config
    experts = f", {config.moe.num_experts} experts" if config.moe.num_experts else ""
    count = model_parameters(model, config.moe)
    parameters = f"{count / 1e9:.4g} billion parameters" if count >= 1e9 else f"{count / 1e6:.4g} million parameters"
    uncompiled = f"\nmodel.compile = {model.compile} is not modelled: times and bytes are those of layers without it"
    return (
        f"{model.layers} layers, hidden {model.hidden}{experts}, {parameters}, sequence {model.seq_length}, "
        f"global batch {config.train.global_batch_size}\n{search.base.world_size} GPUs of {search.machine.name} "
        f"({search.available / GB:.1f} of {search.machine.memory_bytes / GB:.1f} GB usable), {search.base.software}"
    ) + uncompiled * (model.compile != "none")


def calibration(measured: Ranked, ratio: float) -> str:
    """Return what a measured step changes; measured: its layout, with the prediction before."""
    step = measured.prediction
    seconds = ratio * step.seconds
    inside = "inside" if step.low <= seconds <= step.high else "outside"
    doubt = "" if inside == "inside" else "; look whether model, layout and --software are those of the run"
    return (
        f"measured: {in_words(measured.row)} took {seconds:.4g} s, predicted were {step.seconds:.4g} s, {inside} its "
        f"interval{doubt}\n"
        f"so all times here are the predicted ones times {ratio:.3f}, with the interval of a difference\n"
    )


def _is_told(row: np.void, name: str) -> bool:
    """Return True if a column of the table is worth its place."""
    if name == "etp":
        return row["etp"] != row["tp"]
    return bool(row[name]) if name in ("sp", "sharded", "recompute", "schedule") else row[name] > 1


def as_json(search: Search, best: Sequence[Ranked], lost: Sequence[Loser], seconds: float) -> dict[str, Any]:
    """Return the plan as plain values."""
    counts = search.counts
    return {
        "machine": search.machine.name,
        "gpus": search.base.world_size,
        "counts": {"legal": counts.legal, "memory": counts.memory, "bound": counts.bounded,
                   "simulated": counts.simulated},
        "search_seconds": seconds,
        "best": [_ranked(each) for each in best],
        "losers": [
            {"family": each.family, "reason": each.reason, "best": _ranked(each.best) if each.best else None}
            for each in lost
        ],
    }  # fmt: skip


def _ranked(each: Ranked) -> dict[str, Any]:
    step = each.prediction
    layout = {name: each.row[name].item() for name in COLUMNS.names or ()}
    return {
        "layout": layout | {name: word(name, each.row[name]) for name in ("schedule", "recompute")},
        "seconds": step.seconds,
        "low": step.low,
        "high": step.high,
        "parts": step.parts,
        "flops_per_gpu": each.flops_per_gpu,
        "mfu": each.mfu,
        "bubble": each.bubble,
        "memory_bytes": each.memory.bytes,
        "fullest_place": each.memory.place,
    }


def explanation(search: Search, columns: Mapping[str, int], winner: Ranked | None) -> str:
    """Return why a layout is illegal, or what it lacks, or its terms next to the winner's."""
    only = matching(search.rows, columns)
    asked = ",".join(f"{SHOWN.get(name, name)}={word(name, value)}" for name, value in columns.items())
    if not only.any():
        return f"{asked}: {_forbidden(search, columns)}"
    found = search.best(1, only)
    if found and winner is not None:
        head = [title(search), "", f"{asked}: legal, and fits"]
        return "\n".join([*head, *_beside(found[0], winner), "", *_terms(search, found[0])])
    row, need = search.smallest(only)
    lacking = f"{need.bytes / GB:.1f} GB of {search.available / GB:.1f} GB"
    lines = [f"{asked}: {int(only.sum()):,} legal layouts, none of which fits; the smallest is {in_words(row)}"]
    lines += [f"memory of the ranks at place {need.place} of the pipeline: {lacking}"]
    return "\n".join([*lines, *_memory(search, row, need.place)])


def _forbidden(search: Search, columns: Mapping[str, int]) -> str:
    """Return the rules that forbid every layout with these values."""
    row, world = search.rows[0].copy(), search.base.world_size
    for name in COLUMNS.names or ():
        row[name] = 1
    row["schedule"] = row["recompute"] = row["sp"] = row["sharded"] = 0
    for name, value in columns.items():
        row[name] = value
    row["etp"] = columns.get("etp", row["tp"])
    row["schedule"] = columns.get("schedule", 0)
    row["vpp"] = columns.get("vpp", 2 if row["schedule"] in (4, 5) else 1)
    row["sp"] = columns.get("sp", search.base.config.moe.num_experts > 0 and row["tp"] > 1)
    shape = int(row["tp"]) * int(row["cp"]) * int(row["pp"])
    if "dp" in columns and shape * columns["dp"] != world:
        return f"forbidden: tp x cp x pp x dp = {shape} x {columns['dp']}, but there are {world} GPUs"
    if broken := rules_broken(workload_of(search.base, row).config, world):
        return f"forbidden: {'; '.join(broken)}"
    return (
        "not searched: at least one of these values does not go with the others, or a stage would have no layer; give "
        "fewer of them"
    )


def _beside(each: Ranked, winner: Ranked) -> list[str]:
    """Return the parts of a layout's step next to the winner's."""
    rows = [["", "this layout", "the winner", "more"]]
    ours, theirs = each.prediction, winner.prediction
    for kind, name in KINDS.items():
        here, there = ours.parts.get(kind, 0.0), theirs.parts.get(kind, 0.0)
        if here or there:
            rows.append([name, f"{here:.4f} s", f"{there:.4f} s", f"{(here - there) * 1e3:+,.1f} ms"])
    rows.append(["step", f"{ours.seconds:.4f} s", f"{theirs.seconds:.4f} s",
                 f"{(ours.seconds - theirs.seconds) * 1e3:+,.1f} ms"])  # fmt: skip
    rows.append(["memory", f"{each.memory.bytes / GB:.1f} GB", f"{winner.memory.bytes / GB:.1f} GB",
                 f"{(each.memory.bytes - winner.memory.bytes) / GB:+.1f} GB"])  # fmt: skip
    rows.append(_rates("TFLOP/s per GPU", each.flops_per_gpu, winner.flops_per_gpu))
    if _recomputes([each, winner]):
        rows.append(_rates("with recomputation", _executed(each), _executed(winner)))
    rows.append(_shares("MFU", each.mfu, winner.mfu))
    if _recomputes([each, winner]):
        rows.append(_shares("HFU", _executed(each) / each.peak, _executed(winner) / winner.peak))
    head = [f"this layout: {in_words(each.row)}", f"the winner:  {in_words(winner.row)}"]
    reason = [] if each is winner else [compared(winner, each)]
    return [*head, *reason, "", *table(rows, right=(1, 2, 3))]


def _rates(name: str, ours: float, theirs: float) -> list[str]:
    """Return a row of two rates in TFLOP/s."""
    return [name, f"{ours / 1e12:.1f}", f"{theirs / 1e12:.1f}", f"{(ours - theirs) / 1e12:+.1f}"]


def _shares(name: str, ours: float, theirs: float) -> list[str]:
    """Return a row of two shares of the peak."""
    return [name, f"{ours:.1%}", f"{theirs:.1%}", f"{ours - theirs:+.1%}"]


def _terms(search: Search, each: Ranked) -> list[str]:
    """Return every term of time of the critical rank's first stage, and the memory of the fullest rank."""
    stage = min(each.prediction.timeline.schedule.stages_of(each.prediction.critical_rank))
    return [
        f"memory of the ranks at place {each.memory.place} of the pipeline, which need most:",
        *_memory(search, each.row, each.memory.place),
        "",
        each.prediction.explain(stage),
    ]


def _memory(search: Search, row: np.void, place: int) -> list[str]:
    """Return the terms of a rank's memory, the largest first."""
    workload = workload_of(search.base, row)
    schedule = schedule_of(workload.config, workload.microbatches)
    terms = memory_terms(workload, search.machine, schedule, place)
    rows = [[f"  {name}", f"{size / GB:,.2f} GB"] for name, size in sorted(terms.items(), key=lambda item: -item[1])]
    return table([*rows, ["  in all", f"{sum(terms.values()) / GB:,.2f} GB"]], right=(1,))
