"""Predict the time of a step: the real order table with the times of its actions, and what comes after. No torch.

    step = end of the pipeline (`labkit.schedules.simulate`) + exposed reduction of gradients + optimizer
           + exposed gather of weights + host

The bubble has no formula here: `simulate` runs the schedule table of the configuration. One lower bound
(`step_lower_bound`) needs no simulation; a search uses it to leave out layouts.

The parts of a step are those of the critical rank, whose computation takes longest, and add up to the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from labkit.config import RunConfig
from labkit.plan.action_times import StageKind, StageTimes, stage_kinds, stage_times, transfer_bytes
from labkit.plan.collectives import Group, collective_seconds
from labkit.plan.layout import Layout, layout_of
from labkit.plan.machine import Machine
from labkit.plan.pair_times import stage_layers
from labkit.plan.terms import KINDS, Term
from labkit.plan.update_times import LastPasses, update_terms
from labkit.plan.workload import Workload
from labkit.schedules import Costs, LayerTimes, Schedule, Timeline, build_schedule, simulate
from labkit.schedules.ir import KINDS as ACTIONS
from labkit.schedules.simulator import kept_whole


@dataclass(frozen=True)
class StepPrediction:
    """A predicted step."""

    seconds: float
    """Its time."""
    low: float
    """Lower end of the interval in which 80 % of measured steps are expected."""
    high: float
    """Upper end."""
    parts: dict[str, float]
    """Kind (`labkit.plan.terms.KINDS`) -> seconds on the critical rank; they add up to `seconds`."""
    critical_rank: int
    """Pipeline rank whose computation takes longest."""
    stages: list[StageTimes]
    """Times of every stage, with their terms."""
    after: list[Term]
    """What the critical rank does after the pipeline."""
    timeline: Timeline
    """The simulated pipeline."""

    def __str__(self) -> str:
        lines = [f"step {self.seconds:.4g} s, 80 % interval {self.low:.4g} to {self.high:.4g} s"]
        width = max(map(len, KINDS.values()))
        for kind, seconds in self.parts.items():
            lines.append(f"  {KINDS[kind]:<{width}} {seconds:10.4f} s {seconds / self.seconds:6.1%}")
        return "\n".join(lines)

    def scaled(self, ratio: float, width: float) -> StepPrediction:
        """Return it with all seconds but those of stages and timeline times `ratio`.

        width: half width of its interval, as log(measured / predicted).
        """
        seconds = ratio * self.seconds
        parts = {kind: ratio * spent for kind, spent in self.parts.items()}
        return replace(
            self, seconds=seconds, low=seconds * math.exp(-width), high=seconds * math.exp(width), parts=parts
        )

    def explain(self, stage: int = 0) -> str:
        """Return every term of one stage's actions, with formula and inputs, and what comes after the pipeline."""
        lines: list[str] = []
        times = self.stages[stage]
        for name in ("forward", "recompute", "input_grad", "weight_grad"):
            timed = getattr(times, name)
            lines.append(f"stage {stage}, {name}: {timed.seconds * 1e3:,.3f} ms")
            lines += [f"  {count} x {term}" for count, term in timed.terms()]
        lines.append("after the pipeline:")
        return "\n".join([*lines, *(f"  {term}" for term in self.after)])


def predict_step(workload: Workload, machine: Machine) -> StepPrediction:
    """Return the predicted step of a workload on a machine.

    Raises ValueError for what has no times here: another family than gpt, a world size that the layout does not divide,
    and a type that the machine has no peak for.
    """
    plan = _plan(workload, machine)
    timeline = simulate(plan.schedule, plan.costs)
    ends = _rank_ends(timeline)
    afters = [plan.after(rank) for rank in range(plan.schedule.pp)]
    finishes = [end + sum(term.seconds for term in after) for end, after in zip(ends, afters, strict=True)]
    seconds = float(max(finishes))
    busy = timeline.busy + [sum(term.seconds for term in after) for after in afters]
    critical = int(np.argmax(busy))
    parts = plan.parts(critical, afters[critical])
    parts["bubble"] = seconds - sum(parts.values())
    width = machine.interval.get(workload.software, machine.interval.get("default", 0.0))
    ordered = {kind: parts[kind] for kind in KINDS if parts.get(kind)}
    return StepPrediction(seconds, seconds * math.exp(-width), seconds * math.exp(width), ordered, critical,
                          plan.stages, afters[critical], timeline)  # fmt: skip


def parts_by_rank(workload: Workload, machine: Machine) -> list[dict[str, float]]:
    """Return, for each pipeline rank, the seconds by kind of everything that it does in a step; no bubble is in them.

    Errors as in `predict_step`.
    """
    plan = _plan(workload, machine)
    return [plan.parts(rank, plan.after(rank)) for rank in range(plan.schedule.pp)]


def step_lower_bound(workload: Workload, machine: Machine) -> float:
    """Return seconds that the step cannot fall below, without a simulation.

    A rank cannot start before its first stage has its input, and computes everything that it has to. When it has sent
    its last gradient, the stages before it still compute theirs, and the first one its weight gradient. A microbatch
    passes all stages:

        head of F + busy + what it does after the pipeline
        head of F + busy without W + tail of I + W of the first stage + what the first stage's rank does afterwards
        F and I of all stages + W of the first stage + what the first stage's rank does afterwards

    Where backwards are whole, W is part of busy and of the tail. What merged pairs hide is no part of busy.
    """
    plan = _plan(workload, machine)
    schedule, durations = plan.schedule, plan.whole
    forward, inputs, weights = (durations[name] for name in ("forward", "input_grad", "weight_grad"))
    backward = [sum(both) for both in zip(inputs, weights, strict=True)]
    returned, last = (inputs, weights[0]) if plan.layout.splits_backward else (backward, 0.0)
    on_first = last + sum(term.seconds for term in plan.after(schedule.placement(0)))
    bounds = [sum(forward) + sum(returned) + on_first]
    for rank in range(schedule.pp):
        stages, count = schedule.stages_of(rank), schedule.num_microbatches
        before = range(min(stages))
        head = sum(forward[stage] for stage in before)
        busy = count * sum(forward[stage] + backward[stage] for stage in stages)
        hidden = plan.hidden(rank) * (1 + 1e-9)  # rounding must not lift the bound
        bounds.append(head + busy - hidden + sum(term.seconds for term in plan.after(rank)))
        received = count * sum(forward[stage] + returned[stage] for stage in stages)
        bounds.append(head + received - hidden + sum(returned[stage] for stage in before) + on_first)
    return max(bounds)


def schedule_of(config: RunConfig, microbatches: int) -> Schedule:
    """Return the configured schedule for a step of so many microbatches. Raises what `build_schedule` raises."""
    parallel = config.parallel
    build = build_schedule if config.schedule.path is not None else _known_schedule  # a file may have changed
    return build(config.schedule, pp=parallel.pp, vpp=parallel.vpp, microbatches=microbatches)


_known_schedule = lru_cache(maxsize=1024)(build_schedule)


def _has_weight_gradients(schedule: Schedule) -> bool:
    return bool((schedule.kinds == ACTIONS.index("W")).any())


def _kept_microbatches(config: RunConfig) -> int:
    if config.model.recompute_granularity == "none":
        return 0
    return config.model.num_microbatches_with_partial_activation_checkpoints or 0


@dataclass(frozen=True)
class _Plan:
    """A workload with its schedule and the times of its stages."""

    workload: Workload
    machine: Machine
    layout: Layout
    schedule: Schedule
    kinds: list[StageKind]
    """The kind of every stage."""
    stages: list[StageTimes]
    _after: dict[tuple[bool, tuple[StageKind, ...]], list[Term]] = field(default_factory=dict)
    """What ranks with stages of these kinds do after the pipeline."""

    @property
    def config(self) -> RunConfig:
        return self.workload.config

    @property
    def costs(self) -> Costs:
        """Durations for `simulate`. Transfers that do not overlap are parts of the actions already."""
        messages: dict[str, float] = {}
        if self.config.schedule.overlap_p2p_comm and self.layout.pp.size > 1:
            size = transfer_bytes(self.config.model, self.layout)
            messages["latency"] = collective_seconds(self.machine, "p2p", size, Group(2, self.layout.pp.stride))
        return Costs(**self.durations, **messages, **self._pairs)

    @property
    def _pairs(self) -> dict[str, Any]:
        """Arguments of `Costs` for merged pairs: the parts of layers, whose times `durations` then leave out."""
        if not self.schedule.has_pairs:
            return {}
        delay, slowdown = self.config.schedule.delay_wgrad_compute, self.layout.software.overlap_slowdown
        return {"layers": self.layers, "delay_wgrad": delay, "slowdown": slowdown}

    @cached_property
    def layers(self) -> list[list[LayerTimes]]:
        """By stage, the parts of each layer."""
        return stage_layers(self.config, self.layout, self.machine, self.schedule.num_stages)

    def hidden(self, rank: int) -> float:
        """Return the seconds of all-to-alls that the merged pairs of a rank hide."""
        if not self.schedule.has_pairs:
            return 0.0
        hidden = lru_cache(None)(self.costs.hidden)
        pairs = (cell for cell in self.schedule.cells(rank) if len(cell) == 2)
        return sum(hidden(forward.stage, backward.stage) for forward, backward in pairs)

    @property
    def durations(self) -> dict[str, list[float]]:
        """Seconds of each kind of action by stage; a microbatch that a rank keeps whole saves its share of repeats."""
        return self.whole if not self.schedule.has_pairs else self._outside_layers()

    def _outside_layers(self) -> dict[str, list[float]]:
        """Return what the parts of layers leave of `whole`."""
        alone = Costs(forward=0, input_grad=0, weight_grad=0, layers=self.layers).table(self.schedule.num_stages)
        layers = zip(self.whole.items(), alone[[0, 2, 3]].tolist(), strict=True)
        return {
            name: [max(0.0, one - other) for one, other in zip(each, inside, strict=True)]
            for (name, each), inside in layers
        }

    @property
    def whole(self) -> dict[str, list[float]]:
        """Seconds of each kind of action by stage, where nothing is merged."""
        return {
            "forward": [each.forward.seconds for each in self.stages],
            "input_grad": [
                each.input_grad.seconds + each.recompute.seconds * share
                for each, share in zip(self.stages, self.repeats, strict=True)
            ],
            "weight_grad": [each.weight_grad.seconds for each in self.stages],
        }

    @cached_property
    def repeats(self) -> list[float]:
        """Share of a stage's microbatches that are computed again (`kept_whole` of `labkit.schedules.simulator`)."""
        shares, most = [1.0] * self.schedule.num_stages, _kept_microbatches(self.config)
        for rank in range(self.schedule.pp if most else 0):
            for stage, _ in kept_whole(self.schedule, rank, most):
                shares[stage] -= 1 / self.schedule.num_microbatches
        return shares

    def parts(self, rank: int, after: list[Term]) -> dict[str, float]:
        """Return seconds by kind of everything that a rank does."""
        totals: dict[str, float] = {}
        for stage in self.schedule.stages_of(rank):
            times = self.stages[stage]
            for timed in (times.forward, times.input_grad, times.weight_grad):
                for kind, seconds in timed.by_kind.items():
                    totals[kind] = totals.get(kind, 0.0) + seconds * self.schedule.num_microbatches
            again = times.recompute.seconds * self.schedule.num_microbatches * self.repeats[stage]
            totals["recompute"] = totals.get("recompute", 0.0) + again
        if hidden := self.hidden(rank):
            totals["ep"] -= hidden
        for term in after:
            totals[term.kind] = totals.get(term.kind, 0.0) + term.seconds
        return totals

    def after(self, rank: int) -> list[Term]:
        """Return what a rank does after its last backward."""
        stages = self.schedule.stages_of(rank)
        ends = self.schedule.placement(0), self.schedule.placement(self.schedule.num_stages - 1)
        tied = not self.config.model.untie_embeddings_and_output_weights and ends[0] != ends[1] and rank in ends
        kinds = tuple(self.kinds[stage] for stage in stages)
        if (tied, kinds) not in self._after:
            times = [self.stages[stage] for stage in stages]
            passes = LastPasses(sum(each.forward.seconds for each in times), sum(each.backward for each in times))
            self._after[tied, kinds] = update_terms(
                self.config, self.layout, self.machine, kinds, passes, fsdp=self.workload.fsdp, shares_table=tied
            )
        return self._after[tied, kinds]


def _rank_ends(timeline: Timeline) -> np.ndarray:
    """Return the end of each rank's last action (P,)."""
    return timeline.end[timeline.schedule.offsets[1:] - 1]


def _plan(workload: Workload, machine: Machine) -> _Plan:
    config = workload.config
    if config.model.family != "gpt":
        raise ValueError(f"model.family is {config.model.family}; times are known for gpt")
    parallel, precision = config.parallel, config.optim.precision
    shape = parallel.tp * parallel.cp * parallel.pp
    if workload.world_size % shape:
        raise ValueError(f"{workload.world_size} ranks cannot be shared by tp x cp x pp = {shape}")
    if workload.microbatches < 1:
        raise ValueError("a step has no whole microbatch; raise train.global_batch_size, or take fewer ranks")
    for needed in {precision, "fp8" if config.optim.fp8 != "none" else precision}:
        if needed not in machine.peak_flops or needed not in machine.gemm_ceiling:
            raise ValueError(f"{machine.name} has no peak for {needed}")
    schedule = schedule_of(config, workload.microbatches)
    layout = layout_of(workload, splits_backward=schedule.derived("has W", _has_weight_gradients))
    kinds = stage_kinds(config, schedule)
    times = {kind: stage_times(workload, machine, layout, kind) for kind in set(kinds)}
    return _Plan(workload, machine, layout, schedule, kinds, [times[kind] for kind in kinds])
