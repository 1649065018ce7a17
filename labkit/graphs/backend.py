"""The protocol behind `impl`: the functions that a machine offers so that graphs can be captured and replayed on it.

`graphs/capture.py` knows the rules of a capture: order, buffers, weak references, autograd. A backend knows how its
machine records operations. Neither knows the other's part.

| impl                 | backend             | a graph is                          | a pool is                     |
|----------------------|---------------------|-------------------------------------|-------------------------------|
| `emulated`           | `emulated/`, host   | operations on recorded addresses    | an arena of host memory       |
| `local`              | `cuda/`, CUDA       | a `torch.cuda.CUDAGraph`            | a handle of torch's allocator |
| `transformer_engine` | none: `cuda/te_adaptor.py` calls the engine's own function                                  |||
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from labkit.graphs.pool import PoolStep

if TYPE_CHECKING:
    from labkit.parallel.random import RngTracker

IMPLS = ("auto", "transformer_engine", "local", "emulated")
"""Values of `make_graphed_callables(impl=)`. `auto` is `local` for tensors on CUDA and `emulated` for the host's."""


class Graph(Protocol):
    """A graph holds operations that were captured once, in order, on fixed addresses."""

    name: str

    def replay(self) -> None:
        """Run the operations again on the values that lie at their addresses now."""
        ...

    @property
    def num_operations(self) -> int | None:
        """Operations (launches, on a GPU) of a replay; None where the machine does not say."""
        ...

    def reset(self) -> None:
        """Forget the operations and free their memory; a later `replay` is an error."""
        ...


class Pool(Protocol):
    """The memory for tensors that graphs make. A graph may take over the dead blocks of its pool's other graphs."""

    @property
    def history(self) -> Sequence[PoolStep]:
        """All blocks taken and given back, in order; empty where the machine does not say."""
        ...

    @property
    def peak_bytes(self) -> int:
        """Most bytes that were alive at once."""
        ...

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the machine's memory that the pool holds, alive or not."""
        ...

    @property
    def live_bytes(self) -> int:
        """Bytes that are alive now."""
        ...

    @property
    def workspace_bytes(self) -> int | None:
        """Bytes that cuBLAS keeps for the stream of the captures, outside the pool; None where unknown."""
        ...


class GraphBackend(Protocol):
    """The functions that captures need of one kind of machine."""

    name: str
    """`emulated` or `local`."""
    device_type: str
    """Device type of the tensors that it takes: `cpu` or `cuda`."""

    def new_pool(self) -> Pool:
        """An empty pool."""
        ...

    def capturing(self, pool: Any, name: str) -> AbstractContextManager[Graph]:
        """Record the operations inside the block into the Graph that it yields, with garbage collection off.

        Tensors made inside lie in `pool`; memory there is free again once its last tensor is dropped. A replay draws
        new random numbers, from torch's default generator and from the named states of `RngTracker`s.

        Raises:
            GraphCaptureError: an operation cannot be captured; the message names the caller's line.
        """
        ...

    def warming_up(self, pool: Any) -> AbstractContextManager[None]:
        """Run the block as a warm-up for captures into `pool`: on a GPU, on the stream of those captures."""
        ...

    def before_captures(self, pool: Any) -> None:
        """Free unused memory. Call this once before a set of captures into `pool`."""
        ...

    def weak_ref(self, tensor: Tensor) -> Tensor:
        """A tensor at the same address that does not keep the memory: the pool may give it to another tensor."""
        ...


def make_weak_ref(tree: Any, backend: GraphBackend) -> Any:
    """`tree` (tensors in tuples, lists, dicts; anything else stays) with every tensor replaced by a weak reference.

    Once the caller drops `tree`, the next capture of the pool can take its memory. A weak reference reads the values
    that lie at its address at the time.
    """
    return tree_map_only(Tensor, backend.weak_ref, tree)


def choose_impl(impl: str, device: torch.device) -> str:
    """`impl` with `auto` resolved for tensors on `device`.

    Raises:
        ValueError: an unknown name, an implementation for another device, or a GPU that is not the current one.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl={impl!r} is unknown; choose one of {', '.join(IMPLS)}")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"tensors on {device.type} cannot be captured: move modules and sample arguments to cpu or cuda"
        )
    fitting = "local" if device.type == "cuda" else "emulated"
    chosen = fitting if impl == "auto" else impl
    needed = "cpu" if chosen == "emulated" else "cuda"
    if device.type != needed:
        raise ValueError(
            f"impl={chosen!r} captures tensors on {needed}, and these are on {device.type}: "
            f"use impl={fitting!r} (auto does) or move modules and sample arguments to {needed}"
        )
    if needed == "cuda" and torch.cuda.is_available() and device.index not in (None, torch.cuda.current_device()):
        raise ValueError(
            f"these tensors are on {device}, and the current device is cuda:{torch.cuda.current_device()}, whose "
            f"streams a capture would record: call torch.cuda.set_device({device.index}) first"
        )
    return chosen


def get_backend(impl: str, rng_trackers: Sequence[RngTracker] = ()) -> GraphBackend:
    """The backend of `emulated` or `local`.

    rng_trackers: the trackers whose states captured code may draw from. Graphs on a GPU must know these trackers. A
    list may grow during a warm-up.

    Raises:
        ValueError: another name.
    """
    if impl == "emulated":
        from labkit.graphs.emulated.emulated_backend import EmulatedBackend

        return EmulatedBackend()
    if impl == "local":
        from labkit.graphs.cuda.local_backend import LocalBackend

        return LocalBackend(rng_trackers)
    raise ValueError(f"no backend is called {impl!r}; there are emulated and local")
