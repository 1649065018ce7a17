"""From schedule to schedule: split full backwards into input and weight gradients, and merge them again.

    split_backward(s, weight="after")   0F0 0B0 0F1 0B1  ->  0F0 0I0 0W0 0F1 0I1 0W1
    split_backward(s, weight="end")     0F0 0B0 0F1 0B1  ->  0F0 0I0 0F1 0I1 0W0 0W1
    merge_backward(either)                               ->  0F0 0B0 0F1 0B1

Only I is on the way of a gradient to the previous stage. A W right after its I therefore changes nothing but the moment
at which the gradient leaves; a W put off fills time in which the rank would wait, and keeps its activations alive.

Neither pass can make a legal schedule illegal: whoever waits for a gradient waits for I, which is where B was.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from labkit.schedules.dependencies import positions
from labkit.schedules.ir import KINDS, Schedule

_B, _I, _W = (KINDS.index(kind) for kind in "BIW")


def split_backward(schedule: Schedule, *, weight: Literal["after", "end"]) -> Schedule:
    """Each B as I, with its W right after it or, in the same order, at the end of the row.

    What is split already stays as it is. Raises ValueError for another `weight`.
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


def merge_backward(schedule: Schedule) -> Schedule:
    """Each I with its W as a B in the place of I, where the W follows on the same rank; the rest stays as it is."""
    at = positions(schedule)
    inputs, weights = at[_I], at[_W]
    pairs = (inputs >= 0) & (inputs < weights) & (schedule.ranks[inputs] == schedule.ranks[weights])
    kinds = schedule.kinds.copy()
    kinds[inputs[pairs]] = _B
    kept = np.ones(len(schedule), dtype=bool)
    kept[weights[pairs]] = False
    source = np.flatnonzero(kept)
    return _rows(schedule, schedule.name.removesuffix(", split"), source, kinds[source])


def _rows(schedule: Schedule, name: str, source: np.ndarray, kinds: np.ndarray) -> Schedule:
    """The actions at `source`, rank after rank, with these kinds."""
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
