"""The place of a rank's part of a parameter in the whole tensor: boxes.

A checkpoint stores whole tensors as boxes: an offset and a shape in the tensor of one process, without padding. Each
layout cuts a tensor into other boxes, and a box of one layout overlaps boxes of another. So a run can read what any
other layout wrote, and no rank ever needs the whole tensor.

| cut                                     | boxes of one rank                                                       |
|-----------------------------------------|-------------------------------------------------------------------------|
| none                                    | the whole tensor                                                        |
| tp along a dimension, s blocks          | one in each of s blocks (2 for SwiGLU's [gate; up])                     |
| rows that neighbours hold alike         | its own rows, and the rows at the end of the neighbours' block          |
| ep, etp                                 | a range of experts, and a part of each                                  |
| padding of the vocabulary               | rows after the last token are in no box                                 |
| distributed optimizer                   | a run of elements: the end of a row, whole rows, the start of a row     |

`placements` covers the first five, `boxes_of_run` the last. All numbers are elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from labkit.comm.groups import ParallelGroups
    from labkit.parallel.parameters.parameter_record import ParameterRecord


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor."""

    offset: tuple[int, ...]
    """First element along each dimension."""
    shape: tuple[int, ...]
    """Elements along each dimension."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """Return the elements that both boxes have, or None."""
        first = tuple(map(max, self.offset, other.offset))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape))
        shape = tuple(end - start for end, start in zip(ends, first))
        return Box(first, shape) if all(size > 0 for size in shape) else None

    def view(self, tensor: Tensor, inner: Box) -> Tensor:
        """Return the elements `inner` of `tensor`, which holds this box, as a view."""
        for dim, (start, inner_start, size) in enumerate(zip(self.offset, inner.offset, inner.shape)):
            tensor = tensor.narrow(dim, inner_start - start, size)
        return tensor

    def moved(self, before: Sequence[int], after: Sequence[int]) -> Box:
        """Return the box in other coordinates, in which the point `before` is the point `after`."""
        return Box(tuple(o - b + a for o, b, a in zip(self.offset, before, after)), self.shape)


def whole(shape: Sequence[int]) -> Box:
    """Return the box of all elements."""
    return Box((0,) * len(shape), tuple(shape))


def boxes_of_run(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[Box, int]]:
    """Yield boxes that cover the elements start .. end - 1 of the flattened tensor, each with its first element.

    The elements of such a box lie one after the other in memory.
    """
    if start >= end:
        return
    if not shape:
        yield Box((), ()), start
        return
    row = math.prod(shape[1:])
    first = -(-start // row)
    rows = max(0, end // row - first)  # only whole rows
    yield from _in_row(shape, row, start, min(end, first * row))
    if rows:
        yield Box((first, *(0 for _ in shape[1:])), (rows, *shape[1:])), first * row
    yield from _in_row(shape, row, (first + rows) * row, end)


def _in_row(shape: Sequence[int], row: int, start: int, end: int) -> Iterator[tuple[Box, int]]:
    """Yield the boxes of elements that lie in one row."""
    at = start // row
    for inner, first in boxes_of_run(shape[1:], start - at * row, end - at * row):
        yield Box((at, *inner.offset), (1, *inner.shape)), at * row + first


@dataclass(frozen=True, slots=True)
class Placement:
    """A part of a rank's tensor, and the same part in the whole tensor."""

    local: Box
    """Place in the rank's tensor."""
    offset: tuple[int, ...]
    """First element in the whole tensor."""
    copied: bool
    """An earlier neighbour of tp holds these rows as well, and writes them."""

    @property
    def box(self) -> Box:
        """Place in the whole tensor."""
        return Box(self.offset, self.local.shape)

    def of(self, part: Box) -> Placement | None:
        """Return the placement of those elements of this one that lie in `part` of the rank's tensor."""
        common = self.local.overlap(part)
        return common and Placement(common, common.moved(self.local.offset, self.offset).offset, self.copied)


def full_shape_of(record: ParameterRecord, shape: Sequence[int], groups: ParallelGroups) -> tuple[int, ...]:
    """Return the shape of a parameter in one process, without padding.

    A parameter of a user's module has no shape in its record; a cut one is then as large as its parts together.
    """
    if record.full_shape:
        return record.full_shape
    full = list(shape)
    if record.tensor_model_parallel:
        full[record.partition_dim] *= (groups.tp if record.allreduce else groups.etp).size
    return tuple(full)


def placements(record: ParameterRecord, shape: Sequence[int], groups: ParallelGroups) -> list[Placement]:
    """Return the places of a rank's tensor of `shape` in the whole tensor; padding is left out."""
    full = full_shape_of(record, shape, groups)
    group = groups.tp if record.allreduce else groups.etp
    found = []
    for local, at, copied in _cuts(record, shape, group.rank, group.size):
        start = [0] * len(shape)
        if record.expert_parallel:
            start[0] = groups.ep.rank * shape[0]
        if record.tensor_model_parallel:
            start[record.partition_dim] = at
        visible = Box(tuple(start), local.shape).overlap(whole(full))
        if visible is not None:
            found.append(Placement(visible.moved(start, local.offset), visible.offset, copied))
    return found


def _cuts(record: ParameterRecord, shape: Sequence[int], rank: int, size: int) -> Iterator[tuple[Box, int, bool]]:
    """Yield boxes of the rank's tensor, the first place of each along the cut dimension, and `Placement.copied`."""
    if not record.tensor_model_parallel:
        yield whole(shape), 0, False
        return
    dim, length = record.partition_dim, shape[record.partition_dim]
    if record.replicated is not None:
        ranks, rows = record.replicated.ranks, record.replicated.rows
        own = length - rows
        block = (rank // ranks) * (ranks * own + rows)
        yield _slab(shape, 0, 0, own), block + (rank % ranks) * own, False
        yield _slab(shape, 0, own, rows), block + ranks * own, bool(rank % ranks)
        return
    each = length // record.partition_stride
    for number in range(record.partition_stride):
        yield _slab(shape, dim, number * each, each), (number * size + rank) * each, False


def _slab(shape: Sequence[int], dim: int, start: int, size: int) -> Box:
    """Return the box of all elements whose index along `dim` is one of the `size` from `start` on."""
    offset, inner = [0] * len(shape), list(shape)
    offset[dim], inner[dim] = start, size
    return Box(tuple(offset), tuple(inner))
