"""The Event record: recorded, shifted, and as JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.events import (
    KINDS,
    Event,
    active_recorder,
    not_recording,
    recording,
    shift_to_zero,
    span,
    watchers,
)

TIMES = st.floats(0, 1e6, allow_nan=False)
EVENTS = st.builds(
    Event,
    rank=st.integers(0, 1023),
    name=st.text(max_size=20),
    kind=st.sampled_from(KINDS),
    start=TIMES,
    end=TIMES,
    microbatch=st.none() | st.integers(0, 100),
    chunk=st.none() | st.integers(0, 7),
    bytes=st.none() | st.integers(0, 2**40),
    step=st.none() | st.integers(1, 2**31),
)


def test_span_records_where_someone_listens():
    with span("nobody", "forward"):
        pass
    with recording(3) as recorder, span("2F0", "forward", microbatch=0, chunk=1, bytes=8):
        pass
    (event,) = recorder.events
    assert (event.rank, event.name, event.kind, event.microbatch, event.chunk, event.bytes) == (
        3, "2F0", "forward", 0, 1, 8,
    )  # fmt: skip
    assert 0 <= event.duration < 1
    assert active_recorder() is None


def test_nested_spans_end_inside_out_and_recordings_nest():
    with recording(0) as outer:
        with span("step", "timer"):
            with span("work", "forward"):
                pass
            with recording(1) as inner, span("hidden", "forward"):
                pass
        assert active_recorder() is outer
    assert [event.name for event in outer.events] == ["work", "step"]
    assert [event.name for event in inner.events] == ["hidden"]
    work, step = outer.events
    assert step.start <= work.start <= work.end <= step.end


def test_not_recording_hides_a_block_from_all_recorders_and_from_nobody_else():
    somebody = object()
    with recording(0) as outer, recording(1) as inner:
        watchers.append(somebody)
        with not_recording(), span("hidden", "forward"):
            assert active_recorder() is None and watchers == [somebody]
        watchers.remove(somebody)
        assert active_recorder() is inner and watchers == [outer, inner]
        with span("seen", "forward"):
            pass
    assert watchers == []
    assert [[event.name for event in recorder.events] for recorder in (outer, inner)] == [[], ["seen"]]


def test_an_exception_still_ends_the_event_and_the_recording():
    with pytest.raises(KeyError), recording(0) as recorder, span("step", "timer"):
        raise KeyError
    assert [event.name for event in recorder.events] == ["step"]
    assert active_recorder() is None


@given(events=st.lists(EVENTS, max_size=20))
def test_shift_keeps_durations_and_order_of_starts(events):
    shifted = shift_to_zero(events)
    assert len(shifted) == len(events)
    assert [event.start for event in shifted] == sorted(event.start for event in shifted)
    if events:
        assert shifted[0].start == 0
        origin = min(event.start for event in events)
        assert sorted(event.end for event in shifted) == sorted(event.end - origin for event in events)


@given(event=EVENTS)
def test_a_record_becomes_the_event_again(event):
    assert Event(**json.loads(json.dumps(event.record()))) == event


def test_a_record_leaves_out_what_is_not_known():
    found = Event(0, "2F0", "forward", 1.0, 2.0).record()
    assert found == {"rank": 0, "name": "2F0", "kind": "forward", "start": 1.0, "end": 2.0}
