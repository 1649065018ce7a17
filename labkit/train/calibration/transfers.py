"""Times of collectives and messages between the ranks of this machine, by size.

The calls are those of the layers (`labkit.comm.collectives`), so that their Python, their checks and, over gloo, their
copies count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.comm import collectives
from labkit.comm.groups import Group
from labkit.train.calibration.rounds import rounds
from labkit.train.calibration.timing import Sample, Stopwatch, spread_of

SIZES = (4 << 10, 64 << 10, 512 << 10, 2 << 20, 16 << 20)
"""Bytes, as `labkit.plan.collectives.collective_seconds` counts them: two below gloo's limit of exchanges, one near it,
two beyond."""
ROUNDS = 15
"""Timed calls of one size."""
_WORK = 512
"""Size of the square product that each rank computes before a call: some tenths of a millisecond on a CPU."""


def transfers(
    group: Group, device: torch.device, watch: Stopwatch, sizes: Sequence[int] = SIZES
) -> Iterator[tuple[str, int, Sample]]:
    """Yield (kind, bytes, seconds) of each collective and size. Every rank of the group calls this."""
    for kind, make in _CALLS.items():
        for size in sizes:
            sample = _timed(make(torch.zeros(size // 4, device=device), group), group, device, watch)
            messages = group.size if kind == "p2p" else 1
            yield kind, size, Sample(sample.value / messages, sample.spread)


def _timed(call: Callable[[], Any], group: Group, device: torch.device, watch: Stopwatch) -> Sample:
    """Return the seconds of one call after a computation, from the moment when the last rank enters it.

    In a step no rank waits in the collective already, with its threads awake, as it would in a loop of collectives.
    """
    weight = torch.randn(_WORK, _WORK, device=device)
    times = torch.tensor(
        rounds(lambda: weight @ weight, call, group=group, count=ROUNDS, wait=watch.wait), dtype=torch.float64
    )
    by_rank = collectives.all_gather(times.to(device), group).view(group.size, ROUNDS, 3)
    last = by_rank.amax(0)
    return spread_of((last[:, 2] - last[:, 1]).tolist())


def _all_reduce(x: Tensor, group: Group) -> Callable[[], Any]:
    return lambda: collectives.all_reduce(x, group)


def _all_gather(x: Tensor, group: Group) -> Callable[[], Any]:
    part = x[: len(x) // group.size]
    return lambda: collectives.all_gather(part, group)


def _reduce_scatter(x: Tensor, group: Group) -> Callable[[], Any]:
    return lambda: collectives.reduce_scatter(x, group)


def _all_to_all(x: Tensor, group: Group) -> Callable[[], Any]:
    return lambda: collectives.all_to_all(x, group)


def _message(x: Tensor, group: Group) -> Callable[[], Any]:
    """Return a call in which a message goes once around the ranks, each waiting for it before it sends."""
    after, before = group.ranks[(group.rank + 1) % group.size], group.ranks[group.rank - 1]
    came = torch.empty_like(x)

    def call() -> None:
        if group.rank == 0:
            collectives.isend(x, group, after).wait()
            collectives.irecv(came, group, before).wait()
        else:
            collectives.irecv(came, group, before).wait()
            collectives.isend(x, group, after).wait()

    return call


_CALLS: dict[str, Callable[[Tensor, Group], Callable[[], Any]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "p2p": _message,
}
"""Kind, as the plan names it -> a function that makes the call for a tensor of the given bytes."""
