"""Timers are sums of Events; JSON lines survive a reader."""

import json

import pytest

from labkit.events import Event, recording
from labkit.train.reporting.metrics import JsonLines, Timers, min_max_over_ranks


def test_a_timer_is_the_sum_of_the_events_it_records():
    timers = Timers(log_level=1)
    with recording(rank=3) as recorder:
        for _ in range(3):
            with timers("optimizer", log_level=1):
                sum(range(1000))
    assert [(e.rank, e.name, e.kind) for e in recorder.events] == [(3, "optimizer", "timer")] * 3
    assert timers.take() == {"optimizer": pytest.approx(sum(e.duration for e in recorder.events))}
    assert timers.take() == {}


@pytest.mark.parametrize(
    ("level", "expected"), [(0, {"step"}), (1, {"step", "optimizer"}), (2, {"step", "optimizer", "send"})]
)
def test_levels(level, expected):
    timers = Timers(log_level=level)
    with timers("step"), timers("optimizer", log_level=1):
        timers.feed([Event(0, "0F0", "send", 1.0, 1.5), Event(0, "x", "timer", 0.0, 9.0)])
    timers("broadcast", log_level=2).start()  # Megatron's style: what stops it says no level
    timers("broadcast").stop()
    seconds = timers.take()
    assert ("broadcast" in seconds) == (level == 2)
    assert set(seconds) - {"broadcast"} == expected
    if "send" in seconds:
        assert seconds["send"] == 0.5


def test_a_timer_runs_once_at_a_time():
    timer = Timers()("step")
    timer.start()
    with pytest.raises(AssertionError, match="already running"):
        timer.start()
    timer.stop()
    with pytest.raises(AssertionError, match="not started"):
        timer.stop()


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="timing_log_level is 3"):
        Timers(3)


def test_minimum_and_maximum_leave_out_ranks_without_the_timer():
    assert min_max_over_ranks([{"step": 2.0}, {"step": 3.0, "send": 0.5}, {"step": 1.0}]) == {
        "step": (1.0, 3.0),
        "send": (0.5, 0.5),
    }


def test_json_lines(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    lines = JsonLines(path)
    lines.write({"step": 0, "loss": 2.5})
    assert json.loads(path.read_text()) == {"step": 0, "loss": 2.5}
    lines.write({"step": 1})
    lines.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]


def test_json_lines_are_strict_where_a_number_is_not_finite(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    lines.write({"loss": float("nan"), "grad_norm": float("-inf"), "step": 0}, {"step": 1})
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines())
    assert first == {"loss": None, "grad_norm": None, "step": 0, "not_finite": {"loss": "nan", "grad_norm": "-inf"}}
    assert second == {"step": 1}
    lines.close()


def test_json_lines_without_a_path_do_nothing(tmp_path):
    lines = JsonLines(None)
    lines.write({"step": 0})
    lines.close()
    assert list(tmp_path.iterdir()) == []
