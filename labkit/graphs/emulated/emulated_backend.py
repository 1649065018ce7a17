"""CUDA graphs on the host: capture and replay with the semantics of the GPU, for tests, chapters and laptops.

An emulated graph holds operations on fixed addresses. A replay runs no Python of the captured code: branches are
frozen, and side effects happen once. A replay draws new random numbers and runs the collectives inside. Many graphs
share a pool: a block is free when its tensor dies, and a later capture may take it. There are weak references.

The emulation rejects the operations that a GPU rejects (`host_syncs.py`), and names the line. It makes the mistakes
that a GPU makes silently: a tensor whose block another graph has taken shows that graph's values.

Two differences remain. A capture on a GPU computes nothing; here the captured operations also run once. So a capture
changes tensors from outside in place, as a warm-up does. Clear gradients and statistics after it. And a graph here
keeps the memory of tensors from outside. A CUDA graph does not, so a replay would read whatever lies there later.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from labkit.comm.capturing import GraphCaptureError, active_capture, graph_capturing, graph_warmup, is_graph_capturing
from labkit.graphs.emulated.arena import Arena, unmanaged
from labkit.graphs.emulated.host_syncs import watched_methods
from labkit.graphs.emulated.recording import AddressRecorder, RecordedCall

__all__ = ["EmulatedBackend", "EmulatedGraph"]

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


class EmulatedGraph:
    """Operations on addresses, made by `EmulatedBackend.capturing`."""

    def __init__(self, name: str, arena: Arena) -> None:
        self.name = name
        self._arena: Arena | None = arena
        self._steps: list[RecordedCall] = []
        self._parameters: list = []

    @property
    def num_operations(self) -> int:
        """Number of calls of a replay: operations, and starts and waits of collectives."""
        return len(self._steps)

    def replay(self) -> None:
        """Run the operations again on the values that lie at their addresses now.

        Raises:
            GraphCaptureError: the graph was reset, a parameter has moved, or another graph is being captured.
        """
        if self._arena is None:
            raise GraphCaptureError(f"graph {self.name!r} holds nothing: it was reset, or its capture failed")
        if active_capture() is not None:
            raise GraphCaptureError(f"graph {self.name!r} cannot be replayed while another one is captured")
        self._check_parameters()
        # The recorder saw operations below autograd and autocast; a call without these costs half as much.
        with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            for function, args, kwargs in self._steps:
                function(*args, **kwargs)

    def _check_parameters(self) -> None:
        for reference, address in self._parameters:
            parameter = reference()
            if parameter is not None and parameter.data_ptr() != address:
                raise GraphCaptureError(
                    f"graph {self.name!r} reads a parameter of shape {tuple(parameter.shape)} at its address of the "
                    "capture, and the parameter has moved since (.data was replaced, or the module moved). Change "
                    "parameters in place (copy_), or capture again"
                )

    def reset(self) -> None:
        """Forget the operations; a later `replay` is an error."""
        self._arena, self._steps, self._parameters = None, [], []


class EmulatedBackend:
    """Captures on the host. See `backend.GraphBackend`."""

    name = "emulated"
    device_type = "cpu"

    def new_pool(self) -> Arena:
        """An empty arena."""
        return Arena()

    @contextmanager
    def capturing(self, pool: Arena, name: str) -> Iterator[EmulatedGraph]:
        """Record the operations inside the block; tensors made there lie in `pool`."""
        if is_graph_capturing():
            raise GraphCaptureError(f"graph {name!r} cannot be captured while another one is being captured")
        graph, recorder = EmulatedGraph(name, pool), AddressRecorder(pool)
        collected = gc.isenabled()
        gc.disable()  # a collection could free or finalise any object at any point of the capture
        outer, pool.owner = pool.owner, name
        try:
            with watched_methods(), graph_capturing(recorder), recorder:
                yield graph
            recorder.finish()
        except BaseException:
            graph.reset()
            raise
        finally:
            pool.owner = outer
            if collected:
                gc.enable()
        graph._steps, graph._parameters = recorder.steps, recorder.parameters

    def warming_up(self, pool: Arena) -> AbstractContextManager[None]:
        """Run the block as a warm-up; the host has no streams to choose from."""
        return graph_warmup()

    def before_captures(self, pool: Arena) -> None:
        """Do nothing: a capture on the host does not depend on freed memory."""

    def weak_ref(self, tensor: Tensor) -> Tensor:
        """A tensor at the same address that does not keep the block. Outside arenas it keeps its memory."""
        return unmanaged(tensor)
