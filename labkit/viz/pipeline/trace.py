"""Write Events as a trace that Perfetto (ui.perfetto.dev) and Chrome's tracing page open.

The format is the JSON of torch.profiler: one process per rank, one track per kind of work, times in microseconds. An
arrow leads from each forward or backward to the action on another rank that needs its result.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from labkit.events import Event, shift_to_zero
from labkit.output_files import appearing
from labkit.schedules.ir import Action, ScheduleError
from labkit.schedules.simulator import Timeline

_TRACKS = {
    "compute": ("forward", "backward", "input_grad", "weight_grad"),
    "graphs": ("graph_replay",),
    "optimizer": ("optimizer",),
    "wait": ("wait",),
    "collective": ("collective",),
    "send": ("send",),
    "recv": ("recv",),
    "data": ("data",),
    "timers": ("timer",),
}
"""Track -> kinds on it, from top to bottom."""
_TRACK_OF = {kind: track for track, kinds in _TRACKS.items() for kind in kinds}
_LANES = 100
"""Thread ids of a track: an overlapping event moves to the next lane, because a lane can hold only nested events."""


def write_trace(events: Timeline | Iterable[Event], path: str | Path, *, arrows: bool = True) -> Path:
    """Write a Timeline's or recorded Events as one JSON file. Make its folder, and return the path.

    The earliest event starts at 0. In a training run each slice names its step, and the slices `step 1`, `step 2`, ...
    on the track `timers` span the steps.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = shift_to_zero(events.events if isinstance(events, Timeline) else events)
    lanes = _lanes(ordered)
    rows = [*_metadata(lanes), *(_slice(event, lane) for event, lane in lanes)]
    if arrows:
        rows += _arrows(lanes)
    text = json.dumps({"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": rows}, allow_nan=False)
    with appearing(path) as draft:
        draft.write_text(text)
    return path


def _lanes(events: list[Event]) -> list[tuple[Event, int]]:
    """Give each event its thread id: the first lane of its track and rank that is free at the event's start."""
    free_at: dict[tuple[int, str], list[float]] = {}
    placed = []
    for event in events:
        track = _TRACK_OF[event.kind]
        ends = free_at.setdefault((event.rank, track), [])
        lane = next((i for i, end in enumerate(ends) if end <= event.start), len(ends))
        ends[lane : lane + 1] = [event.end]
        placed.append((event, list(_TRACKS).index(track) * _LANES + lane))
    return placed


def _metadata(lanes: list[tuple[Event, int]]) -> list[dict[str, Any]]:
    rows = []
    for rank in sorted({event.rank for event, _ in lanes}):
        rows.append(_meta("process_name", rank, 0, name=f"rank {rank}"))
        rows.append(_meta("process_sort_index", rank, 0, sort_index=rank))
    for rank, lane in sorted({(event.rank, lane) for event, lane in lanes}):
        track, number = list(_TRACKS)[lane // _LANES], lane % _LANES
        rows.append(_meta("thread_name", rank, lane, name=track if number == 0 else f"{track} {number + 1}"))
        rows.append(_meta("thread_sort_index", rank, lane, sort_index=lane))
    return rows


def _meta(what: str, rank: int, lane: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane, "ts": 0, "args": args}


def _slice(event: Event, lane: int) -> dict[str, Any]:
    details = {"step": event.step, "microbatch": event.microbatch, "chunk": event.chunk, "bytes": event.bytes}
    is_step = event.kind == "timer" and event.name == "step" and event.step is not None
    return {
        "ph": "X",
        "cat": event.kind,
        "name": f"step {event.step}" if is_step else event.name,
        "pid": event.rank,
        "tid": lane,
        "ts": event.start * 1e6,
        "dur": event.duration * 1e6,
        "args": {key: value for key, value in details.items() if value is not None},
    }


def _arrows(lanes: list[tuple[Event, int]]) -> list[dict[str, Any]]:
    """Return pairs of flow events within each step of training, because actions repeat their names in every step."""
    rows: list[dict[str, Any]] = []
    waiting: dict[tuple[int, str, int], tuple[Event, int]] = {}
    by_time = sorted(((e, lane) for e, lane in lanes if _TRACK_OF[e.kind] == "compute"), key=lambda pair: pair[0].start)
    for event, lane in by_time:
        action = _action(event.name)
        if action is None or action.kind == "W":
            continue
        kind, step = ("F", 1) if action.kind == "F" else ("B", -1)
        made = waiting.pop((action.stage, kind, action.microbatch), None)
        if made is not None and made[0].rank != event.rank:
            rows += _flow(made, (event, lane), len(rows) // 2)
        waiting[action.stage + step, kind, action.microbatch] = (event, lane)
    return rows


def _flow(made: tuple[Event, int], used: tuple[Event, int], number: int) -> list[dict[str, Any]]:
    common = {"cat": "p2p", "name": "p2p", "id": number}
    # The arrow leaves from inside its slice: at an edge the viewer finds no slice for the arrow.
    leaves = (made[0].start + made[0].end) / 2 * 1e6
    return [
        {"ph": "s", "pid": made[0].rank, "tid": made[1], "ts": leaves, **common},
        {"ph": "f", "bp": "e", "pid": used[0].rank, "tid": used[1], "ts": used[0].start * 1e6, **common},
    ]


def _action(name: str) -> Action | None:
    try:
        return Action.parse(name)
    except ScheduleError:
        return None
