"""Layout of a gradient buffer: the place of every gradient, the cuts into buckets, the owner of every slice.

Pure numbers, no torch: a laptop draws and tests a layout for a thousand ranks.

Parameters are in reverse order of registration, because a backward fills their gradients in about that order. A
bucket is closed as soon as it holds `bucket_size` elements. Sizes [100, 300, 50], four ranks, no limit:

    without the distributed optimizer   | p2 0-50 | p1 50-350 | p0 350-450 |
    with it                             | p2 0-50 | .. | p1 64-364 | .. | p0 384-484 | .. 512

The distributed optimizer (ZeRO-1, arXiv 1910.02054) cuts each bucket into equal parts, one per rank. To make the parts
equal and aligned, parameters start at multiples of 64 elements, and buckets end at multiples of lcm(ranks, 128).
megatron-core has the same layout, number for number (`param_and_grad_buffer.py`).

Under the distributed optimizer rank r owns the r-th part of *every* bucket. The cuts ignore the edges of parameters. So
a parameter may have several owners, and a rank may own the end of one parameter and the beginning of the next. Padding
belongs to the rank of its part, and nobody reads it.

Two parameters (a: 6 elements, b: 4) in one bucket of 12 over 3 ranks, buffer in reverse order of registration:

    buffer   b b b b | a a a a | a a - -
    owner    0 0 0 0 | 1 1 1 1 | 2 2 2 2

`labkit.plan.zero_stages` gives the bytes of a parameter in closed form.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

PARAMETER_ALIGNMENT = 64
"""A parameter starts at a multiple of this many elements: 128 bytes at two bytes per element."""
BUCKET_ALIGNMENT = 128
"""A bucket's length is a multiple of this many elements: 256 bytes at two bytes per element, for cuBLAS and NCCL."""
BANDWIDTH_ALIGNMENT = 1 << 16
"""`pad` of large data-parallel groups (Megatron's `pad_buckets_for_high_nccl_busbw`). NCCL's rings reach full bandwidth
with messages whose length a high power of two divides."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """Name, size and kind of a parameter, as the plan needs them."""

    name: str
    """Unique within the buffer."""
    numel: int
    """Number of elements."""
    shared_embedding: bool = False
    """True for a parameter that other stages hold, too, such as a tied word embedding.

    With the distributed optimizer such a parameter has its own bucket. Then the first and the last stage cut it alike,
    and the two gradients can be summed after the reduce-scatter.
    """


class Bucket(NamedTuple):
    """A stretch of the buffer that one collective reduces."""

    start: int
    """First element."""
    end: int
    """One past the last element, padding included."""
    unpadded_end: int
    """One past the last element of its last parameter."""
    names: tuple[str, ...]
    """Names of its parameters, in the order of the buffer."""

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.end - self.start


@dataclass(frozen=True)
class BucketLayout:
    """The layout of one buffer."""

    ranges: dict[str, tuple[int, int]]
    """Name -> (start, end) in the buffer, in the order of the buffer."""
    buckets: tuple[Bucket, ...]
    """The buckets from the start of the buffer to its end, without gaps."""

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return self.buckets[-1].end if self.buckets else 0

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return self.numel - sum(end - start for start, end in self.ranges.values())


def default_bucket_size(dp: int) -> int:
    """Return the elements of a bucket: 40 million, or a million per rank from 40 ranks on, to keep each rank's part
    large."""
    return max(40_000_000, 1_000_000 * dp)


def plan_buckets(
    parameters: Sequence[ParameterSpec],
    *,
    dp: int,
    bucket_size: int | None = None,
    distributed_optimizer: bool = False,
    pad: int = 1,
) -> BucketLayout:
    """Lay out a buffer.

    Args:
        parameters: parameters in the order of registration.
        dp: number of ranks that reduce each bucket, and that share it under the distributed optimizer.
        bucket_size: a bucket is closed when it holds this many elements; None makes a single bucket.
        distributed_optimizer: align parameters, pad buckets, give shared embeddings a bucket of their own.
        pad: with the distributed optimizer, bucket lengths are multiples of `pad` too (`BANDWIDTH_ALIGNMENT`).

    Raises:
        ValueError: a size is not positive, or two parameters have one name.
    """
    _check(parameters, dp=dp, bucket_size=bucket_size, pad=pad)
    divisor = math.lcm(dp, BUCKET_ALIGNMENT, pad) if distributed_optimizer else 1
    alignment = PARAMETER_ALIGNMENT if distributed_optimizer else 1
    ranges: dict[str, tuple[int, int]] = {}
    buckets: list[Bucket] = []
    names: list[str] = []
    start = end = 0  # bounds of the open bucket

    def close() -> None:
        nonlocal start, end
        if names:
            buckets.append(Bucket(start, _round_up(end, divisor), end, tuple(names)))
            names.clear()
            start = end = buckets[-1].end

    for parameter in reversed(parameters):
        alone = parameter.shared_embedding and distributed_optimizer
        if alone:
            close()
        first = _round_up(end, alignment)
        end = first + parameter.numel
        ranges[parameter.name] = (first, end)
        names.append(parameter.name)
        if alone or (bucket_size is not None and end - start >= bucket_size):
            close()
    close()
    return BucketLayout(ranges, tuple(buckets))


def _round_up(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor


def _check(parameters: Sequence[ParameterSpec], **sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")
    for parameter in parameters:
        if parameter.numel < 0:
            raise ValueError(f"parameter {parameter.name} has {parameter.numel} elements; a size cannot be negative")
    twice = [name for name, count in Counter(parameter.name for parameter in parameters).items() if count > 1]
    if twice:
        raise ValueError(f"several parameters are named {twice[0]}; give each a name of its own")


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of elements of one parameter that one rank owns: the rank reduces their gradient and updates them."""

    rank: int
    """Position of the owner in the data-parallel group (of its instance, if there are several)."""
    bucket: int
    """Number of the bucket in the buffer."""
    name: str
    """Name of the parameter."""
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
    """Return (start, end) of the part of rank `rank` in the bucket [start, end): the rank-th of dp equal parts.

    All positions are in elements of the buffer. Raises ValueError for a rank outside 0 .. dp-1, and if dp does not
    divide the bucket.
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


def pieces_of_rank(plan: BucketLayout, dp: int, rank: int) -> list[Piece]:
    """Return the pieces that `rank` of `dp` owns, in the order of the buffer. Raises ValueError as `shard_range`."""
    pieces: list[Piece] = []
    for number, bucket in enumerate(plan.buckets):
        low, high = shard_range(bucket.start, bucket.end, dp=dp, rank=rank)
        for name in bucket.names:
            start, end = plan.ranges[name]
            first, last = max(start, low), min(end, high)
            if first < last:
                pieces.append(Piece(rank, number, name, first, last, first - start))
    return sorted(pieces, key=lambda piece: piece.start)


def shard_map(plan: BucketLayout, dp: int) -> list[Piece]:
    """Return all pieces of all ranks, in the order of the buffer. Raises ValueError if dp does not divide a bucket.

    The pieces of a parameter cover it: every element has exactly one owner.
    """
    pieces = [piece for rank in range(dp) for piece in pieces_of_rank(plan, dp, rank)]
    return sorted(pieces, key=lambda piece: piece.start)
