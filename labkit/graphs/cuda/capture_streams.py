"""The CUDA streams of captures, and the graphs that must be reset together.

cuBLAS keeps a workspace for each (handle, stream). torch allocates it at the first matrix product there, and every
captured product holds its address. A workspace made during a capture therefore stays in the pool of that capture
permanently. It takes 32 MiB on Hopper and Blackwell for each thread that runs products: the main thread, and
autograd's thread for backwards. So `CaptureStream.prepare` makes the workspaces of a stream before the first capture
on it.

| torch         | a reset graph                                | capture streams  | graphs reset together      |
|---------------|----------------------------------------------|------------------|----------------------------|
| before 2.12   | leaves workspaces alone                      | one for a device | those of one pool          |
| 2.12 and later| frees the workspaces of its stream (#175276) | one for a pool   | those of one stream        |

One stream for a device has one set of workspaces for all pools. From torch 2.12 on this would be wrong. There the reset
of a graph frees workspaces that all graphs of its stream use (pytorch#193402), and the next eager tensor takes them.
So each pool has a stream there, and a reset graph is kept until the last graph of its stream is reset too.

Sources: `aten/src/ATen/cuda/CUDAGraph.cpp` (`reset`) and `CublasHandlePool.cpp` of PyTorch; pytorch#175276, #193402.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import torch

STREAMS_DEALT = 32
"""`torch.cuda.Stream()` deals out this many streams of a device in turn (`kStreamsPerPool` in CUDAStream.cpp)."""


def resets_free_workspaces() -> bool:
    """True where this torch frees the cuBLAS workspaces of a stream when a graph captured there is reset."""
    return torch.__version__ >= "2.12"


class CaptureStream:
    """A stream for captures and for the warm-up before them."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.workspace_bytes = 0
        """Bytes of cuBLAS's workspaces on this stream, as `prepare` measured."""

    def prepare(self) -> None:
        """Have cuBLAS make its workspaces for this stream in ordinary memory, unless they exist."""
        before = torch.cuda.memory_allocated()
        with torch.cuda.stream(self.stream):
            _products()
        self.workspace_bytes = max(self.workspace_bytes, torch.cuda.memory_allocated() - before)


def _products() -> None:
    """A product with and without a bias (cuBLASLt, cuBLAS): forward on this thread, backward on autograd's."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cuda", enabled=False):
        x, bias = torch.ones(16, 16, device="cuda", requires_grad=True), torch.ones(16, device="cuda")
        torch.autograd.grad((torch.addmm(bias, x, x) @ x).sum(), x)


class PoolMates:
    """Graphs that must be reset together, and the stream of their captures."""

    def __init__(self, on: CaptureStream) -> None:
        self.on = on
        self._alive: dict[int, Any] = {}
        self._waiting: list[Any] = []

    def join(self, graph: Any) -> None:
        """Keep `graph`, torch's object, until all graphs of this group have left."""
        self._alive[id(graph)] = graph

    def leave(self, graph: Any) -> None:
        """End the use of `graph`. When the last graph leaves, all of them are reset."""
        if self._alive.pop(id(graph), None) is None:
            return
        self._waiting.append(graph)
        if self._alive:
            return
        while self._waiting:
            with suppress(RuntimeError):  # nothing to undo where CUDA is gone
                self._waiting.pop(0).reset()


_of_device: dict[int, CaptureStream] = {}
_of_pool: WeakValueDictionary[tuple[int, Any], PoolMates] = WeakValueDictionary()


def pool_mates(handle: Any) -> PoolMates:
    """The graphs of the pool with this handle on the current device; one object as long as a caller holds it."""
    device = torch.cuda.current_device()
    key = device, tuple(handle)
    found = _of_pool.get(key)
    if found is None:
        found = _new_stream(device) if resets_free_workspaces() else PoolMates(_stream_of_device(device))
        _of_pool[key] = found
    return found


def _stream_of_device(device: int) -> CaptureStream:
    if device not in _of_device:
        _of_device[device] = CaptureStream(torch.cuda.Stream())
    return _of_device[device]


def _new_stream(device: int) -> PoolMates:
    """Graphs on a stream without a living graph; where no stream is free, the pool joins the last stream dealt."""
    taken = {mates.on.stream.cuda_stream: mates for (where, _), mates in _of_pool.items() if where == device}
    stream = torch.cuda.Stream()
    for _ in range(STREAMS_DEALT - 1):
        if stream.cuda_stream not in taken:
            break
        stream = torch.cuda.Stream()
    return taken.get(stream.cuda_stream) or PoolMates(CaptureStream(stream))
