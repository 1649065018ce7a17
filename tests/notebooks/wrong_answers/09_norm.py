"""Chapter 09, exercise `09.norm`: norm(ranks) -> the norm of the whole gradient, from each rank's slices."""


def wrong_1(ranks):
    """Keeps the rule of an optimizer that is whole on every rank: replicas hold the same, so only the first counts."""
    return solution([rank for rank in ranks if rank["dp"] == 0])


def wrong_2(ranks):
    """Adds up everything that any rank holds, and so counts a norm's weight on each rank of tp."""
    return squares(ranks, lambda rank, piece: True) ** 0.5


def wrong_3(ranks):
    """Adds norms as if they were squares; the norm of two parts is the root of the sum of their squares."""
    return sum(solution([rank]) for rank in ranks)
