"""Chapter 12, exercise `12.schedule`: schedule(pp, microbatches) -> one row of actions per rank.

A row is written as a program, one letter an action; each kind counts its own microbatches. Capital letters belong to
the stage `here`, small ones to a second stage of the same rank.
"""


def wrong_1(pp, microbatches):
    """Believes that splitting the backward is enough: each W stands right after its I, where it delays the next I."""
    rows = []
    for rank in range(pp):
        behind = pp - 1 - rank
        rows.append(_row("F" * behind + "FIW" * (microbatches - behind) + "IW" * behind, rank))
    return rows


def wrong_2(pp, microbatches):
    """Believes that W may wait as long as it likes: so do the activations, and the gaps before it stay empty."""
    rows = []
    for rank in range(pp):
        behind = pp - 1 - rank
        rows.append(_row("F" * behind + "FI" * (microbatches - behind) + "I" * behind + "W" * microbatches, rank))
    return rows


def wrong_3(pp, microbatches):
    """Believes that later ranks warm up longer: they wait for forwards that come after what waits for them."""
    return [_row("F" * rank + "FIW" * (microbatches - rank) + "IW" * rank, rank) for rank in range(pp)]
