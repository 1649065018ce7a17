"""What it costs to keep the Events that `labkit why` reads: steps with and without them, in turn, in one run.

    python benchmarks/event_costs.py             # writes results/event_costs.json
    python benchmarks/event_costs.py --dry

A run writes the Events of every fourth step (`train.event_interval` 4, with `train.timing_log_level` 1). Rank 0
collects and writes them before the next step, so two steps together pay for it: the one that records and the one after.
The next two steps pay nothing, and are what the first two are compared with. The aim is a cost of at most 1 % of the
run; the interval that reaches it is printed. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import LEAST, Comparison, report
from other_work import OtherWork
from torch import nn

from labkit.comm.groups import ParallelGroups
from labkit.config import RunConfig
from labkit.launch import run
from labkit.schedules import Schedule
from labkit.train import pretrain

EVERY = 4
"""Steps from one that is written to the next: two that pay, two that do not."""
WARM_UP = 2
"""Groups of `EVERY` steps that do not count."""
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("one rank, hidden 256", 1, {}),
    ("tp 2, hidden 256", 2, {"parallel.tp": 2}),
    ("pp 2, hidden 256, 8 microbatches", 2, {"parallel.pp": 2}),
    ("tp 2, hidden 512", 2, {"parallel.tp": 2, "model.hidden": 512, "model.heads": 8}),
]
COMMON = {"model.layers": 4, "model.hidden": 256, "model.heads": 4, "model.seq_length": 256, "model.vocab_size": 1024,
          "train.global_batch_size": 8, "train.micro_batch_size": 1, "train.record_events": False,
          "train.write_events": True, "train.timing_log_level": 1, "train.event_interval": EVERY}  # fmt: skip
AIM = 0.01


class Clock:
    """An observer that notes when each step has updated its weights."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_model(self, groups: ParallelGroups, chunks: Sequence[nn.Module], schedule: Schedule) -> None:
        """Note nothing."""

    def on_gradients(self, step: int, chunks: Sequence[nn.Module]) -> None:
        """Note nothing."""

    def on_update(self, step: int, chunks: Sequence[nn.Module]) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())


def clocked(config: RunConfig) -> list[float]:
    """Train, and return when each step had updated its weights, on one rank."""
    clock = Clock()
    pretrain(config, observer=clock)
    return clock.times


def measure(case: str, world: int, changes: dict[str, Any], groups: int) -> Comparison:
    """Compare pairs of steps that pay for Events with the pairs between them."""
    with tempfile.TemporaryDirectory() as folder:
        fields = COMMON | changes | {"train.output_dir": folder, "train.steps": EVERY * (WARM_UP + groups + 1)}
        others = OtherWork()
        times = run(clocked, world, RunConfig().replaced(fields), device="cpu")[0]
        cores = others.cores()
        events = sum(1 for _ in (Path(folder) / "events.jsonl").open())
    written = range(EVERY * WARM_UP - 1, len(times) - EVERY, EVERY)  # index of a step whose number EVERY divides
    paying = [times[at + 1] - times[at - 1] for at in written]
    free = [times[at + 3] - times[at + 1] for at in written]
    cost, step = statistics.median(a - b for a, b in zip(paying, free, strict=True)), statistics.median(free) / 2
    facts = {
        "events of a step": round(events / (len(times) // EVERY)),
        "cost of a recorded step (ms)": round(1e3 * cost, 3),
        "share of a step": round(cost / step, 4),
        "event_interval for 1 %": max(1, math.ceil(cost / step / AIM)),
    }
    return Comparison(case, {"two steps, one recorded": paying, "two steps": free}, cores, facts=facts)


def main() -> None:
    """Measure all cases and report them."""
    parser = argparse.ArgumentParser(description="Cost of Events")
    parser.add_argument("--dry", action="store_true", help="write no results")
    parser.add_argument("--groups", type=int, default=2 * LEAST, help=f"groups of {EVERY} steps")
    arguments = parser.parse_args()
    found = [measure(*case, arguments.groups) for case in CASES]
    for comparison in found:
        print(f"{comparison.case}: {comparison.facts}")
    notes = [
        f"Aim: {AIM:.0%} of the run, by train.event_interval. Two steps that pay, then two that do not, in one run."
    ]
    report("event_costs", found, title="What Events cost", notes=notes, write=not arguments.dry)


if __name__ == "__main__":
    main()
