"""Chapter 10, exercise `10.schedule`: schedule(pp, microbatches) -> one row of actions per rank.

A row is written as a program, one letter an action; each kind counts its own microbatches.
"""


def _row(rank: int, program: str) -> list[str]:
    return [f"{rank}{kind}{program[:i].count(kind)}" for i, kind in enumerate(program)]


def solution(pp: int, microbatches: int) -> list[list[str]]:
    """ZB-H1: 1F1B whose weight gradients wait, on rank r for r more microbatches, and fill the time at the end.

    Every rank then keeps p activations, which in 1F1B only rank 0 does. Needs m >= p.
    """
    rows = []
    for rank in range(pp):
        behind = pp - 1 - rank
        steady = "FI" * rank + "FIW" * (microbatches - pp + 1)
        rows.append(_row(rank, "F" * behind + steady + "IW" * behind + "W" * rank))
    return rows


def wrong_1(pp: int, microbatches: int) -> list[list[str]]:
    """Believes that splitting the backward is enough: each W stands right after its I, where it delays the next I."""
    rows = []
    for rank in range(pp):
        behind = pp - 1 - rank
        rows.append(_row(rank, "F" * behind + "FIW" * (microbatches - behind) + "IW" * behind))
    return rows


def wrong_2(pp: int, microbatches: int) -> list[list[str]]:
    """Believes that W may wait as long as it likes: so do the activations, and the gaps before it stay empty."""
    rows = []
    for rank in range(pp):
        behind = pp - 1 - rank
        rows.append(_row(rank, "F" * behind + "FI" * (microbatches - behind) + "I" * behind + "W" * microbatches))
    return rows


def wrong_3(pp: int, microbatches: int) -> list[list[str]]:
    """Believes that ranks further down warm up longer: they wait for forwards that come after what waits for them."""
    return [_row(rank, "F" * rank + "FIW" * (microbatches - rank) + "IW" * rank) for rank in range(pp)]
