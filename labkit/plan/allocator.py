"""The bytes that torch's caching allocator counts as allocated, though no tensor uses them. No torch.

A tensor takes the smallest free block that is large enough. Without one the allocator asks for a segment: 20 MiB for a
tensor below 10 MiB, else the tensor's size in multiples of 2 MiB. What remains behind the tensor becomes a free block
only if it is more than 1 MiB; otherwise it stays part of the tensor's block. Tensors up to 1 MiB have segments of their
own, which leave nothing unused but the rounding to 512 bytes, and are left out here.

Source: c10/cuda/CUDACachingAllocator.cpp (kSmallSize, kMinLargeAlloc, kLargeBuffer, kRoundLarge, `should_split`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from functools import lru_cache

SMALL = 1 << 20
LARGE = 10 << 20
SEGMENT = 20 << 20
ROUNDED_TO = 2 << 20


@lru_cache(maxsize=4096)
def unused_bytes(sizes: tuple[int, ...]) -> int:
    """Return the unused bytes behind tensors of these sizes, allocated one after the other and never freed."""
    free: list[int] = []
    unused = 0
    for size in sizes:
        if size <= SMALL:
            continue
        place = bisect_left(free, size)
        block = (
            free.pop(place)
            if place < len(free)
            else max(SEGMENT if size < LARGE else 0, -(-size // ROUNDED_TO) * ROUNDED_TO)
        )
        if block - size > SMALL:
            insort(free, block - size)
        else:
            unused += block - size
    return unused
