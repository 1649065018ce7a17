"""The order of calls to CUDA of our own captures, with CUDA stood in for; on a GPU tests/gpu holds the rules."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fake_captures import Machine, fake_captures

from labkit.comm.capturing import GraphCaptureError, is_graph_capturing, is_graph_warmup
from labkit.graphs import FullIterationGraph, full_iteration, make_graphed_callables
from labkit.graphs.backend import choose_impl
from labkit.graphs.cuda.local_backend import LocalBackend, LocalPool, explained, stale_streams_followed
from labkit.launch import info, torchrun


@pytest.fixture
def device() -> Iterator[Machine]:
    with fake_captures() as found:
        yield found


class Tracker:
    generators = ("first", "second")


def test_a_capture_runs_on_the_side_stream_without_collections(device: Machine) -> None:
    backend, tracker = LocalBackend([Tracker()]), Tracker  # type: ignore[list-item]
    with backend.capturing(backend.new_pool(), "a") as graph:
        assert str(device.stream) == "side"
        assert is_graph_capturing()
        assert not gc.isenabled()
        device.calls.append("work")
    assert device.calls == ["synchronize", "on side", "begin in pool (0, 1), thread_local", "work", "end", "on default"]
    assert gc.isenabled()
    assert not is_graph_capturing()
    assert tuple(graph.cuda_graph.generators[:2]) == tracker.generators  # type: ignore[attr-defined]
    graph.replay()
    graph.reset()
    graph.reset()
    assert device.calls[-2:] == ["replay", "reset"]
    with pytest.raises(GraphCaptureError, match="holds nothing"):
        graph.replay()


def test_a_refusal_ends_the_capture_and_names_the_line(device: Machine) -> None:
    named = pytest.raises(GraphCaptureError, match=r"test_graphs_local\.py:\d+ \(in test_a_ref.*a cannot be captured")
    with named as error, LocalBackend().capturing(LocalPool(), "a"):
        device.invalid = True
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")
    assert "more lines" not in str(error.value)
    assert device.calls[-1] == "on default"
    assert device.stream is device.default_stream
    assert gc.isenabled()
    assert not is_graph_capturing()


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("mine"), torch.OutOfMemoryError("CUDA out of memory"), KeyError("k")]
)
def test_other_errors_stay_what_they_are(device: Machine, error: Exception) -> None:
    with pytest.raises(type(error)) as raised, LocalBackend().capturing(LocalPool(), "a"):
        raise error
    assert raised.value is error
    assert device.calls[-3:] == ["end", "reset", "on default"], "nothing to repair: the capture has ended"
    assert device.stream is device.default_stream


def test_an_error_of_ours_is_not_explained_twice() -> None:
    ours = GraphCaptureError("while capturing: no")
    assert explained(ours, "a") is ours


def test_a_pool_has_one_stream_even_if_only_its_handle_is_given(device: Machine) -> None:
    """The allocator keeps free blocks by stream: on another one a capture would find none of the pool's."""
    backend = LocalBackend()
    for name in ("a", "b"):
        with backend.capturing((0, 7), name):
            assert str(device.stream) == "side"
    assert str(LocalPool((0, 7)).stream) == "side"


def test_generators_found_in_the_warm_up_are_known_to_the_graphs(device: Machine) -> None:
    trackers: list[Any] = []
    backend = LocalBackend(trackers)
    trackers.append(Tracker())
    with backend.capturing(LocalPool(), "a") as graph:
        pass
    assert tuple(graph.cuda_graph.generators[:2]) == Tracker.generators  # type: ignore[attr-defined]


def test_graphs_are_reset_before_the_process_group_ends(device: Machine) -> None:
    """NCCL waits in `destroy_process_group` for graphs that hold its collectives."""
    graphs, pool = [], LocalPool()
    for name in ("a", "b"):
        with LocalBackend().capturing(pool, name) as graph:
            graphs.append(graph)
    graphs[0].reset()
    device.calls.clear()
    dist = patch.multiple(
        "torch.distributed",
        is_initialized=lambda: True, barrier=device.call("barrier"), destroy_process_group=device.call("destroy"),
    )  # fmt: skip
    with dist:
        info.leave_group()
    assert device.calls == ["reset", "reset", "barrier", "destroy"]
    with pytest.raises(GraphCaptureError, match="holds nothing"):
        graphs[1].replay()


def test_at_the_end_of_a_script_graphs_are_reset_even_after_an_exception(
    device: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError("uncaught"), raising=False)
    with LocalBackend().capturing(LocalPool(), "a") as graph:
        pass
    torchrun._leave()
    assert graph is not None
    assert device.calls[-1] == "reset"


@pytest.mark.parametrize("known", [True, False], ids=["torch 2.13", "torch 2.11"])
def test_a_backward_leaves_the_stream_of_an_earlier_one(device: Machine, monkeypatch: Any, known: bool) -> None:
    followed = [False]
    monkeypatch.setattr(torch._C, "_override_stale_capture_stream", lambda: followed[0], raising=False)
    switch = lambda on: followed.__setitem__(0, on)  # noqa: E731
    monkeypatch.setattr(torch.autograd.graph, "set_override_stale_capture_stream", switch, raising=False)
    if not known:
        monkeypatch.delattr(torch.autograd.graph, "set_override_stale_capture_stream")
    with LocalBackend().capturing(LocalPool(), "a"):
        assert followed == [known]
    assert followed == [False]


@pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "set_override_stale_capture_stream"),
    reason=f"torch {torch.__version__} has no such switch (2.13 has)",
)
def test_the_switch_is_torchs() -> None:
    with stale_streams_followed():
        assert torch._C._override_stale_capture_stream()
    assert not torch._C._override_stale_capture_stream()


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


def test_a_pool_counts_its_segments(device: Machine) -> None:
    segments = [
        {"segment_pool_id": (0, 1), "total_size": 100, "allocated_size": 30},
        {"segment_pool_id": (0, 0), "total_size": 7, "allocated_size": 7},
        {"segment_pool_id": (0, 1), "total_size": 20, "allocated_size": 0},
        {"segment_pool_id": (0, 2), "total_size": 3, "allocated_size": 1},
    ]
    pool = LocalPool()
    with patch.object(torch.cuda, "memory_snapshot", lambda: segments):
        assert (pool.reserved_bytes, pool.peak_bytes, pool.live_bytes) == (120, 120, 30)
        pool.renew()
        assert (pool.reserved_bytes, pool.live_bytes) == (123, 31), "graphs of before still lie in the old one"
    assert list(pool.history) == []


def test_warm_up_runs_on_the_stream_of_the_captures(device: Machine) -> None:
    """cuBLAS keeps a workspace for each stream: made elsewhere, it would be made again in the capture, in its pool."""
    backend = LocalBackend()
    pool = backend.new_pool()
    with backend.warming_up(pool):
        assert is_graph_warmup()
        assert device.stream is pool.stream
    assert not is_graph_warmup()
    assert device.stream is device.default_stream
    assert device.calls == [
        "side waits for default", "on side", "products", "on default", "on side", "on default",
        "default waits for side", "synchronize",
    ]  # fmt: skip
    with backend.capturing(pool, "a"):
        assert device.stream is pool.stream


def test_a_set_of_captures_is_preceded_by_one_collection(device: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda.graph` gives memory back ahead of every graph."""
    monkeypatch.setattr(gc, "collect", device.call("gc.collect"))
    layers = [torch.nn.Linear(2, 2) for _ in range(2)]
    samples = [(torch.ones(1, 2, requires_grad=True),) for _ in range(4)]
    order = [1, 2, -2, -1, 1, 2, -2, -1]
    make_graphed_callables(tuple(layers), samples, order=order, backend=LocalBackend(), num_warmup=1)
    given_back = ["synchronize", "gc.collect", "on side", "products", "on default", "empty_cache", "host empty_cache"]
    assert (
        device.calls.count("gc.collect")
        == device.calls.count("empty_cache")
        == device.calls.count("host empty_cache")
        == 1
    )
    first = device.calls.index("gc.collect") - 1
    assert device.calls[first : first + len(given_back)] == given_back
    begins = [i for i, call in enumerate(device.calls) if call.startswith("begin")]
    assert len(begins) == 8
    assert first < begins[0]
    warm = device.calls.index("default waits for side")
    assert warm < first, "what the warm-up left is given back as well"


def test_a_full_iteration_does_both_for_its_capture(device: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "collect", device.call("gc.collect"))
    monkeypatch.setattr(full_iteration, "get_backend", lambda *_: LocalBackend())
    step = FullIterationGraph(lambda batches: next(batches)["x"] * 2, num_microbatches=1, impl="emulated")
    monkeypatch.setattr(full_iteration, "graph_objects_made", lambda _: nullcontext([]))
    for _ in range(5):
        step(iter([{"x": torch.ones(2)}]))
    assert device.calls.count("gc.collect") == device.calls.count("empty_cache") == 1
    assert [call for call in device.calls if call == "products"] == ["products"] * 4, "three warm-ups and one capture"
    assert device.calls.count("replay") == 2
