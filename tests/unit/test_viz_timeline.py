"""Timelines: sentences with the right numbers, labels, strips, memory; refusals."""

import re

import pytest

from labkit.events import Event
from labkit.schedules import Costs, Schedule, gpipe, interleaved, one_f_one_b, simulate, zbv
from labkit.viz import compare_timelines, gantt, gantt_overlay
from labkit.viz.pipeline.timeline import measured_bubble


def measured(timeline, late=0.0, stretch=1.0):
    """Events as a real run leaves them: another origin, stretched, each with a wait before it."""
    events = []
    for e in timeline.events:
        start, end = 100 + e.start * stretch + late, 100 + e.end * stretch
        events.append(Event(e.rank + 4, e.name, e.kind, start, end, e.microbatch, e.chunk))
        events.append(Event(e.rank + 4, "wait recv pp", "wait", start - 0.001, start))
        events.append(Event(e.rank + 4, "send pp", "send", end, end + 0.5))
    return events


def texts(figure):
    return [text.get_text() for axes in figure.fig.axes for text in axes.texts]


def test_the_sentence_of_a_prediction():
    assert repr(gantt(simulate(one_f_one_b(4, 8)))) == "1F1B, 4 stages, 8 microbatches: bubble 27.3%, peak 4 in flight"
    assert repr(gantt(simulate(gpipe(4, 8)))) == "GPipe, 4 stages, 8 microbatches: bubble 27.3%, peak 8 in flight"
    single = gantt(simulate(one_f_one_b(2, 1)), name="mine", memory=True)
    assert repr(single) == "mine, 2 stages, 1 microbatch: bubble 50.0%, peak 1 in flight"


def test_timelines_are_compared_on_one_axis():
    pair = [simulate(interleaved(4, 2, 4, all_warmup=rule)) for rule in (True, False)]
    figure = compare_timelines(pair)
    assert repr(figure) == (
        "interleaved, all warm-up, 8 stages, 4 microbatches: bubble 27.3%, ranks keep 8, 8, 8, 8 in flight; "
        "interleaved 1F1B, 8 stages, 4 microbatches: bubble 27.3%, ranks keep 8, 8, 7, 5 in flight"
    )
    above, below = figure.fig.axes
    assert above.get_xlim() == below.get_xlim() and len(above.patches) == len(below.patches)
    with pytest.raises(ValueError, match="no timeline"):
        compare_timelines([])


def test_a_comparison_of_forwards_says_nothing_of_what_is_kept():
    forwards = Schedule("forwards", 2, 2, [["0F0", "0F1"], ["1F0", "1F1"]])
    assert repr(compare_timelines([simulate(forwards)])) == "forwards, 2 stages, 2 microbatches: bubble 33.3%"


def test_the_legend_names_every_kind_of_every_timeline():
    figure = compare_timelines([simulate(one_f_one_b(2, 4)), simulate(zbv(2, 4))])
    named = {text.get_text() for text in figure.fig.legends[0].get_texts()}
    assert {"forward", "backward", "input gradient", "weight gradient", "chunk 1"} <= named


def test_every_bar_is_labelled_and_stands_in_its_row():
    figure = gantt(simulate(one_f_one_b(3, 4)))
    assert sorted(texts(figure)) == sorted(3 * [f"{kind}{m}" for kind in "FB" for m in range(4)])
    axes = figure.fig.axes[0]
    forwards, backwards = axes.collections[:2]
    assert len(forwards.get_paths()) == len(backwards.get_paths()) == 12
    first = forwards.get_paths()[0].get_extents()
    assert (first.x0, first.x1) == (0, 1)
    assert 0 < first.y0 < first.y1 < 1
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]


def test_the_sentence_of_a_measurement_has_no_clock_unless_asked():
    events = measured(simulate(one_f_one_b(2, 3), Costs(forward=0.01, backward=0.02)))
    figure = gantt(events, memory=True)
    assert repr(figure) == "measured, 2 ranks: 6 forward passes and 6 backward passes, at most 2 in flight"
    assert repr(gantt(events, numbers=True)).endswith("in flight, bubble 25.0%, 120 ms")
    assert [label.get_text() for label in figure.fig.axes[0].get_yticklabels()] == ["rank 4", "rank 5"]
    assert len(figure.fig.axes) == 2


def test_measured_bubble_by_hand():
    events = [Event(0, "0F0", "forward", 1, 2), Event(1, "1F0", "forward", 2, 3), Event(1, "w", "wait", 0, 9)]
    assert measured_bubble(events) == 0.5
    assert measured_bubble([]) == 0


def test_what_layers_report_inside_an_action_is_left_out():
    events = [Event(0, "0F0", "forward", 0, 1), Event(0, "0B0", "backward", 1, 3)]
    details = [Event(0, "layers.0.mlp", "input_grad", 1, 2), Event(0, "layers.0.mlp", "weight_grad", 2, 3)]
    assert repr(gantt(events + details)) == repr(gantt(events))
    assert measured_bubble(events + details) == 0
    assert repr(gantt(details)) == (
        "measured, 1 rank: 1 input gradient pass and 1 weight gradient pass, at most 0 in flight"
    )


def test_overlay_says_whether_the_rows_agree():
    timeline = simulate(one_f_one_b(2, 3), Costs(forward=0.01, backward=0.02))
    same = gantt_overlay(timeline, measured(timeline), memory=True)
    assert repr(same) == (
        "1F1B, 2 stages, 3 microbatches: both ranks ran their rows in the predicted order, peak 2 in flight"
    )
    slower = repr(gantt_overlay(timeline, measured(timeline, stretch=1.5), numbers=True))
    assert "makespan 1.50 of the prediction" in slower
    assert "measured bubble 25.0%, predicted 25.0%; what differs most is computation on rank 0: +45.0 ms" in slower
    other = simulate(gpipe(2, 3), Costs(forward=0.01, backward=0.02))
    assert "rank 0 did not run its row in the predicted order" in repr(gantt_overlay(timeline, measured(other)))
    predicted, found = same.fig.axes[0].collections[0], same.fig.axes[0].collections[2]
    assert set(predicted.get_facecolor().ravel()) == {1.0} != set(found.get_facecolor().ravel()), "an outline"
    assert predicted.get_paths()[0].get_extents().y1 < found.get_paths()[0].get_extents().y0


def test_arrows_come_from_what_an_action_needs_on_another_rank():
    def needs(name):
        return [f"0F{name[2:]}"] if name[:2] in ("1F", "0B") else []

    figure = compare_timelines([simulate(gpipe(2, 3))], needs=needs)
    arrows = [text for text in figure.fig.axes[0].texts if not text.get_text()]
    assert [(arrow.xyann, arrow.xy) for arrow in arrows] == [((i + 1, 0.5), (i + 1, 1.5)) for i in range(3)]


def test_a_timeline_has_arrows_and_frames_on_demand():
    figure = gantt(simulate(gpipe(2, 3)), needs=lambda name: ["0F2"] if name == "1F2" else [], framed=["0F1", "1B0"])
    axes = figure.fig.axes[0]
    assert [(text.xyann, text.xy) for text in axes.texts if not text.get_text()] == [((3, 0.5), (3, 1.5))]
    (forward, backward) = axes.patches
    assert forward.get_x() == 1 and 0 < forward.get_y() < 1 < backward.get_y(), "rank 0's second F, rank 1's B"
    assert not forward.get_fill()


def test_rows_are_called_stages_where_ranks_share_one():
    """Pipeline rank 1 of a run with tp 2 is not rank 1 of the world, so it must not be called so."""
    timeline = simulate(one_f_one_b(4, 4), Costs(forward=0.01, backward=0.02))
    overlay = gantt_overlay(timeline, measured(timeline), memory=True, row="stage")
    assert ": all 4 stages ran their rows in the predicted order" in repr(overlay)
    other = simulate(gpipe(4, 4), Costs(forward=0.01, backward=0.02))
    assert "stage 1 did not run its row" in repr(gantt_overlay(timeline, measured(other), row="stage"))
    one = simulate(one_f_one_b(1, 2))
    assert "the one stage ran its row" in repr(gantt_overlay(one, one.events, row="stage"))
    assert repr(gantt(measured(timeline), row="stage")).startswith("measured, 4 stages: 16 forward passes")
    for figure in (overlay, gantt(timeline, memory=True, row="stage")):
        rows, memory = figure.fig.axes
        assert [label.get_text() for label in rows.get_yticklabels()] == [f"stage {stage}" for stage in range(4)]
        assert memory.get_legend_handles_labels()[1] == [f"stage {stage}" for stage in range(4)]
        assert "rank" not in rows.get_title(loc="left")


def test_labels_are_large_enough_to_read_or_left_out():
    for microbatches in (1, 4, 8, 16, 24, 32):
        labels = gantt(simulate(one_f_one_b(4, microbatches))).fig.axes[0].texts
        assert all(float(text.get_fontsize()) >= 7 for text in labels)


def test_a_split_backward_and_two_chunks_are_told_apart():
    v = Schedule.from_csv("0F0,3F0,3I0,0I0,3W0,0W0\n1F0,2F0,2I0,1I0,2W0,1W0", "V")
    figure = gantt(simulate(v), memory=True)
    assert repr(figure).startswith("V, 4 stages, 1 microbatch")
    assert {re.sub(r"\d", "", text) for text in texts(figure)} == {"F", "I", "W"}
    colours = {tuple(colour) for colour in figure.fig.axes[0].collections[0].get_facecolor()}
    assert len(colours) == 2


def test_narrow_bars_go_without_labels_rather_than_with_illegible_ones():
    assert texts(gantt(simulate(one_f_one_b(8, 64)))) == []


def test_fixed_axes_make_pictures_comparable():
    for schedule in (one_f_one_b(2, 4), gpipe(4, 8)):
        figure = gantt(simulate(schedule), memory=True, time_limit=50, memory_limit=10)
        rows, memory = figure.fig.axes
        assert rows.get_xlim() == memory.get_xlim() == (0, 50)
        assert memory.get_ylim() == (0, 10)


def test_narrow_bars_keep_the_microbatch_where_their_colour_says_the_rest():
    """zbv: 51 units in 8 inches leave 11 points a bar; a letter and a digit take 14."""
    figure = gantt(simulate(zbv(4, 8)))
    assert sorted(texts(figure)) == sorted(2 * 4 * 3 * list("01234567"))
    wide = texts(gantt(simulate(interleaved(4, 2, 8))))  # backwards are twice as wide as forwards
    assert sorted({re.sub(r"\d", "", text) for text in wide}) == ["", "B"]


def test_chunks_have_shades_and_a_legend():
    figure = gantt(simulate(interleaved(4, 2, 8)))
    labels = [text.get_text() for text in figure.fig.legends[0].get_texts()]
    assert labels == ["forward", "backward", "idle", "chunk 0", "chunk 1"]
    many = gantt(simulate(interleaved(2, 8, 2)))
    assert [t.get_text() for t in many.fig.legends[0].get_texts()][-2:] == ["chunk 0", "chunk 7"]
    shades = {tuple(colour) for colour in many.fig.axes[0].collections[0].get_facecolor()}
    assert len(shades) == 8
    swatches = [tuple(patch.get_facecolor()) for patch in figure.fig.legends[0].get_patches()]
    assert len(set(swatches)) == 5, "a chunk does not look like a kind"
    bars = [sum(colour[:3]) for colour in figure.fig.axes[0].collections[0].get_facecolor()]
    assert max(bars) - min(bars) > 0.5 and sum(swatches[-1]) - sum(swatches[-2]) > 0.5, "chunk 1 is paler, in both"


def test_the_axis_names_the_unit_of_the_costs():
    timeline = simulate(one_f_one_b(2, 2))
    assert gantt(timeline, unit="forwards").fig.axes[0].get_xlabel() == "time (forwards)"
    assert gantt(timeline).fig.axes[0].get_xlabel() == "time (units of the costs)"
    assert gantt(timeline.events, unit="forwards").fig.axes[0].get_xlabel() == "time (ms)"


def test_the_overlay_says_that_the_memory_is_measured():
    timeline = simulate(one_f_one_b(2, 2), Costs(forward=0.01, backward=0.02))
    assert "measured" in gantt_overlay(timeline, measured(timeline), memory=True).fig.axes[1].get_ylabel()


def test_input_gradients_do_not_look_like_forwards_of_a_later_chunk():
    axes = gantt(simulate(zbv(2, 4))).fig.axes[0]
    forward, inputs = ({tuple(c[:3]) for c in axes.collections[k].get_facecolor()} for k in (0, 1))
    assert min(sum(abs(a - b) for a, b in zip(f, i, strict=True)) for f in forward for i in inputs) > 0.8


def test_many_ranks_stay_on_a_page():
    figure = gantt(simulate(one_f_one_b(64, 64)), memory=True)
    assert figure.fig.get_size_inches()[1] < 9
    rows, memory = figure.fig.axes
    assert [label.get_text() for label in rows.get_yticklabels()] == [f"rank {rank}" for rank in range(0, 64, 2)]
    assert rows.collections[0].get_linewidth() == 0  # white edges would cover bars of a pixel
    assert [text.get_text() for text in memory.get_legend().get_texts()] == [f"rank {r}" for r in (0, 21, 42, 63)]


def test_the_overlay_names_the_largest_gap_when_asked_for_numbers():
    timeline = simulate(one_f_one_b(4, 8), Costs(forward=0.01, backward=0.02))
    slower = simulate(one_f_one_b(4, 8), Costs(forward=0.01, backward=[0.02, 0.02, 0.03, 0.02]))
    told = repr(gantt_overlay(timeline, measured(slower), numbers=True, row="stage"))
    assert told.endswith("; what differs most is computation on stage 2: +80.0 ms, of it +80.0 ms in the "
                         "backward of stage 2")  # fmt: skip
    other = simulate(gpipe(4, 8), Costs(forward=0.01, backward=0.02))
    assert "what differs" not in repr(gantt_overlay(timeline, measured(other), numbers=True))


def test_the_memory_panel_weighs_activations():
    timeline = simulate(one_f_one_b(2, 4), Costs(activation=[3, 2.5]))
    figure = gantt(timeline, memory=True)
    peaks = [max(line.get_ydata()) for line in figure.fig.axes[1].lines]
    assert peaks == timeline.peak_memory == [6, 2.5]
    assert repr(figure).endswith("peak 6 in flight")


def test_the_same_timeline_gives_the_same_bytes():
    assert gantt(simulate(gpipe(2, 2))).png == gantt(simulate(gpipe(2, 2))).png


def test_what_is_measured_weighs_what_the_prediction_says():
    """Half a rank's share a stage: 2 ranks with 2 stages each keep as much as with one, 2 microbatches."""
    timeline = simulate(zbv(2, 4), Costs(activation=0.5))
    overlay = gantt_overlay(timeline, timeline.events, memory=True)
    assert repr(overlay).endswith("peak 2 in flight")
    assert [max(line.get_ydata()) for line in overlay.fig.axes[1].lines] == timeline.peak_memory == [2, 2]
    assert repr(gantt_overlay(simulate(zbv(2, 4)), timeline.events)).endswith("peak 4 in flight")
