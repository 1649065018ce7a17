"""Which item of a data iterator a forward reads.

Every chunk's iterator yields the microbatches in order. Schedules of the sources also run them in order; a reader's own
may not, and then the stages of one microbatch must still see one microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from labkit.schedules.lowering import Program, Step


class Reader:
    """The iterator itself, where microbatches run in order anyway (or None, where the rank has no data)."""

    def __init__(self, iterator: Any, microbatches: int) -> None:
        self.iterator, self._microbatches = iterator, microbatches
        self.wanted = 0
        """Microbatch of the next forward."""

    def _given(self) -> int:
        """Microbatches that the iterator gave."""
        return self.wanted

    def ran_short(self, step: Step) -> ValueError:
        """What to raise where the forward of `step` found no more data."""
        stage, microbatch = step.action.stage, step.action.microbatch
        return ValueError(
            f"stage {stage} (chunk {step.chunk} of its rank) found no data for microbatch {microbatch}: its data "
            f"iterator had enough for {self._given()} of the {self._microbatches} microbatches of a step. Give each "
            f"chunk an iterator of its own with data for {self._microbatches}, or run fewer microbatches"
        )


class ReorderingReader(Reader):
    """Gives a forward step that calls `next` once its own microbatch, and keeps what it skips for later."""

    def __init__(self, source: Iterator[Any], microbatches: int) -> None:
        super().__init__(self, microbatches)
        self._source = source
        self._kept: dict[int, Any] = {}
        self._count = 0

    def _given(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while self.wanted not in self._kept:
            self._kept[self._count] = next(self._source)
            self._count += 1
        return self._kept.pop(self.wanted)


def reader(iterator: Any, program: Program, chunk: int) -> Reader:
    """How the forwards of `chunk` read `iterator`."""
    order = program.forwards[chunk]
    if iterator is None or all(first < second for first, second in pairwise(order)):
        return Reader(iterator, len(order))
    return ReorderingReader(iterator, len(order))
