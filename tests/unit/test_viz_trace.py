"""The trace file by its schema: what Perfetto's JSON importer asks for."""

import json
from itertools import pairwise

import pytest

from labkit.events import KINDS, Event
from labkit.schedules import Costs, one_f_one_b, simulate
from labkit.viz import write_trace


@pytest.fixture
def trace(tmp_path):
    timeline = simulate(one_f_one_b(3, 2), Costs(forward=0.01, backward=0.02))
    extra = [
        Event(0, "send pp", "send", 0.01, 0.05, bytes=96),
        Event(0, "send pp", "send", 0.02, 0.03, bytes=96),
        Event(2, "optimizer", "optimizer", 0.2, 0.21),
        Event(1, "wait recv pp", "wait", 0.0, 0.01),
    ]
    return json.loads(write_trace([*timeline.events, *extra], tmp_path / "new" / "trace.json").read_text())


def of(trace, phase):
    return [row for row in trace["traceEvents"] if row["ph"] == phase]


def test_shape_of_the_file(trace):
    assert set(trace) == {"schemaVersion", "displayTimeUnit", "traceEvents"}
    assert {row["ph"] for row in trace["traceEvents"]} == {"M", "X", "s", "f"}
    for row in trace["traceEvents"]:
        assert isinstance(row["pid"], int)
        assert isinstance(row["tid"], int)
        assert row["ts"] >= 0
        assert isinstance(row["name"], str)
    for row in of(trace, "X"):
        assert row["dur"] >= 0


def test_times_are_microseconds_and_details_travel(trace):
    slices = {(row["pid"], row["name"]): row for row in of(trace, "X")}
    assert len(of(trace, "X")) == 12 + 4
    assert slices[1, "1F0"]["ts"] == pytest.approx(10_000)
    assert slices[1, "1F0"]["dur"] == pytest.approx(10_000)
    assert slices[1, "1F0"]["args"] == {"microbatch": 0, "chunk": 0}
    assert slices[0, "send pp"]["args"] == {"bytes": 96}


def test_ranks_and_tracks_are_named(trace):
    names = {(row["pid"], row["tid"], row["name"]): row["args"] for row in of(trace, "M")}
    assert [names[rank, 0, "process_name"]["name"] for rank in range(3)] == ["rank 0", "rank 1", "rank 2"]
    threads = {args["name"] for (_, _, what), args in names.items() if what == "thread_name"}
    assert threads == {"compute", "send", "send 2", "optimizer", "wait"}
    assert {row["tid"] for row in of(trace, "X")} <= {tid for _, tid, what in names if what == "thread_name"}


def test_each_step_of_a_run_is_named_and_replays_have_a_track(tmp_path):
    events = [
        Event(0, "step", "timer", 0.0, 1.0, step=7),
        Event(0, "optimizer", "timer", 0.5, 1.0, step=7),
        Event(0, "full iteration, training", "graph_replay", 0.0, 0.4, step=7),
        Event(0, "step", "timer", 1.0, 2.0, step=8),
    ]
    rows = of(json.loads(write_trace(events, tmp_path / "t.json").read_text()), "X")
    assert [row["name"] for row in rows if row["cat"] == "timer"] == ["step 7", "optimizer", "step 8"]
    assert [row["args"]["step"] for row in rows] == [7, 7, 7, 8]


def test_every_kind_of_event_has_a_track(tmp_path):
    events = [Event(0, kind, kind, 0.0, 1.0) for kind in KINDS]
    rows = of(json.loads(write_trace(events, tmp_path / "t.json").read_text()), "X")
    assert sorted(row["cat"] for row in rows) == sorted(KINDS)


def test_slices_of_one_track_do_not_overlap(trace):
    by_track = {}
    for row in of(trace, "X"):
        by_track.setdefault((row["pid"], row["tid"]), []).append((row["ts"], row["ts"] + row["dur"]))
    for spans in by_track.values():
        assert all(first[1] <= second[0] + 1e-3 for first, second in pairwise(sorted(spans)))


def test_an_arrow_for_each_message_between_ranks(trace):
    starts, ends = ({row["id"]: row for row in of(trace, phase)} for phase in "sf")
    assert set(starts) == set(ends)
    assert len(starts) == 2 * 2 * 2
    slices = of(trace, "X")
    for number, start in starts.items():
        end = ends[number]
        assert end["bp"] == "e"
        assert abs(end["pid"] - start["pid"]) == 1
        assert end["ts"] >= start["ts"]
        inside = [s for s in slices if s["pid"] == start["pid"] and s["ts"] <= start["ts"] <= s["ts"] + s["dur"]]
        assert any(s["tid"] == start["tid"] for s in inside)


def test_a_timeline_and_no_arrows(tmp_path):
    rows = json.loads(write_trace(simulate(one_f_one_b(2, 2)), tmp_path / "t.json", arrows=False).read_text())
    assert {row["ph"] for row in rows["traceEvents"]} == {"M", "X"}
