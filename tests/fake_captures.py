"""A stand-in of the few calls to CUDA that captures make, with the state that torch keeps beside them.

It knows the order of calls, allocators and generators of several versions of torch, and computes nothing.
tests/fake_device runs whole steps instead, and knows streams and waits.

What it repeats, from the C++ of PyTorch (`aten/src/ATen/cuda/CUDAGraph.cpp`, `CUDAGeneratorImpl.cpp`,
`aten/src/ATen/core/CachingHostAllocator.h`, `c10/cuda/CUDACachingAllocator.cpp`):

- `capture_begin` sets `capturing_` of each registered generator and of the default one (`capture_prologue`), counts the
  graph to its pool and has both allocators ask it whether memory is for that pool. A second one for the same pool is
  refused by both ("already recording to mempool_id").
- `capture_end` first ends the capture of the stream. Where CUDA has invalidated that, torch 2.11 throws at once; since
  pytorch#180395 both allocators are told first. Only then come `capture_epilogue`, `capture_ended_` and the
  instantiation, which may throw as well.
- `reset` gives the claim on the pool back only where `capture_ended_`; from 2.12 on it frees the cuBLAS workspaces of
  the stream as well (pytorch#175276).
- `CUDAGeneratorState::increase` refuses to draw outside a capture while `capturing_`. From 2.12 on that is kept by
  capture, and no draw outside is refused (pytorch#176753).
- `release_cached_blocks` asserts that no capture is under way; every allocation asks the graphs of those that are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from labkit.comm import capturing
from labkit.graphs.cuda import capture_streams, failed_capture
from labkit.launch import info

INVALIDATED = "CUDA error: operation failed due to a previous error during capture"


class Stream:
    """In the place of `torch.cuda.Stream`."""

    def __init__(self, machine: Machine, name: str, number: int) -> None:
        self.machine, self.name, self.cuda_stream = machine, name, number

    def __str__(self) -> str:
        return self.name

    def wait_stream(self, other: Stream) -> None:
        self.machine.calls.append(f"{self} waits for {other}")


class Generator:
    """In the place of a CUDA generator with its `CUDAGeneratorState`."""

    device = "cuda"

    def __init__(self) -> None:
        self.capturing, self.offset = False, 0

    def get_state(self) -> int:
        return self.offset

    def set_state(self, state: int) -> None:
        self.offset = state


class Number:
    """A tensor on the device."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def add_(self, _: int) -> None:
        self.machine.calls.append("add")


class Machine:
    """One device and what torch knows of it. `calls`: what was asked, in order."""

    def __init__(self, version: str = "2.11.0") -> None:
        self.version = torch.torch_version.TorchVersion(version)
        self.tells_first = self.version >= "2.12"
        self.calls: list[str] = []
        self.stream = self.default_stream = Stream(self, "default", 0)
        self.streams_dealt = self.handles_dealt = 0
        self.pools: dict[Any, int] = {}
        """Claims on each pool of the device's allocator."""
        self.device_asks: dict[Any, Any] = {}
        self.host_asks: dict[Any, Any] = {}
        """Weak references to the graphs that are asked at each allocation."""
        self.workspaces: set[int] = set()
        """Streams that have them."""
        self.captured: Graph | None = None
        self.invalid = False
        self.begin_refused = self.instantiation_refused = False
        self.generator = Generator()

    # ---- torch.cuda ----

    def call(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append(name)

    def new_stream(self) -> Stream:
        self.streams_dealt += 1
        name = "side" if self.streams_dealt == 1 else f"side {self.streams_dealt}"
        return Stream(self, name, 1 + (self.streams_dealt - 1) % capture_streams.STREAMS_DEALT)

    def new_handle(self) -> tuple[int, int]:
        self.handles_dealt += 1
        return 0, self.handles_dealt

    def set_stream(self, stream: Stream) -> None:
        self.stream = stream
        self.calls.append(f"on {stream}")

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        outer = self.stream
        self.set_stream(stream)
        yield
        self.set_stream(outer)

    def synchronize(self, *_: Any) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")
        if self.device_asks:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        self.pools = {handle: count for handle, count in self.pools.items() if count}

    def end_allocate(self, _: int, handle: Any) -> None:
        if handle not in self.device_asks:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        del self.device_asks[handle]

    def release(self, _: int, handle: Any) -> None:
        self.pools[handle] -= 1
        assert self.pools[handle] >= 0, "INTERNAL ASSERT FAILED: uc >= 0"

    # ---- computing ----

    def allocate(self) -> None:
        """Any allocation of the device."""
        for graph in self.device_asks.values():
            assert graph() is not None, "the allocator asks a graph that was freed"

    def pin(self) -> None:
        """Any allocation of pinned memory."""
        for graph in self.host_asks.values():
            assert graph() is not None, "the allocator of the host asks a graph that was freed"

    def draw(self, *_: Any, generator: Generator | None = None, **__: Any) -> None:
        generator = self.generator if generator is None else generator
        self.allocate()
        if self.captured is not None:
            assert generator in self.captured.generators, "generator not in capture mode"
        elif generator.capturing:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        else:
            generator.offset += 4

    def zeros(self, *_: Any, **__: Any) -> Number:
        self.allocate()
        return Number(self)

    def products(self) -> None:
        """Matrix products on the current stream."""
        self.workspaces.add(self.stream.cuda_stream)
        self.calls.append("products")

    def invalidate(self) -> None:
        """What CUDA does at a refused call, such as the copy of an `item()`."""
        self.invalid = True
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")


class Graph:
    """In the place of `torch.cuda.CUDAGraph`."""

    machine: Machine

    def __init__(self) -> None:
        self.generators: list[Any] = []
        self.ended = False
        self.stream = self.machine.stream

    def register_generator_state(self, generator: Any) -> None:
        self.generators.append(generator)

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        machine, self.handle, self.stream = self.machine, pool, self.machine.stream
        machine.calls.append(f"begin in pool {pool}, {capture_error_mode}")
        self.generators.append(machine.generator)
        for generator in self.generators:
            if isinstance(generator, Generator):
                generator.capturing = not machine.tells_first
        machine.pools[pool] = machine.pools.get(pool, 0) + 1
        for asks in (machine.device_asks, machine.host_asks):
            if pool in asks:
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            asks[pool] = weakref.ref(self)
        if machine.begin_refused or machine.captured is not None:
            raise RuntimeError("CUDA error: invalid argument")
        machine.captured = self

    def capture_end(self) -> None:
        machine = self.machine
        machine.calls.append("end")
        if machine.captured is not self:
            raise RuntimeError("CUDA error: the stream is not capturing")
        broken, machine.captured, machine.invalid = machine.invalid, None, False
        if broken and not machine.tells_first:
            raise RuntimeError(INVALIDATED)
        del machine.device_asks[self.handle], machine.host_asks[self.handle]
        if broken:
            raise RuntimeError(INVALIDATED)
        for generator in self.generators:
            if isinstance(generator, Generator):
                generator.capturing = False
        self.ended = True
        if machine.instantiation_refused:
            raise RuntimeError("CUDA error: out of memory")

    def pool(self) -> Any:
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.handle

    def replay(self) -> None:
        self.machine.calls.append("replay")

    def reset(self) -> None:
        self.machine.calls.append("reset")
        if self.ended:
            if self.machine.tells_first:
                self.machine.workspaces.discard(self.stream.cuda_stream)
            self.machine.release(0, self.handle)
            self.ended = False


@contextmanager
def fake_captures(version: str = "2.11.0") -> Iterator[Machine]:
    """Inside the block the calls of `labkit.graphs` to CUDA reach a new Machine, and nothing of it stays afterwards."""
    machine = Machine(version)
    Graph.machine = machine
    cuda = {
        "CUDAGraph": Graph, "Stream": machine.new_stream, "current_device": lambda: 0,
        "graph_pool_handle": machine.new_handle, "synchronize": machine.synchronize,
        "current_stream": lambda: machine.stream, "set_stream": machine.set_stream, "stream": machine.on_stream,
        "empty_cache": machine.empty_cache, "memory_allocated": lambda: 100 * len(machine.workspaces),
        "default_generators": (machine.generator,), "get_rng_state": machine.generator.get_state,
        "set_rng_state": machine.generator.set_state,
    }  # fmt: skip
    private = {
        "_cuda_endAllocateToPool": machine.end_allocate, "_cuda_releasePool": machine.release,
        "_host_emptyCache": machine.call("host empty_cache"),
    }  # fmt: skip
    with ExitStack() as stack:
        for target, names in ((torch.cuda, cuda), (torch._C, private)):
            for name, value in names.items():
                stack.enter_context(patch.object(target, name, value, create=True))
        stack.enter_context(patch.object(torch, "__version__", machine.version))
        stack.enter_context(patch.multiple(failed_capture.torch, rand=machine.draw, zeros=machine.zeros))
        stack.enter_context(patch.object(capture_streams, "_products", machine.products))
        for found in (capture_streams._of_device, capture_streams._of_pool):
            stack.enter_context(_emptied(found))
        stack.enter_context(patch.object(failed_capture, "_kept", []))
        stack.enter_context(patch.object(failed_capture, "_spent", set()))
        stack.enter_context(patch.object(capturing._state, "broken", None))
        stack.enter_context(patch.object(info, "_before_leaving", []))
        yield machine


@contextmanager
def _emptied(found: Any) -> Iterator[None]:
    before = dict(found)
    found.clear()
    yield
    found.clear()
    found.update(before)
