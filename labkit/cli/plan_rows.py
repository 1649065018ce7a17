"""`labkit plan --rows FILE`: predict every row of a table of runs, and print errors by source."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from labkit.cli.arguments import Arguments
from labkit.cli.output import room, show, table
from labkit.cli.written_files import output_problems
from labkit.config import RunConfig
from labkit.config.errors import counted, no_file, shown
from labkit.output_files import appearing
from labkit.plan.row_predictions import Errors, PredictedTable, memory_errors, predict_table, time_errors

_IDLE = (
    "machine", "gpus", "only", "why", "measured", "software", "reserve", "megatron_args", "hf", "write_megatron",
    "plot", "goodput", "cluster",
)  # fmt: skip
_MOST_REASONS = 12
"""Reasons that are printed; the file has all."""


def predict_rows(arguments: Arguments) -> int:
    """Predict the table, write it with the predictions, and print errors, coverage, rules and reasons."""
    options = arguments.options
    rule = "a row of a table has its own; leave it out"
    problems = [f"--{name.replace('_', '-')}: {rule}" for name in _IDLE if options[name] not in (None, False)]
    if options["config"] or options["preset"] or arguments.config != RunConfig():
        problems.append(f"--rows: fields, presets and files of a configuration do not matter: {rule}")
    arguments.refuse([*problems, *output_problems("--out", options["out"])])
    try:
        found = predict_table(options["rows"])
    except OSError as error:
        text = no_file(options["rows"]) if isinstance(error, FileNotFoundError | IsADirectoryError) else error.strerror
        arguments.refuse([f"--rows {shown(options['rows'], 200)}: {text}"])
        raise
    if options["out"] is not None:
        with appearing(options["out"]) as draft:
            found.write(draft)
    errors = {"time": time_errors(found.rows), "memory": memory_errors(found.rows)}
    if options["json"]:
        print(json.dumps(_as_json(found, errors)))
    else:
        show("\n".join(_text(found, errors, options["out"])))
    return 0


def _text(found: PredictedTable, errors: dict[str, list[Errors]], out: str | None) -> list[str]:
    expressible = sum(not row.not_expressible for row in found.rows)
    lines = [f"{counted(len(found.rows), 'row')}, {expressible} expressible"]
    if found.is_golden:
        lines += ["", "memory of the last rank, each configuration once (median of its rows):"]
        lines += _table(errors["memory"])
        lines += ["", "step, which in these tests is mostly the host's; shown, and never counted:"]
        lines += _table(errors["time"])
    else:
        lines += ["", "step:", *_table(errors["time"])]
    lines += ["", "what rows leave out is filled in:"]
    for name, count, text in found.rules:
        rows = f" ({counted(count, 'row')})" if count else ""
        lines.append(f"  {name}{rows}: {text}")
    reasons = Counter(row.not_expressible for row in found.rows if row.not_expressible)
    if reasons:
        lines += ["", "not expressible:"]
        lines += [f"  {counted(count, 'row')}: {reason}" for reason, count in reasons.most_common(_MOST_REASONS)]
        left = len(reasons) - _MOST_REASONS
        lines += [f"  and {counted(left, 'more reason')}: --out FILE.csv has all"] if left > 0 else []
    return [*lines, *(["", f"written: {out}"] if out else [])]


def _table(errors: Sequence[Errors]) -> list[str]:
    if not errors:
        return ["  no row states a measurement"]
    rows = [["", "n", "median", "mean", "worst", "inside the interval"]]
    rows += [
        [f"  {each.group}", str(each.rows), *(f"{value:.1%}" for value in each[2:5]),
         "" if math.isnan(each.inside) else f"{each.inside:.0%}"]
        for each in errors
    ]  # fmt: skip
    return table(rows, right=(1, 2, 3, 4, 5), width=room())


def _as_json(found: PredictedTable, errors: dict[str, list[Errors]]) -> dict[str, Any]:
    plain = {
        name: [{key: None if value != value else value for key, value in each._asdict().items()} for each in group]
        for name, group in errors.items()
    }
    return {
        "rows": [{"group": row.group, "measured_step_s": row.measured_seconds, **row.added()} for row in found.rows],
        "errors": plain,
        "rules": [{"rule": name, "rows": count, "text": text} for name, count, text in found.rules],
    }
