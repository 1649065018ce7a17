"""labkit's own graphs on a GPU: `torch.cuda.CUDAGraph` behind the protocol of `backend.py`.

Warm-up and captures of a pool run on one side stream, and autograd runs the captured backwards there too. The
allocator keeps free blocks by stream, so captures on another stream could not take them. `capture_streams.py` chooses
the stream and resets graphs. Once before a set of captures, the backend collects garbage and gives unused memory
back. `torch.cuda.graph` gives memory back for every graph, and collects only with TORCH_CUDAGRAPH_GC=1, because a
collection is slow.

Every graph knows torch's generator. The backend registers the generators of `RngTracker`s with each graph, so that a
replay draws on from their states. Garbage collection is off during a capture, since it could destroy another graph at
any moment and so end the capture. Other threads, such as one that pins batches in memory, go on (mode `thread_local`).

Destroying a communicator of NCCL hangs while graphs hold its collectives (pytorch#115388). So all graphs are reset
before a process leaves its process group (`launch.info.before_leaving`).

After a failed capture the backend ends the capture and restores the stream, and the error names the user's line. Up to
torch 2.11 allocators and generators need more (pytorch#180395): `failed_capture.py` repairs them, or says that this
process must end.

Written from the documentation; tests/gpu tests it where there is a GPU.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from labkit.comm.capturing import GraphCaptureError, graph_capturing, graph_warmup, require_whole_process
from labkit.graphs.cuda.capture_streams import pool_mates
from labkit.graphs.cuda.failed_capture import is_spent, repair_process
from labkit.graphs.pool import PoolStep
from labkit.graphs.user_line import raised_at
from labkit.launch.info import before_leaving
from labkit.parallel.random import RngTracker

__all__ = ["LocalBackend", "LocalGraph", "LocalPool"]

_alive: weakref.WeakSet[Any] = weakref.WeakSet()


def reset_before_leaving(graph: Any) -> None:
    """Have `graph.reset()` called before this process leaves its process group, if the graph lives until then."""
    _alive.add(graph)
    before_leaving(_reset_all)


def _reset_all() -> None:
    for graph in list(_alive):
        graph.reset()


class LocalPool:
    """A private pool of torch's allocator, shared by graphs, and the stream of their captures."""

    def __init__(self, handle: tuple[int, int] | None = None) -> None:
        """handle: a handle from `torch.cuda.graph_pool_handle()` or from `.pool()` of a graph; None makes a new one."""
        self.handle: Any = torch.cuda.graph_pool_handle() if handle is None else handle
        self._handles = {tuple(self.handle)}
        self.mates = pool_mates(self.handle)
        """The graphs that must be reset together with those of this pool."""

    @property
    def stream(self) -> Any:
        """The stream of captures and warm-up."""
        return self.mates.on.stream

    def renew(self) -> None:
        """Take a new handle, because torch takes no more captures for the old one."""
        self.handle = torch.cuda.graph_pool_handle()
        self._handles.add(tuple(self.handle))

    @property
    def history(self) -> Sequence[PoolStep]:
        """Empty: torch's allocator records only on demand (`torch.cuda.memory._record_memory_history`)."""
        return ()

    def _segments(self) -> list[dict[str, Any]]:
        return [s for s in torch.cuda.memory_snapshot() if tuple(s.get("segment_pool_id", ())) in self._handles]

    @property
    def peak_bytes(self) -> int:
        """Bytes that the pool holds: the most that was alive at once, rounded up to the allocator's segments."""
        return self.reserved_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the pool's segments."""
        return sum(segment["total_size"] for segment in self._segments())

    @property
    def live_bytes(self) -> int:
        """Bytes of blocks with a living tensor."""
        return sum(segment["allocated_size"] for segment in self._segments())

    @property
    def workspace_bytes(self) -> int:
        """Bytes of cuBLAS's workspaces on the stream of the captures, in no pool. Pools with one stream share them."""
        return self.mates.on.workspace_bytes


class LocalGraph:
    """A `torch.cuda.CUDAGraph` with a name, which is reset before its process leaves its process group."""

    def __init__(self, name: str, generators: Sequence[torch.Generator] = ()) -> None:
        self.name = name
        self._graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        for generator in generators:
            self._graph.register_generator_state(generator)
        self._leave: weakref.finalize | None = None
        reset_before_leaving(self)

    @property
    def num_operations(self) -> int | None:
        """None: torch does not say. A profiler counts the kernels of a replay."""
        return None

    @property
    def cuda_graph(self) -> torch.cuda.CUDAGraph:
        """torch's object.

        Raises:
            GraphCaptureError: the graph was reset.
        """
        if self._graph is None:
            raise GraphCaptureError(f"graph {self.name!r} holds nothing: it was reset, or its capture failed")
        return self._graph

    @property
    def is_captured(self) -> bool:
        """True where torch has begun and ended the capture, also where the code inside failed."""
        return self._leave is not None

    def captured(self, pool: LocalPool) -> None:
        """Note the end of the capture. From now on the graph is reset together with the pool's other graphs."""
        pool.mates.join(self.cuda_graph)
        self._leave = weakref.finalize(self, pool.mates.leave, self.cuda_graph)
        self._leave.atexit = False

    def replay(self) -> None:
        """Launch the graph on the current stream; the host does not wait.

        Raises:
            BrokenProcessError: after a failed capture this process cannot draw random numbers.
        """
        require_whole_process()
        self.cuda_graph.replay()

    def reset(self) -> None:
        """Drop the graph; a later `replay` is an error. Its memory is free when all graphs of its pool are reset."""
        if self._leave is not None:
            self._leave()
        self._graph = None


class LocalBackend:
    """Captures on the current CUDA device. See `backend.GraphBackend`."""

    name = "local"
    device_type = "cuda"

    def __init__(self, rng_trackers: Sequence[RngTracker] = ()) -> None:
        """rng_trackers: the trackers that captured code may draw from; a list may grow during the warm-up."""
        self._rng_trackers = rng_trackers
        self._of_handles: dict[tuple[int, ...], LocalPool] = {}
        """Pools of bare handles: one object for each handle, so warm-up and captures share a stream."""

    def new_pool(self) -> LocalPool:
        """An empty pool."""
        return LocalPool()

    @contextmanager
    def capturing(self, pool: LocalPool | tuple[int, int], name: str) -> Iterator[LocalGraph]:
        """Record the operations inside the block, on the pool's stream.

        Raises:
            GraphCaptureError: CUDA rejected an operation (the message names the user's line), or torch takes no more
                captures for this handle of a pool.
            BrokenProcessError: a failed capture, this one or an earlier one, could not be repaired.
        """
        require_whole_process()
        pool = self._open(pool)
        generators = [g for tracker in self._rng_trackers for g in tracker.generators]
        graph = LocalGraph(name, generators)
        torch.cuda.synchronize()
        collected = gc.isenabled()
        gc.disable()
        outer, begun = torch.cuda.current_stream(), False
        try:
            torch.cuda.set_stream(pool.stream)
            graph.cuda_graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
            begun = True
            try:
                with graph_capturing(), stale_streams_followed():
                    yield graph
            except BaseException:
                with suppress(RuntimeError):  # it says only that the capture was broken off
                    graph.cuda_graph.capture_end()
                    graph.captured(pool)
                raise
            graph.cuda_graph.capture_end()
            graph.captured(pool)
        except BaseException as error:
            told = explained(error, name) if isinstance(error, RuntimeError) else error
            if told is not error:
                told.__cause__ = error
            if begun and not graph.is_captured and _has_ended(graph.cuda_graph):
                graph.captured(pool)  # CUDA could not make it runnable, but torch has ended the capture
            if not graph.is_captured:
                repair_process(graph.cuda_graph, pool.handle, generators, told, begun=begun)
            graph.reset()
            if told is not error:
                raise told from error
            raise
        finally:
            torch.cuda.set_stream(outer)
            if collected:
                gc.enable()

    @contextmanager
    def warming_up(self, pool: LocalPool | tuple[int, int]) -> Iterator[None]:
        """Run the block on the pool's stream. Memory that is made lazily, as by cuBLAS, then lies outside the pool.

        Raises:
            BrokenProcessError: an earlier failed capture could not be repaired.
        """
        require_whole_process()
        pool = self._open(pool)
        stream = pool.stream
        stream.wait_stream(torch.cuda.current_stream())
        pool.mates.on.prepare()
        with torch.cuda.stream(stream), graph_warmup():
            yield
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()

    def before_captures(self, pool: LocalPool | tuple[int, int]) -> None:
        """Collect garbage and give back unused memory of the device and pinned memory, since a capture can do neither.

        If no warm-up ran, cuBLAS also makes its workspaces for the pool's stream.

        Raises:
            BrokenProcessError: an earlier failed capture could not be repaired.
        """
        require_whole_process()
        torch.cuda.synchronize()
        gc.collect()  # may reset graphs, and with them free the workspaces of their stream
        self._open(pool).mates.on.prepare()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()

    def _open(self, pool: LocalPool | tuple[int, int]) -> LocalPool:
        """A pool that takes captures.

        Raises:
            GraphCaptureError: torch takes no more captures for this handle.
        """
        if isinstance(pool, LocalPool):
            if is_spent(pool.handle):
                pool.renew()
            return pool
        if is_spent(pool):
            raise GraphCaptureError(
                f"nothing can be captured into the pool {tuple(pool)} any more: a capture into it has failed, and "
                f"torch {torch.__version__} believes that it goes on (pytorch#180395). Take a new pool (pool=None), or "
                "give .pool of the earlier graphs"
            )
        if tuple(pool) not in self._of_handles:
            self._of_handles[tuple(pool)] = LocalPool(pool)
        return self._of_handles[tuple(pool)]

    def weak_ref(self, tensor: Tensor) -> Tensor:
        """A tensor at the same address that owns nothing."""
        return weak_cuda_tensor(tensor)


def _has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """True where torch has ended the capture; the instantiation after it may still have failed."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


@contextmanager
def stale_streams_followed() -> Iterator[None]:
    """Inside the block autograd's nodes run on the stream of the capture, also those that remember another stream.

    A node that accumulates the gradient of a parameter remembers the stream of its first use. It lives as long as any
    result that depends on it, such as a loss that was kept. Versions of torch before 2.13 have no such switch: there
    the capture fails, and `explained` says what to drop.
    """
    switch = getattr(torch.autograd.graph, "set_override_stale_capture_stream", None)
    if switch is None:
        yield
        return
    before = torch._C._override_stale_capture_stream()
    switch(True)
    try:
        yield
    finally:
        switch(before)


def explained(error: RuntimeError, name: str) -> RuntimeError:
    """CUDA's error with the user's line; other errors (out of memory, labkit's own) unchanged."""
    if isinstance(error, GraphCaptureError | torch.OutOfMemoryError) or "captur" not in str(error).lower():
        return error
    where = f"{line}: " if (line := raised_at(error)) else ""
    first = str(error).strip().splitlines()[0].rstrip(".")
    kept = "results of an earlier run that still depend on the same parameters (a loss that was kept): del them"
    if any(word in str(error) for word in ("stale", "legacy stream", "CaptureIsolation", "dependency created")):
        return GraphCaptureError(f"{where}{name} cannot be captured: {first}. The cause is {kept}")
    return GraphCaptureError(
        f"{where}{name} cannot be captured: {first}. A CUDA graph cannot hold an operation that makes the host wait "
        "for the device (item, cpu, tolist, nonzero, a mask as index): move it out of the captured part, or compute on "
        f"the device. In a backward the cause may also be {kept}"
    )


class _AtAddress:
    """Memory of another tensor, offered through the CUDA array interface as integers of the same size."""

    TYPES = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8", 16: "<c16"}  # noqa: RUF012

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "typestr": self.TYPES[size],
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "version": 3,
        }


def weak_cuda_tensor(tensor: Tensor) -> Tensor:
    """A CUDA tensor with the same address, shape, strides and type that does not keep the memory."""
    if tensor.numel() == 0:
        return torch.empty_like(tensor, requires_grad=False)
    weak = torch.as_tensor(_AtAddress(tensor), device=tensor.device).view(tensor.dtype)
    assert weak.data_ptr() == tensor.data_ptr(), "torch copied what it should have aliased"
    return weak
