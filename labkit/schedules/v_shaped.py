"""Schedules over a V: 2 p stages, rank r holds r on the way down and 2 p - 1 - r on the way up."""

from __future__ import annotations

from labkit.schedules.ir import Schedule
from labkit.schedules.programs import Phase, from_programs
from labkit.schedules.tables import require_positive


def zbv(pp: int, microbatches: int) -> Schedule:
    """ZB-V."""
    require_positive(pp=pp, microbatches=microbatches)
    planned = max(microbatches, 2 * pp - 1)
    return _over_a_v("ZB-V", pp, microbatches, [_zbv(pp, planned, rank) for rank in range(pp)])


def _zbv(pp: int, microbatches: int, rank: int) -> list[Phase]:
    left = pp - rank
    return [
        (2 * left - 1, "F0"),
        (rank, "F1 F0"),
        (left, "F1 I1 W1"),
        (microbatches - 2 * pp + rank + 1, "F0 I0 W0 F1 I1 W1"),
        (left - 1, "I0 W0 F1 I1 W1"),
        (rank, "I0 I1"),
        (left, "I0 W0"),
        (rank, "W1"),
        (rank, "W0"),
    ]


def dualpipe_v(pp: int, microbatches: int) -> Schedule:
    """DualPipeV."""
    require_positive(pp=pp, microbatches=microbatches)
    if microbatches < 2 * pp:
        raise ValueError(
            f"{microbatches} microbatches on {pp} pipeline ranks: dualpipe_v needs at least {2 * pp}, one per stage; "
            "raise the global batch size, or use zbv"
        )
    return _over_a_v("DualPipeV", pp, microbatches, [_dualpipe_v(pp, microbatches, rank) for rank in range(pp)])


def _dualpipe_v(pp: int, microbatches: int, rank: int) -> list[Phase]:
    below = pp - rank - 1
    half, odd = divmod(rank + 1, 2)
    return [
        (2 * below, "F0"),
        (rank + 1, "F0 F1"),
        (below, "I1 W F1"),
        (microbatches - 2 * pp + rank + 1, "F0 I1 W F1 I0 W"),
        (below, "I1 W F1 I0 W"),
        (half, "I1 W I0 W"),
        (odd, "I1 W I0"),
        (half, "I1 I0"),
        (below, "W I0"),
        (rank + 1, "W"),
    ]


def _over_a_v(name: str, pp: int, microbatches: int, programs: list[list[Phase]]) -> Schedule:
    return from_programs(name, microbatches, programs, lambda rank, chunk: 2 * pp - 1 - rank if chunk else rank)
