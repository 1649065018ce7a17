"""Numbers in the page's sentences, computed from the same rows as its tables."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from statistics import median

from fit_plan_rates import FITS
from scale_page.belief import coverage, held_out
from scale_page.compared import Summary, left_out, planned_rows, summary, timed_rows
from scale_page.megatron_tables import DAY, EPOCH, days_of
from scale_page.memory_tables import recorded_counts, room
from scale_page.pipeline_tables import bubble
from scale_page.ranking_tables import differences, gaps, runs, share_of, single_errors

from labkit.plan.flops import paper_step_flops
from labkit.plan.search import DIFFERENCE

A100 = ("arXiv 2104.04473", "arXiv 2205.05198", "MosaicML")
"""Sources of well-specified A100 rows."""

MEGATRON = ("Megatron-Core README", "arXiv 2504.14960", "arXiv 2407.21783", "Megatron-Bridge")
"""Sources of runs of Megatron on H100; none says all that decides the time."""


@cache
def _main() -> Summary:
    found = summary(held_out(sources=A100, gpus=("A100",)))
    assert found is not None
    return found


@cache
def _every() -> Summary:
    found = summary(held_out())
    assert found is not None
    return found


@cache
def _h100() -> list[float]:
    """Return the absolute errors of Megatron's rows on H100."""
    rows = held_out(specified=False, sources=MEGATRON, gpus=("H100",))
    return [abs(each.error) for each in rows]


def _close() -> list[bool]:
    """Return of each pair of layouts that differ by less than `DIFFERENCE` whether the plan orders it as published."""
    return [
        fast.predicted < slow.predicted
        for run in runs()
        for fast, slow in run.pairs
        if slow.measured < (1 + DIFFERENCE) * fast.measured
    ]


def _petaflops(*, recompute: bool) -> float:
    """Return PFLOP/s of the 8.3B model at the days of Table 2."""
    each = timed_rows()["1909_t2_8.3B"]
    assert each.row.workload is not None
    model = each.row.workload.config.model
    return paper_step_flops(model, samples=512, recompute=recompute) / each.measured / 1e15


def _days_at_15_1(*, recompute: bool) -> float:
    """Return days of an epoch of the 8.3B model if 15.1 PFLOP/s count recomputation, or if they do not."""
    return 2.10 * _petaflops(recompute=recompute) / 15.1


def _days(which: str) -> str:
    each = timed_rows()["1909_t2_8.3B"]
    ends = {"low": each.step.low, "high": each.step.high}
    value = ends[which] * EPOCH / DAY if which in ends else days_of(each)[which == "predicted"]
    return f"{value:.2f}"


def _errors_of_1_5b() -> str:
    errors = [each.error for each in timed_rows().values() if re.match("zb_t4.*_1.5B", each.row.id)]
    return f"{100 * min(errors):+.0f} to {100 * max(errors):+.0f} %"


def _gain_of_float8(*, measured: bool) -> str:
    wide, narrow = (timed_rows()[f"fold_t2_MCore folding_{precision}"] for precision in ("bf16", "fp8 delayed"))
    gain = wide.measured / narrow.measured if measured else wide.step.seconds / narrow.step.seconds
    return f"{gain:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def numbers() -> dict[str, Callable[[], str]]:
    """Return the numbers by the names of their markers."""
    return {
        "days": lambda: _days("predicted"),
        "error of days": lambda: f"{100 * abs(timed_rows()['1909_t2_8.3B'].error):.0f} %",
        "days of figure 5": lambda: f"{days_of(timed_rows()['1909_fig5_8.3B_512gpu'])[0]:.2f}",
        "error of figure 5": lambda: f"{100 * abs(timed_rows()['1909_fig5_8.3B_512gpu'].error):.0f} %",
        "days low": lambda: _days("low"),
        "days high": lambda: _days("high"),
        "rows": lambda: str(len(planned_rows())),
        "timed rows": lambda: str(len(timed_rows())),
        "fitted rows": lambda: str(sum(each.fitted for each in timed_rows().values())),
        "constants": lambda: str(sum(len(fit.rates) for fit in FITS)),
        "main count": lambda: str(_main().count),
        "main median": lambda: _percent(_main().median),
        "main mean": lambda: _percent(_main().mean),
        "main worst": lambda: _percent(_main().worst),
        "main inside": lambda: f"{100 * _main().inside:.0f} %",
        "every count": lambda: str(_every().count),
        "every worst": lambda: _percent(_every().worst),
        "worst guessed": lambda: f"{100 * max(abs(each.error) for each in held_out(specified=False)):.0f} %",
        "within 10": lambda: str(sum(abs(each.error) <= 0.1 for each in held_out())),
        "every inside": lambda: f"{100 * _every().inside:.0f} %",
        "h100 count": lambda: str(len(_h100())),
        "h100 within 10": lambda: str(sum(error <= 0.1 for error in _h100())),
        "h100 within 25": lambda: str(sum(error <= 0.25 for error in _h100())),
        "h100 worst": lambda: _percent(max(_h100())),
        "runs": lambda: str(len(runs())),
        "median gap": lambda: f"{100 * median(gaps()):.0f} %",
        "close pairs": lambda: str(len(_close())),
        "close right": lambda: str(sum(_close())),
        "difference": lambda: f"{100 * DIFFERENCE:.0f} %",
        "pairs": lambda: str(len(differences())),
        "pair error": lambda: _percent(share_of(differences())),
        "single error": lambda: _percent(share_of(single_errors())),
        "independent error": lambda: _percent(2**0.5 * share_of(single_errors())),
        "2019 inside": lambda: coverage(held_out(sources=("arXiv 1909",))),
        "PFLOP/s with": lambda: f"{_petaflops(recompute=True):.1f}",
        "PFLOP/s without": lambda: f"{_petaflops(recompute=False):.1f}",
        "days at 15.1": lambda: f"{_days_at_15_1(recompute=True):.2f}",
        "days at 15.1 without": lambda: f"{_days_at_15_1(recompute=False):.2f}",
        "fp8 gain": lambda: _gain_of_float8(measured=True),
        "predicted fp8 gain": lambda: _gain_of_float8(measured=False),
        "room": lambda: f"{room() / 1e9:.1f}",
        "2401 left out": lambda: str(left_out("zb_")),
        "2504 left out": lambda: str(left_out("fold_t4_")),
        "bubble of 28.3B": lambda: f"{100 * bubble(timed_rows()['zb_t6_1F1B_28.3B_96'].step):.1f} %",
        "errors of 1.5B": _errors_of_1_5b,
        "recorded rows": lambda: str(recorded_counts()["rows"]),
        "recorded compared": lambda: str(recorded_counts()["compared"]),
        "recorded configurations": lambda: str(recorded_counts()["configurations"]),
    }
