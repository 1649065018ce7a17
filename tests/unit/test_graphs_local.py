"""The order of calls to CUDA of our own captures, with CUDA stood in for; on a GPU tests/gpu holds the rules."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from labkit.graphs import local
from labkit.graphs.backend import choose_impl
from labkit.graphs.local import LocalBackend, LocalPool, explained
from labkit.launch import info, torchrun
from labkit.parallel.capturing import GraphCaptureError, is_graph_capturing, is_graph_warmup


class Device:
    """What was asked of CUDA, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.stream: Any = "default"
        self.end_fails = False
        self.streams = 0

    def call(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append(name)

    def new_stream(self) -> str:
        self.streams += 1
        return "side" if self.streams == 1 else f"side {self.streams}"

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

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.device.calls.append(f"begin in pool {pool}, {capture_error_mode}")

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
        "CUDAGraph": FakeGraph, "Stream": found.new_stream, "current_device": lambda: 0,
        "graph_pool_handle": lambda: (0, 1), "synchronize": found.call("synchronize"),
        "current_stream": lambda: found.stream, "set_stream": found.set_stream,
    }  # fmt: skip
    here = patch.dict(local._streams, clear=True), patch.object(info, "_before_leaving", [])
    with patch.multiple(torch.cuda, **stand_ins), here[0], here[1]:
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
    assert device.calls == ["synchronize", "on side", "begin in pool (0, 1), thread_local", "work", "end", "on default"]
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


def test_a_pool_has_one_stream_even_if_only_its_handle_is_given(device: Device) -> None:
    """The allocator keeps free blocks by stream: on another one a capture would find none of the pool's."""
    backend = LocalBackend()
    for name in ("a", "b"):
        with backend.capturing((0, 7), name):
            assert device.stream == "side"
    assert LocalPool((0, 7)).stream == "side"
    assert LocalPool((0, 8)).stream == "side 2"


def test_generators_found_in_the_warm_up_are_known_to_the_graphs(device: Device) -> None:
    trackers: list[Any] = []
    backend = LocalBackend(trackers)
    trackers.append(Tracker())
    with backend.capturing(LocalPool(), "a") as graph:
        pass
    assert tuple(graph.cuda_graph.generators) == Tracker.generators  # type: ignore[attr-defined]


def test_graphs_are_reset_before_the_process_group_ends(device: Device) -> None:
    """NCCL waits in `destroy_process_group` for graphs that hold its collectives."""
    graphs = []
    for name in ("a", "b"):
        with LocalBackend().capturing(LocalPool(), name) as graph:
            graphs.append(graph)
    graphs[0].reset()
    device.calls.clear()
    dist = patch.multiple(
        "torch.distributed",
        is_initialized=lambda: True, barrier=device.call("barrier"), destroy_process_group=device.call("destroy"),
    )  # fmt: skip
    with dist:
        info.leave_group()
    assert device.calls == ["reset", "barrier", "destroy"]
    with pytest.raises(GraphCaptureError, match="holds nothing"):
        graphs[1].replay()


def test_at_the_end_of_a_script_graphs_are_reset_even_after_an_exception(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError("uncaught"), raising=False)
    with LocalBackend().capturing(LocalPool(), "a") as graph:
        pass
    torchrun._leave()
    assert graph is not None
    assert device.calls[-1] == "reset"


@pytest.mark.parametrize("known", [True, False], ids=["torch 2.13", "torch 2.11"])
def test_a_backward_leaves_the_stream_of_an_earlier_one(device: Device, monkeypatch: Any, known: bool) -> None:
    name, override = "override_stale_capture_stream", [False]
    monkeypatch.setattr(torch._C, f"_{name}", lambda: override[0], raising=False)
    monkeypatch.setattr(torch.autograd.graph, f"set_{name}", lambda on: override.__setitem__(0, on), raising=False)
    if not known:
        monkeypatch.delattr(torch.autograd.graph, f"set_{name}")
    with LocalBackend().capturing(LocalPool(), "a"):
        assert override == [known]
    assert override == [False]


def test_what_an_earlier_loss_breaks_is_said() -> None:
    told = explained(
        RuntimeError("Node 'AccumulateGrad' has a stale reference to the default stream during capture.\nmore"), "a"
    )
    assert "(a loss that was kept): del them" in str(told)
    assert "item, cpu" not in str(told)


def test_tensors_of_another_gpu_than_the_current_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernels run on streams of their own device, which a capture on this one does not see: an empty graph."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert choose_impl("auto", torch.device("cuda:0")) == choose_impl("auto", torch.device("cuda")) == "local"
    for impl in ("auto", "transformer_engine"):
        with pytest.raises(ValueError, match=r"on cuda:1, and the current device is cuda:0.*set_device\(1\) first"):
            choose_impl(impl, torch.device("cuda:1"))


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
