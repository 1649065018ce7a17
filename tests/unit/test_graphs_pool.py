"""A pool's history played back, and the peak of an order predicted from one layer: counted by hand and by another
program."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.graphs import LayerMemory, layer_memory, plan_buffers, play_back, predict_pool
from labkit.schedules import gpipe, one_f_one_b

LAYER = LayerMemory(forward_peak=10, kept=8, backward_peak=3, grad_inputs=1)


def history(rows):
    """Rows such as `F0 + 0 8` (graph F0 takes 8 bytes at 0) and `B0 - 0 8`; `. - 0 8` belongs to no capture."""
    read = [row.split() for row in rows]
    return [
        (time, {"+": "alloc", "-": "free"}[kind], int(offset), int(nbytes), owner.strip("."))
        for time, (owner, kind, offset, nbytes) in enumerate(read)
    ]


SMALL = history(["F0 + 0 8", "F0 + 8 4", "F0 - 8 4", "F1 + 8 8", "B0 + 16 2", "F0 - 0 8", "F2 + 0 6", "F1 - 8 8"])


def test_blocks_live_from_one_row_to_another():
    playback = play_back(SMALL)
    assert [(life.owner, life.offset, life.nbytes, life.born, life.died) for life in playback.lives] == [
        ("F0", 0, 8, 0, 5), ("F0", 8, 4, 1, 2), ("F1", 8, 8, 3, 7), ("B0", 16, 2, 4, None), ("F2", 0, 6, 6, None),
    ]  # fmt: skip
    assert playback.live_bytes == (8, 12, 8, 16, 18, 10, 16, 8)
    assert (playback.peak_bytes, playback.high_water) == (18, 18)


def test_a_capture_owns_what_follows_it():
    assert play_back(SMALL).captures == (("F0", 0, 2), ("F1", 3, 3), ("B0", 4, 5), ("F2", 6, 7))
    assert play_back([]).captures == ()
    assert play_back([]).peak_bytes == 0


def test_frames_say_what_lies_where_somebody_else_lay():
    frames = play_back(SMALL).frames
    assert [frame.name for frame in frames] == ["F0", "F1", "B0", "F2"]
    assert [[(life.owner, life.offset) for life in frame.live] for frame in frames] == [
        [("F0", 0)], [("F0", 0), ("F1", 8)], [("F1", 8), ("B0", 16)], [("F2", 0), ("B0", 16)],
    ]  # fmt: skip
    assert [[life.owner for life in frame.taken_over] for frame in frames] == [[], ["F1"], [], ["F2"]]
    assert [frame.peak_bytes for frame in frames] == [12, 16, 18, 16]
    assert [frame.live_bytes for frame in frames] == [8, 16, 10, 8]


def test_neighbours_of_somebody_else_lie_on_nobody():
    rows = ["F0 + 8 4", "F0 - 8 4", "F1 + 4 4", "F1 + 12 4", "F2 + 11 1", "F2 + 3 1"]
    frames = play_back(history(rows)).frames
    assert [[life.offset for life in frame.taken_over] for frame in frames] == [[], [], [11]]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6), st.booleans()), max_size=40))
def test_live_bytes_are_the_blocks_that_are_held(wishes):
    rows, held = [], {}
    for offset, nbytes, give_back in wishes:
        if give_back and held:
            first = min(held)
            rows.append(("free", first, held.pop(first)))
        elif not any(offset < start + size and start < offset + nbytes for start, size in held.items()):
            held[offset] = nbytes
            rows.append(("alloc", offset, nbytes))
    playback = play_back((time, *row, "g") for time, row in enumerate(rows))
    for row in range(len(rows)):
        assert sum(life.nbytes for life in playback.lives if life.alive(row)) == playback.live_bytes[row]


def test_histories_that_no_pool_writes_are_refused():
    with pytest.raises(ValueError, match="row 1 takes bytes 4 to 12, where F0 holds 0 to 8"):
        play_back(history(["F0 + 0 8", "F1 + 4 8"]))
    with pytest.raises(ValueError, match="row 1 takes bytes 0 to 8, where F0 holds 4 to 8"):
        play_back(history(["F0 + 4 4", "F1 + 0 8"]))
    with pytest.raises(ValueError, match="row 1 gives back offset 8, where no block is held"):
        play_back(history(["F0 + 0 8", "F0 - 8 8"]))


def test_a_layers_numbers_are_read_off_its_graphs():
    """The backward gives a block back before it takes one of its own: that must not look as if nobody had kept it."""
    rows = [
        "F0 + 0 8", "F0 + 16 2", "F0 - 16 2", "F1 + 8 8", "F0 - 0 8", "B0 + 16 1", "B0 + 17 10", "B0 - 17 10",
        "F2 + 0 8", "B1 + 17 1", "B2 + 18 1",
    ]  # fmt: skip
    assert layer_memory(history(rows)) == LAYER
    with pytest.raises(ValueError, match="has seen 4 captures"):
        layer_memory(SMALL)


def test_peak_of_a_small_pipeline_by_hand():
    """1F1B, 2 stages, 3 microbatches, rank 0: 1 1 -1 1 -1 -1. After B0 one forward is left and B0's gradient, which
    goes with B1."""
    prediction = predict_pool(one_f_one_b(2, 3).order(0), 1, LAYER)
    assert prediction.live_bytes == (8, 16, 9, 17, 9, 1)
    assert prediction.peak_bytes == 20  # the backward of the second microbatch, beside two forwards and B0's gradient


def test_layers_of_a_chunk_hand_gradients_down():
    """Two layers: B of layer 1 leaves 1, B of layer 0 leaves 1 and lets layer 1's go."""
    prediction = predict_pool([1, -1], 2, [LAYER, LayerMemory(20, 16, 5, 2)])
    assert prediction.live_bytes == (24, 1)
    assert prediction.peak_bytes == 29  # 8 + 20 forward, 24 + 5 backward


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 3))
def test_the_pool_grows_with_ranks_and_not_with_microbatches(pp, microbatches, layers):
    for rank in range(pp):
        order = one_f_one_b(pp, microbatches).order(rank)
        pure = predict_pool(order, layers, LayerMemory(1, 1, 0, 0))
        assert pure.peak_bytes == layers * min(pp - rank, microbatches) == plan_buffers(order, layers).num_buffers
    assert predict_pool(gpipe(pp, microbatches).order(0), 1, LayerMemory(1, 1, 0, 0)).peak_bytes == microbatches


def test_memory_of_another_number_of_layers_is_refused():
    with pytest.raises(ValueError, match="memory of 1 layers for 2"):
        predict_pool([1, -1], 2, [LAYER])


def test_weight_gradients_of_their_own_are_not_predicted():
    with pytest.raises(ValueError, match="measure the pool instead"):
        predict_pool([1, -1, -1.5], 1, LAYER)
