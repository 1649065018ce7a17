"""The history of a pool during captures, played back as the lives of its blocks.

All graphs of a rank share one pool. A capture takes a block for each tensor that it makes. The pool gets the block back
with the tensor's last reference, often while a later graph is captured. Another tensor may then take the address. So
the pool holds only the tensors that are alive at once, not those of all graphs:

    capture     alive after it, in units of what a forward leaves        order 1 1 -1 1 -1 -1
    F0          A
    F1          A B
    B0          . B         A's tensors are weak references now: the graph knows the address and keeps no memory
    F2          C B         C lies where A lay
    B1          C .
    B2          . .

This module imports no torch: a history is rows of (time, alloc or free, offset, bytes, owner), see `PoolStep`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal, NamedTuple

PoolHistory = Iterable[tuple[int, str, int, int, str]]
"""Rows of (time, "alloc" or "free", offset, bytes, graph that took the block during its capture)."""


class PoolStep(NamedTuple):
    """One entry of a pool's history."""

    time: int
    """0, 1, 2, ..: one tick per entry."""
    kind: Literal["alloc", "free"]
    offset: int
    """Bytes from the start of the pool."""
    nbytes: int
    """Size of the block, rounding included."""
    owner: str
    """Name of the graph that took the block during its capture."""


@dataclass(frozen=True, slots=True)
class Life:
    """One block, from the row that takes it to the row that gives it back."""

    owner: str
    """Graph that took it during its capture."""
    offset: int
    """Bytes from the start of the pool."""
    nbytes: int
    """Size of the block."""
    born: int
    """Row of the history that takes it."""
    died: int | None
    """Row of the history that gives it back; None where no row does."""

    @property
    def end(self) -> int:
        """Bytes from the start of the pool to the end of the block."""
        return self.offset + self.nbytes

    def alive(self, row: int) -> bool:
        """True where the block is held after a row of the history."""
        return self.born <= row and (self.died is None or self.died > row)


@dataclass(frozen=True, slots=True)
class Frame:
    """The pool at the end of a capture."""

    name: str
    """Name of the captured graph."""
    live: tuple[Life, ...]
    """Blocks that are held, by offset."""
    taken_over: tuple[Life, ...]
    """The held blocks that this capture took where an earlier graph's block lay."""
    peak_bytes: int
    """Most bytes held at once during the capture."""

    @property
    def live_bytes(self) -> int:
        """Bytes of the blocks that are held."""
        return sum(life.nbytes for life in self.live)


@dataclass(frozen=True)
class Playback:
    """A history as lives of blocks and one frame per capture."""

    lives: tuple[Life, ...]
    """Every block of the history, in the order in which they are taken."""
    captures: tuple[tuple[str, int, int], ...]
    """(graph, first row, last row) in the order of the captures. A history has no borders between captures: a capture
    begins when its graph takes its first block. Blocks given back just before count to the capture before."""
    live_bytes: tuple[int, ...]
    """Bytes held after each row of the history."""

    @property
    def peak_bytes(self) -> int:
        """Most bytes held at once."""
        return max(self.live_bytes, default=0)

    @property
    def high_water(self) -> int:
        """End of the highest block: the bytes that the pool needs, gaps included."""
        return max((life.end for life in self.lives), default=0)

    @cached_property
    def frames(self) -> tuple[Frame, ...]:
        """The pool at the end of each capture."""
        frames: list[Frame] = []
        live: list[Life] = []
        touched: list[tuple[int, int]] = []  # bytes that blocks of earlier captures have covered
        done = 0
        for name, first, last in self.captures:
            born = self.lives[done : bisect_right(self.lives, last, key=lambda life: life.born)]
            done += len(born)
            live = sorted((life for life in (*live, *born) if life.alive(last)), key=lambda life: life.offset)
            taken = tuple(life for life in live if first <= life.born and _on(life, touched))
            frames.append(Frame(name, tuple(live), taken, max(self.live_bytes[first : last + 1])))
            touched = _merged([*touched, *((life.offset, life.end) for life in born)])
        return tuple(frames)


def play_back(history: PoolHistory) -> Playback:
    """Read a pool's history.

    Raises:
        ValueError: a row takes bytes that another block holds, or gives back a block that is not held.
    """
    lives: list[Life] = []
    held: dict[int, int] = {}  # offset -> index in `lives`
    edges: list[tuple[int, int]] = []  # (offset, index), by offset: neighbours of a new block
    live, total = [], 0
    owners: list[str] = []
    for row, (_, kind, offset, nbytes, owner) in enumerate(history):
        owners.append(owner if kind == "alloc" else "")
        if kind == "alloc":
            _require_room(offset, nbytes, edges, lives, row)
            held[offset] = len(lives)
            edges.insert(bisect_right(edges, (offset, len(lives))), (offset, len(lives)))
            lives.append(Life(owner, offset, nbytes, row, None))
            total += nbytes
        else:
            if offset not in held:
                raise ValueError(f"row {row} gives back offset {offset}, where no block is held")
            index = held.pop(offset)
            edges.remove((offset, index))
            born = lives[index]
            lives[index] = Life(born.owner, born.offset, born.nbytes, born.born, row)
            total -= born.nbytes
        live.append(total)
    return Playback(tuple(lives), tuple(_captures(owners)), tuple(live))


@dataclass(frozen=True, slots=True)
class Overwritten:
    """A block that was given back too early, and the first block that took some of its bytes too soon."""

    block: Life
    taker: Life
    until: int
    """Row of the history up to which somebody reads the first block."""


def overwritten(playback: Playback, right: Playback) -> list[Overwritten]:
    """Find the blocks that another block takes before `right`, a history of the same captures, gives them back.

    Both histories take the same blocks in the same order and differ only in when they give them back and where they
    are. A block is needed until the number of later blocks that `right` takes before it gives this one back.

    Raises:
        ValueError: the histories are of different captures.
    """
    if [(life.owner, life.nbytes) for life in playback.lives] != [(life.owner, life.nbytes) for life in right.lives]:
        raise ValueError("these pools have seen different captures, so their blocks cannot be compared")
    births = [life.born for life in right.lives]
    found = []
    for number, (life, held) in enumerate(zip(playback.lives, right.lives, strict=True)):
        until = len(births) if held.died is None else bisect_left(births, held.died)
        later = (each for each in playback.lives[number + 1 : until] if life.died is not None and each.born > life.died)
        taker = next((each for each in later if each.offset < life.end and life.offset < each.end), None)
        if taker is not None:
            end = playback.lives[until].born if until < len(births) else len(playback.live_bytes)
            found.append(Overwritten(life, taker, end))
    return found


def _require_room(offset: int, nbytes: int, edges: list[tuple[int, int]], lives: list[Life], row: int) -> None:
    place = bisect_right(edges, (offset, len(lives)))
    for _, index in edges[max(0, place - 1) : place + 1]:
        other = lives[index]
        if offset < other.end and other.offset < offset + nbytes:
            raise ValueError(
                f"row {row} takes bytes {offset} to {offset + nbytes}, where {other.owner or 'another graph'} holds "
                f"{other.offset} to {other.end}"
            )


def _captures(owners: Sequence[str]) -> Iterable[tuple[str, int, int]]:
    found: list[tuple[str, int, int]] = []
    for owner, rows in groupby(range(len(owners)), key=owners.__getitem__):
        *_, last = first, *_ = list(rows)
        if found and (not owner or owner == found[-1][0]):
            found[-1] = (found[-1][0], found[-1][1], last)
        else:
            found.append((owner, first, last))
    return found


def _on(life: Life, ranges: Sequence[tuple[int, int]]) -> bool:
    """True where a block covers a byte of `ranges`, which are sorted and do not touch."""
    place = bisect_right(ranges, life.offset, key=lambda pair: pair[1])
    return place < len(ranges) and ranges[place][0] < life.end


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
