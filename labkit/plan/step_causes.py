"""Why a step takes as long as it does: the seconds of all ranks, and their idle time by cause. No torch.

`RankStep` says what each rank did. What it does not say is why a rank waited for another stage, so the step is
simulated several times, each time with one more fact of what was measured:

    1  every action of a kind takes the mean of all stages      its idle time is the fill and drain of the pipeline
    2  the actions of each stage take that stage's mean         + unequal stages
    3  the same, with the time that slow ranks cost             + stragglers
    4  every action takes its own time                          + single slow actions
    5  every action begins after the gap of its rank            + gaps of the host, for which other stages wait

What a simulated step gets longer by is the cost of that fact; the part of it that is no computation is idle time. What
is measured beyond the fifth is messages, and waits for them.

A part below zero makes the fill and drain shorter: actions that happened to be short where the pipeline fills, or ranks
that used their idle time, for example to reduce gradients.

A rank is slow if its actions compute longer than the same actions of its peers, the ranks of its stage. It costs the
difference to the (lower) median of the peers. Ranks that share the slow one's collectives lose the same time inside
them, and data-parallel replicas lose it when gradients are reduced; all of this counts as stragglers. A rank without
peers cannot be told from a stage with more work.

All values are seconds, means over all ranks, and add up to the step of the rank whose step was longest.

Legend: C = pipelines (one for each position in tp, cp and dp), A = actions of the schedule, K = kind and stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from labkit.plan.rank_steps import AXES, RankStep
from labkit.schedules import Schedule
from labkit.schedules.simulator import earliest

INNER = ("tp", "cp", "ep", "dp")
"""Axes that communicate inside actions; dp in the last backward."""


class Pipelines(NamedTuple):
    """Which global ranks form which pipeline."""

    ranks: np.ndarray
    """Global ranks (C, pp) in the order of stages."""
    in_step: np.ndarray
    """Number of the ranks that wait for each other inside actions (C,): equal numbers share collectives of layers."""


class Actions(NamedTuple):
    """Seconds of all actions of a step."""

    computing: np.ndarray
    """(C, A)."""
    waiting: np.ndarray
    """(C, A), blocked inside the action."""
    gaps: np.ndarray
    """(C, A), before the action."""


class Idle(NamedTuple):
    """Idle seconds of the pipeline by cause, means over ranks, and what stragglers cost inside actions."""

    fill: float
    stages: float
    stragglers: float
    actions: float
    host: float
    slow_computing: float
    """Seconds that slow ranks compute longer than their peers."""
    slow_waiting: float
    """Seconds that others wait for them inside actions."""
    late_replicas: float
    """Seconds that data-parallel replicas wait for one with a slow rank."""


def step_causes(ranks: Sequence[RankStep], schedule: Schedule, pipelines: Pipelines, *,
                sees_waits: bool = True) -> dict[str, float]:  # fmt: skip
    """Return the seconds of a step by cause; they add up to the longest `RankStep.total`.

    ranks: steps of all global ranks in their order. sees_waits: as in `rank_step`; without it, what a rank idles
    between actions counts as idle time of the pipeline, and so does the simulated end of the others after its own.
    Raises ValueError for a rank that ran other actions than the schedule's.
    """
    actions = all_actions(ranks, schedule, pipelines)
    mean = {axis: _mean(rank.blocked[axis] for rank in ranks) for axis in AXES}
    inside = {axis: _mean(rank.blocked_inside[axis] for rank in ranks) for axis in INNER}
    update, after, gaps = (
        _mean(float(np.sum(getattr(rank, name))) for rank in ranks) for name in ("update", "after", "gaps")
    )
    if not sees_waits and schedule.pp > 1:
        drain = min(_drain(actions, schedule), update + after)
        mean["pp"] += gaps + drain
        update, after = max(0.0, update - drain), after - max(0.0, drain - update)
        actions, gaps = actions._replace(gaps=np.zeros_like(actions.gaps)), 0.0
    found = idle_by_cause(actions, schedule, pipelines.in_step)
    share = found.slow_waiting / sum(inside.values()) if found.slow_waiting else 0.0
    late = min(found.late_replicas, mean["dp"] - inside["dp"] * share)
    messages = mean["pp"] - (found.fill + found.stages + found.stragglers + found.actions + found.host)
    return {
        "compute": _mean(float(rank.computing.sum()) for rank in ranks) - found.slow_computing,
        **{axis: mean[axis] - inside[axis] * share - late * (axis == "dp") for axis in INNER},
        "fill": found.fill + min(0.0, messages) + min(0.0, found.actions),
        "stages": found.stages,
        "actions": max(0.0, found.actions),
        "pp": max(0.0, messages),
        "stragglers": found.slow_computing + found.slow_waiting + found.stragglers + late,
        "update": update,
        "after": after,
        "host": gaps + found.host,
        "unexplained": max(rank.total for rank in ranks) - _mean(rank.total for rank in ranks),
    }


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _drain(actions: Actions, schedule: Schedule) -> float:
    """Return the simulated time from a rank's last action to the end of its pipeline, mean over ranks."""
    ends = [earliest(schedule, row)[1] for row in actions.computing + actions.waiting]
    return float(np.mean([end.max() - end[schedule.offsets[1:] - 1] for end in ends]))


def all_actions(ranks: Sequence[RankStep], schedule: Schedule, pipelines: Pipelines) -> Actions:
    """Return the actions of all ranks in the order of the schedule's columns. Errors as in `step_causes`."""
    rows = [tuple(map(str, schedule.actions(rank))) for rank in range(schedule.pp)]
    for chain in pipelines.ranks:
        for stage, rank in enumerate(chain):
            if ranks[rank].actions != rows[stage]:
                rule = "Events and configuration must be of the same run"
                raise ValueError(f"rank {rank} did not run the actions of {schedule.name} in their order; {rule}")
    columns = [
        np.stack([np.concatenate([getattr(ranks[rank], name) for rank in chain]) for chain in pipelines.ranks])
        for name in Actions._fields
    ]
    return Actions(*columns)


def idle_by_cause(actions: Actions, schedule: Schedule, in_step: np.ndarray) -> Idle:
    """Return the idle time of a step's pipelines by cause (see the top of this file)."""
    key = schedule.kinds.astype(np.int64) * schedule.num_stages + schedule.stages
    whole = actions.computing + actions.waiting
    computing, waiting = _means(actions.computing, key), _means(actions.waiting, key)
    own, lost = _excess(computing, waiting, in_step)
    usual = whole - (own + lost)[:, key]

    equal = _means(usual.mean(0)[None], schedule.kinds)[:, schedule.kinds]
    spans = [
        _span(schedule, equal),
        _span(schedule, _means(usual, key)[:, key]),
        _span(schedule, _means(whole, key)[:, key]),
        _span(schedule, whole),
        _span(schedule, whole + actions.gaps),
    ]
    makespan = [float(span.mean()) for span in spans]
    slow_computing, slow_waiting = (float(each[:, key].sum() / len(whole)) / schedule.pp for each in (own, lost))
    busy, gaps = (float(each.sum() / len(whole)) / schedule.pp for each in (usual, actions.gaps))
    late = [float(span.max() - span.mean()) for span in spans[1:3]]
    return Idle(
        fill=makespan[0] - busy,
        stages=makespan[1] - makespan[0],
        stragglers=makespan[2] - makespan[1] - slow_computing - slow_waiting,
        actions=makespan[3] - makespan[2],
        host=makespan[4] - makespan[3] - gaps,
        slow_computing=slow_computing,
        slow_waiting=slow_waiting,
        late_replicas=max(0.0, late[1] - late[0]),
    )


def slow_ranks(actions: Actions, schedule: Schedule) -> np.ndarray:
    """Return by pipeline and stage rank (C, pp) how long it computes, over the lower median of its peers."""
    rank_seconds = np.add.reduceat(actions.computing, schedule.offsets[:-1], axis=1)
    return rank_seconds / np.maximum(_lower_median(rank_seconds), 1e-12)


def _excess(computing: np.ndarray, waiting: np.ndarray, in_step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return seconds by which actions are longer because of slow ranks (C, K): on the slow one, and on those that wait
    for it inside the action, at most as long as they waited."""
    typical = _lower_median(computing)
    slowest = np.empty_like(computing)
    for number in np.unique(in_step):
        slowest[in_step == number] = computing[in_step == number].max(0)
    excess = np.maximum(slowest - typical, 0.0)
    own = np.maximum(computing - typical, 0.0)
    return own, np.minimum(excess - own, waiting)


def _lower_median(values: np.ndarray) -> np.ndarray:
    """Return the lower median over the first axis; of two peers that is the faster one."""
    return np.sort(values, axis=0)[(len(values) - 1) // 2]


def _means(values: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Return the means of the columns of `values` (C, A) with the same key (C, K); 0 for a key without columns."""
    count = np.maximum(np.bincount(key), 1)
    return np.stack([np.bincount(key, weights=row) / count for row in values])


def _span(schedule: Schedule, durations: np.ndarray) -> np.ndarray:
    """Return the simulated makespan of each pipeline (C,), with free messages."""
    return np.array([earliest(schedule, row)[1].max() for row in durations])
