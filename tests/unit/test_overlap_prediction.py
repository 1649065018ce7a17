"""A step of data parallelism, predicted: by hand, in its extremes, and as pictures."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgba
from PIL import Image

from labkit.events import Event
from labkit.parallel.data_parallel.bucket_layout import ParameterSpec, plan_buckets
from labkit.plan.overlap import BackwardPiece, BucketSize, Link, exposed_seconds, predict_step
from labkit.viz import bucket_meetings, bucket_size_curve, explore_buckets, overlap_gantt
from labkit.viz.data_parallel.bucket_overlap import QUEUED
from labkit.viz.figure import Figure
from labkit.viz.style import color

LAYERS = [ParameterSpec(f"p{i}", 100) for i in range(4)]
BACKWARD = [BackwardPiece(1.0, (f"p{i}",)) for i in reversed(range(4))]
LINK = Link(latency=0.5, bandwidth=400.0)  # a layer of 100 elements of 4 bytes takes 1.5 s


def collectives(events: list[Event]) -> list[tuple[float, float]]:
    return [(event.start, event.end) for event in events if event.kind == "collective"]


def test_by_hand():
    """p3 leaves at 1, p2 at 2 while the link is busy to 2.5, ..; backward ends at 4, the link at 1 + 4 x 1.5 = 7."""
    each = plan_buckets(LAYERS, dp=2, bucket_size=1)
    assert collectives(predict_step(each, BACKWARD, link=LINK)) == [(1, 2.5), (2, 4), (3, 5.5), (4, 7)]
    pairs = plan_buckets(LAYERS, dp=2, bucket_size=101)
    events = predict_step(pairs, BACKWARD, link=LINK, forward=2.0)
    assert collectives(events) == [(4, 6.5), (6, 9)]
    assert exposed_seconds(events) == 3.0
    assert [(e.start, e.end) for e in events if e.kind == "wait"] == [(6, 9)]
    late = predict_step(pairs, BACKWARD, link=LINK, overlap=False)
    assert collectives(late) == [(4, 6.5), (4, 9)] and exposed_seconds(late) == 5.0


def test_a_bucket_waits_for_those_before_it():
    """p0's gradient comes first, but its bucket is the last."""
    backward = [BackwardPiece(1.0, ("p0",)), BackwardPiece(1.0, ("p3", "p2")), BackwardPiece(1.0, ("p1",))]
    plan = plan_buckets(LAYERS, dp=2, bucket_size=1)
    assert [start for start, _ in collectives(predict_step(plan, backward, link=Link(0, 1e9)))] == [2, 2, 3, 3]


sizes = st.lists(st.integers(1, 1000), min_size=1, max_size=12)


@given(
    numels=sizes, size=st.integers(1, 3000), latency=st.floats(0, 2), bandwidth=st.floats(1, 1e6), dp=st.integers(1, 9)
)
def test_overlap_never_exposes_more_and_never_less_than_the_last_bucket(numels, size, latency, bandwidth, dp):
    specs = [ParameterSpec(str(i), numel) for i, numel in enumerate(numels)]
    backward = [BackwardPiece(0.25, (spec.name,)) for spec in reversed(specs)]
    link, plan = Link(latency, bandwidth), plan_buckets(specs, dp=dp, bucket_size=size)
    behind, after = (exposed_seconds(predict_step(plan, backward, link=link, overlap=o)) for o in (True, False))
    total = sum(link.seconds(4 * bucket.numel) for bucket in plan.buckets)
    assert after == pytest.approx(total)
    assert link.seconds(4 * plan.buckets[-1].numel) <= behind * (1 + 1e-9) + 1e-9
    assert behind <= after + 1e-9


def test_refusals():
    plan = plan_buckets(LAYERS, dp=2)
    with pytest.raises(ValueError, match="no piece of the backward completes the gradient of p0"):
        predict_step(plan, BACKWARD[:-1], link=LINK)
    with pytest.raises(ValueError, match="p3 is complete after two pieces"):
        predict_step(plan, [*BACKWARD, BACKWARD[0]], link=LINK)
    for latency, bandwidth in ((-1.0, 1.0), (0.0, 0.0), (float("nan"), 1.0)):
        with pytest.raises(ValueError, match="positive bandwidth"):
            Link(latency, bandwidth)
    with pytest.raises(ValueError, match="nothing was computed in 1 Events"):
        overlap_gantt({"x": [Event(0, "all_reduce dp", "collective", 0.0, 1.0)]})
    with pytest.raises(ValueError, match="bucket_rows is 2: give 3 or more"):
        overlap_gantt({"x": predict_step(plan, BACKWARD, link=LINK)}, bucket_rows=2)
    with pytest.raises(ValueError, match="at least one curve"):
        bucket_size_curve({})


def test_pictures_say_what_they_show(monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    one, two = (predict_step(plan_buckets(LAYERS, dp=2, bucket_size=n), BACKWARD, link=LINK) for n in (400, 200))
    figure = overlap_gantt({"one": one, "two": two})
    assert figure.sentence == (
        "one: 1 reduction, none starts before the backward ends; "
        "two: 2 reductions, 1 of them starts before the backward ends."
    )
    assert overlap_gantt({"two": two}, numbers=True).sentence.endswith(", 3000.0 ms exposed.")
    axes = figure.fig.axes[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [
        "computes", "bucket 0", "computes", "bucket 0", "bucket 1"
    ]  # fmt: skip
    swept = []
    for size in (1, 200, 400):
        plan = plan_buckets(LAYERS, dp=2, bucket_size=size)
        swept.append(BucketSize(size, len(plan.buckets), exposed_seconds(predict_step(plan, BACKWARD, link=LINK))))
    assert [(each.buckets, each.exposed) for each in swept] == [(4, 3.0), (2, 3.0), (1, 4.5)]
    assert bucket_size_curve({"here": swept}).sentence == (
        "Exposed communication, the best and the largest size: "
        "here: 3000.0 ms with 2 buckets of 0.0008 MB or more, 4500.0 ms with 1 bucket."
    )
    explored = explore_buckets(
        dict.fromkeys(("p0", "p1", "p2", "p3"), 100),
        BACKWARD,
        bucket_mb=0.0008,
        latency_us=5e5,
        gigabytes_per_second=4e-7,
    )
    assert "2 reductions, 1 of them starts before the backward ends, 3000.0 ms exposed" in explored.sentence
    assert explored.png[:4] == b"\x89PNG"


def bars(figure: Figure, kind: tuple[float, ...]) -> list[tuple[float, float]]:
    """(start, end) in seconds of all bars of this colour."""
    found = [c for c in figure.fig.axes[0].collections if tuple(c.get_facecolor()[0]) == kind]
    xs = [path.vertices[:, 0] / 1e3 for collection in found for path in collection.get_paths()]
    return [(float(x.min()), float(x.max())) for x in xs]


def test_the_link_carries_one_bucket_at_a_time():
    """Leaving at 1, 2, 3, 4 and 1.5 s each: on the link from 1, 2.5, 4, 5.5, before that in the queue."""
    figure = overlap_gantt({"": predict_step(plan_buckets(LAYERS, dp=2, bucket_size=1), BACKWARD, link=LINK)})
    assert bars(figure, to_rgba(color("collective"))) == [(1, 2.5), (2.5, 4), (4, 5.5), (5.5, 7)]
    assert bars(figure, to_rgba(QUEUED)) == [(2, 2.5), (3, 4), (4, 5.5)]
    (legend,) = figure.fig.legends
    assert legend.get_texts()[-1].get_text() == "queued after the previous bucket"


def test_a_prediction_is_an_outline_over_what_was_measured():
    """Two buckets, predicted an hour late: the axis has room for the outline, and the bars stay where they are."""
    events = predict_step(plan_buckets(LAYERS, dp=2, bucket_size=200), BACKWARD, link=LINK)
    late = [(3600.0, 3601.0), (3601.0, 3602.0)]
    figure = overlap_gantt({"measured": events}, outlines={"measured": late})
    boxes = [patch for patch in figure.fig.axes[0].patches if not patch.get_fill()]
    assert [(box.get_x(), box.get_width()) for box in boxes] == [(3_600_000, 1000), (3_601_000, 1000)]
    assert figure.fig.axes[0].get_xlim()[1] > 3_602_000
    assert [text.get_text() for text in figure.fig.legends[0].get_texts()][-1] == "predicted"
    assert figure.sentence == overlap_gantt({"measured": events}).sentence


def test_buckets_that_meet_are_counted_and_another_number_of_ranks_is_refused():
    full = [("arrives", "a"), ("starts", "a"), ("arrives", "b"), ("starts", "b")]
    other = [("arrives", "b"), ("starts", "b"), ("arrives", "a"), ("starts", "a")]
    waits = [("arrives", "b"), ("arrives", "a"), ("starts", "a"), ("starts", "b")]
    figure = bucket_meetings({"when full": [full, other], "in order": [full, waits]})
    assert (
        figure.sentence == "when full: 2 of 2 starts meet something else; in order: 0 of 2 starts meet something else."
    )
    red = [line for line in figure.fig.axes[0].lines if line.get_color() == "#D40000"]
    assert len(red) == 2 and len(figure.fig.axes[0].lines) == 4
    with pytest.raises(ValueError, match="x: 1 ranks; give the steps of two"):
        bucket_meetings({"x": [full]})
    name = full[0][1]
    fills = [
        next(p.get_facecolor() for p in drawn.fig.axes[0].patches)
        for drawn in (bucket_meetings({"x": [full[:2]] * 2}, names=order) for order in ([name], ["before", name]))
    ]
    assert fills[0] != fills[1]  # a bucket has the colour of its place among the names
    with pytest.raises(ValueError, match=f"no colour for .*{name}"):
        bucket_meetings({"x": [full, other]}, names=["before"])


def test_a_picture_of_fixed_height_names_what_it_leaves_out_and_marks_where_it_is_cut():
    specs = [ParameterSpec(f"p{i}", 100) for i in range(20)]
    backward = [BackwardPiece(1.0, (f"p{i}",)) for i in reversed(range(20))]
    many, few = (predict_step(plan_buckets(specs, dp=2, bucket_size=n), backward, link=LINK) for n in (1, 1000))
    cut, whole = (overlap_gantt({"": each}, time_limit=25.0, bucket_rows=6) for each in (many, few))
    assert tuple(cut.fig.get_size_inches()) == tuple(whole.fig.get_size_inches())
    assert [tick.get_text() for tick in cut.fig.axes[0].get_yticklabels()] == [
        "computes", "bucket 0", "bucket 1", "bucket 2", "15 more", "bucket 18", "bucket 19"
    ]  # fmt: skip
    # 1 + 20 x 1.5 s against 10 + 2 x (0.5 + 10) s; both go on beyond the 25 s of the axis, and not beyond 31
    ends = [[t.get_text() for t in each.fig.axes[0].texts if t.get_text().startswith("to ")] for each in (cut, whole)]
    assert ends == [["to 31,000 ms \u25b6"], ["to 31,000 ms \u25b6"]]
    (ample,) = overlap_gantt({"": many}, time_limit=31.0, bucket_rows=6).fig.axes
    assert not [text for text in ample.texts if text.get_text().startswith("to ")]


def test_sliders_redraw_the_step_in_a_picture_that_stays_where_it_is(monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "somewhere")
    layers = {f"p{i}": 100_000 for i in range(4)}  # 0.4 MB each
    box = explore_buckets(layers, BACKWARD, bucket_mb=37.5, latency_us=5000.0, gigabytes_per_second=1.0)
    size, latency, bandwidth, picture, words = box.children
    units = [slider.description for slider in (size, latency, bandwidth)]
    assert units == ["bucket size (MB)", "latency (\u00b5s)", "bandwidth (GB/s)"]
    assert "buckets of 37.5 MB or more: 1 reduction," in words.value, "the caller's size is one of the stops"
    before = picture.value
    size.value = 0.1
    assert "4 reductions, 3 of them start" in words.value and picture.value != before
    after = picture.value
    latency.value, bandwidth.value = 10.0, 0.1
    shown = [Image.open(io.BytesIO(value)).size for value in (before, after, picture.value)]
    assert picture.value != after and len(set(shown)) == 1, shown
