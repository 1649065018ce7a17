"""What `labkit plan --goodput` prints: how much of two weeks a layout spends on useful steps, and at which interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labkit.cli.output import table
from labkit.plan.checkpoint_intervals import daly_interval, young_interval
from labkit.plan.cluster import CAUSES, Cluster
from labkit.plan.goodput import (
    SHARES,
    ClusterRun,
    Goodput,
    best_goodput,
    cluster_run,
    duration,
    goodput_by_size,
    interval_curve,
    simulate_goodput,
)
from labkit.plan.layouts import in_words
from labkit.plan.search import Ranked

_SIZES = (8, 64, 512, 2048, 8192, 16384)
"""Numbers of GPUs in the table of sizes."""
_NAMED_CAUSES = 4
"""Causes of failures that are named; the others share a number."""


@dataclass(frozen=True)
class PlannedGoodput:
    """A layout's run on a cluster, simulated."""

    layout: Ranked
    run: ClusterRun
    intervals: dict[str, Goodput]
    """Whose interval -> the goodput with it; the first counts."""
    sizes: list[Goodput]

    @property
    def chosen(self) -> Goodput:
        """With the interval that was given, or the best one."""
        return next(iter(self.intervals.values()))


def planned_goodput(layout: Ranked, cluster: Cluster) -> PlannedGoodput:
    """Simulate the runs of a layout. Raises ConfigError if they make no progress."""
    run = cluster_run(layout.workload, layout.prediction, cluster)
    intervals = {}
    if cluster.interval_minutes is not None:
        intervals["given"] = simulate_goodput(run, cluster.interval_minutes * 60)
    intervals["simulated best"] = best_goodput(run, interval_curve(run))
    blocking = run.checkpoint.blocking
    for name, seconds in (("Young (1974)", young_interval(blocking, run.mtbf)),
                          ("Daly (2006)", daly_interval(blocking, run.mtbf))):  # fmt: skip
        if seconds >= run.least_interval:
            intervals[name] = simulate_goodput(run, seconds)
    return PlannedGoodput(layout, run, intervals, goodput_by_size(run, sorted({*_SIZES, run.gpus})))


def goodput_lines(found: PlannedGoodput, width: int | None) -> list[str]:
    """Return the section of a plan."""
    run, chosen = found.run, found.chosen
    cluster = run.cluster
    lost = (1 - chosen.goodput) * cluster.days * 24
    return [
        f"goodput of {cluster.days:g} days on {run.gpus:,} GPUs, {in_words(found.layout.row)}: {chosen.goodput:.1%}",
        f"{lost:,.1f} h of all GPUs are lost; 80 % of runs have a goodput from {chosen.low:.1%} to {chosen.high:.1%}",
        f"effective training time, which counts slow steps in full: {chosen.effective_time:.1%}",
        *_losses(found, width),
        _causes(chosen.failures),
        "",
        "interval between checkpoints:",
        *_intervals(found, width),
        "",
        "the same step and the same checkpoint on other numbers of GPUs, each with Daly's interval:",
        *_by_size(found, width),
        *_without_progress(found),
    ]


def _losses(found: PlannedGoodput, width: int | None) -> list[str]:
    run, chosen, step = found.run, found.chosen, found.layout.prediction
    cluster, checkpoint = run.cluster, run.checkpoint
    mode = f", and {duration(checkpoint.background)} in the background" if cluster.asynchronous else ""
    size = checkpoint.bytes / 1e9
    notes = {
        "useful": f"steps of {step.seconds:.4g} s",
        "checkpoints": f"{size:,.{0 if size >= 10 else 2}f} GB block for {duration(checkpoint.blocking)}{mode}; one "
        f"every {duration(chosen.interval)}",
        "lost": f"{chosen.failures:.1f} failures, one every {duration(run.mtbf)}",
        "restarts": f"{duration(run.restart)} each, unless it fails again, {duration(checkpoint.load)} of it to load "
        "the checkpoint",
        "stragglers": f"{cluster.straggler_share:.3%} of GPUs take {cluster.straggler_factor:g} times as long",
        "jitter": f"the slowest of {run.gpus:,} ranks; {run.communication:.1%} of the step is communication",
    }
    rows = [[f"  {name}", f"{chosen.shares[key]:.2%}", notes[key]] for key, name in SHARES.items()]
    return table([["", "share", "why"], *rows], right=(1,), width=width)


def _causes(failures: float) -> str:
    """Return the expected failures by cause, if they have the mix of Llama 3's."""
    every = sum(CAUSES.values())
    named = sorted(CAUSES.items(), key=lambda item: -item[1])[:_NAMED_CAUSES]
    named.append(("others", every - sum(count for _, count in named)))
    parts = ", ".join(f"{name} {failures * count / every:.3g}" for name, count in named)
    return f"failures by cause, if yours are as Llama 3's: {parts}"


def _intervals(found: PlannedGoodput, width: int | None) -> list[str]:
    rows = [["", "time", "steps", "goodput"]]
    for name, each in found.intervals.items():
        seconds = found.layout.prediction.seconds * each.effective_time / each.goodput
        steps = each.interval / seconds
        rows.append([f"  {name}", duration(each.interval), f"{steps:,.0f}", f"{each.goodput:.1%}"])
    return table(rows, right=(1, 2, 3), width=width)


def _by_size(found: PlannedGoodput, width: int | None) -> list[str]:
    losses = [name for name in SHARES if name != "useful"]
    rows = [["GPUs", "fail every", "interval", "goodput", "saves", *losses[1:]]]  # in 80 columns
    rows += [
        [f"{each.gpus:,}", duration(found.run.cluster.mtbf(each.gpus)), duration(each.interval),
         f"{each.goodput:.1%}", *(f"{each.shares[name]:.1%}" for name in losses)]
        for each in found.sizes
    ]  # fmt: skip
    return table(rows, right=range(len(rows[0])), width=width)


def _without_progress(found: PlannedGoodput) -> list[str]:
    """Return a line about the sizes that are not in the table."""
    sizes = [f"{size:,}" for size in _SIZES if size not in {each.gpus for each in found.sizes}]
    return [f"no progress on {', '.join(sizes)} GPUs: failures leave no time to restart and save"] if sizes else []


def goodput_json(found: PlannedGoodput) -> dict[str, Any]:
    """Return the section as plain values."""
    return {
        "mtbf_seconds": found.run.mtbf,
        "checkpoint": vars(found.run.checkpoint),
        "communication": found.run.communication,
        "cluster": vars(found.run.cluster),
        "intervals": {name: _plain(each) for name, each in found.intervals.items()},
        "sizes": [_plain(each) for each in found.sizes],
    }


def _plain(each: Goodput) -> dict[str, Any]:
    return vars(each) | {"goodput": each.goodput, "shares": dict(each.shares)}
