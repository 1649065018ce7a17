"""Fit the rates of software on machines, and show the errors on rows kept out: python scripts/fit_plan_rates.py

The rows of `labkit/plan/tables/published.csv` are split by source and model before anything is fitted (`FITS`): the
named models give the constants, all other models of the source test them. A constant belongs to a machine and a
generation of software, never to a row: the rate of GEMMs over the machine's ceiling, for long sequences that of fused
attention, and once the host's seconds of a step. Each minimises the mean of |log(predicted / measured)|.

The script prints what `labkit/plan/machines/*.yaml` holds, with the width of the intervals: 1.5 times the 80th
percentile of the residuals of the fitted rows, at least 8 %.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.plan.machine import Machine, load_machine
from labkit.plan.published_rows import read_published
from labkit.plan.rows import PlannedRow
from labkit.plan.step_time import predict_step

PUBLISHED = Path(__file__).parents[1] / "labkit" / "plan" / "tables" / "published.csv"
LEAST_WIDTH, WIDENED, SHARE = 0.08, 1.5, 0.8


@dataclass(frozen=True)
class Fit:
    """Constants of a generation of software on machines, and the models whose rows give them."""

    machines: tuple[str, ...]
    source: str
    """Beginning of the source's name."""
    software: str
    models: tuple[str, ...]
    """Endings of the models that are fitted; the others of the source are kept out."""
    rates: tuple[str, ...] = ("",)
    """Suffixes of the constants that are fitted: rate of GEMMs, ` attention`, ` host` (`Machine.software`)."""
    fp8: bool | None = None
    """Only rows with, or only rows without fp8."""
    aliases: tuple[str, ...] = ()
    """Other generations with the same rates."""

    def covers(self, row: PlannedRow) -> bool:
        """Return True if a row belongs to the source, the software and the machines."""
        if row.workload is None or row.measured_seconds is None or row.machine not in self.machines:
            return False
        has_fp8 = row.workload.config.optim.fp8 != "none"
        known = row.workload.software in (self.software, *self.aliases)
        return row.source.startswith(self.source) and known and self.fp8 in (None, has_fp8) and counted(row)

    def fits(self, row: PlannedRow) -> bool:
        """Return True if the row gives the constants."""
        return row.model.endswith(self.models)


FITS = (
    Fit(("a100",), "arXiv 2104.04473", "megatron_2021", ("1.7B", "7.5B", "39B", "145B", "1T")),
    Fit(("a100",), "arXiv 2205.05198", "megatron_2022", ("22B",)),
    Fit(("a100",), "arXiv 2401.10241", "megatron_2023", ("6.2B",)),
    Fit(("a100", "a100_40gb"), "MosaicML", "foundry_2023", ("13b", "MPT 3b"), ("", " attention")),
    Fit(("h100",), "MosaicML", "foundry_2023", ("13b", "MPT 3b"), ("", " attention"), fp8=False),
    Fit(("v100",), "arXiv 1909.08053", "megatron_2019", ("1.2B", "355M", "4.2B"), ("", " host")),
    Fit(("h100_96gb",), "torchtitan", "torchtitan", ("8B",), ("", " attention"), aliases=("torchtitan_async",)),
    Fit(("h100",), "Megatron-Core README", "megatron_tp_overlap", ("7.1B", "70B", "314B")),
    Fit(("h100",), "arXiv 2504.14960", "megatron_core", ("Mixtral-8x22B",), ("", " attention")),
    Fit(("b200",), "SimuMax", "megatron_core", ("70B cut to few layers",)),
    Fit(("gb200",), "Megatron-Bridge", "megatron_tp_overlap", ("LLAMA3_8B", "LLAMA3_70B")),
    Fit(("gb300",), "Megatron-Bridge", "megatron_tp_overlap", ("LLAMA3_8B", "LLAMA3_70B")),
)
"""The split by source and model."""


def counted(row: PlannedRow) -> bool:
    """Return True for all rows but MosaicML's small models and short sequences."""
    return row.specified or not row.source.startswith("MosaicML")


def changed(machines: Sequence[str], fit: Fit, rates: dict[str, float]) -> dict[str, Machine]:
    """Return the machines with these rates."""
    names = (fit.software, *fit.aliases)
    software = {f"{name}{suffix}": rate for name in names for suffix, rate in rates.items()}
    result = {}
    for name in machines:
        machine = load_machine(name)
        result[name] = dataclasses.replace(machine, software={**machine.software, **software})
    return result


def residuals(rows: Iterable[PlannedRow], machines: dict[str, Machine]) -> list[float]:
    """Return log(predicted / measured) of every row."""
    found = []
    for row in rows:
        assert row.workload is not None and row.measured_seconds is not None and row.machine is not None
        predicted = predict_step(row.workload, machines[row.machine]).seconds
        found.append(math.log(predicted / row.measured_seconds))
    return found


def fitted(fit: Fit, rows: Sequence[PlannedRow]) -> dict[str, float]:
    """Return the rates, one after another on a finer and finer grid."""
    rates = {suffix: 0.1 if suffix == " host" else 0.8 for suffix in fit.rates}
    for step in (0.2, 0.1, 0.05, 0.02, 0.01):
        for _ in range(2):
            for suffix in rates:
                grid = [rates[suffix] + step * number for number in range(-3, 4)]
                grid = [value for value in grid if value > 0.05]
                tried = {value: _cost(fit, rows, rates | {suffix: value}) for value in grid}
                rates[suffix] = min(tried, key=lambda value: tried[value])
    return rates


def _cost(fit: Fit, rows: Sequence[PlannedRow], rates: dict[str, float]) -> float:
    return statistics.fmean(map(abs, residuals(rows, changed(fit.machines, fit, rates))))


def width(found: Sequence[float]) -> float:
    """Return the half width of the interval from the residuals of fitted rows."""
    ordered = sorted(map(abs, found))
    return max(LEAST_WIDTH, WIDENED * ordered[min(len(ordered) - 1, int(SHARE * len(ordered)))])


def shown(found: Sequence[float], half: float) -> str:
    """Return the errors of rows in words."""
    if not found:
        return "no rows"
    errors = [abs(math.expm1(value)) for value in found]
    inside = sum(abs(value) <= half for value in found) / len(found)
    return (
        f"n {len(found):3d}  median {statistics.median(errors):6.1%}  mean {statistics.fmean(errors):6.1%}  "
        f"worst {max(errors):6.1%}  inside {inside:4.0%}"
    )


def main() -> None:
    """Fit every row of `FITS`, and print constants and errors."""
    rows = read_published(sys.argv[1] if len(sys.argv) > 1 else PUBLISHED)
    for fit in FITS:
        covered = [row for row in rows if fit.covers(row)]
        used, kept = [row for row in covered if fit.fits(row)], [row for row in covered if not fit.fits(row)]
        rates = fitted(fit, used)
        machines = changed(fit.machines, fit, rates)
        half = width(residuals(used, machines))
        words = ", ".join(f"{fit.software}{suffix} {rate:.2f}" for suffix, rate in rates.items())
        print(f"{'/'.join(fit.machines)} {fit.source}: {words}, interval {half:.2f}")
        print(f"  fitted   {shown(residuals(used, machines), half)}")
        print(f"  kept out {shown(residuals(kept, machines), half)}")


if __name__ == "__main__":
    main()
