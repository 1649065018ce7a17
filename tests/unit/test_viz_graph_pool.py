"""Pictures of buffers and pools: what they draw and say is what they were given."""

import pytest

from labkit.graphs import overwritten, plan_buffers, play_back
from labkit.schedules import interleaved, one_f_one_b
from labkit.viz import (
    buffer_lives,
    explore_pool,
    gradient_errors,
    pool_blocks,
    pool_collisions,
    pool_frame,
    pool_frames,
)

K = 1024


def named(kind, microbatch, layer=0):
    return f"chunk 0 layer {layer} microbatch {microbatch} {'forward' if kind == 'F' else 'backward'}"


def pool(rows):
    """Rows such as `F0 + 0 8`: the forward of microbatch 0 takes 8 KiB at 0."""
    read = [row.split() for row in rows]
    return play_back(
        (time, "alloc" if sign == "+" else "free", int(offset) * K, int(size) * K, named(graph[0], int(graph[1])))
        for time, (graph, sign, offset, size) in enumerate(read)
    )


SMALL = pool(["F0 + 0 8", "F0 + 8 4", "F0 - 8 4", "F1 + 8 8", "B0 + 16 1", "F0 - 0 8", "F2 + 0 6", "F1 - 8 8"])


def boxes(figure, axes=0):
    return [
        (round(box.get_x(), 3), round(box.get_y(), 3), round(box.get_width(), 3))
        for box in figure.fig.axes[axes].patches if box.get_fill()
    ]  # fmt: skip


def test_lives_reach_from_forward_to_backward():
    order = one_f_one_b(2, 3).order(0)
    figure = buffer_lives(plan_buffers(order, 1), order, what="1F1B")
    assert repr(figure) == "1F1B: 2 buffers for 3 inputs, at most 2 held at once, no buffer held twice."
    assert boxes(figure) == [(0.04, 0.08, 2.92), (1.04, 1.08, 3.92), (3.04, 0.08, 2.92)]
    assert [label.get_text() for label in figure.fig.axes[0].texts] == ["0", "1", "2"]
    assert figure.png


def test_a_plan_that_is_early_shows_where_two_hold_a_buffer():
    order = one_f_one_b(2, 3).order(0)
    figure = buffer_lives(plan_buffers(order, 1, early_release=1), order)
    assert repr(figure) == (
        "1 buffer for 3 inputs; held twice in 2 places, first buffer 0 at step 1, which microbatch 1 takes before the "
        "backward of microbatch 0 has read it."
    )
    frames = [box for box in figure.fig.axes[0].patches if not box.get_fill()]
    assert [(box.get_x(), round(box.get_width(), 2)) for box in frames] == [(1, 1.96), (3, 1.96)]
    assert [label.get_text() for label in figure.fig.axes[0].texts] == ["0", "0", "1", "1", "2"]


def test_chunks_are_named_where_there_are_several():
    order = interleaved(2, 2, 2).order(1)
    texts = [label.get_text() for label in buffer_lives(plan_buffers(order, 1), order).fig.axes[0].texts]
    assert texts[:3] == ["0 (1)", "1 (1)", "0 (2)"]


def test_blocks_over_time():
    figure = pool_blocks(SMALL, what="small")
    assert repr(figure) == (
        "small: 4 captures took 27 KiB in 5 blocks; at most 17 KiB were held at once, in a pool of 17 KiB."
    )
    assert boxes(figure) == [(0, 0, 5), (1, 8, 1), (3, 8, 4), (4, 16, 4), (6, 0, 2)]
    _, below = figure.fig.axes
    assert [label.get_text() for label in below.get_xticklabels()] == ["F0", "F1", "B0", "F2"]
    held = [8, 12, 8, 16, 17, 9, 15, 7]  # KiB after each row: an amount, on an axis of its own
    assert list(below.patches[0].get_data().values) == held
    assert [text.get_text() for text in below.texts] == ["at most 17"]


KEPT = pool(["F0 + 0 8", "F1 + 8 4", "B0 + 16 2", "F0 - 0 8", "B0 - 16 2", "B1 + 16 2", "F1 - 8 4"])
EARLY = pool(["F0 + 0 8", "F0 - 0 8", "F1 + 4 4", "B0 + 0 2", "B0 - 0 2", "B1 + 0 2", "F1 - 4 4"])
"""The same blocks; F0 goes back at once, and F1 and B0 lie on it. B0 is the last that F0 is needed for, so B1 may."""


def test_a_block_that_went_back_too_early_has_a_red_frame_while_it_is_needed():
    (only,) = overwritten(EARLY, KEPT)
    assert (only.block.owner, only.taker.owner, only.until) == (named("F", 0), named("F", 1), 5)
    assert overwritten(KEPT, KEPT) == []
    figure = pool_collisions(KEPT, {"at once": EARLY})
    assert repr(figure) == (
        "all rules kept: no block is overwritten while it is needed; at once: 1 block overwritten, first one of "
        "chunk 0 layer 0 microbatch 0 forward by chunk 0 layer 0 microbatch 1 forward."
    )
    frames = [[box for box in axes.patches if not box.get_fill()] for axes in figure.fig.axes]
    assert [len(each) for each in frames] == [0, 1]
    assert frames[1][0].get_bbox().bounds == (2, 4, 3, 4), "from F1's first moment, the bytes that both have"
    with pytest.raises(ValueError, match="different captures"):
        overwritten(SMALL, KEPT)


def test_frames_are_strips_in_the_order_of_captures():
    figure = pool_frames(SMALL, what="small")
    assert repr(figure) == (
        "small: 4 frames, most held after F1, 16 KiB; F1 is the first forward that is mostly in memory of "
        "earlier graphs (100%)."
    )
    assert boxes(figure) == [
        (0, 0.1, 8), (0, 1.1, 8), (8, 1.1, 8), (8, 2.1, 8), (16, 2.1, 1), (0, 3.1, 6), (16, 3.1, 1),
    ]  # fmt: skip
    arrows = [text for text in figure.fig.axes[0].texts if text.arrow_patch]
    assert [(text.xy, text.xyann) for text in arrows] == [((3, 3.1), (3, 1.9))], "from F0's memory, last held after F1"
    assert "2 frames, most held after B0, 9 KiB; F2 is" in repr(pool_frames(SMALL, first=2))
    assert repr(pool_frames(SMALL, count=1)).endswith("no forward is mostly in memory of earlier graphs.")


def test_one_frame_alone():
    figure = pool_frame(SMALL, 3)
    assert repr(figure) == ("Frame 3 of 4, F2: 7 KiB held in 2 blocks, 6 KiB of it just taken from earlier graphs.")
    assert [box[2] for box in boxes(figure)] == [6, 1]
    assert [round(bar.get_height(), 2) for bar in figure.fig.axes[1].patches] == [8, 16, 9, 7]
    with pytest.raises(ValueError, match="there is no frame 4: the pool has 4, 0 first"):
        pool_frame(SMALL, 4)
    with pytest.raises(ValueError, match="there is no frame 9"):
        pool_frames(SMALL, first=9)


def test_layers_are_told_apart():
    both = play_back(
        [
            (0, "alloc", 0, K, named("F", 0)),
            (1, "alloc", K, K, named("F", 0, 1)),
            (2, "alloc", 2 * K, K, named("B", 0, 1)),
        ]
    )
    labels = pool_frames(both).fig.axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == ["F0 l0", "F0 l1", "B0 l1"]


def test_a_live_notebook_gets_a_player(monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert repr(explore_pool(SMALL)) == repr(pool_frames(SMALL))
    monkeypatch.setenv("JPY_SESSION_NAME", "chapter")
    controls, picture, words = explore_pool(SMALL).children
    _, slider = controls.children
    assert slider.max == 3
    before = picture.value
    slider.value = 3
    assert picture.value != before
    assert "Frame 3 of 4, F2" in words.value


def test_gradients_are_compared_with_what_the_loss_shows():
    errors = {"layers.1.fc.weight": 0.0, "layers.1.norm.weight": 0.1, "layers.0.fc.weight": 1e-4, "embedding": 2e-6}
    figure = gradient_errors(errors, {"loss": 1e-5}, stressed="norm.weight", what="early")
    assert repr(figure) == (
        "early: 3 of 4 gradients are wrong, most of all layers.1.norm.weight, by 10%; 2 are further off than the loss "
        "(1.0e-05)."
    )
    axes = figure.fig.axes[0]
    small, large = ([tuple(map(float, place)) for place in each.get_offsets()] for each in axes.collections)
    assert large == [(1, 0.1)]
    assert small[1:] == [(2, 1e-4), (3, 2e-6)] and small[0][1] < 1e-6, "an equal gradient lies below all others"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "0"]
    with pytest.raises(ValueError, match="a logarithmic axis needs a wrong gradient"):
        gradient_errors({"w": 0.0}, {"loss": 1e-5}, stressed="norm")
    with pytest.raises(ValueError, match="positive levels"):
        gradient_errors(errors, {"loss": 0.0}, stressed="norm")
