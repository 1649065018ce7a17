"""Predict every row of a table of runs: its step, the memory of its last rank, and the errors by source. No torch.

A table has the form of `published.csv` (`published_rows.py`) or of `megatron_golden.csv` (`golden_rows.py`), which its
columns tell. A row that no workload describes has the reason in `not_expressible`.
"""

from __future__ import annotations

import csv
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

from labkit.config import ConfigError
from labkit.plan import golden_rows, published_rows
from labkit.plan.device_memory import DeviceMemory, gpu_memory
from labkit.plan.fitting import on_machine
from labkit.plan.golden_rows import Configuration, GoldenRow, configurations, golden_row, gpu_of
from labkit.plan.machine import load_machine
from labkit.plan.published_rows import planned
from labkit.plan.rows import measured
from labkit.plan.step_time import StepPrediction, predict_step
from labkit.plan.workload import Workload

COLUMNS = ("predicted_step_s", "predicted_low_s", "predicted_high_s", "predicted_mem_bytes", "predicted_alloc_bytes",
           "not_expressible")  # fmt: skip
"""Columns that a prediction adds."""
PUBLISHED = ("source", "model", "hardware", "gpus", "layers", "hidden", "heads", "seq")
"""Columns that tell a table in the form of `published.csv`."""
GOLDEN = golden_rows.COLUMNS
_MACHINES = {"a100": "a100", "h100": "h100", "b200": "gb200", "v100": "v100"}
"""GPU of a golden file -> machine; its Blackwells are GB200."""


@dataclass(frozen=True)
class PredictedRow:
    """A row with what was predicted of it."""

    cells: Mapping[str, str]
    """The row as the file has it."""
    group: str
    """Its source, or the family of its test."""
    step: StepPrediction | None
    memory: DeviceMemory | None
    """Of the last rank."""
    not_expressible: str = ""
    """Why there is no step; of a test of Megatron-LM, which records bytes, why there is no memory."""
    measured_seconds: float | None = None
    specified: bool = True
    """False if the source leaves out so much that an error says little."""
    filled: tuple[str, ...] = ()
    golden: GoldenRow | None = None

    def added(self) -> dict[str, str]:
        """Return the cells of `COLUMNS`."""
        step, memory = self.step, self.memory
        times = ["", "", ""] if step is None else [f"{value:.6g}" for value in (step.seconds, step.low, step.high)]
        sizes = ["", ""] if memory is None else [str(memory.peak), str(memory.allocated)]
        return dict(zip(COLUMNS, (*times, *sizes, self.not_expressible), strict=True))


class Errors(NamedTuple):
    """Relative errors of a group of rows."""

    group: str
    rows: int
    median: float
    mean: float
    worst: float
    inside: float
    """Share of rows whose measurement is inside the stated interval; nan for memory, which has none."""


@dataclass
class PredictedTable:
    """The rows of a table."""

    columns: list[str]
    rows: list[PredictedRow] = field(default_factory=list)

    @property
    def is_golden(self) -> bool:
        """True for a table of Megatron-LM's tests."""
        return set(GOLDEN) <= set(self.columns)

    @property
    def rules(self) -> list[tuple[str, int, str]]:
        """(rule, rows that it filled, what it says) of every rule that was used; 0 rows where they are not counted."""
        if self.is_golden:
            return [(name, 0, text) for name, text in golden_rows.RULES.items()]
        used = Counter(rule for row in self.rows for rule in set(row.filled))
        return [(name, used[name], text) for name, text in published_rows.RULES.items() if used[name]]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the rows with the predictions as further columns, which replace columns of these names."""
        kept = [name for name in self.columns if name not in COLUMNS]
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, [*kept, *COLUMNS], extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows({name: row.cells.get(name) or "" for name in kept} | row.added() for row in self.rows)


def predict_table(path: str | os.PathLike[str]) -> PredictedTable:
    """Return the predictions of a CSV file. Raises ConfigError for a file of neither form, and OSError."""
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        columns = list(reader.fieldnames or ())
        table = PredictedTable(columns)
        if not table.is_golden and (missing := [name for name in PUBLISHED if name not in columns]):
            rule = "labkit predicts tables with the columns of published.csv or of megatron_golden.csv"
            raise ConfigError([f"has no column {', '.join(missing)}; {rule}"], source=os.fspath(path))
        try:
            rows = [{name: cell or "" for name, cell in row.items() if isinstance(name, str)} for row in reader]
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError([f"is not a CSV file: {error}"], source=os.fspath(path)) from None
    table.rows = [predicted_row(row, is_golden=table.is_golden) for row in rows]
    return table


def predicted_row(cells: Mapping[str, str], *, is_golden: bool) -> PredictedRow:
    """Return the prediction of one row, which depends on no other row."""
    try:
        return (_golden if is_golden else _published)(cells)
    except (ValueError, ArithmeticError, LookupError) as error:  # a model that no run could have
        reason = f"its values contradict each other: {error}"
        return PredictedRow(cells, cells["family" if is_golden else "source"], None, None, reason)


def _published(cells: Mapping[str, str]) -> PredictedRow:
    row = planned([cells])[0]
    step, memory, reason = _predicted(row.workload, row.machine)
    reason = row.not_expressible or ("" if step else reason)
    return PredictedRow(
        cells, row.source.partition(" Table")[0] or "no source", step, memory, reason,
        row.measured_seconds, row.specified, row.filled,
    )  # fmt: skip


def _golden(cells: Mapping[str, str]) -> PredictedRow:
    row = golden_row(cells)
    machine = _MACHINES[gpu_of(row.golden)] if row.workload else None
    step, memory, reason = _predicted(row.workload, machine)
    reason = row.not_expressible or ("" if memory else reason)
    seconds = measured(cells, "iteration_time_median_s")
    return PredictedRow(cells, row.family, step, memory, reason, seconds, False, golden=row)


def _predicted(workload: Workload | None, machine: str | None
               ) -> tuple[StepPrediction | None, DeviceMemory | None, str]:  # fmt: skip
    """Return step, memory, and why one of them is missing. The GPU's libraries are those of the machine."""
    step = memory = None
    reasons = []
    if workload is not None and machine is not None:
        try:
            step = predict_step(workload, load_machine(machine))
        except ValueError as error:
            reasons.append(f"time: {error}")
        try:
            memory = gpu_memory(on_machine(workload, load_machine(machine)))
        except ValueError as error:
            reasons.append(f"memory: {error}")
    return step, memory, "; ".join(reasons)


def time_errors(rows: Iterable[PredictedRow]) -> list[Errors]:
    """Return the errors of the step by source, of rows with a measurement, and of all rows that count."""
    compared = [row for row in rows if row.step and row.measured_seconds]
    groups = {name: [row for row in compared if row.group == name] for name in sorted({row.group for row in compared})}
    counted = [row for row in compared if row.specified]
    found = [_time_errors(name + _mark(each), each) for name, each in groups.items()]
    return [*found, _time_errors("all counted", counted)] if counted else found


def _mark(rows: list[PredictedRow]) -> str:
    return "" if any(row.specified for row in rows) else " (shown, not counted)"


def _time_errors(name: str, rows: list[PredictedRow]) -> Errors:
    errors, inside = [], []
    for row in rows:
        assert row.step is not None and row.measured_seconds is not None
        errors.append(abs(row.step.seconds / row.measured_seconds - 1))
        inside.append(row.step.low <= row.measured_seconds <= row.step.high)
    return Errors(name, len(rows), median(errors), fmean(errors), max(errors), fmean(inside))


def memory_errors(rows: Iterable[PredictedRow]) -> list[Errors]:
    """Return the errors of allocated and peak bytes by group, each configuration of golden rows counted once."""
    found = []
    for group, compared in sorted(compared_memory(row.golden for row in rows if row.golden is not None).items()):
        for name in ("allocated", "peak"):
            errors = [abs(getattr(memory, name) / getattr(each, name) - 1) for each, memory in compared]
            counts = len(errors), median(errors), fmean(errors), max(errors)
            found.append(Errors(f"{group}: {name}", *counts, math.nan))
    return found


def compared_memory(rows: Iterable[GoldenRow]) -> dict[str, list[tuple[Configuration, DeviceMemory]]]:
    """Return group -> its configurations, each with the memory that is predicted of it."""
    groups: dict[str, list[tuple[Configuration, DeviceMemory]]] = {}
    for each in configurations(rows):
        groups.setdefault(each.group, []).append((each, gpu_memory(each.workload)))
    return groups
