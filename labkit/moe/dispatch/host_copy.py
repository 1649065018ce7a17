"""One small tensor from the GPU to the host without stopping the GPU's queue.

Split sizes of an all-to-all must be numbers on the host; the router computes them on the GPU. `.tolist()` would wait
for everything queued so far. `HostCopy` starts the copy on a stream of its own, so that the host can queue the
permutation meanwhile, and waits for the copy alone when the numbers are needed.

While work is recorded for replays there is no such copy. Dispatchers then hand over numbers that are known from shapes
alone (drop-and-pad), so that `host_numbers` may be asked.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from labkit.parallel.communication.capturing import refuse_host_sync, unrecorded

__all__ = ["HostCopy", "host_numbers"]


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class HostCopy:
    """A copy of `x` in host memory, under way from the start; x itself where it is there already.

    Raises:
        GraphCaptureError: while work is recorded: replays would go on with the numbers of the recording.
    """

    def __init__(self, x: Tensor) -> None:
        refuse_host_sync("a copy of counts to the host")
        self._done: torch.cuda.Event | None = None
        self._host = x
        if not x.is_cuda:
            return
        stream = _copy_stream(x.device)
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._host.copy_(x, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(stream)
        x.record_stream(stream)  # its memory must not be reused before the copy has read it

    def wait(self) -> Tensor:
        """Return the host tensor as soon as it is complete."""
        if self._done is not None:
            self._done.synchronize()
            self._done = None
        return self._host


def host_numbers(counts: Tensor) -> list[int]:
    """The integers of a tensor on the host that dispatchers have made: by a `HostCopy`, or from shapes alone.

    A recorder takes every tensor for one on a device, and would refuse this. It need not: a `HostCopy` has refused
    before.
    """
    with unrecorded():
        return counts.tolist()
