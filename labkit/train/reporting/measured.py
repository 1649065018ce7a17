"""Turn the Events of a training run into a pipeline's timeline and the costs of each stage's actions.

A pipeline rank may run several stages (interleaved or V schedules) and split backwards, so the stage of an Event is
read from the name of its action.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from labkit.config.errors import counted
from labkit.events import Event, shift_to_zero
from labkit.schedules.ir import ACTION, EVENT_KINDS, KINDS, Action, Schedule
from labkit.schedules.simulator import Costs


def step_events(events: Iterable[Event], step: int) -> list[Event]:
    """Return the Events of one rank inside one optimizer step, without the timers.

    step: an index into the recorded steps: 0 is the first step with kept Events, -1 the last.
    Raises ValueError if the run has no such step, or recorded none (`train.record_events`).
    """
    recorded = list(events)
    steps = [event for event in recorded if event.kind == "timer" and event.name == "step"]
    if not -len(steps) <= step < len(steps):
        raise ValueError(f"index {step}: {counted(len(steps), 'step')} recorded; is train.record_events on?")
    whole = steps[step]
    return [e for e in recorded if e.kind != "timer" and whole.start <= e.start and e.end <= whole.end]


def pipeline_events(events_by_rank: Sequence[Iterable[Event]], step: int = -1) -> list[Event]:
    """Return the actions of one step on all pipeline ranks, numbered by pipeline rank, the first action at time 0.

    events_by_rank: for each pipeline rank in order, the Events of one of its global ranks.
    step: an index into the recorded steps: 0 is the first step with kept Events, -1 the last.
    """
    actions = [
        replace(event, rank=rank)
        for rank, events in enumerate(events_by_rank)
        for event in step_events(events, step)
        if _is_action(event)
    ]
    return shift_to_zero(actions)


def stage_costs(events: Iterable[Event], num_stages: int) -> Costs:
    """Return the median seconds of each kind of action on each stage as Costs of a simulation; messages cost nothing.

    The costs serve for any schedule of the same stages. If a stage ran only full backwards, I and W each get half of
    the time of B. If a stage ran only split backwards, B gets the sum of I and W.

    events: Events of one or several steps from `pipeline_events`. The median ignores single disturbed actions.
    Raises ValueError for a stage without a forward.
    """
    seconds: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for event in events:
        if _is_action(event):
            action = Action.parse(event.name)
            seconds[action.kind, action.stage].append(event.duration)
    missing = [stage for stage in range(num_stages) if not seconds["F", stage]]
    if missing:
        raise ValueError(f"no forward of stage {missing[0]} among the events: give those of all {num_stages} stages")

    middle = {kind: [median(seconds[kind, stage] or [0.0]) for stage in range(num_stages)] for kind in KINDS}
    for stage in range(num_stages):
        whole, split = seconds["B", stage], seconds["I", stage]
        if whole and not split:
            middle["I"][stage] = middle["W"][stage] = middle["B"][stage] / 2
        elif split and not whole:
            middle["B"][stage] = middle["I"][stage] + middle["W"][stage]
    return Costs(forward=middle["F"], backward=middle["B"], input_grad=middle["I"], weight_grad=middle["W"])


def follows(events: Iterable[Event], schedule: Schedule) -> bool:
    """Return True if every pipeline rank ran the actions of `schedule` in their order."""
    ordered = sorted(events, key=lambda event: event.start)
    return all(
        [event.name for event in ordered if event.rank == rank] == [str(a) for a in schedule.actions(rank)]
        for rank in range(schedule.pp)
    )


def ratios_by_kind(measured: Iterable[Event], predicted: Iterable[Event]) -> dict[str, float]:
    """Return measured over predicted duration by stage and kind, such as `stage 1 forward`: the median of the boxes.

    A median ignores single disturbed boxes, so one kind on one stage that is far off has a cause of its own.

    measured: actions of one step, as `pipeline_events` returns them. predicted: those of the simulated step.
    """
    expected = {event.name: event.duration for event in predicted}
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for event in sorted(measured, key=lambda event: (event.rank, event.kind != "forward")):
        ratios[f"stage {Action.parse(event.name).stage} {event.kind}"].append(event.duration / expected[event.name])
    return {name: median(each) for name, each in ratios.items()}


TOLERANCE = 0.2
"""Largest relative difference of a measured step from a predicted one; on a quiet machine a median step is closer."""


def judge_prediction(ratio: float, ranks: int) -> str:
    """Return a sentence that says if a step takes as long as predicted, and if not, if other programs used the machine.

    The load average counts processes that run or wait for a core, over a minute. At most `ranks` of these processes are
    the run's own. If the load is above `ranks` and above the number of cores, other programs took turns with the run.

    ratio: measured over predicted seconds of one step.
    ranks: processes of the run, all on this machine.
    """
    said = f"one step took {ratio:.2f} of its predicted time"
    if abs(ratio - 1) <= TOLERANCE:
        return f"{said}, which is within {TOLERANCE:.0%}"
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    machine = f"load {load:.0f} on {cores} {'core' if cores == 1 else 'cores'}"
    if load >= max(ranks, cores) + 1:
        return f"{said}; this machine was busy: {machine}, at most {ranks} of it by this run"
    return f"{said}, and the load shows no other program ({machine})"


def _is_action(event: Event) -> bool:
    """Return True if the Event is a whole action of the schedule. (Layers record their gradients as parts of one.)"""
    found = ACTION.fullmatch(event.name)
    return found is not None and event.kind == EVENT_KINDS[found[2]]
