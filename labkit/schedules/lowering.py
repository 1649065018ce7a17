"""From rows of actions to rows of steps: which message each action waits for, and which it sends.

Communication is never written down in a schedule, because it follows from it: F of stage s needs the message that F of
stage s - 1 sends, B (or I) of stage s the one of stage s + 1. All ranks know all rows, so each knows in which order its
neighbours send, which is what makes channels without names enough.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.schedules.ir import Action, Schedule


@dataclass(frozen=True, slots=True)
class Message:
    """An activation (F) or a gradient (B) on its way from one stage to a neighbouring one; prints as `1F0>2`."""

    kind: str
    """`F` to the next stage, `B` to the previous one."""
    microbatch: int
    from_stage: int
    to_stage: int
    source: int
    """Rank that sends."""
    target: int
    """Rank that receives; equal to `source` where both stages are on one rank, and nothing is transferred."""
    produced: int
    """Position of the action that makes it, in the row of `source`."""
    consumed: int
    """Position of the action that needs it, in the row of `target`."""

    def __str__(self) -> str:
        return f"{self.from_stage}{self.kind}{self.microbatch}>{self.to_stage}"

    @property
    def is_local(self) -> bool:
        """Whether it stays on its rank."""
        return self.source == self.target


@dataclass(frozen=True, slots=True)
class Step:
    """An action with the message it waits for and the message it sends."""

    action: Action
    chunk: int
    """Model chunk of the action's stage on this rank."""
    needs: Message | None
    gives: Message | None
    ends_chunk: bool
    """Whether this is the last backward of its chunk: gradients are complete after it."""


@dataclass(frozen=True, slots=True)
class Program:
    """What one rank does."""

    steps: list[Step]
    incoming: dict[int, list[Message]]
    """By sending rank, the messages that come from it, in the order it sends them."""


def lower(schedule: Schedule, rank: int) -> Program:
    """The program of `rank`. The schedule must be complete (`simulate` says so)."""
    positions = _positions(schedule)
    steps = []
    left: dict[int, int] = {}
    for action in schedule.actions(rank):
        if action.kind in "BW":
            left[action.stage] = left.get(action.stage, 0) + 1
    chunks = {stage: chunk for chunk, stage in enumerate(schedule.stages_of(rank))}
    for action in schedule.actions(rank):
        if action.kind in "BW":
            left[action.stage] -= 1
        needs, gives = _message(schedule, positions, action, -1), _message(schedule, positions, action, 1)
        ends = action.kind in "BW" and left[action.stage] == 0
        steps.append(Step(action, chunks[action.stage], needs, gives, ends))
    incoming: dict[int, list[Message]] = {}
    for step in steps:
        if step.needs is not None and not step.needs.is_local:
            incoming.setdefault(step.needs.source, []).append(step.needs)
    for messages in incoming.values():
        messages.sort(key=lambda message: message.produced)
    return Program(steps, incoming)


def _positions(schedule: Schedule) -> dict[tuple[int, str, int], int]:
    """Position in its row of each (stage, direction, microbatch); I counts as B, since it makes the gradient."""
    found = {}
    for rank in range(schedule.pp):
        for position, action in enumerate(schedule.actions(rank)):
            if action.kind != "W":
                found[action.stage, "F" if action.kind == "F" else "B", action.microbatch] = position
    return found


def _message(
    schedule: Schedule, positions: dict[tuple[int, str, int], int], action: Action, side: int
) -> Message | None:
    """What `action` receives (side -1) or sends (side 1); None at the ends of the model and for weight gradients."""
    if action.kind == "W":
        return None
    kind, down = ("F", 1) if action.kind == "F" else ("B", -1)
    other = action.stage + side * down
    if not 0 <= other < schedule.num_stages:
        return None
    here, there = (action.stage, other) if side == 1 else (other, action.stage)
    return Message(
        kind,
        action.microbatch,
        here,
        there,
        schedule.placement(here),
        schedule.placement(there),
        positions[here, kind, action.microbatch],
        positions[there, kind, action.microbatch],
    )
