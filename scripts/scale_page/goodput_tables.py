"""Llama 3 405B on a cluster that fails (arXiv 2407.21783): what is published beside the simulation, and other sizes."""

from __future__ import annotations

from functools import cache

from scale_page.compared import timed_rows
from site_pages.tables import table

from labkit.plan.cluster import Cluster
from labkit.plan.goodput import (
    SHARES,
    ClusterRun,
    Goodput,
    best_goodput,
    cluster_run,
    duration,
    goodput_by_size,
)

_SIZES = (8, 64, 512, 2048, 8192, 16384, 65536)


@cache
def _run() -> ClusterRun:
    """Return the 54 days of the paper."""
    each = timed_rows()["llama3_t4_16384_8192"]
    assert each.row.workload is not None
    return cluster_run(each.row.workload, each.step, Cluster(days=54))


@cache
def _best() -> Goodput:
    return best_goodput(_run())


def published() -> str:
    """The paper's two numbers beside the simulation's."""
    best, run = _best(), _run()
    return table(
        ("54 days on 16,384 H100", "published", "simulated"),
        [
            ["unexpected interruptions", "419", f"{best.failures:.0f} (their rate is given)"],
            ["effective training time", "higher than 90 %", f"{100 * best.effective_time:.1f} %"],
            ["goodput: slow steps count as the steps that were planned", "", f"{100 * best.goodput:.1f} %"],
            ["checkpoint", "1 MB to 4 GB per GPU", f"{run.checkpoint.bytes / 16384 / 1e9:.2f} GB per GPU"],
            ["interval between checkpoints", "", f"{duration(best.interval)}, the best"],
        ],
    )


def by_size() -> str:
    """Where the time goes with the same step and checkpoint on other numbers of GPUs."""
    losses = [name for name in SHARES if name != "useful"]
    head = ("GPUs", "fail every", "interval", "goodput", *(SHARES[name] for name in losses))
    rows = []
    for each in goodput_by_size(_run(), _SIZES):
        times = (_run().cluster.mtbf(each.gpus), each.interval)
        shares = (each.goodput, *(each.shares[name] for name in losses))
        rows.append([f"{each.gpus:,}", *map(duration, times), *(f"{100 * share:.1f} %" for share in shares)])
    return table(head, rows)
