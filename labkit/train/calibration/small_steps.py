"""What a step costs beyond its arithmetic: Python, autograd and dispatch of each kernel, and once in a step the rest.

A model with few layers and one with more, both too small to compute for long, train for some steps each. Let p be the
predicted step without these costs, and n the kernels that the plan counts. Then the measured steps t give

    seconds of a kernel   c = ((t_more - t_few) - (p_more - p_few)) / (n_more - n_few)
    host                  t_few - p_few - c n_few

On a GPU such a step waits for the host all the time, so the arithmetic is hidden: there p is left out.

A third model is large enough to compute nearly all the time. Inside a step a product is slower than in a loop, because
its operands lie in memory that other kernels have just used or that is new. With g the predicted seconds of products in
a step p that has the costs above, the rate of products in a step, over that in a loop, is g / (t - (p - g)).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from labkit.config import ModelConfig, OptimConfig, RunConfig, TrainConfig
from labkit.launch import Ranks
from labkit.plan.machine import Machine
from labkit.plan.step_time import predict_step
from labkit.plan.workload import Workload
from labkit.train.calibration.timing import Sample, spread_of
from labkit.train.pretraining import pretrain

STEPS, WARM_UP = 24, 6
"""Steps of each model, and those of them that do not count."""
_NUDGE = 1e-6
"""Seconds of a kernel, with which the plan is asked how many kernels it counts."""


class Overhead(NamedTuple):
    """Costs of a step beyond its arithmetic."""

    kernel: Sample
    """Seconds of each kernel."""
    step: Sample
    """Seconds of each step."""


def small_config(layers: int, precision: str) -> RunConfig:
    """Return a model that computes next to nothing: 32 wide, 16 tokens a microbatch, 4 microbatches."""
    return RunConfig(
        model=ModelConfig(layers=layers, hidden=32, heads=2, vocab_size=1024, seq_length=16),
        optim=OptimConfig(precision=precision),
        train=TrainConfig(steps=STEPS, micro_batch_size=1, global_batch_size=4, record_events=False),
    )


def measured_steps(precision: str, device: str, layers: tuple[int, int] = (2, 8)) -> list[Sample]:
    """Return the seconds of a step of both small models on one rank."""
    found = []
    with Ranks(1, device=device) as ranks:
        for count in layers:
            (result,) = ranks.run(pretrain, small_config(count, precision))
            found.append(spread_of(line["step_time"] for line in result.metrics[WARM_UP:]))
    return found


def overhead(machine: Machine, precision: str, steps: list[Sample], *, hides_arithmetic: bool,
             layers: tuple[int, int] = (2, 8)) -> Overhead:  # fmt: skip
    """Return the overhead that explains the measured steps, for a machine that has none yet."""
    software = machine.default_software
    nudged = replace(machine, kernel_launch=_NUDGE)
    few, more = steps
    plans = [Workload(small_config(count, precision), 1, software=software) for count in layers]
    bare = [predict_step(plan, machine).seconds for plan in plans]
    counts = [(predict_step(plan, nudged).seconds - p) / _NUDGE for plan, p in zip(plans, bare, strict=True)]
    if hides_arithmetic:
        bare = [0.0, 0.0]
    spread = max(few.spread, more.spread)
    kernel = max(0.0, ((more.value - few.value) - (bare[1] - bare[0])) / (counts[1] - counts[0]))
    step = max(0.0, few.value - bare[0] - kernel * counts[0])
    return Overhead(Sample(kernel, spread), Sample(step, spread))


def middle_config(precision: str) -> RunConfig:
    """Return a model that computes nearly all the time: 384 wide, 192 tokens a microbatch, 2 microbatches."""
    return RunConfig(
        model=ModelConfig(layers=3, hidden=384, heads=6, vocab_size=1024, seq_length=192),
        optim=OptimConfig(precision=precision),
        train=TrainConfig(steps=STEPS, micro_batch_size=1, global_batch_size=2, record_events=False),
    )


def middle_step(precision: str, device: str) -> Sample:
    """Return the seconds of a step of that model on one rank."""
    with Ranks(1, device=device) as ranks:
        (result,) = ranks.run(pretrain, middle_config(precision))
    return spread_of(line["step_time"] for line in result.metrics[WARM_UP:])


def product_rate(machine: Machine, precision: str, step: Sample) -> Sample:
    """Return the rate of products in a measured step over that in a loop, at most 2; the machine has its overhead."""
    predicted = predict_step(Workload(middle_config(precision), 1, software=machine.default_software), machine)
    products = predicted.parts["gemm"]
    left = step.value - (predicted.seconds - products)
    return Sample(products / max(left, products / 2), step.spread)
