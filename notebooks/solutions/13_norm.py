"""Chapter 13, exercise `13.norm`: global_norm(ranks) -> the norm of the whole model's gradient."""

import math
from typing import Any

Ranks = list[dict[str, Any]]


def _squares(grad: list[float]) -> float:
    return sum(value * value for value in grad)


def solution(ranks: Ranks) -> float:
    """Count a cut part where it is, a whole parameter on tp rank 0, one replica, and the tied weight once."""
    total = 0.0
    for rank in ranks:
        for parameter in rank["parameters"]:
            first_copy = parameter["cut"] or rank["tp"] == 0
            if rank["dp"] == 0 and first_copy and not parameter["shared"]:
                total += _squares(parameter["grad"])
    return math.sqrt(total)


def wrong_1(ranks: Ranks) -> float:
    """Forgets the tied weight: first and last stage have one matrix and one gradient, and both count it."""
    counted = [
        p["grad"] for rank in ranks if rank["dp"] == 0 for p in rank["parameters"] if p["cut"] or rank["tp"] == 0
    ]
    return math.sqrt(sum(map(_squares, counted)))


def wrong_2(ranks: Ranks) -> float:
    """Lets every rank of tp count the norms' weights, which all of them hold whole and alike."""
    counted = [p["grad"] for rank in ranks if rank["dp"] == 0 for p in rank["parameters"] if not p["shared"]]
    return math.sqrt(sum(map(_squares, counted)))


def wrong_3(ranks: Ranks) -> float:
    """Adds the ranks' norms: lengths of pieces that stand at right angles add up as squares."""
    return sum(solution([rank]) for rank in ranks)
