"""Layers, stages, rings and experts that sleep instead of computing: the timing of many cores on few.

A sleeping process needs no core. So the time that such a pipeline takes beyond the simulator's is overhead: messages
between processes, waking up, the Python around each action. Everything but the products is real: autograd, the runtime,
its transport, and small tensors between real processes. The keys of the ring and the rows of experts travel too.

Shapes: T tokens, E experts, N rows of this rank, H hidden, L local experts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.collectives import barrier
from labkit.comm.groups import Group, ParallelGroups
from labkit.events import Event, recording, span
from labkit.parallel.context.ring_attention import ring_steps
from labkit.parallel.context.ring_plan import cut_load
from labkit.parallel.weight_grad_store import deferred
from labkit.schedules import Costs, PipelineRuntime, Schedule
from labkit.schedules.lowering import DEFAULT_TRANSPORT, Transport

# ---- pipelines ----

_SHAPE = (1, 1, 4)
"""(S, B, H) between stages."""


_SPIN = 60e-6
"""Seconds at the end of a sleep in which the process polls the clock, because it wakes up late by about this much."""


def _sleep(seconds: float) -> None:
    """Sleep, then poll the clock for the last moment, because a sleeping process wakes up late."""
    end = time.perf_counter() + seconds
    if seconds > _SPIN:
        time.sleep(seconds - _SPIN)
    while time.perf_counter() < end:
        pass


class _Sleep(torch.autograd.Function):
    """Sleep in each of the three computations; shift (H,) is the weight that the stage trains.

    forward   y = x + shift         after the forward's sleep
    backward  dx = dy               after the sleep of the input gradient
              dshift = sum of dy    after the sleep of the weight gradient, which a split backward postpones
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
    """A stage that sleeps for `seconds` of forward, input and weight gradient; a full backward takes the last two."""

    def __init__(self, seconds: tuple[float, float, float]) -> None:
        super().__init__()
        self.seconds = seconds
        self.shift = nn.Parameter(torch.zeros(_SHAPE[-1]))
        self.x: Tensor | None = None

    def set_input_tensor(self, x: Tensor | None) -> None:
        """Take the previous stage's output."""
        self.x = x

    def forward(self, x: Tensor) -> Tensor:
        """Sleep and return the output. Only the first stage reads `x`."""
        return _Sleep.apply(x if self.x is None else self.x, self.shift, self.seconds)  # pyright: ignore[reportReturnType]


class SleepingLayer(nn.Module):
    """y = x + the mean of a weight; sleeps `forward` and `backward` seconds in the two passes, each an Event.

    `elements` sets the size of the weight, and so of the gradient that data parallelism must reduce.
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
    groups: ParallelGroups, schedule: Schedule, costs: Costs, *, transport: Transport = DEFAULT_TRANSPORT
) -> list[Event]:
    """Run one step of `schedule` with sleeping stages on this rank and return its Events. Every rank calls this.

    costs: seconds of F, I and W, as for `simulate`; messages are real. A step before the recorded step opens the
    connections; in that step nobody sleeps. Raises ValueError if `costs` gives `backward`.
    """
    if costs.backward is not None:
        raise ValueError("a sleeping backward is input_grad and then weight_grad: give these two, not backward")
    forward, _, input_grad, weight_grad = costs.table(schedule.num_stages).tolist()
    seconds = [(forward[s], input_grad[s], weight_grad[s]) for s in schedule.stages_of(groups.pp.rank)]
    chunks = [SleepingStage(each).to(groups.device) for each in seconds]
    runtime = PipelineRuntime(
        schedule, chunks, groups, forward_step_func=_step, tensor_shape=_SHAPE, transport=transport
    )
    for chunk in chunks:
        chunk.seconds = (0.0, 0.0, 0.0)
    runtime.run(_microbatches(schedule, groups))
    for chunk, each in zip(chunks, seconds, strict=True):
        chunk.seconds = each
    barrier(groups.pp)
    with recording(groups.rank) as recorder:
        runtime.run(_microbatches(schedule, groups))
    return recorder.events


def _microbatches(schedule: Schedule, groups: ParallelGroups) -> list[Iterator[Tensor]]:
    data = torch.zeros(schedule.num_microbatches, *_SHAPE, device=groups.device)
    return [iter(data) for _ in schedule.stages_of(groups.pp.rank)]


def _step(data: Iterator[Tensor], stage: nn.Module) -> Any:
    return stage(next(data)), lambda output: (output.mean(), {})


# ---- ring attention ----


def sleeping_ring(group: Group, cut: Sequence[Sequence[int]], *, seconds_per_pair: float = 1e-5) -> list[Event]:
    """Run one causal forward of ring attention on this rank. A block sleeps in proportion to its (query, key) pairs.

    cut: the positions that each rank holds, as many on every rank. Every rank of `group` calls this; all begin
    together. Returns this rank's Events. Blocks have the kind `forward` and the name of the rank whose keys they read
    (`kv 2`). Messages are `send` and `recv`, and waits are `wait`.
    """
    pairs = cut_load(cut)[group.rank]
    keys_and_values = torch.zeros(2, 1, 1, len(cut[group.rank]), 8)
    barrier(group)
    with recording(group.rank) as recorder:
        for step, (count, _) in enumerate(zip(pairs, ring_steps(keys_and_values, group), strict=True)):
            if count:
                with span(f"kv {(group.rank - step) % group.size}", "forward"):
                    _sleep(count * seconds_per_pair)
    return recorder.events


# ---- experts ----


class SleepingExperts(nn.Module):
    """Takes the place of a layer's experts: sleeps for each row, and returns the rows times their weights.

    Args:
        seconds_per_row: time of one row through one expert.

    Attributes:
        rows: N of the last forward.
    """

    def __init__(self, seconds_per_row: float) -> None:
        super().__init__()
        self.seconds_per_row = seconds_per_row
        self.rows = 0

    def forward(self, tokens_NH: Tensor, tokens_per_expert: Tensor, probs_N: Tensor) -> Tensor:
        """[N, H], rows of each local expert [L], weights [N] -> [N, H]."""
        self.rows = int(tokens_per_expert.sum())
        with span(f"{self.rows} rows", "forward"):
            time.sleep(self.rows * self.seconds_per_row)
        return tokens_NH * probs_N.unsqueeze(-1)


class _Slept(torch.autograd.Function):
    """y = x after a sleep; dx = dy after a sleep of twice as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = 2 * seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], None


class SleepingParts:
    """Observer of a training run: each attention and each set of experts sleeps after its own computation.

    The other observations are ignored.

    Args:
        seconds: sleep of a forward; a backward sleeps twice as long. With 0 nothing is changed.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_model(self, groups: ParallelGroups, chunks: Sequence[nn.Module], schedule: Schedule) -> None:
        """Give the modules their sleep."""
        if self.seconds:
            ends = (".attention", ".experts")
            modules = [module for chunk in chunks for name, module in chunk.named_modules() if name.endswith(ends)]
            for module in modules:
                module.register_forward_hook(lambda _, __, y: _Slept.apply(y, self.seconds))

    def on_gradients(self, step: int, chunks: Sequence[nn.Module]) -> None:
        """Nothing to see."""

    def on_update(self, step: int, chunks: Sequence[nn.Module]) -> None:
        """Nothing to see."""


def zipf_logits(tokens: int, num_experts: int, skew: float, *, seed: int = 0) -> Tensor:
    """Return logits [T, E], float64, whose top-k draws experts without replacement.

    Their chances fall as (e + 1)^-skew, which is Zipf's law. Skew 0 is even. At skew 1 expert 0 is twice as likely as
    expert 1 to be drawn first, at 3 eight times. Gumbel noise turns a top-k into such a draw (arXiv 1903.06059). It
    depends on the seed alone, so more skew moves few tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(tokens, num_experts, generator=generator, dtype=torch.float64).clamp_(min=1e-12)
    popularity = torch.arange(1, num_experts + 1, dtype=torch.float64).log()
    return -skew * popularity - (-uniform.log()).log()
