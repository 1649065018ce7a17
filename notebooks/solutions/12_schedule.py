"""Chapter 12, exercise `12.schedule`: schedule(pp, microbatches) -> one row of actions per rank.

A row is written as a program, one letter an action; each kind counts its own microbatches. Capital letters belong to
the stage `here`, small ones to a second stage of the same rank.
"""


def _row(program: str, here: int, back: int = -1) -> list[str]:
    return [
        f"{here if kind.isupper() else back}{kind.upper()}{program[:i].count(kind)}" for i, kind in enumerate(program)
    ]


def solution(pp: int, microbatches: int) -> list[list[str]]:
    """ZB-V: rank r holds stage r on the way down and 2p - 1 - r on the way up, each with half of its layers.

    Fill the V with forwards; then a forward, an I and a W, one stage after the other; on the way out every I as soon as
    it can be, W where nothing else is ready. The program is written for 2p - 1 microbatches or more, and those that
    are not there are left out.
    """
    planned = max(microbatches, 2 * pp - 1)
    rows = []
    for rank in range(pp):
        left = pp - rank
        fill = "F" * (2 * left - 1) + "fF" * rank + "fiw" * left
        steady = "FIWfiw" * (planned - 2 * pp + rank + 1)
        drain = "IWfiw" * (left - 1) + "Ii" * rank + "IW" * left + "w" * rank + "W" * rank
        row = _row(fill + steady + drain, rank, 2 * pp - 1 - rank)
        rows.append([action for action in row if int(action.lstrip("0123456789")[1:]) < microbatches])
    return rows


def half_way(pp: int, microbatches: int) -> list[list[str]]:
    """ZB-H1, which meets all targets with one stage a rank and none with two.

    1F1B whose weight gradients wait, on rank r for r more microbatches, and fill the time at the end. Every rank then
    keeps p activations, which in 1F1B only rank 0 does. Needs m >= p.
    """
    rows = []
    for rank in range(pp):
        behind = pp - 1 - rank
        steady = "FI" * rank + "FIW" * (microbatches - pp + 1)
        rows.append(_row("F" * behind + steady + "IW" * behind + "W" * rank, rank))
    return rows


def wrong_1(pp: int, microbatches: int) -> list[list[str]]:
    """Believes that splitting the backward is enough: each W stands right after its I, where it delays the next I."""
    rows = []
    for rank in range(pp):
        behind = pp - 1 - rank
        rows.append(_row("F" * behind + "FIW" * (microbatches - behind) + "IW" * behind, rank))
    return rows


def wrong_2(pp: int, microbatches: int) -> list[list[str]]:
    """Believes that W may wait as long as it likes: so do the activations, and the gaps before it stay empty."""
    rows = []
    for rank in range(pp):
        behind = pp - 1 - rank
        rows.append(_row("F" * behind + "FI" * (microbatches - behind) + "I" * behind + "W" * microbatches, rank))
    return rows


def wrong_3(pp: int, microbatches: int) -> list[list[str]]:
    """Believes that later ranks warm up longer: they wait for forwards that come after what waits for them."""
    return [_row("F" * rank + "FIW" * (microbatches - rank) + "IW" * rank, rank) for rank in range(pp)]
