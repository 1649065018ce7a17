"""Search the fastest layouts that fit: bounds of all, then simulated steps of those that may be among the best.

    1. `legal_layouts` lists them, `memory_bounds` leaves out those that cannot fit, `time_bounds` orders the others
    2. the layout with the least bound is next: first it gets `step_lower_bound`, which is higher, and waits again
    3. when its turn comes once more, its ranks' memory is computed, and if they fit, its step is simulated
    4. the search ends when the next bound is above the tenth best step; nothing that is left can be better

A layout is never left out by an estimate: both bounds are proved by tests not to exceed what they bound. No torch.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from labkit.config import ConfigError
from labkit.plan.fitting import RESERVE, Fullest, device_of, ends_first, fullest, on_machine
from labkit.plan.flops import step_flops
from labkit.plan.layout_bounds import memory_bounds, time_bounds
from labkit.plan.layout_pieces import Progress
from labkit.plan.layouts import legal_layouts, matching, neutral, rules_broken, workload_of
from labkit.plan.machine import Machine
from labkit.plan.step_time import StepPrediction, predict_step, schedule_of, step_lower_bound
from labkit.plan.workload import Workload

BEST = 10
"""Layouts that a search ranks."""
DIFFERENCE = 0.06
"""Half width of the interval of the ratio of two layouts' steps, as a logarithm: 80 % of pairs of published layouts of
one run are within it (docs/scale.md). It is less than that of one step, since two layouts share much of their error."""
_BOUNDS_PER_TRY = 4
"""Layouts whose `step_lower_bound` orders those that are tried, for each of them."""


@dataclass(frozen=True)
class Ranked:
    """A layout that fits, with its predicted step."""

    row: np.void
    """Its columns (`labkit.plan.layouts.COLUMNS`)."""
    workload: Workload
    prediction: StepPrediction
    memory: Fullest
    machine: Machine

    @property
    def flops_per_gpu(self) -> float:
        """Model FLOP/s of one GPU: forward and backward without recomputation, all pairs of attention counted."""
        config = self.workload.config
        samples = config.train.global_batch_size
        flops = step_flops(config.model, samples=samples, moe=config.moe).total
        return flops / self.prediction.seconds / self.workload.world_size

    @property
    def peak(self) -> float:
        """FLOP/s of one GPU at the peak of the type that the run computes in."""
        return self.machine.peak_flops[computed_type(self.workload)]

    @property
    def mfu(self) -> float:
        """`flops_per_gpu` over `peak`."""
        return self.flops_per_gpu / self.peak

    @property
    def bubble(self) -> float:
        """Share of the step in which the critical rank waits."""
        return max(0.0, self.prediction.parts.get("bubble", 0.0)) / self.prediction.seconds


def computed_type(workload: Workload) -> str:
    """Return the type of the operands of linear layers."""
    optim = workload.config.optim
    return "fp8" if optim.fp8 != "none" else optim.precision


@dataclass
class Counts:
    """What became of the legal layouts."""

    legal: int
    memory: int = 0
    """Left out because a rank's memory is too small, by the bound or by the exact peak."""
    simulated: int = 0

    @property
    def bounded(self) -> int:
        """Left out by a lower bound of their time."""
        return self.legal - self.memory - self.simulated

    def line(self) -> str:
        """Return the counts in words."""
        return (
            f"{self.legal:,} legal layouts: {self.memory:,} left out by memory, {self.bounded:,} by a bound of their "
            f"time, {self.simulated:,} simulated"
        )


def _silent(_what: str, _done: int, _all: int) -> None:
    """Report nothing."""


@dataclass
class Search:
    """The layouts of a workload on a machine; `best` finds the fastest of all, or of some.

    Raises ConfigError for a model without times, and for rules that the configuration breaks in any layout.
    """

    base: Workload
    """What is planned; the fields of its layout do not matter."""
    machine: Machine
    reserve: float = RESERVE
    """Bytes of each GPU that stay free."""
    progress: Progress = _silent
    fixed: Mapping[str, int] = field(default_factory=dict)
    """Column -> value of all layouts that are searched; ConfigError if none has them."""
    rows: np.ndarray = field(init=False)
    """Legal layouts (N,)."""
    memory_bound: np.ndarray = field(init=False)
    """Bytes (N,)."""
    time_bound: np.ndarray = field(init=False)
    """Seconds (N,); infinite where the memory bound is too large."""
    counts: Counts = field(init=False)
    ratio: float = field(default=1.0, init=False)
    """Measured over predicted step of a layout (`calibrate`); all times of ranked layouts are multiplied with it."""
    _known: dict[int, Ranked | None] = field(default_factory=dict, init=False)
    """Layout -> its step; None if it does not fit."""
    _refined: dict[int, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.base = on_machine(_neutral(self.base), self.machine)
        _require_times(self.base, self.machine)
        self.rows = legal_layouts(self.base.config, self.base.world_size)
        if not len(self.rows):
            raise ConfigError([_no_layout(self.base)], source="the plan")
        self.rows = self.rows[matching(self.rows, self.fixed)]
        if not len(self.rows):
            words = ", ".join(f"{name} {value}" for name, value in self.fixed.items())
            raise ConfigError([f"no legal layout on {self.base.world_size} GPUs has {words}"], source="the plan")
        self.memory_bound = memory_bounds(self.base, device_of(self.machine), self.rows, self.progress)
        fits = self.memory_bound <= self.available
        self.time_bound = np.full(len(self.rows), np.inf)
        if fits.any():
            self.time_bound[fits] = time_bounds(self.base, self.machine, self.rows[fits], self.progress)
        self.counts = Counts(len(self.rows), int((~fits).sum()))

    @property
    def available(self) -> float:
        """Bytes of a GPU that a rank may use."""
        return self.machine.memory_bytes - self.reserve

    @property
    def simulated(self) -> list[Ranked]:
        """Every layout that was simulated so far."""
        return [self._calibrated(ranked) for ranked in self._known.values() if ranked is not None]

    def fastest_simulated(self, only: np.ndarray) -> Ranked | None:
        """Return the fastest of the layouts in a mask (N,) that were simulated so far; None if none was."""
        known = [ranked for place, ranked in self._known.items() if ranked is not None and only[place]]
        fastest = min(known, key=lambda ranked: ranked.prediction.seconds, default=None)
        return None if fastest is None else self._calibrated(fastest)

    def best(self, count: int = BEST, only: np.ndarray | None = None, *, limit: float = np.inf,
             tries: int | None = None) -> list[Ranked]:  # fmt: skip
        """Return the fastest `count` layouts that fit, the fastest first.

        only: a mask (N,) of those that compete. limit: most bytes of a rank, if fewer than a GPU has. tries: most
        layouts whose memory is computed, in the order of their bounds, once some fit; None is as many as it takes, and
        only then the answer is proved.
        """
        found: list[tuple[float, int]] = []
        for places in self._candidates(only, limit, tries):
            for tried, (bound, place) in enumerate(self._by_bound(places)):
                settled = bound >= found[-1][0] if len(found) == count else False
                if settled or (found and tries is not None and tried >= tries):
                    break
                ranked = self._ranked(place)
                if ranked is not None and ranked.memory.bytes <= limit:
                    insort(found, (ranked.prediction.seconds, place))
                    del found[count:]
                    self.progress("simulated", self.counts.simulated, self.counts.legal)
            if found:
                break
        return [self._calibrated(ranked) for _, place in found if (ranked := self._known[place]) is not None]

    def calibrate(self, only: np.ndarray, seconds: float) -> Ranked | None:
        """Take the measured step of a layout; return its prediction, or None if no layout of the mask `only` fits.

        From then on every step is multiplied by measured / predicted, and has the interval of a difference
        (`DIFFERENCE`): what the layouts have in common, such as a GEMM rate, is corrected, and their order stays.
        """
        self.ratio = 1.0
        found = self.best(1, only)
        if not found:
            return None
        self.ratio = seconds / found[0].prediction.seconds
        return found[0]

    def _calibrated(self, ranked: Ranked) -> Ranked:
        if self.ratio == 1.0:
            return ranked
        return replace(ranked, prediction=ranked.prediction.scaled(self.ratio, DIFFERENCE))

    def _candidates(self, only: np.ndarray | None, limit: float, tries: int | None) -> Iterator[np.ndarray]:
        """Yield the layouts in the order of `time_bound`: all at once, or with `tries` some first, and the others only
        if none of these fits."""
        fits = np.isfinite(self.time_bound) & (self.memory_bound <= limit)
        places = np.flatnonzero(fits if only is None else fits & only)
        places = places[np.argsort(self.time_bound[places], kind="stable")]
        some = len(places) if tries is None else tries * _BOUNDS_PER_TRY
        yield places[:some]
        yield places[some:]

    def _by_bound(self, places: np.ndarray) -> Iterator[tuple[float, int]]:
        """Yield bound and place of these layouts in the order of `step_lower_bound`, which is computed when needed."""
        waiting: list[tuple[float, int]] = []
        for place in places:
            while waiting and waiting[0][0] <= self.time_bound[place]:
                yield heapq.heappop(waiting)
            heapq.heappush(waiting, (self._lower_bound(int(place)), int(place)))
        while waiting:
            yield heapq.heappop(waiting)

    def _lower_bound(self, place: int) -> float:
        if place not in self._refined:
            self._refined[place] = step_lower_bound(workload_of(self.base, self.rows[place]), self.machine)
        return self._refined[place]

    def _ranked(self, place: int) -> Ranked | None:
        """Return the layout with its simulated step; None if its ranks do not fit."""
        if place not in self._known:
            workload = workload_of(self.base, self.rows[place])
            schedule = schedule_of(workload.config, workload.microbatches)
            need = fullest(workload, self.machine, schedule, ends_first(schedule))
            if need.bytes <= self.available and schedule.pp > 2:
                need = max(need, fullest(workload, self.machine, schedule, range(1, schedule.pp - 1)))
            self._known[place] = None
            if need.bytes > self.available:
                self.counts.memory += 1
            else:
                self.counts.simulated += 1
                step = predict_step(workload, self.machine)
                self._known[place] = Ranked(self.rows[place], workload, step, need, self.machine)
        return self._known[place]

    def smallest(self, only: np.ndarray | None = None) -> tuple[np.void, Fullest]:
        """Return the layout with the least memory bound, of all or of `only`, and the memory of its fullest rank."""
        bound = self.memory_bound if only is None else np.where(only, self.memory_bound, np.inf)
        row = self.rows[int(np.argmin(bound))]
        workload = workload_of(self.base, row)
        schedule = schedule_of(workload.config, workload.microbatches)
        return row, fullest(workload, self.machine, schedule)


def _neutral(base: Workload) -> Workload:
    """Return the workload with no layout. Raises ConfigError for what no layout could repair."""
    config = base.config
    problems = []
    if config.schedule.path is not None:
        problems.append("schedule.path: a plan searches schedules that have a name; leave it out")
    if config.model.family != "gpt":
        problems.append(f"model.family = {config.model.family}: times are known for gpt; plan a GPT")
    if base.fsdp:
        problems.append("fully sharded weights are not searched; plan with the distributed optimizer")
    plain = neutral(config)
    if problems := [*problems, *rules_broken(plain)]:
        raise ConfigError(problems, source="the plan")
    return Workload(plain, base.world_size, expert_load=base.expert_load, software=base.software, extras=base.extras,
                    libraries=base.libraries)  # fmt: skip


def _require_times(base: Workload, machine: Machine) -> None:
    """Raise ConfigError for a type without a peak on the machine."""
    needed = {base.config.optim.precision, computed_type(base)}
    if missing := sorted(needed - set(machine.peak_flops) | needed - set(machine.gemm_ceiling)):
        known = ", ".join(sorted(set(machine.peak_flops) & set(machine.gemm_ceiling)))
        raise ConfigError(
            [f"optim.precision: {machine.name} has no rate for {missing[0]}; it has {known}, as in --precision bf16"],
            source="the plan",
        )


def _no_layout(base: Workload) -> str:
    batch = base.config.train.global_batch_size
    return (
        f"no layout on {base.world_size} GPUs: data-parallel ranks must divide train.global_batch_size = {batch}, tp "
        f"the {base.config.model.heads} heads, and pp be at most the {base.config.model.layers} layers; take a power "
        "of two, or another batch"
    )
