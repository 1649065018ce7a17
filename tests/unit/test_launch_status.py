"""The status slot: what is written by a rank is what the launcher reads, whatever happens in between."""

import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.launch import info, report_progress, status, waiting


@pytest.fixture
def slots(tmp_path):
    path = tmp_path / "status"
    status.create_slots(path, 4)
    status.attach(status.StatusSlot(path, 2))
    yield path
    status.attach(None)


def test_a_wait_is_seen_from_outside_and_remembered_afterwards(slots):
    before = time.monotonic()
    with waiting("all_reduce tp #12 (4, 8) float32"):
        seen = status.read_slot(slots, 2)
    assert (seen.text, seen.inside) == ("all_reduce tp #12 (4, 8) float32", True)
    assert before <= seen.since <= time.monotonic()
    after = status.read_slot(slots, 2)
    assert (after.text, after.inside) == ("all_reduce tp #12 (4, 8) float32", False)


def test_ranks_do_not_touch_each_other(slots):
    with waiting("x" * 300):
        assert status.read_slot(slots, 1) == status.Status("", False, 0.0)
        assert status.read_slot(slots, 3) == status.Status("", False, 0.0)


def test_nested_waits_show_the_innermost_and_come_back(slots):
    with waiting("outer"):
        with waiting("a much longer inner text"):
            assert status.read_slot(slots, 2).text == "a much longer inner text"
        assert status.read_slot(slots, 2).text == "outer"
        assert status.read_slot(slots, 2).inside
    assert not status.read_slot(slots, 2).inside


def test_an_exception_ends_the_wait(slots):
    with pytest.raises(KeyError), waiting("recv"):
        raise KeyError
    assert not status.read_slot(slots, 2).inside


def test_clear_forgets(slots):
    with waiting("rendezvous"):
        pass
    status.current.clear()
    assert status.read_slot(slots, 2).text == ""


@given(text=st.text(max_size=400))
def test_any_text_is_cut_to_the_record_and_never_breaks_it(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("slots") / "status"
    status.create_slots(path, 2)
    slot = status.StatusSlot(path, 0)
    slot.enter(text)
    seen = status.read_slot(path, 0).text
    whole = text.encode(errors="replace")
    assert seen == text if len(whole) <= 200 else text.startswith(seen[:50])
    assert path.stat().st_size == 2 * status.RECORD_BYTES + 1
    assert not slot.asked_to_stop
    assert status.read_slot(path, 1) == status.Status("", False, 0.0)


def test_the_seconds_of_waits_add_up_and_nested_ones_count_once(slots, monkeypatch):
    now = 10.0
    monkeypatch.setattr(status.time, "monotonic", lambda: now)
    with waiting("outer"):
        now += 1.0
        with waiting("inner"):
            now += 2.0
        now += 4.0
        assert status.waited_seconds() == 0.0, "the wait is not over"
    now += 8.0
    with waiting("another"):
        now += 16.0
    assert status.waited_seconds() == 7.0 + 16.0
    status.current.clear()
    assert status.waited_seconds() == 23.0


def test_the_launcher_asks_all_ranks_to_stop_also_those_that_start_later(slots):
    assert not status.current.asked_to_stop
    status.ask_to_stop(slots, True)
    assert status.current.asked_to_stop and status.StatusSlot(slots, 3).asked_to_stop
    with waiting("a wait leaves the request alone"):
        assert status.current.asked_to_stop
    status.ask_to_stop(slots, False)
    assert not status.current.asked_to_stop


def test_a_rank_without_a_launcher_has_a_record_of_its_own():
    status.attach(status.StatusSlot(None, 3))
    try:
        with waiting("recv"):
            pass
        assert status.waited_seconds() > 0 and not status.current.asked_to_stop
    finally:
        status.attach(None)


def test_outside_a_rank_it_does_nothing():
    with waiting("nobody listens"):
        report_progress({"step": 1})
    assert status.waited_seconds() == 0.0


def test_it_costs_few_calls(slots):
    """A collective takes at least 20 microseconds; the slot must not show beside it (measured: about one)."""
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event.endswith("call") else None)
    try:
        with waiting("all_reduce tp #12 (4, 8) float32"):
            pass
    finally:
        sys.setprofile(None)
    assert len(calls) <= 20, calls


def test_progress_reaches_its_receiver_as_a_copy():
    received = []
    info.send_progress_to(received.append)
    values = {"step": 1}
    report_progress(values)
    values["step"] = 2
    info.send_progress_to(None)
    assert received == [{"step": 1}]
