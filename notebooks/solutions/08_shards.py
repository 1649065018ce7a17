"""Chapter 08, exercise `08.shards`: shards(sizes, bucket_size, dp) -> by rank, the (parameter, first, last) it owns."""

import math
from collections.abc import Iterable

Placed = tuple[int, int, int]
"""(parameter, its first element in the buffer, one past its last)."""
Bucket = tuple[int, int, list[Placed]]
"""(start, end with padding, its parameters)."""


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _buckets(
    sizes: list[int], order: Iterable[int], bucket_size: float, dp: int, *, alignment: int = 64, pads: bool = True
) -> list[Bucket]:
    """Lay the parameters out in `order`; close a bucket when it is large enough."""
    buckets: list[Bucket] = []
    start, end, placed = 0, 0, []

    def close() -> None:
        nonlocal start, end, placed
        length = _up(end - start, math.lcm(dp, 128) if pads else dp)
        buckets.append((start, start + length, placed))
        start = end = start + length
        placed = []

    for parameter in order:
        first = _up(end, alignment)
        end = first + sizes[parameter]
        placed.append((parameter, first, end))
        if end - start >= bucket_size:
            close()
    if placed:
        close()
    return buckets


def _cut(buckets: list[Bucket], dp: int) -> list[list[Placed]]:
    """The rank-th part of every bucket, as pieces of its parameters."""
    owned: list[list[Placed]] = []
    for rank in range(dp):
        pieces = []
        for start, end, placed in buckets:
            share = (end - start) // dp
            low, high = start + rank * share, start + (rank + 1) * share
            for parameter, first, last in placed:
                if max(first, low) < min(last, high):
                    pieces.append((parameter, max(first, low) - first, min(last, high) - first))
        owned.append(pieces)
    return owned


def solution(sizes: list[int], bucket_size: int, dp: int) -> list[list[Placed]]:
    """Lay out in the order of the backward, pad, and give each rank its part of each bucket."""
    return _cut(_buckets(sizes, reversed(range(len(sizes))), bucket_size, dp), dp)


def wrong_1(sizes: list[int], bucket_size: int, dp: int) -> list[list[Placed]]:
    """Cuts the buffer as a whole, not each bucket: then one rank owns a whole bucket, and its link carries it alone."""
    buckets = _buckets(sizes, reversed(range(len(sizes))), bucket_size, dp)
    return _cut([(0, buckets[-1][1], [each for _, _, placed in buckets for each in placed])], dp)


def wrong_2(sizes: list[int], bucket_size: int, dp: int) -> list[list[Placed]]:
    """Lays parameters end to end: parts are still equal, but a parameter starts anywhere, off the hardware's stride."""
    return _cut(_buckets(sizes, reversed(range(len(sizes))), bucket_size, dp, alignment=1, pads=False), dp)


def wrong_3(sizes: list[int], bucket_size: int, dp: int) -> list[list[Placed]]:
    """Lays parameters out as they were registered: the first bucket is then complete when the backward is."""
    return _cut(_buckets(sizes, range(len(sizes)), bucket_size, dp), dp)
