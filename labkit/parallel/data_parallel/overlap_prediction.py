"""A step of data parallelism, predicted: when each bucket can leave, how long the link takes, what the backward hides.

Pure arithmetic, no torch. The rules are those of `distributed_data_parallel.py`: a bucket is started when its last
gradient is there and all buckets before it have been started; the link carries one bucket after another. What runs on
beyond the backward is *exposed*: nobody computes meanwhile.

    bucket i leaves at      l_i = max(its last gradient, l_{i-1})
    and has arrived at      a_i = max(l_i, a_{i-1}) + latency + bytes / bandwidth
    exposed                 max(0, a_last - end of the backward)

Small buckets leave early and pay the latency often; large ones leave late. Whatever the size, the bucket with the last
gradient of the backward is exposed whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from labkit.events import Event
from labkit.parallel.data_parallel.bucket_layout import BucketLayout, ParameterSpec, plan_buckets

COMPUTES = ("forward", "backward", "input_grad", "weight_grad")
"""Kinds of Events during which a rank computes."""


@dataclass(frozen=True, slots=True)
class Link:
    """What a collective costs, as a benchmark of it measures: time = latency + payload / bandwidth."""

    latency: float
    """Seconds of an empty one."""
    bandwidth: float
    """Payload bytes a second, the ranks' own traffic being counted in ("algorithm bandwidth")."""

    def __post_init__(self) -> None:
        if not self.latency >= 0 or not self.bandwidth > 0:
            raise ValueError(
                f"a link has a latency of 0 s or more and a positive bandwidth, not {self.latency} s and "
                f"{self.bandwidth} bytes/s"
            )

    def seconds(self, size: int) -> float:
        """Of a collective of `size` bytes."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True, slots=True)
class BackwardPiece:
    """A piece of the backward, such as that of a layer."""

    seconds: float
    """How long it takes."""
    completes: tuple[str, ...]
    """Parameters whose gradients are complete when it ends."""


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
    """Events of one rank: a forward, the pieces of the backward, a collective per bucket, a wait for the exposed part.

    plan: of the gradient buffer. backward: in its order. forward: seconds before it. element_bytes: of a gradient.
    overlap: start buckets during the backward; else all of them after it.

    Raises ValueError where a parameter of the plan is completed by no piece, or by several.
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
    """Of one rank's Events, predicted or measured: how long the last collective runs on after the last computation."""
    events = list(events)
    computed = max((event.end for event in events if event.kind in COMPUTES), default=0.0)
    return max(0.0, max((event.end for event in events if event.kind == "collective"), default=computed) - computed)


@dataclass(frozen=True, slots=True)
class BucketSize:
    """What one bucket size costs."""

    size: int
    """Elements from which on a bucket is closed."""
    buckets: int
    """How many there are."""
    exposed: float
    """Seconds."""


def sweep_bucket_sizes(
    parameters: Sequence[ParameterSpec],
    backward: Sequence[BackwardPiece],
    sizes: Iterable[int],
    *,
    link: Link,
    dp: int,
    element_bytes: int = 4,
    distributed_optimizer: bool = False,
) -> list[BucketSize]:
    """`predict_step` for each of `sizes`; parameters in the order of registration."""

    def tried() -> Iterator[BucketSize]:
        for size in sizes:
            plan = plan_buckets(parameters, dp=dp, bucket_size=size, distributed_optimizer=distributed_optimizer)
            events = predict_step(plan, backward, link=link, element_bytes=element_bytes)
            yield BucketSize(size, len(plan.buckets), exposed_seconds(events))

    return list(tried())
