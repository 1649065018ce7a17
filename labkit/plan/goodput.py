"""Goodput of a run on a cluster: the share of its time in which useful steps run as fast as planned. No torch.

    goodput = useful steps x planned step / wall time

The rest is lost to checkpoints, to work since the last checkpoint (a failure discards it), to restarts, to stragglers
and to jitter of the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from labkit.plan.cluster import Checkpoint, Cluster

SHARES: Mapping[str, str] = {
    "useful": "useful steps",
    "checkpoints": "checkpoints",
    "lost": "lost since the last checkpoint",
    "restarts": "restarts",
    "stragglers": "stragglers",
    "jitter": "jitter of the network",
}
"""Where the time of a run goes -> its name in tables."""


@dataclass(frozen=True)
class ClusterRun:
    """A run on a cluster."""

    gpus: int
    checkpoint: Checkpoint
    cluster: Cluster
    communication: float = 0.0
    """Share of the planned step that is exposed communication."""


@dataclass(frozen=True)
class Goodput:
    """Where the time of a run goes, over many simulated runs."""

    gpus: int
    interval: float
    """Seconds of training between two checkpoints."""
    shares: Mapping[str, float]
    """Key of `SHARES` -> its mean share of the wall time; they add up to 1."""
    low: float
    """Goodput that 10 % of the runs stay below."""
    high: float
    """Goodput that 10 % of the runs exceed."""
    failures: float
    """Mean number of failures of a run."""

    @property
    def goodput(self) -> float:
        return self.shares["useful"]


def simulate_goodput(run: ClusterRun, interval: float, *, seed: int = 0) -> Goodput: ...


def interval_curve(run: ClusterRun, *, seed: int = 0) -> list[Goodput]: ...


def best_goodput(run: ClusterRun, *, seed: int = 0) -> Goodput: ...


def goodput_by_size(run: ClusterRun, sizes: Sequence[int], *, seed: int = 0) -> list[Goodput]: ...
