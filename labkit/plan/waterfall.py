"""From the peak of the hardware to the step that a run achieved, row by row, predicted beside measured. No torch.

The first row is the ideal step, model FLOPs / (ranks x peak), so ideal / step is the MFU. Each further row is what one
cause adds, and the last is the step. All rows are means over ranks, since a rank that waits is as much a loss as one
that computes; both columns add up to their step.

An action is one Event, whatever runs in it. Only the gradients of linear layers have Events of their own, where the
host waits for them (on a CPU). These are two of a layer's three products, so the row of GEMMs is 1.5 times their time.
The other rows of computation are measured together and split in the proportions of the prediction
(`Waterfall.joint`): what is measured of them is only their sum.

A run has many steps, and medians of rows do not add up. So the rows are means over the middle half of the steps, those
between the quartiles of the step time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from labkit.comm.group_plan import all_groups
from labkit.plan.flops import step_flops
from labkit.plan.machine import Machine
from labkit.plan.rank_steps import RankStep
from labkit.plan.step_causes import Actions, Pipelines, all_actions, idle_by_cause, slow_ranks, step_causes
from labkit.plan.step_time import StepPrediction, parts_by_rank, predict_step, schedule_of
from labkit.plan.workload import Workload
from labkit.schedules import Schedule

ROWS = {
    "ideal": "model FLOPs at the peak",
    "gemm": "GEMM below the peak",
    "attention": "attention",
    "memory": "memory-bound kernels",
    "launch": "kernel launches",
    "recompute": "recomputation",
    "tp": "communication of tp",
    "cp": "communication of cp",
    "ep": "communication of ep",
    "dp": "communication of dp",
    "fill": "bubble: fill and drain",
    "stages": "bubble: unequal stages",
    "actions": "bubble: single slow actions",
    "pp": "pp: messages, and waits for them",
    "stragglers": "stragglers",
    "optimizer": "optimizer",
    "host": "host, between actions",
    "unexplained": "not explained",
}
"""Row of a waterfall -> its name in tables, in order."""
PRODUCTS = 1.5
"""All products of linear layers over those of their gradients: each layer has three of the same size."""
COMPUTE = ("gemm", "attention", "memory", "launch", "recompute")
"""Rows that an action's computation is made of."""


class Row(NamedTuple):
    """One row of a waterfall, in seconds."""

    key: str
    """A key of `ROWS`."""
    predicted: float
    measured: float


@dataclass(frozen=True)
class Waterfall:
    """The rows of a run, and what they were made from."""

    rows: list[Row]
    joint: list[tuple[str, ...]]
    """Rows that were measured together, each tuple split by the prediction's proportions."""
    prediction: StepPrediction
    steps: list[int]
    """Numbers of the steps whose mean the measured column is."""
    median: float
    """Median seconds of all steps that could be used."""
    ends: tuple[float, float]
    """Seconds of the shortest and of the longest of `steps`."""
    slowest: list[tuple[int, int, float]] = field(default_factory=list)
    """(global rank, pipeline rank, its computation over the lower median of its peers), the slowest first."""
    stage_loads: list[float] = field(default_factory=list)
    """Seconds in actions of each pipeline rank over their mean."""
    predicted_loads: list[float] = field(default_factory=list)
    """The same, predicted."""

    @property
    def predicted(self) -> float:
        """Predicted step in seconds, the sum of its column."""
        return sum(row.predicted for row in self.rows)

    @property
    def measured(self) -> float:
        """Measured step in seconds, the sum of its column."""
        return sum(row.measured for row in self.rows)

    @property
    def largest(self) -> Row:
        """The row that costs most of the measured step, beside the ideal."""
        return max(self.rows[1:], key=lambda row: row.measured)


def waterfall(workload: Workload, machine: Machine, steps: Mapping[int, Sequence[RankStep]], *,
              sees_waits: bool) -> Waterfall:  # fmt: skip
    """Return the waterfall of a run.

    steps: number of a step -> its `RankStep` of every rank. sees_waits: as in `rank_step`.
    Raises ValueError if a rank ran other actions than the configured schedule's, and as `predict_step` does.
    """
    prediction = predict_step(workload, machine)
    schedule = schedule_of(workload.config, workload.microbatches)
    if schedule.has_pairs:
        raise ValueError(
            f"{schedule.name}: merged actions run at once, so no time belongs to one alone; record a run without "
            "schedule.overlap_moe_expert_parallel_comm"
        )
    pipelines = pipelines_of(workload)
    predicted = predicted_rows(workload, machine, prediction)
    times = {number: max(rank.total for rank in ranks) for number, ranks in steps.items()}
    chosen = middle_half(times)
    causes = [step_causes(steps[number], schedule, pipelines, sees_waits=sees_waits) for number in chosen]
    mean = {cause: fmean(each[cause] for each in causes) for cause in causes[0]}
    phases = all(rank.has_phases for number in chosen for rank in steps[number])
    joint = _joint(predicted, phases=phases, sees_waits=sees_waits)
    ranks = [rank for number in chosen for rank in steps[number]]
    products = sum(rank.products for rank in ranks) / sum(float(rank.computing.sum()) for rank in ranks)
    joint = _without_products(joint, products)
    measured = _measured_rows(mean, predicted, joint, _ideal(workload, machine), PRODUCTS * products)
    rows = [Row(key, predicted[key], measured[key]) for key in ROWS]
    seconds = [all_actions(steps[number], schedule, pipelines) for number in chosen]
    loads = _loads(np.mean([each.computing + each.waiting for each in seconds], axis=(0, 1)), schedule)
    expected = _loads(_durations(prediction), schedule)
    slowest = _slowest(seconds, schedule, pipelines)
    return Waterfall(
        rows,
        [keys for keys in joint.values() if len(keys) > 1],
        prediction,
        chosen,
        median(times.values()),
        (min(times[number] for number in chosen), max(times[number] for number in chosen)),
        slowest,
        loads,
        expected,
    )


def middle_half(seconds: Mapping[int, float]) -> list[int]:
    """Return the numbers of the steps between the quartiles of their time, at least one, in order."""
    ordered = sorted(seconds, key=lambda number: seconds[number])
    cut = len(ordered) // 4
    return sorted(ordered[cut : len(ordered) - cut])


def pipelines_of(workload: Workload) -> Pipelines:
    """Return the pipelines of a run. With expert parallelism all ranks of a stage count as waiting for each other."""
    groups = all_groups(workload.config.parallel, workload.world_size)
    chains = groups["pp"]
    if workload.config.parallel.ep > 1:
        return Pipelines(chains, np.zeros(len(chains), int))
    number_of = {int(rank): number for number, group in enumerate(groups["tp_cp"]) for rank in group}
    return Pipelines(chains, np.array([number_of[int(chain[0])] for chain in chains]))


def predicted_rows(workload: Workload, machine: Machine, prediction: StepPrediction) -> dict[str, float]:
    """Return the predicted seconds of every row."""
    ranks = parts_by_rank(workload, machine)
    mean = {
        kind: fmean(parts.get(kind, 0.0) for parts in ranks) for kind in {kind for parts in ranks for kind in parts}
    }
    durations = _durations(prediction)[None]
    nothing = np.zeros_like(durations)
    found = idle_by_cause(Actions(durations, nothing, nothing), prediction.timeline.schedule, np.zeros(1, int))
    waits = prediction.seconds - sum(mean.values()) - found.fill - found.stages
    rows = dict.fromkeys(ROWS, 0.0) | {key: mean[key] for key in ROWS if key in mean}
    ideal, of_attention = _ideal(workload, machine)
    return rows | {
        "ideal": ideal,
        "gemm": rows["gemm"] - (ideal - of_attention),
        "attention": rows["attention"] - of_attention,
        "fill": found.fill + min(0.0, waits),
        "stages": found.stages,
        "pp": rows["pp"] + max(0.0, waits),
    }


def _ideal(workload: Workload, machine: Machine) -> tuple[float, float]:
    """Return the seconds of a rank's share of the model FLOPs at the peak, and those of attention in them."""
    config = workload.config
    flops = step_flops(config.model, samples=config.train.global_batch_size, moe=config.moe)
    precision = config.optim.precision
    linear = machine.peak_flops["fp8" if config.optim.fp8 != "none" else precision]
    attention = flops.attention / machine.peak_flops[precision] / workload.world_size
    return (flops.total - flops.attention) / linear / workload.world_size + attention, attention


def _joint(predicted: Mapping[str, float], *, phases: bool, sees_waits: bool) -> dict[str, tuple[str, ...]]:
    """Return measured cause -> rows that it holds, of which some are predicted to take time."""
    inner = [] if sees_waits else ["tp", "cp", "ep"]
    outer = [] if sees_waits else ["dp"]
    compute = [key for key in (*COMPUTE, *inner) if predicted[key] or key == "gemm"]
    after = ["host"] if phases and sees_waits else [*outer, "optimizer", "host"]
    update = ["optimizer"] if sees_waits else [*outer, "optimizer"]
    return {"compute": tuple(compute), "update": tuple(update), "after": tuple(after)}


def _without_products(joint: dict[str, tuple[str, ...]], products: float) -> dict[str, tuple[str, ...]]:
    """Return `joint` without the row of GEMMs, if these were measured and are not all of the computation."""
    others = tuple(key for key in joint["compute"] if key != "gemm")
    measured = 0 < PRODUCTS * products < 1 and others
    return joint | {"compute": others} if measured else joint


def _measured_rows(mean: Mapping[str, float], predicted: Mapping[str, float], joint: Mapping[str, tuple[str, ...]],
                   ideals: tuple[float, float], products: float) -> dict[str, float]:  # fmt: skip
    """Return the measured seconds of every row, from those of every cause.

    products: share of the computation that GEMMs take, if it was measured.
    """
    ideal, of_attention = ideals
    if "gemm" not in joint["compute"]:
        of_products = mean["compute"] * products
        mean = {**mean, "gemm": of_products, "compute": mean["compute"] - of_products}
    weights = dict(predicted)
    weights["gemm"] += ideal - of_attention
    weights["attention"] += of_attention
    rows = dict.fromkeys(ROWS, 0.0) | {key: mean[key] for key in ROWS if key in mean}
    for cause, keys in joint.items():
        total = sum(weights[key] for key in keys)
        for key in keys:
            rows[key] += mean[cause] * (weights[key] / total if total else 1 / len(keys))
    rows["ideal"] = ideal
    rows["gemm"] -= ideal - of_attention
    rows["attention"] -= of_attention
    return rows


def _durations(prediction: StepPrediction) -> np.ndarray:
    """Return the predicted duration of every action (A,)."""
    timeline = prediction.timeline
    return timeline.end - timeline.start


def _loads(durations: np.ndarray, schedule: Schedule) -> list[float]:
    """Return the seconds of each pipeline rank over their mean, from those of its actions (A,)."""
    seconds = np.add.reduceat(durations, schedule.offsets[:-1])
    return (seconds / max(seconds.mean(), 1e-12)).tolist()


def _slowest(steps: Sequence[Actions], schedule: Schedule, pipelines: Pipelines) -> list[tuple[int, int, float]]:
    """Return all ranks with peers by their computation over that of their peers, the slowest first."""
    if len(pipelines.ranks) == 1:
        return []
    ratios = np.median([slow_ranks(actions, schedule) for actions in steps], axis=0)
    places = [(int(pipelines.ranks[at]), at[1], float(ratio)) for at, ratio in np.ndenumerate(ratios)]
    return sorted(places, key=lambda place: -place[2])
