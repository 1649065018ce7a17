"""Numbers in mixed radix, and the ranks of a group by formula. Needs numpy and no torch.

A number in mixed radix has a base for each digit. `prefix_product` gives the strides of the digits, `decompose` the
digits of a number. `Members` are the ranks of the group that some of the digits span.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from numbers import Integral
from typing import overload

import numpy as np

MAX_LISTED_RANKS = 2**24
"""Largest number of ranks in one array (128 MiB as int64). `Members` and `members_of` build no array."""


def prefix_product(sizes: Sequence[int], init: int = 1) -> list[int]:
    """Return the strides of a mixed-radix number, and the product: `[2, 3, 4]` gives `[1, 2, 6]` and 24 in one list."""
    strides = [init]
    for size in sizes:
        strides.append(strides[-1] * size)
    return strides


def decompose(index: int, shape: Sequence[int], stride: Sequence[int] | None = None) -> list[int]:
    """Return the digits of `index` in the bases `shape`, fastest first. The sum of digit x stride gives `index` again.

    `stride` defaults to `prefix_product(shape)`. Raises ValueError if `index` does not fit into `shape`.
    """
    stride = prefix_product(shape) if stride is None else stride
    digits = [index // step % size for size, step in zip(shape, stride)]
    if sum(digit * step for digit, step in zip(digits, stride)) != index:
        raise ValueError(f"index {index} does not fit into the shape {list(shape)}: its digits would be {digits}")
    return digits


def as_size(name: str, value: object, least: int = 1) -> int:
    """Return `value` as an int. Raises ValueError with `name` if it is below `least` or no integer (True, "8")."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"{name} is {value!r}, which is not an integer; give a whole number of at least {least}")
    if number < least:
        raise ValueError(f"{name} is {number}; it must be at least {least}")
    return number


def check_listable(count: int, what: str) -> None:
    """Raise ValueError if `count` is more than MAX_LISTED_RANKS."""
    if count > MAX_LISTED_RANKS:
        raise ValueError(
            f"{what} would list {count} ranks, and at most {MAX_LISTED_RANKS} are listed at once; "
            "ask members_of_rank, which lists none, or use a smaller world"
        )


@dataclass(frozen=True)
class Members(Sequence[int]):
    """The ranks of one group by formula, in group order. Like a `range` with several strides, it builds no list.

    Member i is `first` plus the sum of digit x stride, where the digits write i in the bases `sizes`, fastest first.
    Sizes (8, 128) with strides (1, 1024) are 8 ranks in a row, 128 times, 1024 apart.
    """

    first: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, first: int, axes: Sequence[tuple[int, int]]) -> Members:
        """Build from the (size, stride) of each axis, fastest first. Axes that continue one another become one run."""
        runs: list[tuple[int, int]] = []
        for size, stride in axes:
            if runs and runs[-1][0] * runs[-1][1] == stride:
                runs[-1] = (runs[-1][0] * size, runs[-1][1])
            elif size > 1:
                runs.append((size, stride))
        return cls(first, tuple(size for size, _ in runs), tuple(stride for _, stride in runs))

    def __len__(self) -> int:
        return prod(self.sizes)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        return self.first + sum(d * step for d, step in zip(decompose(place, self.sizes), self.strides))

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(len(self)))

    def __contains__(self, rank: object) -> bool:
        if not isinstance(rank, Integral):
            return False
        rest = int(rank) - self.first
        for size, stride in zip(reversed(self.sizes), reversed(self.strides)):
            rest -= max(0, min(rest // stride, size - 1)) * stride
        return rest == 0

    def array(self) -> np.ndarray:
        """Return all members as int64. Raises ValueError for more than MAX_LISTED_RANKS."""
        check_listable(len(self), f"the group of rank {self.first}")
        members = np.array([self.first], dtype=np.int64)
        for size, stride in zip(self.sizes, self.strides):
            steps = np.arange(size, dtype=np.int64) * stride
            members = (steps[:, None] + members[None, :]).ravel()
        return members
