"""Chapter 13, exercise `13.norm`: global_norm(ranks) -> the norm of the whole model's gradient."""

import math


def wrong_1(ranks):
    """Forgets the tied weight: first and last stage have one matrix and one gradient, and both count it."""
    counted = [
        p["grad"] for rank in ranks if rank["dp"] == 0 for p in rank["parameters"] if p["cut"] or rank["tp"] == 0
    ]
    return math.sqrt(sum(map(_squares, counted)))


def wrong_2(ranks):
    """Lets every rank of tp count the norms' weights, which all of them hold whole and alike."""
    counted = [p["grad"] for rank in ranks if rank["dp"] == 0 for p in rank["parameters"] if not p["shared"]]
    return math.sqrt(sum(map(_squares, counted)))


def wrong_3(ranks):
    """Adds the ranks' norms: lengths of pieces that stand at right angles add up as squares."""
    return sum(solution([rank]) for rank in ranks)
