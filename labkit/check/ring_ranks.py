"""Sequences over a ring of ranks, and a learner's program that every rank of the ring runs at once.

Each rank sees only its own rows of q, k and v, and has a way to the next rank (`RingPlace`).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.check.rank_threads import RankThreads, Stalled
from labkit.check.scoring import plain, raised
from labkit.parallel.context.ring_plan import Layout, chunks_of_rank

Array = NDArray[Any]


class RingCase(NamedTuple):
    """A sequence over cp ranks, with its arrays in the order of positions; `at`, the cut, has each rank's positions."""

    name: str
    q: Array
    k: Array
    v: Array
    at: list[NDArray[np.int64]]

    @property
    def scores(self) -> Array:
        """Return [S, S]: the scores of queries and keys, before any mask."""
        return self.q @ self.k.T / np.sqrt(self.q.shape[1])

    @property
    def causal(self) -> NDArray[np.bool_]:
        """Return [S, S]: True where the query may see the key."""
        return np.tri(len(self.q), dtype=bool)

    def by_position(self, values: Sequence[Any]) -> Array:
        """Return values[rank][row] as an array in the order of positions."""
        whole = np.empty((len(self.q), *np.shape(values[0])[1:]))
        for rows, part in zip(self.at, values, strict=True):
            whole[rows] = part
        return whole

    @property
    def steps(self) -> NDArray[np.int64]:
        """Return [S, S]: the ring step in which the query's rank has the key."""
        return (self.holder[:, None] - self.holder[None]) % len(self.at)

    @property
    def holder(self) -> NDArray[np.int64]:
        """Return [S]: the rank of each position."""
        return self.by_position([np.full(len(rows), rank) for rank, rows in enumerate(self.at)]).astype(int)

    @property
    def places(self) -> Array:
        """Return [S]: the row of each position on its rank."""
        return self.by_position([np.arange(len(rows)) for rows in self.at])

    def place_of(self, position: int) -> str:
        """Name a position with its rank and its row there."""
        return f"position {position} (rank {self.holder[position]}, row {self.places[position]:.0f})"


CASES: tuple[tuple[int, Layout, float], ...] = (
    (1, "zigzag", 1.0),
    (2, "contiguous", 1.0),
    (2, "zigzag", 1.0),
    (4, "zigzag", 1.0),
    (4, "zigzag", 800.0),
)
"""(cp, way to cut the sequence, factor of the queries, because scores of several hundred overflow exp)."""


def ring_case(cp: int, layout: Layout, factor: float, width: int = 0) -> RingCase:
    """Return 4 cp positions in chunks of 2; [S, width], or [S, S] with values that show the weights."""
    numbers = np.random.default_rng(cp)
    length = 4 * cp
    q, k, v = numbers.normal(size=(3, length, width or length))
    chunks = [chunks_of_rank(cp, rank, layout) for rank in range(cp)]
    at = [np.concatenate([np.arange(2 * chunk, 2 * chunk + 2) for chunk in pair]) for pair in chunks]
    cut = "plain cut" if layout == "contiguous" else "zigzag"
    name = f"cp {cp}, {cut}{', scores of hundreds' if factor > 1 else ''}"
    return RingCase(name, factor * q, k, v if width else np.eye(length), at)


class RingRun(NamedTuple):
    """Results of all ranks in the order of positions (no array after an error); a rank's messages, the largest one."""

    arrays: list[Array]
    error: str
    messages: int
    largest: int


class RingPlace:
    """`cp` of a rank's program: its place on the ring, and a way to the next rank."""

    def __init__(self, rank: int, ranks: RankThreads, sizes: list[int]) -> None:
        self.rank, self.size, self._ranks, self._sizes = rank, ranks.size, ranks, sizes

    def pass_on(self, *arrays: Any) -> Any:
        """Give arrays to the next rank, and return what the previous rank gave: one array, or as many as it gave."""
        held = [np.array(plain(array), dtype=float) for array in arrays]
        if self.rank == 0:
            self._sizes += [array.size for array in held]
        given = self._ranks.meet(self.rank, "pass_on", held)
        if len({tuple(array.shape for array in each) for each in given}) > 1:
            raise ValueError(f"the ranks pass on {[[list(array.shape) for array in each] for each in given]}")
        received = deepcopy(given[self.rank - 1])
        return received[0] if len(received) == 1 else received


def run_on_ring(answer: Any, case: RingCase, more: Sequence[Array], shapes: Sequence[Array]) -> RingRun:
    """Run the answer on every rank with its rows of q, kv and `more`; its arrays have the rows of `shapes`."""
    threads, sizes = RankThreads(len(case.at)), [0]

    def program(rank: int) -> list[Array]:
        at = case.at[rank]
        kv, mine = np.stack([case.k[at], case.v[at]]), [each[at].copy() for each in more]
        cut = [part.copy() for part in case.at]
        with np.errstate(all="ignore"):
            found = answer(case.q[at].copy(), kv, cut, RingPlace(rank, threads, sizes), *mine)
        if not isinstance(found, (list, tuple)) or len(found) != len(shapes):
            raise ValueError(f"rank {rank} returns {type(found).__name__}, not {len(shapes)} arrays")
        arrays = [np.asarray(plain(part), dtype=float) for part in found]
        if arrays[-1].ndim == 3:  # dkv [2, L, D] by rows
            arrays[-1] = arrays[-1].swapaxes(0, 1)
        for array, like in zip(arrays, shapes):
            if array.shape != like[at].shape:
                raise ValueError(f"rank {rank} returns an array {list(array.shape)}, not {list(like[at].shape)}")
        return arrays

    try:
        found = threads.run(program)
    except Stalled as stalled:
        return RingRun([], str(stalled), 0, 0)
    except (Exception, SystemExit) as error:
        return RingRun([], raised(error), 0, 0)
    return RingRun([case.by_position(parts) for parts in zip(*found)], "", len(sizes) - 1, max(sizes))
