"""Goodput of a run on a cluster: the share of its time in which useful steps run as fast as planned. No torch.

    goodput = useful steps x planned step / wall time

The rest is lost to checkpoints, to work since the last checkpoint (a failure discards it), to restarts, to stragglers
and to jitter of the network. Many runs are simulated at once. A run is a row of *lives*, each from one failure to the
next, and a life of y seconds after its restart keeps only whole cycles of training and checkpoint:

    life        exponential, mean MTBF / GPUs; the least of n exponential times is exponential with 1/n of their mean
    cycles      floor((y - background) / (interval + blocking))
    kept        cycles x interval
    lost        y - cycles x (interval + blocking)
    a step      planned x (1 + slow x (factor - 1) x (1 - c) + c x (jitter - 1)), c the share of communication

A straggler (`slow` 1) stays for a life. The ends of runs are cut off: work after the last checkpoint then counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from labkit.config import ConfigError
from labkit.plan.checkpoint_intervals import daly_interval
from labkit.plan.cluster import Checkpoint, Cluster, checkpoint_of
from labkit.plan.slowest_rank import jitter_factor, straggler_chance
from labkit.plan.step_time import StepPrediction
from labkit.plan.workload import Workload

SHARES: Mapping[str, str] = {
    "useful": "useful steps",
    "checkpoints": "checkpoints",
    "lost": "lost since the last checkpoint",
    "restarts": "restarts",
    "stragglers": "stragglers",
    "jitter": "jitter of the network",
}
"""Where the time of a run goes -> its name in tables."""
_COMMUNICATION = ("tp", "cp", "ep", "dp", "pp")
"""Parts of a predicted step that are exposed communication."""
_DRAWS = 60_000
"""Lives that are simulated, at least; many runs of few failures, or few runs of many."""
_RUNS = (8, 4000)
"""Least and most simulated runs."""
_MOST_FAILURES = 20_000
"""Failures after which a simulated run ends; what follows would not differ."""
_WIDTH = 8.0
"""The curve of intervals ends at this many times Daly's, and begins at its reciprocal."""


@dataclass(frozen=True)
class ClusterRun:
    """A run on a cluster. Raises ConfigError if it could make no progress there."""

    gpus: int
    checkpoint: Checkpoint
    cluster: Cluster
    communication: float = 0.0
    """Share of the planned step that is exposed communication."""

    def __post_init__(self) -> None:
        if problems := self._impossible() or self._without_progress():
            raise ConfigError(problems, source="the run on a cluster")

    def _impossible(self) -> list[str]:
        problems = []
        if self.gpus < 1:
            problems.append(f"{self.gpus} GPUs: give at least 1")
        if not 0 < self.checkpoint.blocking < math.inf:
            problems.append(f"a checkpoint blocks training for {self.checkpoint.blocking:g} s; give a time above 0")
        if min(self.checkpoint.background, self.checkpoint.load) < 0:
            problems.append("a checkpoint is written or loaded in less than 0 s; give 0 or more")
        if not 0 <= self.communication <= 1:
            problems.append(f"communication is {self.communication:g} of a step; give a share from 0 to 1")
        return problems

    def _without_progress(self) -> list[str]:
        writing = self.checkpoint.blocking + self.checkpoint.background
        every = f"and {self.gpus:,} GPUs fail every {duration(self.mtbf)}, so the run makes no progress"
        if writing >= self.mtbf:
            ways = "take fewer GPUs, faster storage (storage_gb_s) or a longer gpu_mtbf_hours"
            return [f"a checkpoint takes {duration(writing)}, {every}; {ways}"]
        if self.restart >= 5 * self.mtbf:
            ways = "take fewer GPUs, a shorter restart_seconds or a longer gpu_mtbf_hours"
            return [f"a restart takes {duration(self.restart)}, {every}; {ways}"]
        return []

    @property
    def mtbf(self) -> float:
        """Mean seconds between two failures."""
        return self.cluster.mtbf(self.gpus)

    @property
    def seconds(self) -> float:
        """Simulated wall time."""
        return min(self.cluster.days * 86400, _MOST_FAILURES * self.mtbf)

    @property
    def restart(self) -> float:
        """Seconds from a failure until training goes on."""
        return self.cluster.restart_seconds + self.checkpoint.load

    @property
    def least_interval(self) -> float:
        """Seconds below which a save would start before the last one is written."""
        return self.checkpoint.background


def cluster_run(workload: Workload, step: StepPrediction, cluster: Cluster) -> ClusterRun:
    """Return the run of a workload whose step is predicted. Raises ConfigError if it could make no progress."""
    communication = sum(step.parts.get(kind, 0.0) for kind in _COMMUNICATION) / step.seconds
    return ClusterRun(workload.world_size, checkpoint_of(workload, cluster), cluster, communication)


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
        """The share of useful steps."""
        return self.shares["useful"]

    @property
    def effective_time(self) -> float:
        """Share of the time in which steps run that count, however slow: the effective training time of arXiv
        2407.21783."""
        return self.shares["useful"] + self.shares["stragglers"] + self.shares["jitter"]


@dataclass(frozen=True)
class _Lives:
    """Lives of simulated runs, each field (runs, lives)."""

    up: np.ndarray
    """Seconds after the restart; 0 for a life that would begin after the end of the run."""
    restarting: np.ndarray
    failed: np.ndarray
    """False for the last life of a run, which the end of the run cuts off."""
    slow: np.ndarray
    """Whether a straggler is among its ranks."""


def _lives(run: ClusterRun, seed: int) -> _Lives:
    """Return the same lives for the same seed, whatever the interval."""
    random = np.random.default_rng(seed)
    end, mean = run.seconds, run.seconds / run.mtbf
    count = math.ceil(mean + 8 * math.sqrt(mean)) + 8
    runs = int(np.clip(_DRAWS // count, *_RUNS))
    lengths = random.exponential(run.mtbf, (runs, count))
    lengths[:, -1] = np.inf  # eight standard deviations above the mean; the last life reaches the end in any case
    ends = np.cumsum(lengths, axis=1)
    starts = np.minimum(np.hstack([np.zeros((runs, 1)), ends[:, :-1]]), end)
    whole = np.minimum(ends, end) - starts
    restarting = np.minimum(whole, run.restart)
    restarting[:, 0] = 0.0
    slow = random.random((runs, count)) < straggler_chance(run.gpus, run.cluster.straggler_share)
    return _Lives(whole - restarting, restarting, ends < end, slow)


def simulate_goodput(run: ClusterRun, interval: float, *, seed: int = 0) -> Goodput:
    """Return where the time of a run goes that saves after every `interval` seconds of training.

    Raises ConfigError for an interval of 0 or less, and for one in which an asynchronous save is not written.
    """
    return _simulated(run, _lives(run, seed), interval)


def _simulated(run: ClusterRun, lives: _Lives, interval: float) -> Goodput:
    _check(run, interval)
    blocking, c = run.checkpoint.blocking, run.communication
    cycle = interval + blocking
    complete = lives.up - lives.failed * run.checkpoint.background
    cycles = np.floor(np.maximum(complete, 0.0) / cycle)
    rest = lives.up - cycles * cycle
    kept = cycles * interval + np.where(lives.failed, 0.0, np.minimum(rest, interval))
    saving = cycles * blocking + np.where(lives.failed, 0.0, np.maximum(rest - interval, 0.0))
    straggling = (run.cluster.straggler_factor - 1) * (1 - c) * lives.slow
    jittering = c * (jitter_factor(run.gpus, run.cluster.jitter) - 1)
    useful = kept / (1 + straggling + jittering)
    seconds = {
        "useful": useful,
        "checkpoints": saving,
        "lost": np.where(lives.failed, rest, 0.0),
        "restarts": lives.restarting,
        "stragglers": useful * straggling,
        "jitter": useful * jittering,
    }
    shares = {name: float(each.sum(axis=1).mean()) / run.seconds for name, each in seconds.items()}
    low, high = np.quantile(useful.sum(axis=1), (0.1, 0.9)) / run.seconds
    failures = lives.failed.sum(axis=1).mean() * run.cluster.days * 86400 / run.seconds
    return Goodput(run.gpus, interval, shares, float(low), float(high), float(failures))


def _check(run: ClusterRun, interval: float) -> None:
    if not 0 < interval < math.inf:
        suggestion = duration(suggested_interval(run))
        problem = f"an interval of {interval:g} s: give a time above 0, such as {suggestion}, which is Daly's"
    elif interval < run.least_interval:
        least = duration(run.least_interval)
        problem = f"an interval of {duration(interval)}: writing a checkpoint takes {least}; give at least that"
    else:
        return
    raise ConfigError([problem], source="the run on a cluster")


def suggested_interval(run: ClusterRun) -> float:
    """Return Daly's interval, or if an asynchronous save is not written by then the time that it takes."""
    return max(daly_interval(run.checkpoint.blocking, run.mtbf), run.least_interval)


def interval_curve(run: ClusterRun, *, points: int = 24, seed: int = 0) -> list[Goodput]:
    """Return the goodput over intervals around Daly's, in equal ratios; all have the same failures."""
    middle = suggested_interval(run)
    intervals = np.geomspace(max(middle / _WIDTH, run.least_interval), middle * _WIDTH, points)
    lives = _lives(run, seed)
    return [_simulated(run, lives, interval) for interval in intervals.tolist()]


def best_goodput(run: ClusterRun, curve: Sequence[Goodput] = (), *, seed: int = 0) -> Goodput:
    """Return the simulated optimum: the vertex of a parabola in log(interval) through the best of a curve.

    curve: of `interval_curve` with the same seed; computed if it is empty. The parabola evens out the noise.
    """
    curve = curve or interval_curve(run, seed=seed)
    top = max(curve, key=lambda each: each.goodput)
    near = [each for each in curve if 0.4 <= each.interval / top.interval <= 2.5]
    logs = np.log([each.interval / top.interval for each in near])
    bend, slope, _ = np.polyfit(logs, [each.goodput for each in near], 2)
    if bend >= 0 or abs(vertex := -slope / (2 * bend)) > 1:
        return top
    return simulate_goodput(run, max(top.interval * math.exp(vertex), run.least_interval), seed=seed)


def goodput_by_size(run: ClusterRun, sizes: Sequence[int], *, seed: int = 0) -> list[Goodput]:
    """Return the goodput of runs on other numbers of GPUs, each with Daly's interval for its size.

    Step and checkpoint stay as they are: a larger run has a larger model or batch, and as much storage for each GPU.
    Sizes at which a run makes no progress are left out.
    """
    found = []
    for size in sizes:
        with suppress(ConfigError):
            other = replace(run, gpus=size)
            found.append(simulate_goodput(other, suggested_interval(other), seed=seed))
    return found


def duration(seconds: float) -> str:
    """Return a time in readable units."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    for unit, name, most in ((60, "min", 120), (3600, "h", 72)):
        if seconds < most * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 86400:,.0f} days"
