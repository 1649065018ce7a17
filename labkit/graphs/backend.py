"""The protocol behind `impl`: functions that a machine must offer for graphs to be captured on it and replayed.

`graphs/capture.py` knows the rules of capturing (order, buffers, weak references, autograd) and nothing of the machine;
a backend knows how operations are recorded and nothing of those rules.

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
"""What `make_graphed_callables(impl=)` takes. `auto` is `local` for tensors on CUDA and `emulated` for those on the
host."""


class Graph(Protocol):
    """Operations captured once, in order, on fixed addresses."""

    name: str

    def replay(self) -> None:
        """Run the operations again on whatever their addresses hold now."""
        ...

    @property
    def num_operations(self) -> int | None:
        """Operations (launches, on a GPU) of a replay; None where the machine does not say."""
        ...

    def reset(self) -> None:
        """Forget the operations and let their memory go; a later `replay` is an error."""
        ...


class Pool(Protocol):
    """Memory in which graphs find what they make. Graphs of one pool take over each other's dead blocks."""

    @property
    def history(self) -> Sequence[PoolStep]:
        """Everything that was taken and given back; empty where the machine does not say."""
        ...

    @property
    def peak_bytes(self) -> int:
        """Most that was alive at once."""
        ...

    @property
    def reserved_bytes(self) -> int:
        """What the pool holds of the machine's memory, alive or not."""
        ...

    @property
    def live_bytes(self) -> int:
        """What is alive now."""
        ...

    @property
    def workspace_bytes(self) -> int | None:
        """What cuBLAS keeps for the stream of the captures, outside the pool; None where nobody knows."""
        ...


class GraphBackend(Protocol):
    """Captures on one kind of machine."""

    name: str
    """`emulated` or `local`."""
    device_type: str
    """Of the tensors it takes: `cpu` or `cuda`."""

    def new_pool(self) -> Pool:
        """An empty pool."""
        ...

    def capturing(self, pool: Any, name: str) -> AbstractContextManager[Graph]:
        """Record what runs inside the block into the Graph that it yields, with garbage collection off.

        Tensors made inside lie in `pool`; a block there is free again once its last tensor is dropped. Replays draw
        random numbers as the recorded operations would if they ran anew, from torch's default generator and from the
        named states of `RngTracker`s.

        Raises:
            GraphCaptureError: something inside the block cannot be captured; names the caller's line.
        """
        ...

    def warming_up(self, pool: Any) -> AbstractContextManager[None]:
        """Where the runs before captures into `pool` take place: on a GPU, on the stream of those captures."""
        ...

    def before_captures(self, pool: Any) -> None:
        """To be called once ahead of a set of captures into `pool`: frees the memory that nobody uses."""
        ...

    def static_like(self, tensor: Tensor, pool: Any) -> Tensor:
        """An uninitialised tensor like `tensor` whose address is its own for as long as it lives; requires no grad."""
        ...

    def weak_ref(self, tensor: Tensor) -> Tensor:
        """A tensor at the same address that does not keep the memory: its pool may give it to somebody else."""
        ...


def make_weak_ref(tree: Any, backend: GraphBackend) -> Any:
    """`tree` (tensors in tuples, lists, dicts; anything else stays) with every tensor replaced by a weak reference.

    What the tree held can then be taken by the next capture of the pool, and what is read through the new tensors is
    whatever lies at those addresses by then.
    """
    return tree_map_only(Tensor, backend.weak_ref, tree)


def choose_impl(impl: str, device: torch.device) -> str:
    """`impl` with `auto` resolved for tensors on `device`.

    Raises:
        ValueError: no such implementation, or not for tensors of this device, or a GPU that is not the current one.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl={impl!r} is unknown; it may be {', '.join(IMPLS)}")
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

    rng_trackers: whose states captured code may draw from; graphs on a GPU must be told. It may be a list to which a
    warm-up adds.

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
