"""The state that a failed capture leaves behind on a GPU, and its repair.

After CUDA has invalidated a capture, `CUDAGraph.capture_end` throws. Up to torch 2.11 it throws before it has told
other parts of torch that the capture is over (pytorch#180395):

| part                   | believes                                      | effect                                      |
|------------------------|-----------------------------------------------|---------------------------------------------|
| allocator of the GPU   | the capture goes on; asks the graph each time | `empty_cache` raises; a freed graph is read |
| allocator of the host  | the same                                      | that pool takes no other capture            |
| generators             | draws belong to the capture                   | every draw raises                           |

The repair keeps the graph alive for good and ends the allocation to its pool. One small capture with the same
generators then ends well and so sets the generators right. Python cannot reach the allocator of the host. That
allocator goes on asking the kept graph, so labkit captures nothing more into this pool's handle (`is_spent`). Each step
runs only where a call of torch shows that it is needed: torch 2.13 tells all parts before it throws. In torch 2.13 too
the graph keeps its claim on the pool, whose memory then could not be given back (pytorch#190308). The repair gives the
claim back.

After the repair every generator draws once, then gets its state back, and `empty_cache` runs. If one of them raises,
the process cannot go on: every later capture, replay or draw of labkit raises `BrokenProcessError`.

Sources: PyTorch 2.11's `CUDAGraph::capture_end` and `reset` (CUDAGraph.cpp), `CUDAGeneratorState::increase`,
`capture_prologue` and `capture_epilogue` (CUDAGeneratorImpl.cpp), `endAllocateToPool`, `releasePool` and
`synchronize_and_free_events` (CUDACachingAllocator.cpp), `begin_allocate_to_pool` (CachingHostAllocator.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from labkit.comm.capturing import process_is_broken

_kept: list[Any] = []
"""Graphs that torch's allocators still ask. They are never freed."""
_spent: set[tuple[int, ...]] = set()
"""Handles of pools for which the host's allocator still believes in a capture."""


def is_spent(handle: Any) -> bool:
    """True where torch takes no more captures into the pool of this handle."""
    return tuple(handle) in _spent


def repair_process(
    graph: Any, handle: Any, generators: Sequence[torch.Generator], cause: BaseException, *, begun: bool
) -> None:
    """Repair this process so that it can draw random numbers and give memory back. Call it on the capture's stream.

    Args:
        graph: torch's object, whose `capture_begin` or `capture_end` has thrown.
        handle: handle of the graph's pool.
        generators: the named generators registered with the graph; the device's default generator joins them.
        cause: the error that broke the capture.
        begun: `capture_begin` returned.

    Raises:
        BrokenProcessError: the repair failed; caused by `cause`.
    """
    tried: list[str] = []
    drawing = [torch.cuda.default_generators[torch.cuda.current_device()], *generators]
    try:
        if _allocation_ended(graph, handle, begun=begun):
            tried.append("ending the allocation to the graph's pool")
        if not all(_draws(generator) for generator in drawing):
            tried.append("a small capture with the same generators")
            _capture_something(generators)
        _require_repaired(drawing)
    except RuntimeError as error:
        raise process_is_broken(_words(cause, error, tried)) from cause


def _allocation_ended(graph: Any, handle: Any, *, begun: bool) -> bool:
    """End the allocation to the pool and the graph's claim on it; True where torch had not ended the allocation.

    Up to torch 2.13 `reset` gives back only claims of captures that ended well."""
    device = torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(device, handle)
    except RuntimeError:  # "not currently recording to mempool_id": torch has ended it itself, or not begun
        if begun and torch.__version__ < "2.14":
            torch._C._cuda_releasePool(device, handle)
        return False
    _kept.append(graph)
    _spent.add(tuple(handle))
    torch._C._cuda_releasePool(device, handle)
    return True


def _draws(generator: torch.Generator) -> bool:
    """True where a random number can be drawn; the state does not change."""
    state = generator.get_state()
    try:
        torch.rand(1, device=generator.device, generator=generator)
    except RuntimeError:
        return False
    generator.set_state(state)
    return True


def _capture_something(generators: Sequence[torch.Generator]) -> None:
    """Make a small capture: its good end tells all its generators that no capture is under way."""
    graph, number = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    _kept.append(graph)  # should it fail as well
    for generator in generators:
        graph.register_generator_state(generator)
    torch.cuda.synchronize()
    graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
    number.add_(1)
    graph.capture_end()
    graph.reset()
    _kept.remove(graph)


def _require_repaired(generators: Sequence[torch.Generator]) -> None:
    torch.cuda.synchronize()
    if not all(_draws(generator) for generator in generators):
        raise RuntimeError("random numbers still cannot be drawn")
    torch.cuda.empty_cache()


def _words(cause: BaseException, error: RuntimeError, tried: Sequence[str]) -> str:
    attempts = " and ".join(tried) or "nothing: torch had ended the capture itself"
    return (
        f"a capture has failed ({_line(cause)}), and this process cannot be repaired: {_line(error)}. Tried: "
        f"{attempts}. torch {torch.__version__} can neither draw random numbers nor give memory back here "
        "(pytorch#180395). Leave this process: restart the kernel of a notebook, or end this rank and start the run "
        "again from its last checkpoint"
    )


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
