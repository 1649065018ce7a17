"""Times of GPU work without waiting for it, with a stand-in for CUDA that keeps a host clock and a stream's clock."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch

from labkit.comm.stream_clock import StreamClock
from labkit.events import recording, span

LAUNCH = 1e-5
DEVICE = torch.device("cuda", 0)


@dataclass
class Machine:
    """One host and one stream; what is launched runs when the stream gets there."""

    host: float = 100.0
    stream: float = 0.0
    waits: int = 0

    def launch(self, seconds: float) -> None:
        self.host += LAUNCH
        self.stream = max(self.stream, self.host) + seconds

    def wait_until(self, moment: float) -> None:
        self.waits += 1
        self.host = max(self.host, moment)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """CUDA's events as the documentation describes them, on a machine without."""
    machine = Machine()

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.enable_timing, self.at = enable_timing, None

        def record(self, stream: object = None) -> None:
            assert stream == "current stream"
            self.at = max(machine.stream, machine.host)

        def synchronize(self) -> None:
            machine.wait_until(self.at)

        def elapsed_time(self, end: Event) -> float:
            if not (self.enable_timing and end.enable_timing):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if machine.host < end.at:
                raise RuntimeError("CUDA error: device not ready")
            return 1e3 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current stream")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: machine.wait_until(machine.stream))
    monkeypatch.setattr(time, "perf_counter", lambda: machine.host)
    return machine


def test_actions_are_timed_on_the_stream_and_waited_for_once_at_the_end(machine: Machine) -> None:
    machine.launch(0.5)  # what an earlier step left running
    with recording(3) as recorder:
        clock = StreamClock(DEVICE)
        began, waits = machine.host, machine.waits
        assert began == pytest.approx(100.5, abs=1e-3)
        for number in range(4):
            with clock.span(f"0F{number}", "forward", microbatch=number, chunk=0):
                machine.launch(0.010)
        assert machine.waits == waits, "nothing was waited for between actions"
        assert machine.host - began < 0.001, "the host ran ahead of the stream"
        assert recorder.events == []
        recorder.settle()
        assert machine.host - began == pytest.approx(0.040, abs=1e-4)
    assert [event.name for event in recorder.events] == ["0F0", "0F1", "0F2", "0F3"]
    for number, event in enumerate(recorder.events):
        assert (event.rank, event.kind, event.microbatch, event.chunk) == (3, "forward", number, 0)
        assert event.start == pytest.approx(began + 0.010 * number, abs=1e-4)
        assert event.duration == pytest.approx(0.010, abs=1e-4)


def test_events_of_the_host_keep_their_places_between_those_of_the_stream(machine: Machine) -> None:
    with recording(0) as recorder:
        clock = StreamClock(DEVICE)
        for number in range(2):
            with span(f"data {number}", "data"):
                pass
            with clock.span(f"0F{number}", "forward"), span("kernel launch", "timer"):
                machine.launch(0.010)
        with span("optimizer", "optimizer"):
            pass
    names = [event.name for event in recorder.events]
    assert names == ["data 0", "kernel launch", "0F0", "data 1", "kernel launch", "0F1", "optimizer"]
    recorder.settle()
    assert [event.name for event in recorder.events] == names, "settling twice adds nothing"


def test_nothing_is_marked_where_nobody_records(machine: Machine) -> None:
    clock = StreamClock(DEVICE)
    machine.launch(1.0)
    waits = machine.waits
    with clock.span("0F0", "forward"):
        machine.launch(1.0)
    assert machine.waits == waits
