"""Zero-bubble schedules with one stage a rank: weight gradients wait, and fill what would be idle time."""

from __future__ import annotations

from labkit.schedules.ir import Schedule
from labkit.schedules.programs import Phase, from_programs
from labkit.schedules.tables import require_positive


def zero_bubble_h1(pp: int, microbatches: int) -> Schedule:
    """1F1B with split backwards, whose weight gradients run late on late ranks (ZB-H1, arXiv 2401.10241 section 2.1).

    A gradient leaves for the previous stage after I, without waiting for W. Rank r starts its weight gradients r input
    gradients late; in the flush, where 1F1B waits for gradients from below, it then has W to do.

    Program of rank r, with w = p - r - 1 and m >= p: `wF r(FI) (m-p+1)(FIW) w(IW) rW`.
    Bubble: (p - 1)(F + I - W) where W <= F and W <= I, against (p - 1)(F + I + W) of 1F1B; without these conditions
    (p - 1) max(F + I - W, F, I). Put right after its I, a W would leave (p - 1)(F + I).
    Peak in flight: min(p, m) on every rank, what rank 0 of 1F1B has.
    """
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
