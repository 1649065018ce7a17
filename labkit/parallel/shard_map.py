"""Which rank owns which slice of which parameter under the distributed optimizer (ZeRO-1, arXiv 1910.02054).

The gradient buffer is cut into buckets (`bucket_plan.py`), and each bucket into dp equal parts: rank r owns the r-th
part of *every* bucket. A cut asks for no parameter's edge, so a parameter may have several owners, and a rank may own
the end of one parameter and the beginning of the next. What lies between parameters is padding and is owned as well,
by whoever has that part of the bucket; nobody reads it.

Two parameters (a: 6 elements, b: 4) in one bucket of 12 over 3 ranks, buffer in reverse order of registration:

    buffer   b b b b | a a a a | a a - -
    owner    0 0 0 0 | 1 1 1 1 | 2 2 2 2

Pure arithmetic without torch: a layout for a thousand ranks is drawn, and tested, on a laptop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from labkit.parallel.bucket_plan import BufferPlan


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of elements of one parameter that one rank owns: its gradient is reduced there, its update made there."""

    rank: int
    """Position of the owner in the data-parallel group (of the instance, where there are several)."""
    bucket: int
    """Number of the bucket in the buffer."""
    name: str
    """The parameter."""
    start: int
    """First element, counted in the buffer."""
    end: int
    """One past the last element, counted in the buffer."""
    offset_in_parameter: int
    """First element, counted in the flattened parameter."""

    @property
    def numel(self) -> int:
        """Elements of the piece, at least 1."""
        return self.end - self.start


def shard_range(start: int, end: int, *, dp: int, rank: int) -> tuple[int, int]:
    """Rank `rank`'s part of the bucket [start, end): the rank-th of dp equal parts, in elements of the buffer.

    Raises ValueError for a rank outside 0 .. dp-1, and where dp does not divide the bucket.
    """
    if not 0 <= rank < dp:
        raise ValueError(f"rank {rank} is not among the {dp} ranks that share a bucket; choose 0 .. {dp - 1}")
    if (end - start) % dp:
        raise ValueError(
            f"a bucket of {end - start} elements cannot be cut into {dp} equal parts: plan the buffer for dp = {dp} "
            "with distributed_optimizer=True, which pads every bucket"
        )
    size = (end - start) // dp
    return start + rank * size, start + (rank + 1) * size


def pieces_of_rank(plan: BufferPlan, dp: int, rank: int) -> list[Piece]:
    """What `rank` of `dp` owns, in the order of the buffer. Raises ValueError as `shard_range` does."""
    pieces: list[Piece] = []
    for number, bucket in enumerate(plan.buckets):
        low, high = shard_range(bucket.start, bucket.end, dp=dp, rank=rank)
        for name in bucket.names:
            start, end = plan.ranges[name]
            first, last = max(start, low), min(end, high)
            if first < last:
                pieces.append(Piece(rank, number, name, first, last, first - start))
    return sorted(pieces, key=lambda piece: piece.start)


def shard_map(plan: BufferPlan, dp: int) -> list[Piece]:
    """Every piece of every rank, in the order of the buffer. Raises ValueError where dp does not divide a bucket.

    Together the pieces of a parameter are the parameter: no element is missing, none has two owners.
    """
    return sorted(_all_pieces(plan, dp), key=lambda piece: piece.start)


def _all_pieces(plan: BufferPlan, dp: int) -> Iterator[Piece]:
    """Parameter by parameter, only the ranks that it touches: a thousand ranks cost no more than their pieces."""
    for number, bucket in enumerate(plan.buckets):
        low, high = shard_range(bucket.start, bucket.end, dp=dp, rank=0)
        size = high - low
        for name in bucket.names:
            start, end = plan.ranges[name]
            at = start
            while at < end:
                rank = (at - low) // size
                stop = min(end, low + (rank + 1) * size)
                yield Piece(rank, number, name, at, stop, at - start)
                at = stop


def owned_bytes(plan: BufferPlan, dp: int, rank: int, bytes_per_element: int) -> tuple[int, int]:
    """(bytes, of which padding) of one sharded tensor of the buffer's length on `rank`: a master, a moment.

    The padding is what the alignment of parameters and the equal parts of buckets cost this rank.
    """
    total = sum(bucket.end - bucket.start for bucket in plan.buckets) // dp
    owned = sum(piece.numel for piece in pieces_of_rank(plan, dp, rank))
    return total * bytes_per_element, (total - owned) * bytes_per_element
