"""Memory: the layouts of Table 1 of arXiv 1909.08053, and what others measured, by groups of configurations."""

from __future__ import annotations

import runpy
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from statistics import fmean
from typing import Any

from scale_page.compared import ROOT
from site_pages.tables import table

from labkit.config import presets
from labkit.plan.device_memory import DeviceMemory, gpu_memory
from labkit.plan.golden_rows import Configuration, GoldenRow, configurations, read_golden_rows
from labkit.plan.machine import load_machine
from labkit.plan.memory_need import CUDA_BYTES
from labkit.plan.row_predictions import compared_memory
from labkit.plan.stages import configured_schedule
from labkit.plan.workload import Libraries, Workload

ORACLES = ROOT / "tests" / "oracles"
SIZES = (1, 2, 4, 8)
"""Tensor-parallel sizes of Table 1."""


def table_1_peaks() -> dict[str, dict[int, int | None]]:
    """Return the peak of a rank for each model of Table 1 and each tp; None if tp does not divide the heads."""
    return {name: {tp: _peak(name, tp) for tp in SIZES} for name in presets.TABLE_1}


def _peak(name: str, tp: int) -> int | None:
    config = presets.table1(name)
    if config.model.heads % tp:
        return None
    config = config.replaced({"parallel.tp": tp, "model.attention_backend": "unfused"})
    run = Workload(config, tp, libraries=Libraries(gpu="v100"))
    return gpu_memory(run).peak


def room() -> float:
    """Return the bytes that tensors can have on a V100 of 32 GB: without those of a CUDA context."""
    return load_machine("v100").memory_bytes - CUDA_BYTES


def least_sizes() -> dict[str, int | None]:
    """Return the smallest tp with which each model fits; None if none does."""
    fits = {name: [tp for tp, peak in peaks.items() if peak is not None and peak <= room()]
            for name, peaks in table_1_peaks().items()}  # fmt: skip
    return {name: min(sizes, default=None) for name, sizes in fits.items()}


def table_1() -> str:
    """Table 1 as a question of memory: GB of a rank by tp, the smallest that fits, and what the paper took."""
    least = least_sizes()
    rows = []
    for name, peaks in table_1_peaks().items():
        cells = ["" if peak is None else f"{peak / 1e9:.1f}" for peak in peaks.values()]
        rows.append([f"GPT-2 {name}", *cells, str(least[name] or "none"), str(presets.TABLE_1[name].tp)])
    return table(("model", *(f"tp {tp}" for tp in SIZES), "smallest that fits", "paper"), rows)


@cache
def _golden() -> list[GoldenRow]:
    return read_golden_rows(ORACLES / "data" / "megatron_golden.csv")


def recorded_runs() -> str:
    """Errors of Megatron-LM's recorded runs by group, each configuration counted once."""
    lines = []
    for group, pairs in sorted(compared_memory(_golden()).items()):
        lines.append([group, str(len(pairs)), *_errors(pairs)])
    head = ("runs", "configurations", "after a step: mean error", "worst", "at the peak: mean error", "worst")
    return table(head, lines)


def _errors(pairs: Sequence[tuple[Configuration, DeviceMemory]]) -> list[str]:
    columns = (
        [memory.allocated / each.allocated - 1 for each, memory in pairs],
        [memory.peak / each.peak - 1 for each, memory in pairs],
    )
    return [cell for errors in columns for cell in _mean_and_worst(errors)]


def _mean_and_worst(errors: Sequence[float]) -> list[str]:
    sizes = [100 * abs(error) for error in errors]
    return [f"{fmean(sizes):.1f} %", f"{max(sizes):.1f} %"]


def recorded_counts() -> dict[str, int]:
    """Return how many rows there are, how many are compared, and how many are left out."""
    rows = _golden()
    compared = sum(len(each.rows) for each in configurations(rows))
    return {"rows": len(rows), "compared": compared, "configurations": len(configurations(rows)),
            "not expressible": sum(row.workload is None for row in rows)}  # fmt: skip


def recorded_left_out() -> str:
    """Why rows of the recorded runs are not compared."""
    rows = _golden()
    why = Counter[str]()
    for row in rows:
        reason = row.not_expressible or row.excluded
        why["repeats an earlier row" if reason.startswith("repeats ") else reason] += 1
    why.pop("", None)
    return table(("why a row is not compared", "rows"), [[reason, str(count)] for reason, count in why.most_common()])


def large_models() -> str:
    """Peaks of the fullest rank that others published: models on B200 cut to few layers, pipelines of A100."""
    given = runpy.run_path(str(ORACLES / "test_published_memory_oracle.py"))
    rows, error = given["ROWS"], given["error"]
    groups = {
        "Llama 70B and 405B cut to 12 and 4 layers, 8 B200 (SimuMax)": [error(row) / 100 for row in rows[:13]],
        "DeepSeek-V2 and V3 cut to 4 layers, 8 B200 (SimuMax)": [error(row) / 100 for row in rows[13:]],
    }
    names = {"1f1b": "1F1B", "interleaved": "1F1B-I", "zero_bubble_h1": "ZB-1p", "zbv": "ZB-V"}
    for schedule, name in names.items():
        found = [row for row in given["PIPELINES"] if row[0] == schedule]
        groups[f"pipelines of A100 under {name} (arXiv 2401.10241)"] = [
            _pipeline_error(row, given["in_a_pipeline"]) for row in found
        ]
    lines = [[name, str(len(errors)), *_mean_and_worst(errors)] for name, errors in groups.items()]
    return table(("runs", "configurations", "peak of the fullest rank: mean error", "worst"), lines)


def _pipeline_error(row: tuple[Any, ...], workload_of: Callable[..., Workload]) -> float:
    name, *sizes, measured = row
    run = workload_of(name, *sizes)
    order = configured_schedule(run.config, run.world_size)
    peak = max(gpu_memory(run, place, order).peak for place in range(run.world_size))
    return peak / 2**30 / measured - 1
