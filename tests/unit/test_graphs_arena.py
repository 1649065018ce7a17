"""The arena: blocks never overlap, are free when their last tensor dies, merge, and are taken again."""

from __future__ import annotations

import gc
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.graphs.emulated.arena import ROUNDING, SEGMENT, Arena, block_of, unmanaged


@pytest.fixture(autouse=True)
def no_collection():
    """Blocks must be free without the garbage collector."""
    gc.disable()
    yield
    gc.enable()


def test_a_block_is_free_when_its_last_view_dies_and_is_taken_again() -> None:
    arena = Arena()
    tensor = arena.take(1000)
    view = tensor.view(torch.float32)[3:].detach()
    address = tensor.data_ptr()
    del tensor
    assert arena.live_bytes == 1024  # the view keeps it
    del view
    assert arena.live_bytes == 0
    assert arena.take(700).data_ptr() == address
    assert [(step.kind, step.offset, step.nbytes) for step in arena.history] == [
        ("alloc", 0, 1024),
        ("free", 0, 1024),
        ("alloc", 0, 1024),
        ("free", 0, 1024),
    ]
    assert [step.time for step in arena.history] == [0, 1, 2, 3]


def test_what_autograd_saves_keeps_its_block() -> None:
    arena = Arena()
    x = arena.take(64).view(torch.float32).fill_(2.0).requires_grad_()
    y = (x * x).sum()
    del x
    assert arena.live_bytes == ROUNDING
    del y
    assert arena.live_bytes == 0


def test_a_weak_reference_has_the_address_and_not_the_memory() -> None:
    arena = Arena()
    tensor = arena.take(64).view(torch.float32).fill_(1.0)
    weak = unmanaged(tensor[4:].unflatten(0, (3, 4)).t())
    assert weak.data_ptr() == tensor.data_ptr() + 16
    assert weak.shape == (4, 3) and weak.stride() == (1, 4)
    assert block_of(weak) is block_of(tensor)
    del tensor
    assert arena.live_bytes == 0 and block_of(weak) is None
    taker = arena.take(64).view(torch.float32).fill_(7.0)
    assert (weak == 7.0).all()  # stale, as on a GPU
    del taker, arena
    assert (weak == 7.0).all()  # the segment lives as long as anything refers to it


def test_other_memory_is_kept_by_its_reference() -> None:
    outside = torch.ones(3, requires_grad=True)
    weak = unmanaged(outside)
    assert block_of(outside) is None and not weak.requires_grad and weak.data_ptr() == outside.data_ptr()


def test_the_smallest_hole_that_fits_is_taken_and_neighbours_merge() -> None:
    arena = Arena()
    blocks = [arena.take(n * ROUNDING) for n in (4, 1, 2, 1, 3, 1)]
    addresses = [block.data_ptr() for block in blocks]
    for i in (4, 2, 0):  # holes of 3, 2 and 4
        blocks[i] = torch.empty(0)
    two = arena.take(2 * ROUNDING)
    assert two.data_ptr() == addresses[2]
    blocks[1] = torch.empty(0)  # the hole of 4 and what lies behind it
    five = arena.take(5 * ROUNDING)
    assert five.data_ptr() == addresses[0]
    assert arena.reserved_bytes == SEGMENT


def test_large_requests_have_segments_of_their_own_and_do_not_merge_across() -> None:
    arena = Arena()
    a, b = arena.take(SEGMENT), arena.take(SEGMENT)
    assert arena.reserved_bytes == 2 * SEGMENT
    del a, b
    c = arena.take(2 * SEGMENT)  # the two lie apart in memory
    assert arena.reserved_bytes == 4 * SEGMENT and arena.peak_bytes == 2 * SEGMENT
    assert c.data_ptr() % ROUNDING == 0


@given(st.lists(st.tuples(st.integers(1, 3 * ROUNDING), st.integers(0, 7)), max_size=60))
def test_random_lives(steps: list[tuple[int, int]]) -> None:
    """No two live blocks share a byte, none changes another's values, and the counts are those of the history."""
    arena, alive = Arena(), {}
    for number, (nbytes, slot) in enumerate(steps):
        alive.pop(slot, None)
        alive[slot] = (arena.take(nbytes).fill_(number % 251), number % 251)
        ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t, _ in alive.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
        assert all((tensor == value).all() for tensor, value in alive.values())
        live = peak = 0
        for step in arena.history:
            live += step.nbytes if step.kind == "alloc" else -step.nbytes
            peak = max(peak, live)
        assert (arena.live_bytes, arena.peak_bytes) == (live, peak)
    alive.clear()
    assert arena.live_bytes == 0
    # all holes have merged: what was reserved can be had in whole segments
    if steps:
        whole = arena.take(SEGMENT)
        assert arena.reserved_bytes == SEGMENT and whole.nbytes == SEGMENT
