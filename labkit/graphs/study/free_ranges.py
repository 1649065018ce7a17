"""The free ranges of a pool, and where its blocks were: what exercise 2 of chapter 16 and its emulator work with.

`labkit/graphs/emulated/arena.py` does the same for emulated graphs, with segments and faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Free = tuple[int, int]
"""(first byte, bytes) of a range that nobody holds."""


class Held(NamedTuple):
    """A block of a pool."""

    start: int
    """First byte."""
    nbytes: int
    since: int
    """Number of the request that took it."""
    until: int
    """Number of the request that gave it back; the number of all requests if none did."""


class FreeRanges:
    """The ranges that nobody holds, by their first byte; neighbours are merged."""

    def __init__(self, nbytes: int) -> None:
        self.free: list[Free] = [(0, nbytes)]

    def take(self, start: int, nbytes: int) -> None:
        """Take bytes out of a free range; what is left of it on either side stays free.

        Raises ValueError if one of these bytes is held.
        """
        stop = start + nbytes
        inside = [(first, length) for first, length in self.free if first <= start and stop <= first + length]
        if not inside:
            raise ValueError(f"bytes {start:,} to {stop:,} are not all free; free are {_words(self.free)}")
        first, length = inside[0]
        self.free.remove(inside[0])
        self.free += [(at, size) for at, size in ((first, start - first), (stop, first + length - stop)) if size]
        self.free.sort()

    def give_back(self, start: int, nbytes: int) -> None:
        """Return bytes, and merge them with free neighbours."""
        merged: list[Free] = []
        for first, length in sorted([*self.free, (start, nbytes)]):
            if merged and sum(merged[-1]) == first:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((first, length))
        self.free = merged


def best_fit(free: Sequence[Free], nbytes: int) -> int:
    """Return the start of the smallest free range that is large enough; of equal ones, of the first."""
    return min((length, start) for start, length in free if length >= nbytes)[1]


def tensor_over(memory: Any, like: Tensor) -> Tensor:
    """A tensor over these bytes, a NumPy array of uint8, with the type, shape and strides of another one.

    The array lives as long as the tensor, or any view of it.
    """
    import torch  # which the table of free ranges does without

    storage = torch.from_numpy(memory).untyped_storage()
    made = torch.empty(0, dtype=like.dtype)
    return made.set_(storage, like.storage_offset(), like.size(), like.stride())


def _words(free: Sequence[Free]) -> str:
    *holes, (last, _) = free
    return ", ".join([*(f"{start:,} to {start + length:,}" for start, length in holes), f"all from {last:,}"])
