"""Who attends to what: every pair of the mask is computed once, by the rank that holds the query."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.parallel.context.ring_plan import (
    BOTH,
    LAYOUTS,
    Block,
    chunks_of_rank,
    cut_load,
    gathered_plan,
    ring_load,
    ring_plan,
    ring_time,
)

CP = st.integers(1, 9)
CHUNK = st.integers(1, 4)
LAYOUT = st.sampled_from(LAYOUTS)


def positions(chunks, chunk: int) -> np.ndarray:
    return np.concatenate([np.arange(c * chunk, (c + 1) * chunk) for c in chunks])


def count(pairs: np.ndarray, block: Block | None, queries: np.ndarray, keys: np.ndarray, chunk: int) -> None:
    """Add 1 to every (query, key) pair that the block computes."""
    if block is None:
        return
    rows, columns = queries[block.rows(chunk)], keys[block.columns(chunk)]
    computed = np.ones((len(rows), len(columns)), dtype=int)
    pairs[np.ix_(rows, columns)] += np.tril(computed) if block.causal else computed


def mask(length: int, causal: bool) -> np.ndarray:
    return np.tril(np.ones((length, length), dtype=int)) if causal else np.ones((length, length), dtype=int)


@given(CP, CHUNK, LAYOUT, st.booleans())
def test_the_ring_computes_every_pair_of_the_mask_once(cp, chunk, layout, causal):
    pairs = np.zeros((2 * cp * chunk,) * 2, dtype=int)
    held = [positions(chunks_of_rank(cp, rank, layout), chunk) for rank in range(cp)]
    for rank in range(cp):
        for step, block in enumerate(ring_plan(cp, rank, causal=causal, layout=layout)):
            count(pairs, block, held[rank], held[(rank - step) % cp], chunk)
    assert np.array_equal(pairs, mask(len(pairs), causal))


@given(CP, CHUNK, LAYOUT, st.booleans())
def test_so_does_the_gathered_form(cp, chunk, layout, causal):
    pairs = np.zeros((2 * cp * chunk,) * 2, dtype=int)
    for rank in range(cp):
        own = positions(chunks_of_rank(cp, rank, layout), chunk)
        if causal:
            count(pairs, Block(BOTH, BOTH, causal=True), own, own, chunk)
        for block in gathered_plan(cp, rank, causal=causal, layout=layout):
            count(pairs, block, own, np.arange(len(pairs)), chunk)
    assert np.array_equal(pairs, mask(len(pairs), causal))


@given(CP, CHUNK)
def test_zigzag_gives_every_rank_the_same_at_every_step(cp, chunk):
    rows = 2 * chunk
    load = ring_load(rows * cp, cp)
    assert load == [[rows * (rows + 1) // 2] + [rows * rows // 2] * (cp - 1)] * cp
    assert sum(map(sum, load)) == rows * cp * (rows * cp + 1) // 2
    assert ring_time(load) * cp == sum(map(sum, load)), "nobody waits"


@given(CP, CHUNK)
def test_the_plain_cut_keeps_the_ring_waiting_for_its_last_rank(cp, chunk):
    rows = 2 * chunk
    load = ring_load(rows * cp, cp, layout="contiguous")
    assert [sum(rank) for rank in load] == [rows * (rows + 1) // 2 + rank * rows * rows for rank in range(cp)]
    assert ring_time(load) == sum(load[-1])


@given(CP, CHUNK, LAYOUT)
def test_the_load_of_a_cut_is_that_of_its_blocks(cp, chunk, layout):
    cut = [positions(chunks_of_rank(cp, rank, layout), chunk).tolist() for rank in range(cp)]
    assert cut_load(cut) == ring_load(2 * chunk * cp, cp, layout=layout)
    assert cut_load([part[::-1] for part in cut]) == cut_load(cut), "the order on a rank does not matter"


def test_without_a_mask_both_cuts_are_alike():
    assert ring_load(32, 4, causal=False) == ring_load(32, 4, causal=False, layout="contiguous") == [[64] * 4] * 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ring_load(30, 4), "30 positions cannot be cut into 2 x cp = 8 chunks; choose a multiple of 8"),
        (lambda: ring_plan(4, 4), "rank 4 is not one of the 4 ranks"),
        (lambda: gathered_plan(2, 0, layout="striped"), "'striped' is not a layout of a sequence; choose zigzag or"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_planned_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
