"""Every published row next to its prediction, and the numbers of a group of rows."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fit_plan_rates import FITS

from labkit.plan.machine import load_machine
from labkit.plan.published_rows import planned
from labkit.plan.rows import PlannedRow
from labkit.plan.step_time import StepPrediction, predict_step

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "labkit" / "plan" / "tables" / "published.csv"


@dataclass(frozen=True)
class Timed:
    """A row with a measured and a predicted step."""

    row: PlannedRow
    stated: Mapping[str, str]
    """The row's cells in the table."""
    step: StepPrediction
    measured: float
    """Seconds of the published step."""
    fitted: bool
    """The row gave a constant of its machine (`FITS` in scripts/fit_plan_rates.py)."""

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1: negative if the prediction is too fast."""
        return self.step.seconds / self.measured - 1

    @property
    def ratio(self) -> float:
        """What a published rate is multiplied with to get the predicted rate."""
        return self.measured / self.step.seconds

    @property
    def inside(self) -> bool:
        """The measured step is in the stated interval."""
        return self.step.low <= self.measured <= self.step.high

    @property
    def verdict(self) -> str:
        """The error, whether the row was fitted, and whether it is outside of its interval."""
        return ", ".join([percent(self.error)] + ["fit"] * self.fitted + ["outside"] * (not self.inside))


@cache
def stated_rows() -> dict[str, dict[str, str]]:
    """Return the table's rows by name."""
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        return {row["id"]: row for row in csv.DictReader(file)}


@cache
def planned_rows() -> dict[str, PlannedRow]:
    """Return every row as a workload, or with the reason that there is none, by name."""
    return {row.id: row for row in planned(stated_rows().values())}


@cache
def timed_rows() -> dict[str, Timed]:
    """Return the rows that have a measured and a predicted step, by name."""
    return {row.id: _timed(row) for row in planned_rows().values() if row.workload and row.measured_seconds}


def _timed(row: PlannedRow) -> Timed:
    assert row.workload is not None and row.machine is not None and row.measured_seconds is not None
    step = predict_step(row.workload, load_machine(row.machine))
    fitted = any(fit.covers(row) and fit.fits(row) for fit in FITS)
    return Timed(row, stated_rows()[row.id], step, row.measured_seconds, fitted)


def named(prefix: str) -> list[Timed]:
    """Return the timed rows whose names begin with `prefix`."""
    return [each for name, each in timed_rows().items() if name.startswith(prefix)]


def left_out(prefix: str) -> int:
    """Return how many rows whose names begin with `prefix` are not expressible."""
    return sum(row.workload is None for name, row in planned_rows().items() if name.startswith(prefix))


def percent(share: float) -> str:
    """Return a signed error such as `+3.1 %`."""
    return f"{100 * share:+.1f} %"


def whole(share: float) -> str:
    """Return a share such as `77 %`."""
    return f"{100 * share:.0f} %"


def seconds(value: float) -> str:
    """Return seconds with four digits."""
    return f"{value:#.4g}"


def interval(each: Timed) -> str:
    """Return the interval of a prediction in seconds."""
    return f"{seconds(each.step.low)} to {seconds(each.step.high)}"


@dataclass(frozen=True)
class Summary:
    """Errors of some rows."""

    count: int
    median: float
    """Of the absolute errors, as are mean and worst."""
    mean: float
    worst: float
    bias: float
    """Mean of the signed errors."""
    inside: float
    """Share of the rows that are in their intervals."""


def summary(rows: Iterable[Timed]) -> Summary | None:
    """Return the errors of these rows; None without rows."""
    found: Sequence[Timed] = list(rows)
    if not found:
        return None
    errors = [abs(each.error) for each in found]
    return Summary(
        len(found), statistics.median(errors), statistics.fmean(errors), max(errors),
        statistics.fmean(each.error for each in found), statistics.fmean(each.inside for each in found),
    )  # fmt: skip
