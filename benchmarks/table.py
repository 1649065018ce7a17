"""Write docs/benchmarks.md from benchmarks/results/*.json.

    python benchmarks/table.py

Nothing is typed by hand: a number in the document is a number in a file, and a rejected run shows its reason instead.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from provenance import code_in_words, machine_in_words

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "benchmarks.md"

HEAD = """# Benchmarks

These tables compare labkit with peers that compute the same thing. `make bench` repeats the measurements on a laptop,
`make gpu` on a GPU; `benchmarks/table.py` writes this page from `benchmarks/results/*.json`.

- Each row measures labkit and its peers in the same run, with at least 15 interleaved repetitions of each.
- A time is the median. A ratio is the median of the ratios of neighbouring repetitions: at 0.80, labkit takes 0.80 of
  the peer's time.
- A row is rejected if a median exceeds its minimum by more than 30%, or if other processes kept more than 0.2 cores
  busy meanwhile. Rows whose table names a load are older: they had a limit on the load average, which counts the
  benchmark's own threads too.
- Below each table you find how busy the machine was, the measured commit and the machine. The files contain the raw
  seconds of every repetition.
"""

MISSING_GPU = """
## One GPU

Never run on a GPU. `scripts/gpu_suite.sh` measures on one, and `python benchmarks/gpu.py --store build/gpu/rows.jsonl`
then adds the results to this page. [Fifteen minutes with a GPU](gpu.md) explains how.
"""

MISSING_NODE = """
## Several GPUs

Never run on several GPUs. On a node of eight, `torchrun --nproc-per-node 8 benchmarks/scaling.py` measures weak and
strong scaling over tp, pp, dp, cp and ep, each point beside the step that `labkit plan` predicts, and the transfers
between the GPUs. [A node](gpu.md#a-node-of-several-gpus) says how to add the results to this page.
"""


def number(value: Any) -> str:
    """A cell's text."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {number(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(number(item) for item in value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value).replace("|", "/")


BOOKKEEPING = (
    "case",
    "repetitions",
    "load",
    "load_limit",
    "others_cores",
    "others_limit",
    "noise",
    "raw_seconds",
    "median_ms",
    "ratio_to",
    "rejected",
    "part",
    "commit",
    "changed",
)


def others(row: dict[str, Any]) -> str:
    """What a row holds besides times."""
    return "; ".join(f"{key.replace('_', ' ')} {number(value)}" for key, value in row.items() if key not in BOOKKEEPING)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown lines: case, times, ratios, the rest."""
    lines = ["| case | median ms | ours / peer | also |", "|---|---|---|---|"]
    for row in rows:
        times = ", ".join(f"{name} {number(value)}" for name, value in row.get("median_ms", {}).items())
        ratios = ", ".join(f"{value:.2f} of {name}" for name, value in row.get("ratio_to", {}).items())
        lines.append(f"| {number(row['case'])} | {row.get('rejected', times)} | {ratios} | {others(row)} |")
    return lines


MEASURES = (
    ("others_cores", "others_limit", "Other processes kept at most {} cores busy"),
    ("load", "load_limit", "Load at most {}"),
)
"""How busy the machine was, in a row and in words: the key, its limit's key, and the sentence."""


def busy_in_words(rows: list[dict[str, Any]]) -> list[str]:
    """Lines with the most that the machine did around the rows that are quoted, and the limits they ran with."""
    quoted, lines = [row for row in rows if "rejected" not in row], []
    for key, limit_key, words in MEASURES:
        found = [row[key] for row in quoted if row.get(key) is not None]
        limits = sorted({row[limit_key] for row in quoted if key in row and limit_key in row})
        limit = f", limit {' or '.join(f'{value:g}' for value in limits)}" if limits else ""
        lines += [f"- {words.format(f'{max(found):g}')}{limit}."] if found else []
    return lines


def section(result: dict[str, Any]) -> str:
    """One benchmark's part of the document."""
    lines = [f"\n## {result['title']}\n", *table(result["rows"]), ""]
    lines += [f"- {note}" for note in result["notes"]]
    lines += busy_in_words(result["rows"])
    lines.append(f"- Measured {result['date']} at {code_in_words(result)} on {machine_in_words(result['machine'])}.")
    return "\n".join(lines) + "\n"


def document(folder: Path = RESULTS) -> str:
    """The whole text. Raises ValueError naming a file that is no result."""
    parts = [HEAD]
    paths = sorted(folder.glob("*.json"))
    for path in paths:
        try:
            parts.append(section(json.loads(path.read_text())))
        except (KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a benchmark result: {error!r}; run its benchmark again") from error
    if not any(path.stem.startswith("gpu") for path in paths):
        parts.append(MISSING_GPU)
    if not any(path.stem.startswith("scaling") for path in paths):
        parts.append(MISSING_NODE)
    return "".join(parts)


def main() -> None:
    """Write the document."""
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(document())
    print(f"written: {DOCUMENT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
