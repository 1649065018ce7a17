"""From a training run's Events to a pipeline's timeline: one step cut out, and what each stage's actions cost in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from labkit.events import Event, shift_to_zero
from labkit.schedules.ir import Action, Schedule, ScheduleError
from labkit.schedules.simulator import Costs


def step_events(events: Iterable[Event], step: int) -> list[Event]:
    """The Events of one rank inside its `step`-th optimizer step, without the timers.

    Raises ValueError where the run has no such step, or recorded none (`train.record_events`).
    """
    recorded = list(events)
    steps = [event for event in recorded if event.kind == "timer" and event.name == "step"]
    if not -len(steps) <= step < len(steps):
        raise ValueError(f"step {step} is not among the {len(steps)} recorded steps; is train.record_events on?")
    whole = steps[step]
    return [e for e in recorded if e.kind != "timer" and whole.start <= e.start and e.end <= whole.end]


def pipeline_events(events_by_stage: Sequence[Iterable[Event]], step: int = -1) -> list[Event]:
    """The actions of one step on each pipeline rank, numbered by pipeline rank, the first at time 0.

    events_by_stage: the Events of one rank of each stage, in the order of the pipeline.
    step: which optimizer step; -1 is the last.
    """
    actions = [
        replace(event, rank=rank)
        for rank, events in enumerate(events_by_stage)
        for event in step_events(events, step)
        if _is_action(event)
    ]
    return shift_to_zero(actions)


def stage_costs(events: Iterable[Event], num_stages: int) -> Costs:
    """Median seconds of each stage's forward and backward, as costs to simulate with; messages cost nothing.

    events: of one step or of several, as `pipeline_events` gives them; a median, since one disturbed action of many
        says nothing about the next.
    Raises ValueError for a stage without a forward.
    """
    seconds: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for event in events:
        if _is_action(event):
            seconds[event.kind, Action.parse(event.name).stage].append(event.duration)
    missing = [stage for stage in range(num_stages) if not seconds["forward", stage]]
    if missing:
        raise ValueError(f"no forward of stage {missing[0]} among the events: give those of all {num_stages} stages")

    def middle(kind: str) -> list[float]:
        return [median(seconds[kind, stage] or [0.0]) for stage in range(num_stages)]

    return Costs(forward=middle("forward"), backward=middle("backward"))


def follows(events: Iterable[Event], schedule: Schedule) -> bool:
    """Whether every pipeline rank ran the actions of `schedule`, in its order."""
    ordered = sorted(events, key=lambda event: event.start)
    return all(
        [event.name for event in ordered if event.rank == rank] == [str(a) for a in schedule.actions(rank)]
        for rank in range(schedule.pp)
    )


def _is_action(event: Event) -> bool:
    """Whether the Event is a forward or backward of the pipeline, not something inside one."""
    if event.kind not in ("forward", "backward"):
        return False
    try:
        Action.parse(event.name)
    except ScheduleError:
        return False
    return True
