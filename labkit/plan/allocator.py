"""The part of a block that torch's caching allocator counts as allocated, but no tensor uses. No torch.

A tensor of at least 10 MiB that finds no free block gets memory of its own, a multiple of 2 MiB. What remains behind
the tensor becomes a block for others only if it is more than 1 MiB; otherwise the tensor's block includes it. Smaller
tensors share segments of 20 MiB, or of 2 MiB up to 1 MiB; their remainders are left out here.

Source: c10/cuda/CUDACachingAllocator.cpp (kSmallSize, kMinLargeAlloc, kRoundLarge, `should_split`).
"""

from __future__ import annotations

SPLIT_ABOVE = 1 << 20
LARGE = 10 << 20
ROUNDED_TO = 2 << 20


def unused_bytes(size: int) -> int:
    """Return the bytes behind a tensor of `size` bytes that its block includes."""
    remainder = -size % ROUNDED_TO
    return remainder if size >= LARGE and remainder <= SPLIT_ABOVE else 0
