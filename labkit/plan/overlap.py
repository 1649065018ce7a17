"""Predict a step of data parallelism: when each bucket leaves, its time on the link, and how much backward hides.

Pure arithmetic, no torch. The rules are those of `DistributedDataParallel`: a bucket starts once its last gradient is
there and all buckets before it have started, and the link carries one bucket after another. Communication after the end
of the backward is *exposed*, because nobody computes meanwhile.

    bucket i leaves at      l_i = max(its last gradient, l_{i-1})
    and has arrived at      a_i = max(l_i, a_{i-1}) + latency + bytes / bandwidth
    exposed                 max(0, a_last - end of the backward)

Small buckets leave early but pay the latency often; large buckets leave late. With any size, the bucket with the last
gradient of the backward is exposed as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from labkit.events import Event
from labkit.parallel.data_parallel.bucket_layout import BucketLayout

COMPUTES = ("forward", "backward", "input_grad", "weight_grad")
"""Kinds of Events in which a rank computes."""


@dataclass(frozen=True, slots=True)
class Link:
    """Cost of a collective, as a benchmark measures it: time = latency + payload / bandwidth."""

    latency: float
    """Seconds of an empty collective."""
    bandwidth: float
    """Payload bytes per second, of the whole collective ("algorithm bandwidth")."""

    def __post_init__(self) -> None:
        if not self.latency >= 0 or not self.bandwidth > 0:
            raise ValueError(
                f"a link has a latency of 0 s or more and a positive bandwidth, not {self.latency} s and "
                f"{self.bandwidth} bytes/s"
            )

    def seconds(self, size: int) -> float:
        """Return the time of a collective of `size` bytes."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True, slots=True)
class BackwardPiece:
    """A piece of the backward, such as that of a layer."""

    seconds: float
    """Its duration."""
    completes: tuple[str, ...]
    """Parameters whose gradients are complete at its end."""


def predict_step(
    plan: BucketLayout,
    backward: Sequence[BackwardPiece],
    *,
    link: Link,
    forward: float = 0.0,
    element_bytes: int = 4,
    overlap: bool = True,
    rank: int = 0,
) -> list[Event]:
    """Return one rank's Events: a forward, the pieces of the backward, a collective per bucket, the exposed wait.

    plan: layout of the gradient buffer. backward: its pieces in order. forward: seconds of the forward before it.
    element_bytes: bytes of an element of a gradient. overlap: start buckets during the backward, else after it.

    Raises ValueError for a parameter of the plan that no piece completes, or that several pieces complete.
    """
    events = [Event(rank, "forward", "forward", 0.0, forward)] if forward else []
    ready: dict[str, float] = {}
    now = forward
    for number, piece in enumerate(backward):
        events.append(Event(rank, f"backward {number}", "backward", now, now + piece.seconds))
        now += piece.seconds
        for name in piece.completes:
            if name in ready:
                raise ValueError(f"the gradient of {name} is complete after two pieces of the backward; name the later")
            ready[name] = now
    missing = [name for name in plan.ranges if name not in ready]
    if missing:
        raise ValueError(f"no piece of the backward completes the gradient of {missing[0]}")
    leaves = arrives = 0.0
    for bucket in plan.buckets:
        complete = max(ready[name] for name in bucket.names) if overlap else now
        leaves = max(leaves, complete)
        size = bucket.numel * element_bytes
        arrives = max(leaves, arrives) + link.seconds(size)
        events.append(Event(rank, "all_reduce dp", "collective", leaves, arrives, bytes=size))
    if arrives > now:
        events.append(Event(rank, "wait all_reduce dp", "wait", now, arrives))
    return events


def exposed_seconds(events: Iterable[Event]) -> float:
    """Return the time from the last computation to the end of the last collective, in one rank's Events.

    The Events may be predicted or measured.
    """
    events = list(events)
    computed = max((event.end for event in events if event.kind in COMPUTES), default=0.0)
    return max(0.0, max((event.end for event in events if event.kind == "collective"), default=computed) - computed)


@dataclass(frozen=True, slots=True)
class BucketSize:
    """Cost of one bucket size."""

    size: int
    """A bucket closes at this number of elements."""
    buckets: int
    """Number of buckets."""
    exposed: float
    """Exposed seconds."""
