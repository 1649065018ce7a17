"""Stages and layers that sleep instead of computing, so that what a machine of many cores does can be timed on few.

A sleeping process needs no core. What such a pipeline takes longer than the simulator says is therefore the machinery:
messages between processes, waking up, the Python around each action. Everything else is the real thing: autograd, the
runtime, its transport, and real tensors between real processes, only small ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from labkit.events import Event, recording, span
from labkit.parallel import barrier
from labkit.parallel.groups import ParallelGroups
from labkit.parallel.weight_grad_store import deferred
from labkit.schedules import Costs, PipelineRuntime, Schedule
from labkit.schedules.runtime import Transport

_SHAPE = (1, 1, 4)
"""(S, B, H) between stages."""


_SPIN = 60e-6
"""Seconds before its end in which a sleep stays awake: waking up is late by about this much, and never the same."""


def _sleep(seconds: float) -> None:
    """Sleep, and be awake on time: the last moment is waited for, because a sleeper wakes late."""
    end = time.perf_counter() + seconds
    if seconds > _SPIN:
        time.sleep(seconds - _SPIN)
    while time.perf_counter() < end:
        pass


class _Sleep(torch.autograd.Function):
    """forward: sleep, y = x + shift; dx = dy after the input gradient's sleep; dshift = sum of dy after the weight's.

    shift (H,) is what the stage trains: its gradient is what a split backward puts off.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor, seconds: tuple[float, float, float]) -> Tensor:
        ctx.save_for_backward(shift)
        ctx.seconds = seconds
        _sleep(seconds[0])
        return x + shift

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (shift,) = grads, ctx.saved_tensors
        _, input_grad, weight_grad = ctx.seconds

        def compute() -> list[Tensor]:
            _sleep(weight_grad)
            return [dy.sum(dim=(0, 1))]

        if deferred([shift], compute):
            _sleep(input_grad)
            return dy, None, None
        _sleep(input_grad + weight_grad)
        return dy, dy.sum(dim=(0, 1)), None


class SleepingStage(nn.Module):
    """One stage; `seconds` of its forward, its input gradient and its weight gradient (a full backward takes both)."""

    def __init__(self, seconds: tuple[float, float, float]) -> None:
        super().__init__()
        self.seconds = seconds
        self.shift = nn.Parameter(torch.zeros(_SHAPE[-1]))
        self.x: Tensor | None = None

    def set_input_tensor(self, x: Tensor | None) -> None:
        """Take the previous stage's output."""
        self.x = x

    def forward(self, x: Tensor) -> Tensor:
        """`x` is read by the first stage alone."""
        return _Sleep.apply(x if self.x is None else self.x, self.shift, self.seconds)  # pyright: ignore[reportReturnType]


class SleepingLayer(nn.Module):
    """y = x + the mean of a weight; sleeps `forward` and `backward` seconds in the two passes, each an Event.

    The weight has as many elements as one likes, and with its gradient something that data parallelism must reduce.
    """

    def __init__(self, name: str, elements: int, *, forward: float, backward: float) -> None:
        super().__init__()
        self.name, self.seconds = name, (forward, backward)
        self.weight = nn.Parameter(torch.zeros(elements))

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> the same."""
        return _SleepingMean.apply(x, self.weight, self.name, self.seconds)  # pyright: ignore[reportReturnType]


class _SleepingMean(torch.autograd.Function):
    """forward: y = x + mean(w); backward: dx = dy, dw_i = sum(dy) / n for each of the n elements of w."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, name: str, seconds: tuple[float, float]) -> Tensor:
        ctx.numel, ctx.name, ctx.seconds = weight.numel(), name, seconds[1]
        with span(f"forward {name}", "forward"):
            _sleep(seconds[0])
            return x + weight.mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with span(f"backward {ctx.name}", "backward"):
            _sleep(ctx.seconds)
            return grads[0], (grads[0].sum() / ctx.numel).expand(ctx.numel), None, None


def sleep_through(
    groups: ParallelGroups, schedule: Schedule, costs: Costs, *, transport: Transport = "posted"
) -> list[Event]:
    """Run one step of `schedule` with sleeping stages on this rank and return its Events. Called on every rank.

    costs: seconds of F, I and W, as given to `simulate`; the messages cost what they cost. A step before the recorded
    one opens the connections. Raises ValueError for a `backward` that is given as a whole.
    """
    if costs.backward is not None:
        raise ValueError("a sleeping backward is input_grad and then weight_grad: give these two, not backward")
    forward, _, input_grad, weight_grad = costs.table(schedule.num_stages).tolist()
    seconds = [(forward[s], input_grad[s], weight_grad[s]) for s in schedule.stages_of(groups.pp.rank)]
    chunks = [SleepingStage(each).to(groups.device) for each in seconds]
    runtime = PipelineRuntime(
        schedule, chunks, groups, forward_step_func=_step, tensor_shape=_SHAPE, transport=transport
    )
    runtime.run(_microbatches(schedule, groups))
    barrier(groups.pp)
    with recording(groups.rank) as recorder:
        runtime.run(_microbatches(schedule, groups))
    return recorder.events


def _microbatches(schedule: Schedule, groups: ParallelGroups) -> list[Iterator[Tensor]]:
    data = torch.zeros(schedule.num_microbatches, *_SHAPE, device=groups.device)
    return [iter(data) for _ in schedule.stages_of(groups.pp.rank)]


def _step(data: Iterator[Tensor], stage: nn.Module) -> Any:
    return stage(next(data)), lambda output: (output.mean(), {})
