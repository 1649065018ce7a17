"""From the program of each rank to the columns of a Schedule, in numpy.

A program is a list of phases `(times, "F0 I1 W1")`: the words of the second, repeated as often as the first says. A
word is a kind and a model chunk of the rank; `F` alone means chunk 0. Every kind runs the microbatches of a chunk in
ascending order, so numbers need not be written. `W` alone is the oldest weight gradient that is still open, of whatever
chunk; a program has either such W or numbered ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from labkit.schedules.ir import KINDS, Schedule

Phase = tuple[int, str]
"""How often, and which words."""

_I, _W = KINDS.index("I"), KINDS.index("W")
_OLDEST = -1


def from_programs(
    name: str, microbatches: int, programs: Sequence[Sequence[Phase]], stage_of: Callable[[int, int], int]
) -> Schedule:
    """The schedule of these programs, one per rank; `stage_of(rank, chunk)` is the stage of a rank's model chunk.

    Phases that repeat no time are left out. Actions of microbatches from `microbatches` on are dropped, so that a
    program for more of them serves.
    """
    rows = []
    for rank, program in enumerate(programs):
        kinds, chunks, numbers = _row(program)
        stages = np.array([stage_of(rank, chunk) for chunk in range(1 + int(chunks.max()))])
        kept = numbers < microbatches
        rows.append((stages[chunks[kept]], kinds[kept], numbers[kept]))
    stages, kinds, numbers = (np.concatenate(columns) for columns in zip(*rows, strict=True))
    return Schedule.from_columns(
        name,
        1 + int(stages.max()),
        microbatches,
        stages=stages,
        kinds=kinds,
        microbatches=numbers,
        offsets=np.cumsum([0, *(len(row[0]) for row in rows)]),
    )


def _row(program: Sequence[Phase]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(kinds, chunks, microbatches) of one rank's actions."""
    phases = [(times, words.split()) for times, words in program if times]
    kinds = np.concatenate([np.tile([KINDS.index(word[0]) for word in words], times) for times, words in phases])
    chunks = np.concatenate([np.tile([_chunk(word) for word in words], times) for times, words in phases])
    numbers = np.zeros_like(kinds)
    for kind in range(len(KINDS)):
        for chunk in range(1 + int(chunks.max())):
            here = (kinds == kind) & (chunks == chunk)
            numbers[here] = np.arange(np.count_nonzero(here))
    if (chunks == _OLDEST).any():
        inputs, weights = kinds == _I, kinds == _W
        chunks[weights], numbers[weights] = chunks[inputs], numbers[inputs]
    return kinds, chunks, numbers


def _chunk(word: str) -> int:
    if word == "W":
        return _OLDEST
    return int(word[1:] or 0)
