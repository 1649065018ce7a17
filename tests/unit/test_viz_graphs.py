"""Figures of CUDA graphs: sentences, bars and lives worked out by hand, refusals."""

import pytest
import torch

from labkit.graphs.study.launches import Launches, Run, predict_launches
from labkit.graphs.study.operation_log import Memory, Operation, OperationLog, memory_of
from labkit.viz import by_call, graph_memory, launch_timeline


def log_of(*operations):
    log = OperationLog()
    log.operations = [Operation(*each) for each in operations]
    return log


@pytest.fixture
def given():
    return torch.ones(2), torch.ones(2)


def bars(axes):
    """(left, top, width, height) of results, then of lives."""
    boxes = [(p.get_x(), p.get_y(), p.get_width(), p.get_height()) for p in axes.patches]
    return [box for box in boxes if box[3] == 0.72], [box for box in boxes if box[3] != 0.72]


def test_memory_taken_again_is_counted_and_drawn(given):
    """Results of 1,000, 500 and 400 bytes; the third lies in the place of the first, which operation 1 read last."""
    x, y = given
    first, second, third = Memory(10_000, 1000), Memory(11_000, 500), Memory(10_000, 400)
    forward = log_of(("mm", (memory_of(x),), (first,)), ("add", (first, memory_of(y)), (second,)))
    backward = log_of(("mul", (second,), (third,)))
    figure = graph_memory({"forward": forward, "backward": backward}, {"x": x, "y": y})
    assert figure.sentence == (
        "3 operations, 2 in forward and 1 in backward, read 2 given tensors and make 3 results; 1 of these lie where "
        "an earlier one lay, so that the pool has 1.5 kB instead of 1.9."
    )
    left, right = figure.fig.axes
    results, lives = bars(right)
    assert [box[0] for box in results] == [0, 1.0, 0] and [box[2] for box in results] == [1.0, 0.5, 0.4]
    assert [life[3] for life in lives] == [1, 1, 1], "each to the next row; the last to the end, since it leaves"
    assert [patch.get_hatch() for patch in right.patches if patch.get_hatch()] == [".."]
    assert len(left.lines) == 2 and len(right.lines) == 2, "reads"
    assert [text.get_text() for text in left.get_yticklabels()] == ["0 mm", "1 add", "2 mul"]


def test_a_result_that_leaves_is_named_where_it_was_written_last(given):
    x, y = (memory_of(each) for each in given)
    log = log_of(("a", (), (y,)), ("b", (y,), (x,)), ("c", (x,), (y,)))
    left, _ = graph_memory({"forward": log}, {}, {"y": given[1]}).fig.axes
    assert [text.get_text() for text in left.get_yticklabels()] == ["0 a", "1 b", "2 c: y"]


def test_gaps_between_places_are_left_out(given):
    """Two places far apart, as segments of a GPU's pool are."""
    log = log_of(("a", (), (Memory(1 << 40, 1000),)), ("b", (), (Memory(100, 2000),)))
    results, _ = bars(graph_memory({"forward": log}, {}).fig.axes[1])
    assert [(box[0], box[2]) for box in results] == [(2.0, 1.0), (0.0, 2.0)]


def test_writing_in_place_makes_no_result(given):
    x, _ = given
    place = Memory(100, 1000)
    log = log_of(("mul", (memory_of(x),), (place,)), ("add_", (place,), (place,)), ("copy_", (place,), (memory_of(x),)))
    figure = graph_memory({"forward": log}, {"x": x})
    assert "read 1 given tensor and make 1 result; 0 of these" in figure.sentence
    assert [line.get_marker() for line in figure.fig.axes[0].lines] == ["o", "s"], "read, then written"


def test_launches_have_a_lane_for_the_host_and_one_for_the_device():
    runs = {"one by one": predict_launches([3.0] * 4, 8.0), "graph": predict_launches([3.0] * 4, 8.0, graph=True)}
    figure = launch_timeline(runs)
    assert figure.sentence == (
        "one by one 4 operations, device busy 34% of 35 us; graph 4 operations, device busy 60% of 20 us."
    )
    (axes,) = figure.fig.axes
    rows = [round(patch.get_y()) for patch in axes.patches]
    assert [rows.count(row) for row in range(4)] == [4, 4, 1, 4]
    called = launch_timeline({"graph": runs["graph"]}, "kernel")
    assert called.sentence == "graph 4 kernels, device busy 60% of 20 us."
    assert [text.get_text() for text in called.fig.legends[0].get_texts()] == ["kernel", "launch", "idle"]


def test_a_narrow_launch_has_its_name_after_it_where_there_is_room():
    alone = Launches((), (Run("addmm", 0.0, 10.0), Run("gelu", 12.0, 12.4), Run("mm", 12.4, 12.5), Run("", 14, 15)))
    figure = launch_timeline({"eager": alone})
    (axes,) = figure.fig.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["eager"]
    assert [text.get_text() for text in axes.texts] == ["addmm", "mm", ""], "mm follows gelu at once"
    assert axes.texts[1].get_position()[0] > 12.5
    with pytest.raises(ValueError, match="at least one operation"):
        launch_timeline({"none": Launches((), ())})


def test_numbers_by_call_end_in_the_sentence():
    figure = by_call({"by Python": [1, 2, 2, 2], "in a tensor": [0, 0, 1, 2]}, "Runs", captured=2)
    assert figure.sentence == "Runs after 4 calls (2 of them warm-up and capture): by Python 2, in a tensor 2."
    names = [text.get_text() for text in figure.fig.legends[0].get_texts()]
    assert names == ["warm-up and capture", "by Python", "in a tensor"], "in the picture a short zone has no room"
    assert by_call({"eager": [0.5]}, "Factor").sentence == "Factor after 1 call: eager 0.5."
    with pytest.raises(ValueError, match="at least one line"):
        by_call({}, "Runs")
