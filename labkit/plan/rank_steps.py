"""What one rank did in one step, from its Events: seconds that add up to the step. No torch.

Every moment of a step belongs to one of these:

    compute     inside an action of the schedule, not blocked
    tp ... pp   blocked by communication of this axis, inside an action or outside
    gap         before or between actions, not blocked: Python, data, launches
    update      after the last action, inside the timers `finalize-grads` and `optimizer`, not blocked
    after       after the last action, in neither

A call without an asynchronous form blocks from its start to its end. The asynchronous form leaves an Event of kind
`wait`, and only that blocks. On a GPU the host does not see how long NCCL waits. There `compute` holds the
communication inside actions, and what blocks between actions is in `gap` and `after`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from labkit.comm.group_plan import GROUP_TOKENS
from labkit.config import ParallelConfig
from labkit.events import Event
from labkit.plan.layout import rank_groups
from labkit.schedules.ir import ACTION, EVENT_KINDS

AXES = ("tp", "cp", "ep", "dp", "pp")
UPDATE = ("finalize-grads", "optimizer")
"""Timers of the phases after the pipeline (`train.timing_log_level` 1)."""


class RankStep(NamedTuple):
    """One step of one rank; A is the number of its actions."""

    total: float
    """Seconds of the step."""
    actions: tuple[str, ...]
    """Names of its actions in the order of their start."""
    computing: np.ndarray
    """Seconds of each action (A,) without its waits."""
    waiting: np.ndarray
    """Seconds for which each action is blocked (A,)."""
    gaps: np.ndarray
    """Seconds before each action (A,) in which the rank is neither blocked nor in an action."""
    products: float
    """Seconds of the computation in which linear layers compute gradients: two of their three products."""
    blocked: dict[str, float]
    """Axis -> seconds, inside and outside of actions."""
    blocked_inside: dict[str, float]
    """Axis -> seconds inside actions."""
    update: float
    after: float
    """Seconds in and beside the phases after the pipeline."""
    has_phases: bool
    """The phases after the pipeline were recorded."""


def axis_of(parallel: ParallelConfig, world_size: int) -> Callable[[str], str]:
    """Return a function from the name of a group, such as `dp_cp`, to the axis that its communication counts as.

    A group that spans stages counts as pp, and one that spans data-parallel ranks as dp.
    """
    sizes = {axis: group.size for axis, group in rank_groups(parallel, world_size).items()}
    spans_stages = sizes["pp"] > 1

    def axis(group: str) -> str:
        _, token = GROUP_TOKENS.get(group, ("dense", "pp-dp"))
        tokens = token.split("-")
        if "pp" in tokens and (spans_stages or tokens == ["pp"]):
            return "pp"
        if "dp" in tokens:
            return "dp"
        return next((name for name in ("ep", "cp") if name in tokens and sizes[name] > 1), "tp")

    return axis


def rank_step(events: Iterable[Event], axis: Callable[[str], str], *, sees_waits: bool) -> RankStep | None:
    """Return the step of one rank, or None if its Events hold no timer of a step.

    events: Events of one rank and one step. axis: see `axis_of`. sees_waits: the host blocks while it waits, as it
    does with gloo.
    """
    recorded = sorted(events, key=lambda event: (event.start, -event.end))
    whole = next((event for event in recorded if event.kind == "timer" and event.name == "step"), None)
    if whole is None:
        return None
    inside = [event for event in recorded if event.start < whole.end and event.end > whole.start and event is not whole]
    actions = [event for event in inside if _is_action(event)]
    blocking = _blocking(inside) if sees_waits else []
    products = [event for event in inside if _is_product(event)] if sees_waits else []
    phases = [event for event in inside if event.kind == "timer" and event.name in UPDATE]
    edges = [time for event in (*actions, *blocking, *products, *phases) for time in (event.start, event.end)]
    bounds = np.unique(np.clip([whole.start, whole.end, *edges], whole.start, whole.end))
    seconds, count = np.diff(bounds), len(actions)

    cause = _painted(bounds, blocking, [AXES.index(axis(event.name.split()[-1])) for event in blocking])
    place = _painted(bounds, actions, range(count))
    last = actions[-1].end if actions else whole.start
    in_gap = (place < 0) & (bounds[:-1] < last)
    ended = (place < 0) & ~in_gap
    free = cause < 0
    multiplying = _painted(bounds, products, [0] * len(products)) >= 0
    updating = _painted(bounds, phases, [0] * len(phases)) >= 0
    next_action = np.searchsorted([event.start for event in actions], bounds[:-1])

    def by(numbers: np.ndarray, chosen: np.ndarray, size: int) -> np.ndarray:
        return np.bincount(numbers[chosen], weights=seconds[chosen], minlength=size)

    return RankStep(
        total=whole.duration,
        actions=tuple(event.name for event in actions),
        computing=by(place, (place >= 0) & free, count),
        waiting=by(place, (place >= 0) & ~free, count),
        gaps=by(next_action, in_gap & free, count),
        products=float(seconds[(place >= 0) & free & multiplying].sum()),
        blocked=dict(zip(AXES, by(cause, ~free, len(AXES)).tolist(), strict=True)),
        blocked_inside=dict(zip(AXES, by(cause, ~free & (place >= 0), len(AXES)).tolist(), strict=True)),
        update=float(seconds[ended & free & updating].sum()),
        after=float(seconds[ended & free & ~updating].sum()),
        has_phases=bool(phases),
    )


def _is_action(event: Event) -> bool:
    found = ACTION.fullmatch(event.name)
    return found is not None and event.kind == EVENT_KINDS[found[2]]


def _is_product(event: Event) -> bool:
    """Return True for a gradient of a linear layer, such as `layers.0.mlp.fc1 weight_grad`. That of a word embedding
    adds rows; it multiplies nothing."""
    is_gradient = event.kind in ("input_grad", "weight_grad") and event.name.endswith(f" {event.kind}")
    return is_gradient and not event.name.startswith("embedding.")


def _blocking(events: Sequence[Event]) -> list[Event]:
    """Return the Events during which the host is blocked: waits, and calls that have none."""
    waits = [event for event in events if event.kind == "wait"]
    awaited = {(event.name.removeprefix("wait "), event.end) for event in waits}
    calls = [event for event in events if event.kind == "collective" and (event.name, event.end) not in awaited]
    return sorted([*waits, *calls], key=lambda event: event.start)


def _painted(bounds: np.ndarray, events: Sequence[Event], numbers: Sequence[int]) -> np.ndarray:
    """Return, for each piece between two bounds, the number of the last Event that covers it; -1 where none does."""
    found = np.full(len(bounds) - 1, -1)
    for event, number in zip(events, numbers, strict=True):
        start, end = np.searchsorted(bounds, (event.start, event.end))
        found[start:end] = number
    return found
