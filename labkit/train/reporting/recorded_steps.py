"""The Events of a run, read back from events.jsonl step by step. Needs no torch."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from labkit.events import Event

LAST = 50
"""Steps that are kept, the last ones: the file of a long run is larger than memory."""

RecordedSteps = dict[int, dict[int, list[Event]]]
"""Number of a step -> rank -> its Events."""


def recorded_steps(path: Path, world_size: int) -> RecordedSteps:
    """Return the last whole steps in a file of Events, those in which every rank has the timer of the step.

    A line that is not an Event is skipped, because a killed run may have left half of one. Raises OSError for a file
    that cannot be read.
    """
    steps: RecordedSteps = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            event = _event(line)
            if event is None or event.step is None:
                continue
            by_rank = steps.setdefault(event.step, defaultdict(list))
            by_rank[event.rank].append(event)
            if len(steps) > LAST + 1:  # the newest is not whole yet
                del steps[next(iter(steps))]
    whole = [step for step, by_rank in steps.items() if _is_whole(by_rank, world_size)]
    return {step: dict(steps[step]) for step in whole[-LAST:]}


def _event(line: str) -> Event | None:
    try:
        return Event(**json.loads(line))
    except (ValueError, TypeError):
        return None


def _is_whole(by_rank: dict[int, list[Event]], world_size: int) -> bool:
    timed = {rank for rank, events in by_rank.items() for event in events if _is_step(event)}
    return timed == set(range(world_size))


def _is_step(event: Event) -> bool:
    return event.kind == "timer" and event.name == "step"
