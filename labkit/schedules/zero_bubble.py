"""Split backwards, and the zero-bubble schedules built of them.

    split_backward(s, weight="after")   0F0 0B0 0F1 0B1  ->  0F0 0I0 0W0 0F1 0I1 0W1
    split_backward(s, weight="end")     0F0 0B0 0F1 0B1  ->  0F0 0I0 0F1 0I1 0W0 0W1

The previous stage waits for I alone. A W right after its I only lets the gradient leave earlier. A later W fills time
in which the rank would wait, and keeps its activations alive longer. Splitting keeps a legal schedule legal:
an action that waits for a gradient waits for I, and I stands where B was.

`zero_bubble_h1` has one stage a rank. `zbv` and `dualpipe_v` run over a V of 2 p stages. Rank r holds stage r on the
way down and stage 2 p - 1 - r on the way up.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from labkit.config.errors import counted
from labkit.schedules.ir import KINDS, Schedule
from labkit.schedules.tables import Phase, from_programs, require_positive

_B, _I, _W = (KINDS.index(kind) for kind in "BIW")


def split_backward(schedule: Schedule, *, weight: Literal["after", "end"]) -> Schedule:
    """Replace each B by I, and put its W right after it or, in the same order, at the end of the row.

    Backwards that are split already stay. Raises ValueError for another `weight`.
    """
    if weight not in ("after", "end"):
        raise ValueError(f"weight is {weight!r}: put weight gradients 'after' their input gradient or at the 'end'")
    whole = schedule.kinds == _B
    kept = np.arange(len(schedule))
    source = np.concatenate([kept, np.flatnonzero(whole)])
    kinds = np.concatenate([np.where(whole, _I, schedule.kinds), np.full(np.count_nonzero(whole), _W)])
    ranks = schedule.ranks[source]
    late = np.arange(len(source)) >= len(schedule)  # the new W
    order = np.lexsort((late, source, ranks) if weight == "after" else (source, late, ranks))
    return _rows(schedule, f"{schedule.name}, split", source[order], kinds[order])


def _rows(schedule: Schedule, name: str, source: np.ndarray, kinds: np.ndarray) -> Schedule:
    """Return the actions at `source`, rank after rank, with these kinds."""
    lengths = np.bincount(schedule.ranks[source], minlength=schedule.pp)
    return Schedule.from_columns(
        name,
        schedule.num_stages,
        schedule.num_microbatches,
        stages=schedule.stages[source],
        kinds=kinds,
        microbatches=schedule.microbatches[source],
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
    )


# ---- schedules ----


def zero_bubble_h1(pp: int, microbatches: int) -> Schedule:
    """1F1B with split backwards, whose weight gradients run late on late ranks (ZB-H1, arXiv 2401.10241 section 2.1).

    A gradient leaves for the previous stage after I, without waiting for W. Rank r starts its weight gradients r input
    gradients late. In the flush 1F1B waits for gradients of later stages; here the rank computes W meanwhile.

    Program of rank r, with w = p - r - 1 and m >= p: `wF r(FI) (m-p+1)(FIW) w(IW) rW`.
    Bubble: (p - 1) max(F + I - W, F, I).
    If W <= F and W <= I, the bubble is (p - 1)(F + I - W). 1F1B has (p - 1)(F + I + W).
    With each W right after its I, the bubble would be (p - 1)(F + I).
    Peak in flight: min(p, m) on every rank, as on rank 0 of 1F1B.
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


def zbv(pp: int, microbatches: int) -> Schedule:
    """Split backwards on a V, with the memory of 1F1B and next to no idle time (ZB-V, arXiv 2401.10241 section 6).

    Both ends of the model are on rank 0, so a microbatch ends where it started, and its backward can begin at once.
    Chunk 0 is the way down, chunk 1 the way up.

    Program of rank r, with l = p - r and m >= 2p - 1:
        1. (2l-1) F0
        2. r (F1 F0)
        3. l (F1 I1 W1)
        4. (m-2p+r+1) (F0 I0 W0 F1 I1 W1)
        5. (l-1) (I0 W0 F1 I1 W1)
        6. r (I0 I1)
        7. l (I0 W0)
        8. r W1, r W0
    With fewer microbatches this is the program for 2p - 1 of them, less the actions of the missing ones.

    Bubble for F = I = W = t: (p - 1) t, the p - 1 forwards before the last rank has work.
    Then the makespan is (6m + p - 1) t, the fraction (p - 1)/(6m + p - 1), the ratio (p - 1)/(6m).
    Bubble for F <= I and W <= I <= 2W: (p - 1) I.
    These hold for m >= 2p - 1. With fewer microbatches and equal times: max(p - 1, 2(2p - 1 - m)) t.
    Peak in flight: min(2p, m + r + 1, 2m) stages, each half as large as 1F1B's. Rank 0 of 1F1B has the same memory.
    """
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
    """DualPipe cut in half and laid on a V (DualPipeV; deepseek-ai/DualPipe, arXiv 2412.19437 section 3.2.1).

    In its main phase a rank always has a forward of one chunk next to a backward of the other. The communication of one
    can overlap the computation of the other. A Schedule runs one action at a time, so the two stand one after the other
    here, and every backward is I and W. A bare W below is the oldest open weight gradient. It follows its I at once
    wherever the original has a full backward.

    Program of rank r, with l = p - r - 1:
        1. 2l F0
        2. (r+1) (F0 F1)
        3. l (I1 W F1)
        4. (m-2p+r+1) (F0 I1 W F1 I0 W)
        5. l (I1 W F1 I0 W)
        6. (r+1) backwards (I W), chunks 1 and 0 by turns, then I of (r+1) more
        7. l (W I0)
        8. (r+1) W

    Bubble for W <= I <= F <= I + W: (p - 1)(F + I - W).
    With F = I = W = t, the bubble is (p - 1) t and the makespan (6m + p - 1) t.
    Then the fraction is (p - 1)/(6m + p - 1) and the ratio (p - 1)/(6m).
    Peak in flight: 2p + 1 stages on every rank, each half as large as 1F1B's.

    Raises:
        ValueError: m < 2p.
    """
    require_positive(pp=pp, microbatches=microbatches)
    if microbatches < 2 * pp:
        raise ValueError(
            f"{counted(microbatches, 'microbatch')} on {pp} pipeline ranks: dualpipe_v needs at least {2 * pp}, one "
            f"per stage; raise microbatches to {2 * pp}, or use zbv"
        )
    return _over_a_v("DualPipeV", pp, microbatches, [_dualpipe_v(pp, microbatches, rank) for rank in range(pp)])


def merged_dualpipe_v(pp: int, microbatches: int) -> Schedule:
    """DualPipeV whose pairs really merge, as DualPipe's authors run them.

    `dualpipe_v`'s program with merged pairs in its main phase and the one after it. A merged backward is a full one:
        4. (m-2p+r+1) (F0&B1 F1&B0)
        5. l (I1 W F1&B0)
    Errors and peak in flight are those of `dualpipe_v`.
    """
    plain = dualpipe_v(pp, microbatches)  # for its errors
    programs = [_dualpipe_v(pp, microbatches, rank) for rank in range(pp)]
    for program in programs:
        for phase in (3, 4):
            times, words = program[phase]
            words = words.replace("F0 I1 W", "F0&B1").replace("F1 I0 W", "F1&B0")
            program[phase] = (times, words)
    return _over_a_v(f"merged {plain.name}", pp, microbatches, programs)


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
