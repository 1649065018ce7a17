"""Part of the GPU benchmark: graphs of ours beside torch's own, where launching takes the time (row G4).

A stack of layers, forward and backward, without optimizer: graphs by labkit and by `torch.cuda.make_graphed_callables`,
one for each layer or one for all; the plain stack under `torch.compile(mode="reduce-overhead")`; eagerly. Of each: what
the GPU computes (sum over kernels), and how long the host is busy with a replay.

torch's function hands out gradients at fixed addresses, which the next replay overwrites; labkit hands out copies
unless `clone_param_grads=False`. Both are rows, because the copies are kernels too.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from gpu_peers import DEVICE, Row, Side, beside
from gpu_plain import LAYER_TOLERANCE, our_layers, plain_blocks, random_pair, stack_side
from gpu_profile import work_facts
from gpu_steps import PLAIN, synchronize
from harness import Comparison
from torch import Tensor, nn

from labkit.config import ModelConfig
from labkit.graphs import make_graphed_callables

STACK = ModelConfig(layers=12, hidden=768, heads=12, seq_length=256, **PLAIN)


class Replays(Side):
    """A side that replays graphs."""

    count = 0
    """Graphs of a forward; as many of a backward."""
    bare: tuple[Callable[[], Any], Callable[[], Any]] | None = None
    """Replays all graphs of a forward and of a backward, and nothing else."""


def chain(functions: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    """One after the other."""
    for function in functions:
        x = function(x)
    return x


class Sides:
    """Builds the alternatives of one stack."""

    def __init__(self, config: ModelConfig, batch: int, device: torch.device, dtype: torch.dtype, impl: str) -> None:
        self.config, self.device, self.dtype, self.impl = config, device, dtype, impl
        self.x, self.grad = random_pair(config, batch, device, dtype)

    def ours(self, whole: bool, make: Callable[[tuple[nn.Module, ...], Any], Sequence[Any]] | None) -> Replays:
        """A stack of our layers, graphed by `make`, as one callable or as one for each layer; None stays eager."""
        layers = our_layers(self.config, self.device, self.dtype)
        callables: tuple[nn.Module, ...] = (nn.Sequential(*layers),) if whole else tuple(layers)
        graphed: Sequence[Any] = callables
        if make is not None:
            graphed = make(callables, tuple((self.x.detach().clone().requires_grad_(),) for _ in callables))
        made = stack_side(lambda x: chain(graphed, x), layers[-1].mlp, self.x, self.grad, layers)
        side = Replays(made.step, made.results, made.passes)
        side.count = 0 if make is None else len(callables)
        if all(hasattr(one, "graphs") for one in graphed):
            graphs: list[Any] = [one.graphs for one in graphed]
            forwards, backwards = [g.forward for g in graphs], [g.backward for g in reversed(graphs)]
            side.bare = (lambda: [g.replay() for g in forwards], lambda: [g.replay() for g in backwards])
        return side

    def by_labkit(self, whole: bool, clone: bool) -> Side:
        """labkit's function."""
        made: dict[str, Any] = {"impl": self.impl, "clone_param_grads": clone}
        return self.ours(whole, lambda functions, samples: make_graphed_callables(functions, samples, **made))

    def by_torch(self, whole: bool) -> Side:
        """torch's function; it puts the graphs into the modules' forward."""
        if self.device.type != "cuda":
            raise RuntimeError("torch.cuda.make_graphed_callables captures on a GPU alone")
        return self.ours(whole, torch.cuda.make_graphed_callables)

    def reduce_overhead(self) -> Side:
        """The plain stack, compiled with graphs."""
        blocks = plain_blocks(self.config, self.device, self.dtype)
        run = torch.compile(blocks, mode="reduce-overhead", fullgraph=True)

        def step(x: Tensor) -> Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            return run(x)

        x, grad = (t.transpose(0, 1).contiguous() for t in (self.x, self.grad))
        made = stack_side(step, blocks[-1], x, grad, [blocks], batch_first=True)
        side = Replays(made.step, made.results, made.passes)
        side.count = 1
        return side


# ---- the host ----


def host_us(passes: Sequence[Callable[[], Any]], device: torch.device, repetitions: int = 20) -> list[float]:
    """Median microseconds that the host spends in each of the calls, which follow each other; it waits for a GPU only
    before the first."""
    found: list[list[float]] = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(repetitions):
            synchronize(device)
            clock = [time.perf_counter()]
            for one in passes:
                one()
                clock.append(time.perf_counter())
            found.append([1e6 * (b - a) for a, b in pairwise(clock)])
    finally:
        gc.enable()
    synchronize(device)
    return [statistics.median(column) for column in zip(*found, strict=True)]


def host_facts(called: Sequence[float], bare: Sequence[float] | None, replays: int) -> Row:
    """Microseconds of the host for forward and backward: of all, of a replay, and of the Python of a replay, which is
    what `bare` replays do without."""
    row: Row = {"host_us": [round(us, 1) for us in called]}
    if replays:
        row["host_us_a_replay"] = [round(us / replays, 2) for us in called]
    if replays and bare is not None:
        row["bare_us_a_replay"] = [round(us / replays, 2) for us in bare]
        row["python_us_a_replay"] = [round((a - b) / replays, 2) for a, b in zip(called, bare, strict=True)]
    return row


def describe(side: Side, seconds: float | None, device: torch.device) -> Row:
    """What the GPU and the host do in a step."""
    assert isinstance(side, Replays) and side.passes is not None
    called = host_us(side.passes, device)[1:]
    bare = None if side.bare is None else host_us(side.bare, device)
    return host_facts(called, bare, side.count) | work_facts(side.step, seconds, device)


def replays(
    config: ModelConfig = STACK,
    batch: int = 1,
    *,
    device: torch.device = DEVICE,
    dtype: torch.dtype = torch.bfloat16,
    impl: str = "local",
    repetitions: int = 15,
) -> Iterator[Comparison | Row]:
    """G4 beside torch's own graphs: aim at a replay of at most 1.05 of the sum over kernels."""
    make = Sides(config, batch, device, dtype, impl)
    builds: dict[str, Callable[[], Side]] = {
        "labkit, a graph a layer": lambda: make.by_labkit(False, True),
        "labkit, a graph a layer, gradients not cloned": lambda: make.by_labkit(False, False),
        "labkit, one graph": lambda: make.by_labkit(True, True),
        "eager": lambda: make.ours(False, None),
        "plain, compiled, reduce-overhead": make.reduce_overhead,
        "torch.cuda.make_graphed_callables, a graph a layer": lambda: make.by_torch(False),
        "torch.cuda.make_graphed_callables, one graph": lambda: make.by_torch(True),
    }
    case = f"G4: {config.layers} layers h{config.hidden} s{config.seq_length} b{batch}, graphs beside torch's"
    yield from beside(
        f"{case}, forward and backward", builds, device=device, tolerance=LAYER_TOLERANCE, repetitions=repetitions,
        describe=lambda side, seconds: describe(side, seconds, device),
    )  # fmt: skip
