"""The order of calls to CUDA of our own captures, with CUDA stood in for; on a GPU tests/gpu holds the rules."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from labkit.graphs.local import LocalBackend, LocalPool, explained
from labkit.parallel.capturing import GraphCaptureError, is_graph_capturing, is_graph_warmup


class Device:
    """What was asked of CUDA, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.stream: Any = "default"
        self.end_fails = False

    def call(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append(name)

    def set_stream(self, stream: Any) -> None:
        self.stream = stream
        self.calls.append(f"on {stream}")


class FakeGraph:
    """In the place of `torch.cuda.CUDAGraph`."""

    device: Device

    def __init__(self) -> None:
        self.generators: list[Any] = []

    def register_generator_state(self, generator: Any) -> None:
        self.generators.append(generator)

    def capture_begin(self, pool: Any) -> None:
        self.device.calls.append(f"begin in pool {pool}")

    def capture_end(self) -> None:
        self.device.calls.append("end")
        if self.device.end_fails:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def replay(self) -> None:
        self.device.calls.append("replay")

    def reset(self) -> None:
        self.device.calls.append("reset")


@pytest.fixture
def device() -> Iterator[Device]:
    found = Device()
    FakeGraph.device = found
    stand_ins = {
        "CUDAGraph": FakeGraph, "Stream": lambda: "side", "graph_pool_handle": lambda: (0, 1),
        "synchronize": found.call("synchronize"), "current_stream": lambda: found.stream,
        "set_stream": found.set_stream,
    }  # fmt: skip
    with patch.multiple(torch.cuda, **stand_ins):
        yield found


class Tracker:
    generators = ("first", "second")


def test_a_capture_runs_on_the_side_stream_without_collections(device: Device) -> None:
    backend, tracker = LocalBackend([Tracker()]), Tracker  # type: ignore[list-item]
    with backend.capturing(backend.new_pool(), "a") as graph:
        assert device.stream == "side"
        assert is_graph_capturing()
        assert not gc.isenabled()
        device.calls.append("work")
    assert device.calls == ["synchronize", "on side", "begin in pool (0, 1)", "work", "end", "on default"]
    assert gc.isenabled()
    assert not is_graph_capturing()
    assert tuple(graph.cuda_graph.generators) == tracker.generators  # type: ignore[attr-defined]
    graph.replay()
    graph.reset()
    graph.reset()
    assert device.calls[-2:] == ["replay", "reset"]
    with pytest.raises(GraphCaptureError, match="holds nothing"):
        graph.replay()


def test_a_refusal_ends_the_capture_and_names_the_line(device: Device) -> None:
    device.end_fails = True
    named = pytest.raises(GraphCaptureError, match=r"test_graphs_local\.py:\d+ \(in test_a_ref.*a cannot be captured")
    with named as error, LocalBackend().capturing(LocalPool(), "a"):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")
    assert "more lines" not in str(error.value)
    assert device.calls[-3:] == ["end", "reset", "on default"]
    assert device.stream == "default"
    assert gc.isenabled()
    assert not is_graph_capturing()


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("mine"), torch.OutOfMemoryError("CUDA out of memory"), KeyError("k")]
)
def test_other_errors_stay_what_they_are(device: Device, error: Exception) -> None:
    with pytest.raises(type(error)) as raised, LocalBackend().capturing(LocalPool(), "a"):
        raise error
    assert raised.value is error
    assert device.stream == "default"
    assert "reset" in device.calls


def test_an_error_of_ours_is_not_explained_twice() -> None:
    ours = GraphCaptureError("while capturing: no")
    assert explained(ours, "a") is ours


def test_a_pool_counts_its_segments(device: Device) -> None:
    segments = [
        {"segment_pool_id": (0, 1), "total_size": 100, "allocated_size": 30},
        {"segment_pool_id": (0, 0), "total_size": 7, "allocated_size": 7},
        {"segment_pool_id": (0, 1), "total_size": 20, "allocated_size": 0},
    ]
    pool = LocalPool()
    with patch.object(torch.cuda, "memory_snapshot", lambda: segments):
        assert (pool.reserved_bytes, pool.peak_bytes, pool.live_bytes) == (120, 120, 30)
    assert list(pool.history) == []


def test_warm_up_is_marked() -> None:
    class Stream:
        def wait_stream(self, other: Any) -> None:
            assert isinstance(other, Stream)

    nothing = patch.multiple(
        torch.cuda, Stream=Stream, current_stream=Stream, synchronize=lambda: None, stream=lambda _: patch.dict({})
    )
    with nothing, LocalBackend().warming_up():
        assert is_graph_warmup()
    assert not is_graph_warmup()
