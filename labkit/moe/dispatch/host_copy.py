"""One small tensor from the GPU to the host without stopping the GPU's queue.

Split sizes of an all-to-all must be numbers on the host; the router computes them on the GPU. `.tolist()` would wait
for all work queued so far. `HostCopy` starts the copy on a stream of its own, so the host can queue the permutation
meanwhile. `wait` then waits only for the copy.

While work is recorded for replays there is no such copy. Then dispatchers pass on numbers that follow from shapes
(drop-and-pad), and `host_numbers` may read these.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from labkit.comm.capturing import refuse_host_sync, unrecorded

__all__ = ["HostCopy", "host_numbers"]


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class HostCopy:
    """A copy of `x` to host memory, started by the constructor; x itself if it is on the host.

    Raises:
        GraphCaptureError: work is being recorded, and replays would use the numbers of the recording.
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
        """Wait for the copy and return the host tensor."""
        if self._done is not None:
            self._done.synchronize()
            self._done = None
        return self._host


def host_numbers(counts: Tensor) -> list[int]:
    """Return the integers of a host tensor that a dispatcher made, by a `HostCopy` or from shapes.

    A recorder treats every tensor as one on a device and would refuse to read it. Here the reading is safe, because a
    `HostCopy` would have raised before.
    """
    with unrecorded():
        return counts.tolist()
