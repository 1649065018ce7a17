"""Chapter 04, exercise `04.tied`: tied(ranks) -> the final gradient of the tied table, by rank."""

from collections.abc import Callable
from typing import Any

Ranks = list[dict[str, Any]]
Gradients = list[list[float] | None]


def _added(ranks: Ranks, together: Callable[[dict[str, Any], dict[str, Any]], bool]) -> Gradients:
    """Sum of the gradients of the ranks that belong together, for each rank that holds a copy."""
    found: Gradients = []
    for rank in ranks:
        parts = [other["grad"] for other in ranks if other["grad"] is not None and together(rank, other)]
        found.append(None if rank["grad"] is None else [sum(column) for column in zip(*parts)])
    return found


def _one_pipeline(rank: dict[str, Any], other: dict[str, Any]) -> bool:
    return (rank["tp"], rank["dp"]) == (other["tp"], other["dp"])


def solution(ranks: Ranks) -> Gradients:
    """First and last stage of the same pipeline add up: equal in tp and dp, and both have a gradient."""
    return _added(ranks, _one_pipeline)


def wrong_1(ranks: Ranks) -> Gradients:
    """Takes the mean, as data parallelism does; here the two gradients are parts of one, not two samples of it."""
    stages = 1 + max(rank["pp"] for rank in ranks)
    return [None if total is None else [value / min(stages, 2) for value in total] for total in solution(ranks)]


def wrong_2(ranks: Ranks) -> Gradients:
    """Adds up over all of tp, whose ranks hold different rows of the table."""
    return _added(ranks, lambda rank, other: rank["dp"] == other["dp"])


def wrong_3(ranks: Ranks) -> Gradients:
    """Gives the sum to the first stage alone, as to a server; the last stage's copy then takes another update."""
    return [total if rank["pp"] == 0 else rank["grad"] for rank, total in zip(ranks, solution(ranks))]
