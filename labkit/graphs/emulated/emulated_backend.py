"""CUDA graphs on the host: capture and replay with the semantics of the GPU, for tests, chapters and laptops.

What is kept of a CUDA graph: operations on fixed addresses, replayed without Python's part; one pool for many graphs,
whose blocks are free when their tensor dies and are taken by later captures; weak references; branches frozen and side
effects once; random numbers drawn anew at each replay; collectives inside. What a GPU refuses is refused
(`host_syncs.py`), with the line that did it. What a GPU does silently is done silently: a tensor read after its block
was taken by another graph holds that graph's values.

One difference shows: capturing on a GPU computes nothing, and here the captured operations also run once. So in-place
changes to tensors from outside happen at capture too, as they do in a warm-up; clear gradients and statistics after it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from labkit.graphs.emulated.arena import Arena, unmanaged
from labkit.graphs.emulated.host_syncs import watched_methods
from labkit.graphs.emulated.recording import AddressRecorder, RecordedCall
from labkit.parallel.communication.capturing import (
    GraphCaptureError,
    active_capture,
    graph_capturing,
    graph_warmup,
    is_graph_capturing,
)

__all__ = ["EmulatedBackend", "EmulatedGraph"]

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


class EmulatedGraph:
    """Operations on addresses; made by `EmulatedBackend.capturing`."""

    def __init__(self, name: str, arena: Arena) -> None:
        self.name = name
        self._arena: Arena | None = arena
        self._steps: list[RecordedCall] = []
        self._parameters: list = []

    @property
    def num_operations(self) -> int:
        """Calls that a replay makes: operations, and the starts and waits of collectives."""
        return len(self._steps)

    def replay(self) -> None:
        """Run the operations again on whatever their addresses hold now.

        Raises:
            GraphCaptureError: the graph was reset, a parameter has moved, or another graph is being captured.
        """
        if self._arena is None:
            raise GraphCaptureError(f"graph {self.name!r} holds nothing: it was reset, or its capture failed")
        if active_capture() is not None:
            raise GraphCaptureError(f"graph {self.name!r} cannot be replayed while another one is captured")
        self._check_parameters()
        # What was recorded lay below autograd and autocast; without them a call costs half as much.
        with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            for function, args, kwargs in self._steps:
                function(*args, **kwargs)

    def _check_parameters(self) -> None:
        for reference, address in self._parameters:
            parameter = reference()
            if parameter is not None and parameter.data_ptr() != address:
                raise GraphCaptureError(
                    f"graph {self.name!r} reads a parameter of shape {tuple(parameter.shape)} at the address it had at "
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
        """Record what runs inside the block; tensors made there lie in `pool`."""
        if is_graph_capturing():
            raise GraphCaptureError(f"graph {name!r} cannot be captured while another one is being captured")
        graph, recorder = EmulatedGraph(name, pool), AddressRecorder(pool)
        collected = gc.isenabled()
        gc.disable()  # a collection could free, or finalise, anything at any place of the capture
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
        """Runs before a capture; on the host they need no place of their own."""
        return graph_warmup()

    def before_captures(self, pool: Arena) -> None:
        """Nothing: on the host a capture does not need memory that a collection would free."""

    def static_like(self, tensor: Tensor, pool: Arena) -> Tensor:
        """An uninitialised tensor like `tensor`, in memory of its own outside the pool, as on a GPU."""
        return torch.empty_like(tensor.detach(), requires_grad=False)

    def weak_ref(self, tensor: Tensor) -> Tensor:
        """A tensor at the same address that does not keep the block. Outside an arena it does keep its memory."""
        return unmanaged(tensor)
