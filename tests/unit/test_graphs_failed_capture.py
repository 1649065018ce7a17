"""After a failed capture: a process that goes on, or one that says that it must be left. CUDA is stood in for."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fake_captures import Generator, Graph, Machine, fake_captures

from labkit.comm.capturing import GraphCaptureError
from labkit.graphs import BrokenProcessError, FullIterationGraph, make_graphed_callables
from labkit.graphs.cuda import failed_capture, local_backend
from labkit.graphs.cuda.local_backend import LocalBackend, LocalPool
from labkit.parallel.random import RngTracker

LEAVE = "restart the kernel of a notebook, or end this rank"


@pytest.fixture(params=["2.11.0", "2.13.0"])
def device(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with fake_captures(request.param) as found:
        yield found


@pytest.fixture
def old() -> Iterator[Machine]:
    with fake_captures("2.11.0") as found:
        yield found


class Tracker:
    def __init__(self) -> None:
        self.generators = [Generator(), Generator()]


def failed(device: Machine, backend: LocalBackend, pool: Any, name: str = "a") -> str:
    """What a capture says that CUDA invalidates. No traceback is left that would keep the graph alive."""
    with pytest.raises(GraphCaptureError) as error, backend.capturing(pool, name):
        device.draw()
        device.invalidate()
    return str(error.value)


def usable(device: Machine, *generators: Generator) -> bool:
    """Whether this process can do what it could before, once the tracebacks that hold the graph are gone."""
    gc.collect()
    device.allocate()
    device.pin()
    for generator in (device.generator, *generators):
        device.draw(generator=generator)
    device.empty_cache()
    return not device.device_asks


def test_the_stand_in_is_poisoned_as_torch_is(old: Machine) -> None:
    """Without a repair: what the tests below would miss if there were none."""
    tracker, pool = Tracker(), LocalPool()
    with patch.object(local_backend, "repair_process", lambda *_, **__: None):
        failed(old, LocalBackend([tracker]), pool)  # type: ignore[list-item]
    gc.collect()
    for generator in (old.generator, *tracker.generators):
        with pytest.raises(AssertionError, match="a graph that was freed"):
            old.draw(generator=generator)
    with pytest.raises(AssertionError, match="of the host asks a graph that was freed"):
        old.pin()
    with pytest.raises(RuntimeError, match=r"captures_underway\.empty\(\)"):
        old.empty_cache()
    old.device_asks.clear()
    with pytest.raises(RuntimeError, match="Offset increment outside graph capture"):
        old.draw()


def test_the_process_goes_on(device: Machine) -> None:
    tracker, pool = Tracker(), LocalPool()
    backend = LocalBackend([tracker])  # type: ignore[list-item]
    device.draw()
    tracker.generators[1].offset = 40
    assert "a cannot be captured: CUDA error: operation not permitted" in failed(device, backend, pool)
    assert (device.generator.offset, [g.offset for g in tracker.generators]) == (4, [0, 40]), "states are as before"
    assert usable(device, *tracker.generators)
    with backend.capturing(pool, "b") as graph:
        device.draw()
    graph.replay()
    assert device.calls[-1] == "replay"
    assert device.stream is device.default_stream


def test_a_capture_that_ends_in_an_error_without_one_inside(device: Machine) -> None:
    """CUDA notices unjoined work at the end alone."""
    said = pytest.raises(GraphCaptureError, match="previous error during capture")
    with said, LocalBackend().capturing(LocalPool(), "a"):
        device.invalid = True
    del said
    assert usable(device)


def test_a_capture_that_cannot_begin(device: Machine) -> None:
    device.begin_refused = True
    generators = [Generator()]
    graph = Graph()
    graph.register_generator_state(generators[0])
    with pytest.raises(RuntimeError, match="invalid argument") as error:
        graph.capture_begin((0, 9), "thread_local")
    device.begin_refused = False
    failed_capture.repair_process(graph, (0, 9), generators, error.value, begun=False)  # type: ignore[arg-type]
    del graph, error
    assert usable(device, *generators)


def test_a_capture_that_torch_never_began_has_no_claim(device: Machine) -> None:
    """`capture_begin` may throw ahead of everything; the claim on this pool is that of another graph."""
    pool = LocalPool()
    with LocalBackend().capturing(pool, "a") as graph:
        pass
    failed_capture.repair_process(Graph(), pool.handle, [], RuntimeError("no"), begun=False)
    assert device.pools[pool.handle] == 1
    assert graph.is_captured


def test_torch_that_tells_everybody_needs_its_claim_given_back_and_no_more() -> None:
    with fake_captures("2.13.0") as new:
        pool = LocalPool()
        failed(new, LocalBackend(), pool)
        assert sum(call.startswith("begin") for call in new.calls) == 1, "no further capture"
        assert failed_capture._kept == []
        assert not failed_capture.is_spent(pool.handle)
        assert new.pools == {}


def test_a_later_torch_gives_claims_back_itself() -> None:
    """From pytorch#190308 on a second time would take the claim of another graph."""
    with fake_captures("2.14.0") as newer:
        pool = LocalPool()
        failed(newer, LocalBackend(), pool)
        assert newer.pools == {pool.handle: 1}, "untouched here: the stand-in is of 2.13"


def test_only_torchs_own_graph_is_kept(old: Machine) -> None:
    for _ in range(3):
        failed(old, LocalBackend(), LocalPool())
    assert len(failed_capture._kept) == 3
    assert all(not graph.ended for graph in failed_capture._kept)


def test_a_hundred_failed_captures_leave_no_pool(device: Machine) -> None:
    backend = LocalBackend([Tracker()])  # type: ignore[list-item]
    for i in range(100):
        failed(device, backend, LocalPool(), f"{i}")
    device.empty_cache()
    assert device.pools == {}


def test_a_pool_of_living_graphs_keeps_them(old: Machine) -> None:
    """The failed capture gives its own claim back and no other. The next one finds a new handle, as the host's
    allocator refuses the old one."""
    backend, pool = LocalBackend(), LocalPool()
    before = pool.handle
    with backend.capturing(pool, "a") as first:
        pass
    failed(old, backend, pool)
    assert old.pools[before] == 1
    with backend.capturing(pool, "b") as second:
        pass
    assert pool.handle != before
    first.reset()
    second.reset()
    old.empty_cache()
    assert old.pools == {}


def test_a_bare_handle_that_takes_no_more_captures_is_refused(old: Machine) -> None:
    backend = LocalBackend()
    failed(old, backend, (0, 70))
    for use in (backend.capturing((0, 70), "b"), backend.warming_up((0, 70))):
        with pytest.raises(GraphCaptureError, match=r"pool \(0, 70\) any more.*Take a new pool"), use:
            pass
    with backend.capturing((0, 71), "b"):
        pass
    assert usable(old)


def test_a_failure_among_the_captures_of_a_set(device: Machine) -> None:
    """All of the set are let go; the callables run eagerly, and can be captured again."""
    broken = [True]

    def second(x: torch.Tensor) -> torch.Tensor:
        if broken[0] and device.captured is not None:
            device.invalidate()
        return x * 3

    samples = [(torch.ones(2, requires_grad=True),) for _ in range(2)]
    functions = (lambda x: x * 2, second)
    for _ in range(2):
        with pytest.raises(GraphCaptureError, match=r"callable 1.*cannot be captured"):
            make_graphed_callables(functions, samples, backend=LocalBackend(), num_warmup=1)
    assert usable(device)
    assert [count for count in device.pools.values() if count] == []
    broken[0] = False
    assert len(make_graphed_callables(functions, samples, backend=LocalBackend(), num_warmup=1)) == 2


# ---- a repair that does not succeed ----


def broken_process(device: Machine) -> BrokenProcessError:
    """A capture fails, and so does the one that should repair it."""
    with pytest.raises(BrokenProcessError) as error, LocalBackend().capturing(LocalPool(), "a"):
        device.begin_refused = True
        device.invalidate()
    return error.value


def test_a_process_that_must_be_left_says_so(old: Machine) -> None:
    error = broken_process(old)
    for part in ("a cannot be captured: CUDA error: operation not permitted", LEAVE, "CUDA error: invalid argument"):
        assert part in str(error)
    assert "Tried: ending the allocation to the graph's pool and a small capture with the same generators" in str(error)
    cause = error.__cause__
    assert isinstance(cause, GraphCaptureError) and not isinstance(cause, BrokenProcessError)
    assert "operation not permitted" in str(cause.__cause__), "and CUDA's own words behind that"
    assert old.stream is old.default_stream
    assert gc.isenabled()


def test_a_repair_is_not_believed_but_tried(old: Machine) -> None:
    """Every call succeeds, and still nothing can be drawn."""

    def ended(graph: Graph) -> None:
        old.captured = None
        old.device_asks.pop(graph.handle)

    said = pytest.raises(BrokenProcessError, match="random numbers still cannot be drawn")
    with said, LocalBackend().capturing(LocalPool(), "a"):
        old.invalid = True
        torch.cuda.CUDAGraph = type("Ended", (Graph,), {"capture_end": ended})  # type: ignore[misc, assignment]


def test_afterwards_everything_says_the_same(old: Machine) -> None:
    backend = LocalBackend()
    with backend.capturing(LocalPool(), "before") as graph:
        pass
    step = FullIterationGraph(lambda batches: next(batches)["x"], num_microbatches=1, impl="emulated")
    said = str(broken_process(old))
    old.begin_refused = False
    tracker = RngTracker()
    tracker.add("mine", 1)
    asked = len(old.calls)

    def captured() -> None:
        with backend.capturing(LocalPool(), "b"):
            pass

    def warmed_up() -> None:
        with backend.warming_up(LocalPool()):
            pass

    def drawn() -> None:
        with tracker.fork("mine"):
            pass

    uses = [
        captured, warmed_up, drawn, graph.replay, lambda: backend.before_captures(LocalPool()),
        lambda: make_graphed_callables(lambda x: x, (torch.ones(1),), backend=backend),
        lambda: make_graphed_callables(lambda x: x, (torch.ones(1),), impl="emulated"),
        lambda: step(iter([{"x": torch.ones(1)}])),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(BrokenProcessError) as error:
            use()
        assert str(error.value) == said
    assert len(old.calls) == asked, "nothing reaches CUDA any more"
    graph.reset()


def test_why_is_not_hidden_by_putting_states_back(old: Machine) -> None:
    """The surroundings of a capture set random states at its end, which raises where the process is broken."""

    def refused(_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def body(x: torch.Tensor) -> torch.Tensor:
        if old.captured is not None:
            old.begin_refused = True
            old.invalidate()
        return x

    with patch.object(torch.cuda, "set_rng_state", refused), pytest.raises(BrokenProcessError, match=LEAVE):
        make_graphed_callables(body, (torch.ones(1),), backend=LocalBackend(), num_warmup=1)
