"""Plans of context parallelism as data: the block of attention that each rank computes at each step.

A sequence of S positions is cut into 2 cp chunks of c = S / (2 cp). Every rank holds two of them, and so L = 2 c rows:

    zigzag       rank r holds chunks r and 2 cp - 1 - r    (Megatron's; every rank meets the same load)
    contiguous   rank r holds chunks 2 r and 2 r + 1       (the plain cut; under a causal mask the last rank has most)

Keys and values go round a ring of ranks: at step i rank r holds the keys and values of rank r - i. Rank r then computes
at most one rectangle of its queries against these keys:

    causal, zigzag      i = 0: its own, causal | source below r: all queries, first half of the keys
                                               | source above r: second half of the queries, all keys
    causal, contiguous  i = 0: its own, causal | source below r: everything | source above r: nothing
    not causal          everything at every step

Pure functions without torch: ring_attention.py runs these plans, figures draw them, tests count their pairs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Layout = Literal["zigzag", "contiguous"]
LAYOUTS: tuple[Layout, ...] = ("zigzag", "contiguous")


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of scores: rows of this rank's queries against rows of keys. Bounds count chunks of c rows."""

    queries: tuple[int, int]
    """First chunk, and the chunk after the last, of this rank's two."""
    keys: tuple[int, int]
    """The same for the keys, of the two chunks of a ring step or of all 2 cp chunks of the sequence."""
    causal: bool = False
    """Row i sees rows 0 .. i only; such a block is square."""

    def rows(self, chunk: int) -> slice:
        """Return the queries' rows, for chunks of `chunk` positions."""
        return slice(self.queries[0] * chunk, self.queries[1] * chunk)

    def columns(self, chunk: int) -> slice:
        """Return the keys' rows."""
        return slice(self.keys[0] * chunk, self.keys[1] * chunk)

    def pairs(self, chunk: int) -> int:
        """Return the number of (query, key) pairs that the block computes, each 4 D multiply-adds forward."""
        height, width = ((end - start) * chunk for start, end in (self.queries, self.keys))
        return height * (height + 1) // 2 if self.causal else height * width


BOTH = (0, 2)


def chunks_of_rank(cp: int, rank: int, layout: Layout = "zigzag") -> tuple[int, int]:
    """Return the two chunks that a rank holds, in the order in which it holds them.

    Raises:
        ValueError: no such rank or layout.
    """
    if not 0 <= rank < cp:
        raise ValueError(f"rank {rank} is not one of the {cp} ranks of context parallelism, counted from 0")
    if layout not in LAYOUTS:
        raise ValueError(f"{layout!r} is not a layout of a sequence; choose {' or '.join(LAYOUTS)}")
    return (rank, 2 * cp - 1 - rank) if layout == "zigzag" else (2 * rank, 2 * rank + 1)


def ring_block(cp: int, rank: int, source: int, *, causal: bool = True, layout: Layout = "zigzag") -> Block | None:
    """Return the block that `rank` computes against the keys of `source`; None if every pair is masked."""
    if not causal:
        return Block(BOTH, BOTH)
    if source == rank:
        return Block(BOTH, BOTH, causal=True)
    if layout == "contiguous":
        return Block(BOTH, BOTH) if source < rank else None
    return Block(BOTH, (0, 1)) if source < rank else Block((1, 2), BOTH)


def ring_plan(cp: int, rank: int, *, causal: bool = True, layout: Layout = "zigzag") -> list[Block | None]:
    """Return the blocks that `rank` computes at the cp steps; at step i it holds the keys of rank (rank - i) mod cp."""
    chunks_of_rank(cp, rank, layout)
    return [ring_block(cp, rank, (rank - step) % cp, causal=causal, layout=layout) for step in range(cp)]


def gathered_plan(cp: int, rank: int, *, causal: bool = True, layout: Layout = "zigzag") -> list[Block]:
    """Return the blocks that `rank` computes against keys in the order of the sequence, beyond its own causal block.

    The rectangles of the ring join: the keys of all lower ranks are one run of chunks, and so are those of all higher
    ranks. Without a causal mask one block covers everything, including the rank's own keys.
    """
    first, second = chunks_of_rank(cp, rank, layout)
    if not causal:
        return [Block(BOTH, (0, 2 * cp))]
    blocks = [Block(BOTH, (0, first))] if first else []
    if second > first + 1:
        blocks.append(Block((1, 2), (first + 1, second)))
    return blocks


def ring_load(seq_length: int, cp: int, *, causal: bool = True, layout: Layout = "zigzag") -> list[list[int]]:
    """Return the number of (query, key) pairs of every rank at every step, [rank][step].

    Zigzag and causal, every rank has L(L + 1)/2 at step 0 and L^2/2 at the other steps, L = S / cp. Contiguous and
    causal, rank r has L(L + 1)/2 at step 0, L^2 up to step r and 0 after it.

    Raises:
        ValueError: a length that 2 cp does not divide.
    """
    chunk = chunk_length(seq_length, cp)
    plans = [ring_plan(cp, rank, causal=causal, layout=layout) for rank in range(cp)]
    return [[block.pairs(chunk) if block else 0 for block in plan] for plan in plans]


def cut_load(cut: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the (query, key) pairs of every rank at every step, [rank][step], for any cut under a causal mask.

    cut: the positions that each rank holds, in any order.
    """
    keys, ranks = [sorted(part) for part in cut], range(len(cut))
    return [
        [sum(bisect_right(keys[(rank - step) % len(cut)], position) for position in cut[rank]) for step in ranks]
        for rank in ranks
    ]


def ring_time(load: list[list[int]]) -> int:
    """Return the ring's duration in pairs: ranks wait for each other at every step, so the largest block decides."""
    return sum(max(step) for step in zip(*load, strict=True))


def chunk_length(seq_length: int, cp: int) -> int:
    """Return the number of positions in one chunk, S / (2 cp).

    Raises:
        ValueError: a length that 2 cp does not divide.
    """
    if seq_length % (2 * cp):
        raise ValueError(
            f"{seq_length} positions cannot be cut into 2 x cp = {2 * cp} chunks; choose a multiple of {2 * cp}"
        )
    return seq_length // (2 * cp)
