"""The bubbles of arXiv 2401.10241, Tables 4 to 8: samples per second and idle share of five schedules."""

from __future__ import annotations

import re
import statistics

from scale_page.compared import Timed, named
from site_pages.tables import table

from labkit.plan.step_time import StepPrediction

ORDER = ("1F1B", "1F1B-I", "ZB-1p", "ZB-V")
"""Schedules in the order of their bubbles; the paper's ZB-2p is not expressible."""


def bubble(step: StepPrediction) -> float:
    """Return the bubble as the paper defines it: 1 - m (F + I + W) / makespan, of the rank that computes most.

    Transfers count as bubble. What comes after the pipeline does not count.
    """
    timeline = step.timeline
    schedule = timeline.schedule
    busy = [
        schedule.num_microbatches * sum(
            timed.seconds - timed.by_kind.get("pp", 0.0)
            for stage in schedule.stages_of(rank)
            for timed in (step.stages[stage].forward, step.stages[stage].input_grad, step.stages[stage].weight_grad)
        )
        for rank in range(schedule.pp)
    ]  # fmt: skip
    return 1 - max(busy) / timeline.makespan


def published_bubble(each: Timed) -> float | None:
    """Return the bubble that the paper states; None if it does not."""
    found = re.search(r"bubble rate by calculation.*?([01]\.[0-9]+)", each.stated["note"])
    return float(found[1]) if found else None


def _place(each: Timed) -> tuple[float, int, int]:
    stated = each.stated
    return (float(each.row.model.removeprefix("GPT ").removesuffix("B")), int(stated["microbatches"]),
            ORDER.index(stated["schedule"]))  # fmt: skip


def pipelines(prefix: str) -> str:
    """Rows of one of the paper's tables, by model, microbatches and schedule."""
    head = ("model", "pp", "microbatches", "schedule", "samples/s per GPU: paper / predicted",
            "bubble: paper / predicted", "error of the step")  # fmt: skip
    rows = []
    for each in sorted(named(prefix), key=_place):
        stated, idle = each.stated, published_bubble(each)
        rate = float(stated["samples_s_gpu"])
        stated_idle = "not stated" if idle is None else f"{100 * idle:.1f} %"
        rows.append([
            each.row.model, stated["pp"], stated["microbatches"], stated["schedule"],
            f"{rate:#.3g} / {rate * each.ratio:#.3g}", f"{stated_idle} / {100 * bubble(each.step):.1f} %", each.verdict,
        ])  # fmt: skip
    return table(head, rows)


def bubbles() -> str:
    """Predicted minus published bubbles by schedule, in points of percent."""
    lines = []
    for schedule in ORDER:
        pairs = [(bubble(each.step), published_bubble(each)) for each in named("zb_")
                 if each.stated["schedule"] == schedule]  # fmt: skip
        points = [100 * (predicted - published) for predicted, published in pairs if published is not None]
        lines.append([schedule, str(len(points)), f"{statistics.fmean(points):+.1f}",
                      f"{min(points):+.1f} to {max(points):+.1f}"])  # fmt: skip
    return table(("schedule", "rows", "mean difference, points", "from, to"), lines)
