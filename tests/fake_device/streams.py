"""`torch.cuda` of the fake device: streams and events that move the clocks, captures, and answers about the device.

A capture runs its body once; a replay then does all of its accesses on the current stream. While a capture runs, the
host may neither wait for the device nor read from it: CUDA would end the capture with
cudaErrorStreamCaptureUnsupported, and here `Capturing` raises.
"""

from __future__ import annotations

import ctypes
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from fake_device.clocks import HOST, Access, Accesses, Clock, Clocks, united
from fake_device.places import where

Told = ctypes.CFUNCTYPE(None, ctypes.c_long, ctypes.c_long)
GIB, SEGMENT = 2**30, 2 * 2**20
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", total_memory=80 * GIB, multi_processor_count=132, L2_cache_size=50 * 2**20,
    major=9, minor=0,
)  # fmt: skip


_dealt = count(1)
"""Numbers of streams and pools. They are the process's: labkit keeps some streams for its lifetime, and no later device
may deal their numbers again."""


class Capturing(RuntimeError):
    """What CUDA refuses while a stream is being captured."""


class Machine:
    """The device's state: its clocks, the current stream of each thread, and whether a capture is under way."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.clocks = Clocks()
        self.accesses = Accesses(self.clocks)
        self.capturing = False
        self.waits: Counter[str] = Counter()
        """Places where the host waited for the device."""
        self.pools: set[Any] = set()
        """Handles of pools that hold a graph."""
        self.library = library
        self.recorded: defaultdict[int, set[int]] = defaultdict(set)
        """Streams by storage: the allocator waits for them before it takes the memory again."""
        told = self.clocks.record, self.clocks.block, lambda storage, stream: self.recorded[storage].add(stream)
        self._told = tuple(map(Told, told))  # kept: the library holds no reference
        library.tell(*self._told)

    @property
    def stream(self) -> int:
        """The current stream of this thread."""
        return self.library.get_stream()

    def new_stream(self) -> int:
        """The number of a new stream. torch would hand out the same 32 streams in turn."""
        return next(_dealt)

    def host_waits(self, clock: Clock, what: str) -> None:
        """The host waits for what the clock noted."""
        what = f"{what} at {where()}"
        if self.capturing:
            raise Capturing(f"CUDA error: operation not permitted when stream is capturing: {what}")
        self.waits[what] += 1
        self.clocks.join(HOST, clock)

    def segments(self) -> list[dict[str, Any]]:
        """`torch.cuda.memory_snapshot`: a segment of each pool."""
        return [{"segment_pool_id": pool, "total_size": SEGMENT, "allocated_size": SEGMENT} for pool in self.pools]

    def synchronize(self, *_: Any) -> None:
        """`torch.cuda.synchronize`: the host waits for every stream."""
        self.host_waits(self.clocks.everything(), "torch.cuda.synchronize")


class Event:
    """In the place of `torch.cuda.Event`. One that was never recorded orders nothing, as in CUDA."""

    machine: Machine

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = self.machine.clocks.now(self.machine.stream if stream is None else stream.cuda_stream)

    def wait(self, stream: Stream | None = None) -> None:
        self.machine.clocks.join(self.machine.stream if stream is None else stream.cuda_stream, self.clock)

    def synchronize(self) -> None:
        self.machine.host_waits(self.clock, "Event.synchronize")

    def query(self) -> bool:
        self.machine.clocks.join(HOST, self.clock)
        return True

    def elapsed_time(self, _: Event) -> float:
        return 1.0


class Stream:
    """In the place of `torch.cuda.Stream`."""

    machine: Machine
    device = torch.device("cuda", 0)

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **_: Any) -> None:
        self.cuda_stream = self.machine.new_stream() if stream_id is None else stream_id
        self.stream_id = self.cuda_stream

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return self.cuda_stream

    def wait_stream(self, other: Stream) -> None:
        self.machine.clocks.join(self.cuda_stream, self.machine.clocks.now(other.cuda_stream))

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.machine.host_waits(self.machine.clocks.now(self.cuda_stream), "Stream.synchronize")

    def query(self) -> bool:
        self.machine.clocks.join(HOST, self.machine.clocks.now(self.cuda_stream))
        return True


class Generator(torch.Generator):
    """In the place of the device's generator: torch's own of the CPU has no state that can be pointed at."""

    def graphsafe_get_state(self) -> torch.Generator:
        return self

    def graphsafe_set_state(self, state: torch.Generator) -> torch.Generator:  # pyright: ignore
        return state

    def clone_state(self) -> torch.Generator:
        return Generator()


class Graph:
    """In the place of `torch.cuda.CUDAGraph`."""

    machine: Machine

    def __init__(self, *_: Any, **__: Any) -> None:
        self._pool: Any = None
        self._before: Clock = {}
        self._accesses: list[tuple[int, Access]] = []
        """Storages and what a replay does with them."""

    def register_generator_state(self, _: Any) -> None:
        pass

    def capture_begin(self, pool: Any = None, **_: Any) -> None:
        if self.machine.capturing:
            raise Capturing("CUDA error: a capture is under way on this device")
        self._pool, self.machine.capturing = pool or new_pool(), True
        self.machine.pools.add(self._pool)
        self.machine.clocks.meet()
        self._before, self.machine.accesses.recorded = self.machine.clocks.everything(), []

    def capture_end(self) -> None:
        machine, clocks = self.machine, self.machine.clocks
        machine.capturing = False
        self._accesses, machine.accesses.recorded = united(machine.accesses.recorded or []), None
        begun = [(place, time) for place, time in clocks.everything().items() if time > self._before.get(place, 0)]
        unjoined = [place for place, time in begun if place != HOST and not clocks.knows(machine.stream, place, time)]
        if unjoined:
            raise Capturing(f"CUDA error: capturing stream has unjoined work: of streams {unjoined}")
        clocks.meet()  # a capture runs nothing, so only its own streams can race with each other

    def pool(self) -> Any:
        return self._pool

    def replay(self) -> None:
        machine, place = self.machine, f"replayed at {where()}"
        stream = machine.stream
        time = machine.clocks.tick(stream)
        for storage, access in self._accesses:
            done = replace(access, place=stream, time=time, what=f"{access.what}, {place}")
            machine.accesses.add(storage, done)

    def reset(self) -> None:
        self._accesses = []


@contextmanager
def graph(captured: Graph, pool: Any = None, stream: Stream | None = None, **_: Any) -> Iterator[None]:
    """In the place of `torch.cuda.graph`."""
    Graph.machine.synchronize()
    with on_stream(stream or Stream()):
        captured.capture_begin(pool)
        try:
            yield
        finally:
            captured.capture_end()


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """In the place of `torch.cuda.stream`."""
    if stream is None:
        yield
        return
    outer = stream.machine.library.set_stream(stream.cuda_stream)
    try:
        yield
    finally:
        stream.machine.library.set_stream(outer)


def new_pool() -> tuple[int, int]:
    """The handle of a pool of graphs, in the place of `torch.cuda.graph_pool_handle`."""
    return 0, next(_dealt)


def nothing(*_: Any, **__: Any) -> None:
    """A call that changes nothing here."""


def always(answer: Any) -> Callable[..., Any]:
    """A function with one answer."""
    return lambda *_, **__: answer


@contextmanager
def torch_cuda(library: ctypes.CDLL) -> Iterator[Machine]:
    """Inside the block `torch.cuda` is that of a new fake device."""
    machine = Machine(library)
    Event.machine = Stream.machine = Graph.machine = machine
    names: dict[str, Any] = {
        "Stream": Stream, "Event": Event, "CUDAGraph": Graph, "graph": graph, "stream": on_stream,
        "current_stream": lambda *_: Stream(stream_id=machine.stream),
        "default_stream": lambda *_: Stream(stream_id=0),
        "set_stream": lambda stream: library.set_stream(stream.cuda_stream),
        "synchronize": machine.synchronize, "is_current_stream_capturing": lambda: machine.capturing,
        "default_generators": (Generator(),), "graph_pool_handle": new_pool,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8), "set_rng_state": nothing,
        "manual_seed": nothing, "manual_seed_all": nothing,
        "is_available": always(True), "is_initialized": always(True), "init": nothing, "device_count": always(1),
        "current_device": always(0), "set_device": nothing, "is_bf16_supported": always(True),
        "get_device_name": always(PROPERTIES.name), "get_device_properties": always(PROPERTIES),
        "get_device_capability": always((PROPERTIES.major, PROPERTIES.minor)),
        "memory_allocated": always(GIB), "max_memory_allocated": always(2 * GIB), "memory_reserved": always(2 * GIB),
        "max_memory_reserved": always(2 * GIB), "mem_get_info": always((70 * GIB, 80 * GIB)),
        "reset_peak_memory_stats": nothing, "empty_cache": nothing, "memory_snapshot": machine.segments,
    }  # fmt: skip
    private = ("_host_emptyCache", "_cuda_releasePool", "_cuda_endAllocateToPool", "_cuda_beginAllocateToPool")
    with ExitStack() as stack:
        for name, value in names.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(torch.cuda.graphs, "graph_pool_handle", new_pool))
        for name in (*private, "_cuda_beginAllocateCurrentThreadToPool"):
            stack.enter_context(patch.object(torch._C, name, nothing, create=True))
        try:
            yield machine
        finally:
            library.tell(Told(), Told(), Told())
