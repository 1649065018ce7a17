"""On which stream is captured, and which graphs are let go together. CUDA is stood in for."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from fake_captures import Machine, fake_captures

from labkit.graphs.cuda import capture_streams
from labkit.graphs.cuda.local_backend import LocalBackend, LocalGraph, LocalPool


@pytest.fixture
def old() -> Iterator[Machine]:
    with fake_captures("2.11.0") as found:
        yield found


@pytest.fixture
def new() -> Iterator[Machine]:
    with fake_captures("2.13.0") as found:
        yield found


def captured(pool: LocalPool, name: str = "a") -> LocalGraph:
    with LocalBackend().capturing(pool, name) as graph:
        pass
    return graph


@pytest.mark.parametrize(
    ("version", "frees"), [("2.11.0+cu130", False), ("2.12.0", True), ("2.13.0+cu130", True), ("2.11.1", False)]
)
def test_which_torch_frees_workspaces_at_a_reset(version: str, frees: bool) -> None:
    with fake_captures(version):
        assert capture_streams.resets_free_workspaces() is frees


def test_one_stream_for_a_device_where_resets_leave_workspaces(old: Machine) -> None:
    """So that all pools have one set of workspaces, made before the first capture."""
    backend = LocalBackend()
    pools = [backend.new_pool() for _ in range(3)]
    assert len({pool.stream for pool in pools}) == 1
    for pool in pools:
        backend.before_captures(pool)
    assert len(old.workspaces) == 1
    assert [pool.workspace_bytes for pool in pools] == [100, 100, 100]


def test_a_stream_for_each_pool_where_resets_free_them(new: Machine) -> None:
    """pytorch#193402: what one graph frees at its reset, no graph of another pool may need."""
    backend = LocalBackend()
    pools = [backend.new_pool() for _ in range(3)]
    assert len({pool.stream.cuda_stream for pool in pools}) == 3
    graphs = []
    for pool in pools:
        backend.before_captures(pool)
        graphs.append(captured(pool))
    graphs[0].reset()
    assert new.workspaces == {pool.stream.cuda_stream for pool in pools[1:]}


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0"])
def test_a_handle_stands_for_the_pool(version: str) -> None:
    with fake_captures(version):
        pool = LocalPool((0, 70))
        assert LocalPool((0, 70)).mates is pool.mates
        assert LocalPool((0, 71)).mates is not pool.mates


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0"])
def test_graphs_of_a_pool_are_reset_together(version: str) -> None:
    with fake_captures(version) as device:
        backend, pool = LocalBackend(), LocalPool()
        backend.before_captures(pool)
        graphs = [captured(pool, name) for name in "abc"]
        for graph in graphs[:2]:
            graph.reset()
        assert "reset" not in device.calls
        assert device.workspaces, "the third one reads and writes them"
        graphs[2].replay()
        graphs[2].reset()
        assert device.calls.count("reset") == 3
        device.empty_cache()
        assert device.pools == {}


def test_a_graph_that_nobody_holds_any_more_waits_as_well(new: Machine) -> None:
    """torch resets a graph in its destructor."""
    backend, pool = LocalBackend(), LocalPool()
    backend.before_captures(pool)
    first, second = captured(pool, "a"), captured(pool, "b")
    del first
    gc.collect()
    assert new.workspaces == {pool.stream.cuda_stream}
    del second
    gc.collect()
    assert new.workspaces == set()
    assert new.calls.count("reset") == 2


def test_a_broken_off_capture_waits_as_well(new: Machine) -> None:
    """It has ended well for torch, so its reset frees the workspaces of the graphs before it."""
    backend, pool = LocalBackend(), LocalPool()
    backend.before_captures(pool)
    first = captured(pool)
    with pytest.raises(KeyError), backend.capturing(pool, "b"):
        raise KeyError("k")
    assert new.workspaces == {pool.stream.cuda_stream}
    first.reset()
    assert new.calls.count("reset") == 2
    new.empty_cache()
    assert new.pools == {}


def test_workspaces_are_made_again_after_a_reset(new: Machine) -> None:
    backend, pool = LocalBackend(), LocalPool()
    for _ in range(2):
        backend.before_captures(pool)
        assert new.workspaces == {pool.stream.cuda_stream}
        captured(pool).reset()
        assert new.workspaces == set()
    assert pool.workspace_bytes == 100


def test_streams_are_dealt_in_turn_and_those_of_living_graphs_passed_over(new: Machine) -> None:
    """torch has 32 of them: the 33rd pool would be captured on the stream of the first."""
    kept = LocalPool()
    graph = captured(kept)
    numbers = {LocalPool().stream.cuda_stream for _ in range(3 * capture_streams.STREAMS_DEALT)}
    assert kept.stream.cuda_stream not in numbers
    assert graph.is_captured


def test_pools_that_must_share_a_stream_are_let_go_together(new: Machine) -> None:
    pools = [LocalPool() for _ in range(capture_streams.STREAMS_DEALT + 1)]
    graphs = [captured(pool) for pool in pools]
    shared = [pool for pool in pools[:-1] if pool.stream.cuda_stream == pools[-1].stream.cuda_stream]
    assert len(shared) == 1
    assert shared[0].mates is pools[-1].mates
    graphs[-1].reset()
    assert "reset" not in new.calls
    graphs[pools.index(shared[0])].reset()
    assert new.calls.count("reset") == 2


def test_a_hundred_captures_leave_no_pool() -> None:
    for version in ("2.11.0", "2.13.0"):
        with fake_captures(version) as device:
            for _ in range(100):
                captured(LocalBackend().new_pool()).reset()
            device.empty_cache()
            assert device.pools == {}
            gc.collect()
            assert len(capture_streams._of_pool) <= 1


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0"])
def test_a_graph_that_cannot_be_instantiated_gives_its_claim_back_once(version: str) -> None:
    """Torch has ended such a capture and told everybody: nothing is to be repaired."""
    with fake_captures(version) as device:
        backend, pool = LocalBackend(), LocalPool()
        first = captured(pool, "a")
        device.instantiation_refused = True
        with pytest.raises(RuntimeError, match="out of memory"), backend.capturing(pool, "b"):
            pass
        gc.collect()
        assert device.pools[pool.handle] == 2, "the first lives, and the second waits for it"
        device.draw()
        first.reset()
        device.empty_cache()
        assert device.pools == {}


def test_workspaces_are_made_after_the_collection_that_may_free_them(
    new: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, pool = LocalBackend(), LocalPool()
    backend.before_captures(pool)
    old = captured(pool)
    monkeypatch.setattr(gc, "collect", old.reset)
    backend.before_captures(pool)
    assert new.workspaces == {pool.stream.cuda_stream}


def test_a_bare_handle_keeps_its_stream_from_the_warm_up_to_the_capture(new: Machine) -> None:
    backend, handle = LocalBackend(), torch.cuda.graph_pool_handle()
    with backend.warming_up(handle):
        pass
    backend.before_captures(handle)
    with backend.capturing(handle, "a"):
        assert new.stream.cuda_stream in new.workspaces
    assert new.streams_dealt == 1
