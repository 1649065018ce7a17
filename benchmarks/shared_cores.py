"""More ranks than cores: ranks that do not interrupt each other (SCHED_BATCH) against Linux's default.

    python benchmarks/shared_cores.py

Both alternatives run in the same ranks, which change the policy of all their threads before each repetition.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from harness import Comparison, interleave, report, until_quiet

SEVERAL = 50
"""Collectives in one repetition: one alone is shorter than a time slice."""


def under(policy: int, step: Callable[[], Any]) -> Callable[[], Any]:
    """`step` with every thread of this rank under a policy of Linux's scheduler."""

    def call() -> None:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # the threads of a group that was freed end
                os.sched_setscheduler(int(thread), policy, os.sched_param(0))
        step()

    return call


def measure(case: str, elements: int, layout: dict[str, Any], repetitions: int) -> Comparison:
    """On each rank: all-reduces of `elements` numbers; where there are none, a step of training under the layout."""
    step = collectives(elements) if elements else training(layout)
    policies = {"SCHED_BATCH": os.SCHED_BATCH, "SCHED_OTHER": os.SCHED_OTHER}
    alternatives = {name: under(policy, step) for name, policy in policies.items()}
    found = interleave(case, alternatives, repetitions=repetitions, across_ranks=True)
    found.facts["cores"] = len(os.sched_getaffinity(0))
    return found


def collectives(elements: int) -> Callable[[], Any]:
    """Some all-reduces of this many numbers, one after the other."""
    import torch
    import torch.distributed as dist

    x = torch.ones(elements)

    def step() -> None:
        for _ in range(SEVERAL):
            dist.all_reduce(x, op=dist.ReduceOp.MAX)

    return step


def training(layout: dict[str, Any]) -> Callable[[], Any]:
    """Four steps of the preset `tiny`, with what building it costs."""
    from labkit.config import presets
    from labkit.train import pretrain

    config = presets.tiny().override({"record_events": False, "steps": 4, "global_batch_size": 8} | layout)
    return lambda: pretrain(config)


CASES: list[tuple[str, int, int, dict[str, Any]]] = [
    *((f"{SEVERAL} all-reduces of 10 numbers, {ranks} ranks", ranks, 10, {}) for ranks in (2, 4, 8)),
    (f"{SEVERAL} all-reduces of 100,000 numbers, 4 ranks", 4, 100_000, {}),
    ("build and train tiny for 4 steps, 2 ranks, TP2", 2, 0, {"tp": 2}),
    ("build and train tiny for 4 steps, 4 ranks, TP4", 4, 0, {"tp": 4}),
    ("build and train tiny for 4 steps, 4 ranks, TP2 x PP2", 4, 0, {"tp": 2, "pp": 2}),
    ("build and train tiny for 4 steps, 4 ranks, DP4", 4, 0, {}),
]
"""In words; ranks; elements of an all-reduce; layout of a training."""


def main() -> None:
    """Run each case on its ranks and store the table."""
    from labkit.launch import run

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--repetitions", type=int, default=15, help="interleaved repetitions; 15 or more to be quoted")
    parser.add_argument("--dry-run", action="store_true", help="print only, store nothing")
    args = parser.parse_args()
    comparisons = [
        until_quiet(lambda case=case: run(measure, case[1], case[0], *case[2:], args.repetitions)[0]) for case in CASES
    ]
    report(
        "shared_cores",
        comparisons,
        title="Ranks that share cores: SCHED_BATCH and Linux's default (gloo)",
        write=not args.dry_run,
    )


if __name__ == "__main__":
    main()
