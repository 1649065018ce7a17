"""Memory of a pool of emulated graphs: blocks at fixed addresses, free again as soon as their last tensor dies.

CUDA graphs of one pool take their tensors from memory that no other allocation touches. A capture takes a block for a
tensor. The block is free once the tensor is dropped, and a later capture may take it. Then two graphs write to one
address, which is right as long as nothing reads the first tensor after the second graph has run. An `Arena` does the
same on the host.

Memory comes in segments, which live as long as a tensor refers to them. A free block merges with its neighbours. A
request takes the smallest free block that fits (best fit, lowest address first), as in torch's CUDA allocator.

A tensor of the arena keeps an owner, and the end of the owner frees the block. The owner belongs to the tensor's
storage, so views, detached tensors and tensors saved by autograd all keep the block.

A weak reference is a tensor at the address without the owner. It reads the values that lie there at the time. Reading
is always safe, since segments stay.

There is no sweep and no garbage collection: a block is free at the same instant on every run, so addresses repeat.
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
    """The bytes, uint8."""
    address: int
    """Address of the first byte in this process."""
    offset: int
    """Offset of the first byte in the arena, which counts its segments one after the other."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Bytes of a segment that a tensor holds."""

    segment: Segment
    start: int
    """First byte, in the segment."""
    nbytes: int
    owner: str
    """Name of the graph that took it during its capture."""
    bare: Tensor
    """The bytes as a tensor that does not keep the block."""

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""
        return self.segment.address + self.start


_blocks: dict[int, Block] = {}
"""Blocks in use in all arenas, by address. Addresses of live memory are unique in a process."""


class Arena:
    """A pool of emulated graphs. Captures into one arena share its memory.

    A capture sets `owner`; the history notes it next to each block.
    """

    def __init__(self) -> None:
        self.owner = ""
        self.history: list[PoolStep] = []
        self.peak_bytes = self.reserved_bytes = self.live_bytes = 0
        self.workspace_bytes: int | None = None
        """None: the host has no cuBLAS."""
        self._segments: list[Segment] = []  # by offset
        self._free_from: dict[int, int] = {}  # first byte of a free range -> the byte after its last; in the arena
        self._free_until: dict[int, int] = {}  # the same, the other way round
        self._by_size: list[tuple[int, int]] = []  # (bytes, first byte) of free ranges, sorted
        self._dead: deque[Block] = deque()
        self._lock = threading.Lock()

    # ---- tensors ----

    def take(self, nbytes: int) -> Tensor:
        """A new block of uninitialised bytes, uint8 [nbytes]; nbytes > 0. The block is free once its storage dies."""
        rounded = -(-nbytes // ROUNDING) * ROUNDING
        with self._lock:
            self._bury()
            offset, segment = self._cut(rounded)
            self.live_bytes += rounded
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            self.history.append(PoolStep(len(self.history), "alloc", offset, rounded, self.owner))
        start = offset - segment.offset
        # Two tensors over the same bytes: the first keeps the owner of the block, the second only the segment.
        owner = segment.memory[start : start + nbytes]
        bare = torch.frombuffer(segment.memory, dtype=torch.uint8, count=nbytes, offset=start)
        block = Block(segment, start, rounded, self.owner, bare)
        _blocks[block.address] = block
        weakref.finalize(owner, partial(self._free_block, block)).atexit = False
        return torch.frombuffer(owner, dtype=torch.uint8)

    def _free_block(self, block: Block) -> None:
        """Free a block. Python calls this in the thread that dropped the block's last tensor."""
        del _blocks[block.address]
        self._dead.append(block)
        # If the lock is held, the arena is at work in another thread, or in this one (a tensor died inside `take`).
        # The next `_bury` then frees the block.
        if self._lock.acquire(blocking=False):
            try:
                self._bury()
            finally:
                self._lock.release()

    # ---- free ranges, as byte offsets in the arena ----

    def _cut(self, nbytes: int) -> tuple[int, Segment]:
        """Take `nbytes` from the smallest free range that has them, or from a new segment; return (offset, segment)."""
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
        """Free the blocks of dead tensors. The caller holds the lock."""
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
    """The arena's block under the tensor's storage; None for other memory, and for a block that is free again."""
    storage = tensor.untyped_storage()
    block = _blocks.get(storage.data_ptr())
    # another block may begin at the address of a weak reference that outlived its own
    return block if block is not None and block.bare.nbytes == storage.nbytes() else None


def unmanaged(tensor: Tensor) -> Tensor:
    """A tensor with the same address, type, shape and strides that does not keep an arena's block.

    For memory outside arenas the result is a detached tensor, which keeps the memory. On the host nothing else would be
    safe to read.
    """
    block = block_of(tensor)
    if block is None:
        return tensor.detach()
    bare = torch.empty(0, dtype=tensor.dtype)
    bare.set_(block.bare.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    # views that read the conjugate, or the negative, of the stored values
    bare = bare.conj() if tensor.is_conj() else bare
    return torch.ops.aten._neg_view(bare) if tensor.is_neg() else bare
