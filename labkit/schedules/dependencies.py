"""Dependencies of a schedule's actions, the check that no action is missing, and the picture of a deadlock.

    F(s, m)          needs F(s-1, m)
    B(s, m), I(s, m) need F(s, m), and B or I(s+1, m)
    W(s, m)          needs I(s, m)

Merged actions start together, when both have what they need, and give both results at their end.

Functions fill columns rank by rank: besides the result they hold scratch memory for one row at a time.

Legend: A = actions of the schedule, P = ranks, S = stages, M = microbatches.
"""

from __future__ import annotations

from itertools import islice, pairwise

import numpy as np

from labkit.schedules.ir import Action, Schedule, ScheduleError, grid

_F, _B, _I, _W = range(4)
_MOST_NAMED = 10
"""Cells that a refusal names; it counts the others."""
_MOST_CELLS = 1000
"""Most cells per action of a table. More cells mean mistyped sizes, and a table that exhausts memory."""


def positions(schedule: Schedule) -> np.ndarray:
    """Return the index of each action in the schedule's columns, by kind, stage and microbatch (4, S, M). A missing
    action has -1; a doubled action has its last index."""
    at = np.full((4, schedule.num_stages, schedule.num_microbatches), -1, dtype=np.int32)
    flat = at.reshape(-1)
    for row in _rows(schedule):
        cell = schedule.kinds[row].astype(np.int64) * schedule.num_stages + schedule.stages[row]
        flat[cell * schedule.num_microbatches + schedule.microbatches[row]] = np.arange(row.start, row.stop)
    return at


def dependencies(schedule: Schedule, at: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return two columns (A,): index of the action that each action needs from the neighbouring stage, and from its own
    stage.

    -1 means none. The schedule must be complete; `at` is its `positions`, if already known."""
    at = positions(schedule) if at is None else at
    gradient = np.where(at[_B] >= 0, at[_B], at[_I])
    edge = np.full((1, schedule.num_microbatches), -1, dtype=np.int32)
    before, after = (np.concatenate(pair).reshape(-1) for pair in ((edge, at[_F, :-1]), (gradient[1:], edge)))
    forward, inputs = at[_F].reshape(-1), at[_I].reshape(-1)
    from_neighbour, own = np.empty((2, len(schedule)), dtype=np.int32)
    for row in _rows(schedule):
        kinds = schedule.kinds[row]
        cell = schedule.stages[row].astype(np.int64) * schedule.num_microbatches + schedule.microbatches[row]
        from_neighbour[row] = np.where(kinds == _F, before[cell], after[cell])
        own[row] = forward[cell]
        own[row][kinds == _F] = -1
        weight = np.flatnonzero(kinds == _W)
        from_neighbour[row][weight] = -1
        own[row][weight] = inputs[cell[weight]]
    return from_neighbour, own


def producers(schedule: Schedule) -> np.ndarray:
    """Index (A,) of the action on a neighbouring stage whose result each action reads; -1 for none."""
    copied = lambda rows: dependencies(rows)[0].copy()  # noqa: E731  # not a view, which would keep the other column
    return schedule.derived("action whose result each reads", copied)


def consumers(schedule: Schedule) -> np.ndarray:
    """Index (A,) of the action on a neighbouring stage that reads each action's result; -1 for none."""
    return schedule.derived("action that reads each one's result", _inverse_of_producers)


def _inverse_of_producers(schedule: Schedule) -> np.ndarray:
    producer = producers(schedule)
    reads = np.flatnonzero(producer >= 0)
    consumer = np.full(len(schedule), -1, dtype=np.int32)
    consumer[producer[reads]] = reads
    return consumer


def awaited(schedule: Schedule, at: np.ndarray | None = None) -> np.ndarray:
    """Index (A,) of the action on another rank that each action waits for; -1 for none.

    An action of the same rank is normally done in time. If the row has it later, the column names it instead: the rank
    then waits forever. The backward of a merged pair stands for both, because the pair ends as a whole."""
    from_neighbour, own = dependencies(schedule, at)
    crosses = (from_neighbour >= 0) & (schedule.ranks[from_neighbour] != schedule.ranks)
    waits = np.where(crosses, from_neighbour, -1)
    on_rank = np.maximum(np.where(crosses, -1, from_neighbour), own)
    index = np.arange(len(schedule), dtype=np.int32)
    waits = np.where(on_rank > index, on_rank, waits)
    if not schedule.has_pairs:
        return waits
    waits = np.where(schedule.merged & (own == index - 1), index, waits)  # the backward of its own forward: never
    return np.where(waits >= 0, waits + np.append(schedule.merged[1:], False)[waits], waits)


def _rows(schedule: Schedule) -> list[slice]:
    offsets = schedule.offsets.tolist()
    return [slice(start, stop) for start, stop in pairwise(offsets)]


def require_complete(schedule: Schedule) -> np.ndarray:
    """Check that each stage runs each microbatch once forward and once backward (B, or I and W), on one rank.

    A forward-only schedule needs no backward. Returns `positions`. Raises ScheduleError with the first ten cells that
    break the rule."""
    if schedule.num_stages * schedule.num_microbatches > _MOST_CELLS * len(schedule):
        raise _incomplete(schedule, _first_missing(schedule), {})
    at = positions(schedule)
    there = at >= 0
    lacking = [("F", ~there[_F])]
    if not schedule.forward_only:
        none = ~(there[_B] | there[_I] | there[_W])
        lacking += [("B", none), ("W", there[_I] & ~there[_W]), ("I", there[_W] & ~there[_I])]
    missing = _missing(lacking)
    doubled = np.count_nonzero(there) < len(schedule)
    mixed = bool((there[_B] & (there[_I] | there[_W])).any())
    away = any(
        (schedule.placement_of_stages[schedule.stages[row]] != rank).any() for rank, row in enumerate(_rows(schedule))
    )
    marks = _misplaced(schedule) if doubled or mixed or away else {}
    if missing or marks:
        raise _incomplete(schedule, missing, marks)
    return at


def _incomplete(schedule: Schedule, missing: list[str], marks: dict[tuple[int, int], str]) -> ScheduleError:
    return ScheduleError("\n".join([f"{schedule.name} cannot run:", grid(schedule, marks), *missing]))


def _missing(lacking: list[tuple[str, np.ndarray]]) -> list[str]:
    """Return a sentence for each of the first true cells (S, M), by kind, and a last sentence that counts the
    others."""
    named = [
        f"{Action(s, kind, m)} is missing"
        for kind, cells in lacking
        for s, m in np.argwhere(cells)[:_MOST_NAMED].tolist()
    ]
    others = sum(int(cells.sum()) for _, cells in lacking) - _MOST_NAMED
    return [*named[:_MOST_NAMED], f"and {others} more"] if others > 0 else named


def _first_missing(schedule: Schedule) -> list[str]:
    """Return the first missing forwards, found without a table of all cells."""
    forward = schedule.kinds == _F
    there = set(zip(schedule.stages[forward].tolist(), schedule.microbatches[forward].tolist(), strict=True))
    sizes = (schedule.num_stages, schedule.num_microbatches)
    lacking = (Action(s, "F", m) for s in range(sizes[0]) for m in range(sizes[1]) if (s, m) not in there)
    named = [f"{action} is missing" for action in islice(lacking, _MOST_NAMED)]
    return [*named, f"and {sizes[0] * sizes[1] - len(there) - len(named)} more"]


def _misplaced(schedule: Schedule) -> dict[tuple[int, int], str]:
    """Return marks for at most ten actions that are doubled, both whole and split, or on another rank than their
    stage."""
    counts = np.zeros((4, schedule.num_stages, schedule.num_microbatches), dtype=np.int64)
    cell = (schedule.kinds, schedule.stages, schedule.microbatches)
    np.add.at(counts, cell, 1)
    split = (counts[_I] + counts[_W])[cell[1:]] > 0
    away = schedule.ranks != schedule.placement_of_stages[schedule.stages]
    sentences = (
        (counts[cell] > 1, "appears more than once"),
        ((schedule.kinds == _B) & split, "is a full backward, although there is a split one"),
        (away, "is on a rank that does not hold its stage"),
    )
    marks: dict[tuple[int, int], str] = {}
    for bad, sentence in sentences:
        for index in np.flatnonzero(bad)[:_MOST_NAMED].tolist():
            marks.setdefault(schedule.locate(index), f"{schedule.action(index)} {sentence}")
    return marks


def explain_deadlock(schedule: Schedule, heads: np.ndarray, done: np.ndarray) -> str:
    """Draw the grid and mark a circle of ranks that wait for each other.

    From the first stuck rank the function follows the waits until a rank repeats. heads: index of each rank's next
    action (P,); done: true for actions that have run (A,)."""
    needs, done = dependencies(schedule), done.copy()
    done[:-1] &= done[1:] | ~schedule.merged[1:]  # a merged pair ends as a whole
    wanted = {}
    for rank, index in enumerate(heads.tolist()):
        if index < schedule.offsets[rank + 1]:
            wanted[rank] = next(int(need[index]) for need in needs if need[index] >= 0 and not done[need[index]])
    path = [min(wanted)]
    while (following := int(schedule.ranks[wanted[path[-1]]])) not in path:
        path.append(following)
    circle = path[path.index(following) :]
    marks = {}
    for rank in circle:
        other, mine = int(schedule.ranks[wanted[rank]]), int(heads[rank])
        sentence = f"{schedule.action(mine)} waits for {schedule.action(wanted[rank])}"
        head = int(heads[other])
        first = head - int(schedule.merged[head])
        cell = range(first, first + 1 + int(schedule.merged[first + 1 : first + 2].any()))
        why = "itself waits to run" if wanted[rank] in cell else f"runs after {schedule.action(head)}"
        if wanted[rank] == mine - 1 and schedule.merged[mine]:
            why = "runs in the same pair"
        marks[schedule.locate(mine)] = f"{sentence}, which rank {other} {why}"
    ranks = " -> ".join(f"rank {rank}" for rank in [*circle, circle[0]])
    why = (
        f"these wait for each other: {ranks}"
        if len(circle) > 1
        else f"rank {circle[0]} waits for an action of its own that is not before"
        if schedule.has_pairs
        else f"rank {circle[0]} waits for a later action of its own"
    )
    return "\n".join([f"{schedule.name} cannot run, {why}", grid(schedule, marks)])
