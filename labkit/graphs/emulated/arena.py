"""Memory of a pool of emulated graphs: blocks at fixed addresses, free again the moment their last tensor dies.

CUDA graphs of one pool take their tensors from memory that no other allocation touches. A block is taken at capture,
given back when its tensor is dropped, and may then be taken by a later capture: two graphs write to one address, and
that is right as long as nobody reads the first tensor after the second graph has run. An `Arena` does the same on the
host:

- memory comes in segments, which live as long as anything refers to them; a free block merges with its neighbours, and
  a request takes the smallest free block that fits (best fit, lowest address first), as torch's CUDA allocator does;
- a tensor of the arena keeps an owner, and the owner's end frees the block. The owner belongs to the tensor's storage,
  so views, detached tensors and what autograd saves all keep the block;
- a weak reference is a tensor at the address without the owner. Reading through it is always safe, since segments stay;
  what it reads is whatever lies there by then.

No sweep, no garbage collection: a block is free in the same instant on every run, so addresses repeat.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import deque
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from labkit.graphs.pool import PoolStep

__all__ = ["Arena", "Block", "block_of", "unmanaged"]

ROUNDING = 512
"""Blocks are multiples of this many bytes and start at multiples of it, as in torch's CUDA allocator."""
SEGMENT = 2 << 20
"""Segments are multiples of this many bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Memory taken from the system in one piece."""

    memory: np.ndarray
    """Bytes."""
    address: int
    """Of its first byte in this process."""
    offset: int
    """Of its first byte in the arena: segments are counted one behind the other."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Bytes of a segment that a tensor holds."""

    segment: Segment
    start: int
    """First byte, in the segment."""
    nbytes: int
    owner: str
    """Name of the graph that was being captured when it was taken."""
    bare: Tensor
    """The bytes as a tensor that does not keep the block."""

    @property
    def address(self) -> int:
        """Of the first byte in this process."""
        return self.segment.address + self.start


_blocks: dict[int, Block] = {}
"""Blocks in use in all arenas, by their address. Addresses of live memory are unique in a process."""


class Arena:
    """A pool of emulated graphs. Give one to several captures and they share its memory.

    `owner`, set by whoever captures, is written into the history beside each block.
    """

    def __init__(self) -> None:
        self.owner = ""
        self.history: list[PoolStep] = []
        self.peak_bytes = self.reserved_bytes = self.live_bytes = 0
        self.workspace_bytes: int | None = None
        """Of cuBLAS, which the host has not."""
        self._segments: list[Segment] = []  # by offset
        self._free_from: dict[int, int] = {}  # first byte of a free range -> the byte after its last; in the arena
        self._free_until: dict[int, int] = {}  # the same, the other way round
        self._by_size: list[tuple[int, int]] = []  # (bytes, first byte) of free ranges, sorted
        self._dead: deque[Block] = deque()
        self._lock = threading.Lock()

    # ---- tensors ----

    def take(self, nbytes: int) -> Tensor:
        """Uninitialised bytes of their own, uint8 [nbytes]; nbytes > 0. The block is free once their storage dies."""
        rounded = -(-nbytes // ROUNDING) * ROUNDING
        with self._lock:
            self._bury()
            offset, segment = self._cut(rounded)
            self.live_bytes += rounded
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            self.history.append(PoolStep(len(self.history), "alloc", offset, rounded, self.owner))
        start = offset - segment.offset
        # Two tensors over the same bytes: the death of one's owner frees the block, the other holds the segment alone.
        owner = segment.memory[start : start + nbytes]
        bare = torch.frombuffer(segment.memory, dtype=torch.uint8, count=nbytes, offset=start)
        block = Block(segment, start, rounded, self.owner, bare)
        _blocks[block.address] = block
        weakref.finalize(owner, partial(self._free_block, block)).atexit = False
        return torch.frombuffer(owner, dtype=torch.uint8)

    def _free_block(self, block: Block) -> None:
        """The last tensor of a block is gone: called by Python in whichever thread dropped it."""
        del _blocks[block.address]
        self._dead.append(block)
        # If the lock is held, the arena is at work in this very thread (a tensor died inside `take`) or in another one:
        # the block is buried on the next occasion.
        if self._lock.acquire(blocking=False):
            try:
                self._bury()
            finally:
                self._lock.release()

    # ---- free ranges, as byte offsets in the arena ----

    def _cut(self, nbytes: int) -> tuple[int, Segment]:
        """Take `nbytes` from the smallest free range that has them, or from a new segment: offset and segment."""
        place = bisect_left(self._by_size, (nbytes, 0))
        if place == len(self._by_size):
            self._grow(nbytes)
            place = bisect_left(self._by_size, (nbytes, 0))
        size, offset = self._by_size[place]
        self._remove(offset, offset + size)
        if size > nbytes:
            self._add(offset + nbytes, offset + size)
        return offset, self._segment_at(offset)

    def _grow(self, nbytes: int) -> None:
        size = -(-nbytes // SEGMENT) * SEGMENT
        spare = np.empty(size + ROUNDING, np.uint8)
        memory = spare[-spare.ctypes.data % ROUNDING :][:size]
        self._segments.append(Segment(memory, memory.ctypes.data, self.reserved_bytes))
        self._add(self.reserved_bytes, self.reserved_bytes + size)
        self.reserved_bytes += size

    def _bury(self) -> None:
        """Give back the blocks that have died; the lock is held."""
        while self._dead:
            block = self._dead.popleft()
            segment = block.segment
            start = segment.offset + block.start
            end = start + block.nbytes
            self.live_bytes -= block.nbytes
            self.history.append(PoolStep(len(self.history), "free", start, block.nbytes, block.owner))
            # merge with free neighbours, but not across segments
            before = self._free_until.get(start) if block.start else None
            if before is not None:
                self._remove(before, start)
                start = before
            after = self._free_from.get(end) if end < segment.offset + segment.memory.nbytes else None
            if after is not None:
                self._remove(end, after)
                end = after
            self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        self._free_from[start], self._free_until[end] = end, start
        insort(self._by_size, (end - start, start))

    def _remove(self, start: int, end: int) -> None:
        del self._free_from[start], self._free_until[end]
        del self._by_size[bisect_left(self._by_size, (end - start, start))]

    def _segment_at(self, offset: int) -> Segment:
        return self._segments[bisect_right(self._segments, offset, key=lambda segment: segment.offset) - 1]


def block_of(tensor: Tensor) -> Block | None:
    """The arena's block that the tensor's storage is; None for memory that is no arena's, or no block's any more."""
    storage = tensor.untyped_storage()
    block = _blocks.get(storage.data_ptr())
    # a weak reference may outlive its block, and another block begin at its address
    return block if block is not None and block.bare.nbytes == storage.nbytes() else None


def unmanaged(tensor: Tensor) -> Tensor:
    """A tensor at the same address, of the same type, shape and strides, that does not keep an arena's block.

    For other memory there is no such thing on the host that would be safe to read: there it is a detached tensor, which
    keeps the memory (that of a weak reference is the segment's).
    """
    block = block_of(tensor)
    if block is None:
        return tensor.detach()
    bare = torch.empty(0, dtype=tensor.dtype)
    bare.set_(block.bare.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    # complex views whose values are read as the conjugate, or the negative, of what is stored
    bare = bare.conj() if tensor.is_conj() else bare
    return torch.ops.aten._neg_view(bare) if tensor.is_neg() else bare
