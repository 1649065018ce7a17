"""The words of `labkit why`: its table, the nearest published run, and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.cli.output import table
from labkit.config.axis_sizes import sizes_in_words
from labkit.config.errors import counted
from labkit.plan.flops import step_flops
from labkit.plan.machine import Machine
from labkit.plan.nearest_run import FURTHEST, NearRun, family
from labkit.plan.waterfall import ROWS, Row, Waterfall
from labkit.plan.workload import Workload

_SHOWN = 1e-6
"""Share of the step below which a row is left out in both columns."""


def report(folder: Path, workload: Workload, machine: Machine, found: Waterfall, said: str, near: NearRun | None,
           notes: Sequence[str], width: int | None) -> list[str]:  # fmt: skip
    """Return the lines of the report."""
    lines = [said, "", _of(folder, workload, machine), _about_steps(found), ""]
    lines += table(_cells(found), right=(1, 2, 3, 4), width=width)
    lines += ["", *_joint_words(found)]
    lines += [f"note: {note}" for note in notes]
    return [*lines, "", *_near_words(workload, machine, found, near)]


def _of(folder: Path, workload: Workload, machine: Machine) -> str:
    words = ", ".join(filter(None, [counted(workload.world_size, "rank"), _axes(workload)]))
    return f"{folder}: {words}, {counted(workload.microbatches, 'microbatch')}; predicted for {machine.name}"


def _axes(workload: Workload) -> str:
    parallel = workload.config.parallel
    sizes = {"tp": parallel.tp, "cp": parallel.cp, "ep": parallel.ep, "pp": parallel.pp, "dp": workload.dp}
    return sizes_in_words({axis: size for axis, size in sizes.items() if size > 1})


def _layout(workload: Workload) -> str:
    """Return what decides the rate of a run beside its size: axes, batches, recomputation, precision, sharding."""
    train, model = workload.config.train, workload.config.model
    return ", ".join(filter(None, [
        _axes(workload) or "one of each axis", "FSDP" if workload.fsdp else "",
        f"micro batch {train.micro_batch_size}", f"global batch {train.global_batch_size}",
        f"recomputation {model.recompute_granularity}", workload.config.optim.precision, workload.software,
    ]))  # fmt: skip


def _about_steps(found: Waterfall) -> str:
    numbers = _ranges(found.steps)
    if len(found.steps) == 1:
        return f"measured: step {numbers}"
    low, high = found.ends
    middle = f"the middle half by time, which took {_seconds(low)} to {_seconds(high)}"
    return f"measured: mean of steps {numbers}, {middle} (median of all that count: {_seconds(found.median)})"


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers in ascending order as `3, 5 to 7`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in parts)


def _cells(found: Waterfall) -> list[list[str]]:
    together = {key for keys in found.joint for key in keys}
    shown = [
        _line(found, row, together)
        for row in found.rows
        if max(abs(row.predicted) / found.predicted, abs(row.measured) / found.measured) > _SHOWN
    ]
    head = ["", "predicted", "measured", "of the step", "more"]
    return [head, *shown, ["= step", *_numbers(found, found.predicted, found.measured)]]


def _line(found: Waterfall, row: Row, together: set[str]) -> list[str]:
    sign = "  " if row.key == "ideal" else "+ "
    cells = _numbers(found, row.predicted, row.measured)
    if row.key in together:
        cells[1] = f"~ {cells[1]}"
    return [f"{sign}{ROWS[row.key]}", *cells]


def _numbers(found: Waterfall, predicted: float, measured: float) -> list[str]:
    share = measured / found.measured
    return [_ms(predicted), _ms(measured), f"{_positive_zero(share, 3):.1%}", _ms(measured - predicted, "+")]


def _ms(seconds: float, sign: str = "") -> str:
    return f"{_positive_zero(seconds * 1e3, 2):{sign},.2f} ms"


def _positive_zero(value: float, digits: int) -> float:
    return round(value, digits) + 0.0


def _seconds(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


def _joint_words(found: Waterfall) -> list[str]:
    """Return what is measured of each set of rows that was measured together, unless another set has all of them."""
    sets = [set(keys) for keys in found.joint]
    alone = [keys for keys in found.joint if not any(set(keys) < other for other in sets)]
    return [line for keys in alone for line in _together(found, keys)]


def _together(found: Waterfall, keys: Sequence[str]) -> list[str]:
    """Return the sum of rows that was measured, and how it is split."""
    rows = [row for row in found.rows if row.key in keys]
    predicted, measured = _ms(sum(row.predicted for row in rows)), _ms(sum(row.measured for row in rows))
    names = ", ".join(ROWS[row.key] for row in rows)
    whole = [name for key, name in (("gemm", "GEMMs"), ("attention", "attention")) if key in keys]
    split = "  It is split in the predicted proportions" + (
        f" of whole times; a part of {' and '.join(whole)} is in the first row." if whole else "."
    )
    return [f"~ only the sum of these is measured: {measured}, predicted {predicted} ({names})", split]


def flops_per_rank(workload: Workload, seconds: float) -> float:
    """Return the model FLOP/s of one rank, all pairs of attention counted, as Megatron counts them."""
    config = workload.config
    flops = step_flops(config.model, samples=config.train.global_batch_size, moe=config.moe).total
    return flops / seconds / workload.world_size


def _near_words(workload: Workload, machine: Machine, found: Waterfall, near: NearRun | None) -> list[str]:
    ours = flops_per_rank(workload, found.measured) / 1e12
    if family(machine) is None:
        return [f"no published run is near: {machine.name} is not a GPU of which runs were published"]
    if near is None:
        rule = f"none of its GPU's family is within {FURTHEST:g} doublings of parameters, GPUs and sequence length"
        return [f"no published run is near: {rule} together; this run has {ours:.1f} TFLOP/s for each GPU"]
    assert near.row.workload is not None
    theirs, row = near.flops_per_gpu / 1e12, near.row
    there = f"{row.model} on {counted(near.row.workload.world_size, 'GPU')} of {row.machine} ({row.source})"
    doubt = [] if row.specified else ["  its source leaves out so much that a difference says little"]
    lines = [
        f"nearest published run: {row.id}, {there}, {near.distance:.1f} doublings away",
        f"  TFLOP/s for each GPU: {ours:.1f} here, {theirs:.1f} there",
        f"  layout there: {_layout(near.row.workload)}",
        f"  layout here:  {_layout(workload)}",
        *doubt,
    ]
    return lines + [f"  not stated there: {words}" for words in near.not_stated]


def as_json(workload: Workload, machine: Machine, found: Waterfall, said: str, near: NearRun | None,
            notes: Sequence[str]) -> dict[str, Any]:  # fmt: skip
    """Return the report as plain values, in seconds."""
    return {
        "said": said,
        "machine": machine.name,
        "ranks": workload.world_size,
        "steps": found.steps,
        "median_seconds": found.median,
        "predicted_seconds": found.predicted,
        "measured_seconds": found.measured,
        "rows": [{"row": row.key, "predicted": row.predicted, "measured": row.measured} for row in found.rows],
        "measured_together": [list(keys) for keys in found.joint],
        "flops_per_rank": flops_per_rank(workload, found.measured),
        "slowest_ranks": [
            {"rank": rank, "pipeline_rank": place, "over_peers": ratio} for rank, place, ratio in found.slowest[:8]
        ],
        "nearest": None if near is None else {
            "id": near.row.id,
            "source": near.row.source,
            "distance": near.distance,
            "flops_per_gpu": near.flops_per_gpu,
            "not_stated": near.not_stated,
        },
        "notes": list(notes),
    }  # fmt: skip
