"""Zero-bubble schedules with one stage a rank: weight gradients wait, and fill what would be idle time."""

from __future__ import annotations

from labkit.schedules.ir import Schedule
from labkit.schedules.programs import Phase, from_programs
from labkit.schedules.tables import require_positive


def zero_bubble_h1(pp: int, microbatches: int) -> Schedule:
    """ZB-H1: 1F1B whose weight gradients run r backwards late."""
    require_positive(pp=pp, microbatches=microbatches)
    programs = [_zero_bubble_h1(pp, microbatches, rank) for rank in range(pp)]
    return from_programs("ZB-H1", microbatches, programs, lambda rank, _: rank)


def _zero_bubble_h1(pp: int, microbatches: int, rank: int) -> list[Phase]:
    warmup = min(pp - rank - 1, microbatches)
    late = min(rank, microbatches)
    steady = microbatches - warmup
    return [
        (warmup, "F"),
        (min(late, steady), "F I"),
        (max(steady - late, 0), "F I W"),
        (max(late - steady, 0), "I"),
        (microbatches - max(steady, late), "I W"),
        (late, "W"),
    ]
