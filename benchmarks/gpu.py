"""What one GPU can show, in parts, beside the peers that a user would choose. G1 to G7 number the project's aims.

    python benchmarks/gpu.py --list                      # the parts
    python benchmarks/gpu.py NAME --out FILE.jsonl       # one part in this process; appends each row as it is measured
    python benchmarks/gpu.py --store FILE.jsonl ...      # such rows into results/gpu.json and docs/benchmarks.md

`scripts/gpu_suite.sh` runs all parts, each in a process of its own. Rows that were measured without git bear a hash of
the measured files; --store finds the commit that holds these files. Exit code 77: no GPU.

A part is a generator function without required arguments, written as `module:function`; NAME may also be that. It
yields `harness.Comparison` or finished rows, each with a `case`. `gpu_steps.rates` says what MFU is.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
import provenance

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # labkit, where it is not installed
USELESS = ("rejected", "could_not_run", "not_the_same")
"""Keys of a row that holds no number to quote."""
NEEDS_GPU = 77
"""Exit code where there is no GPU: skipped, neither measured nor failed."""

PARTS: dict[str, str] = {
    "gemm": "gpu_steps:gemm",
    "layer": "gpu_plain:layer",
    "gpt2": "gpu_plain:gpt2",
    "stack": "gpu_plain:stack",
    "step_phases": "gpu_profile:where",
    "loss_chunks": "gpu_loss:loss_chunks",
    "attention": "gpu_attention:attention",
    "fp8_layer": "gpu_precision:fp8_layer",
    "fp8_cast": "gpu_fp8_cast:fp8_cast",
    "precisions": "gpu_precision:precisions",
    "recomputation": "gpu_precision:recomputation",
    "grouped_gemm": "gpu_moe:grouped_gemm",
    "grouped_product": "gpu_moe_layers:grouped_product",
    "moe_layers": "gpu_moe_layers:moe_layers",
    "graphs": "gpu_graphs:dense",
    "partial_graphs": "gpu_graphs:experts_in_part",
    "graphs_equal_eager": "gpu_graphs:equality",
    "graph_peers": "gpu_replays:replays",
    "graph_pool": "gpu_graphs:pipeline_pool",
    "graph_memory": "gpu_graph_memory:graph_memory",
    "shared_tensor_parallel": "gpu_shared:tensor_parallel",
    "shared_pipeline": "gpu_shared:pipeline_parallel",
    "shared_reduction": "gpu_shared:overlapped_reduction",
}
"""Name -> module:function; a module that cannot be imported loses its own parts alone."""
NOTES = (
    "mfu is training's: the model's operations over the data sheet's dense rate in the type of its linear layers.",
    "mfu counts all S^2 pairs of attention, as Megatron (arXiv 2104.04473) and PaLM (arXiv 2204.02311) do.",
    "share_of_peak is of a kernel's own operations: attention counts the pairs that its mask leaves.",
    "share_of_gemm_rate is against a bf16 GEMM of the same process.",
)


def part_rows(name: str) -> Iterator[dict[str, Any]]:
    """Rows of a part, each as it is measured.

    Raises:
        ValueError: the name is no part.
    """
    module, _, function = PARTS.get(name, name).partition(":")
    if not function:
        raise ValueError(f"no part {name!r}; parts: {', '.join(PARTS)}")
    for found in getattr(importlib.import_module(module), function)():
        yield found.row() if isinstance(found, harness.Comparison) else dict(found)


def run_part(name: str, out: Path | None) -> None:
    """Measure one part and print its rows, or append them to `out`, each on disk before the next is measured."""
    origin = {"part": name, **provenance.origin()}
    for row in part_rows(name):
        line = json.dumps(origin | {"row": row})
        if out is None:
            print(line, flush=True)
            continue
        print(row["case"], *(f"{key}: {row[key]}" for key in USELESS if key in row), flush=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a+") as file:
            file.write("\n" * ends_inside_a_line(out) + line + "\n")
            file.flush()
            os.fsync(file.fileno())


def ends_inside_a_line(path: Path) -> bool:
    """Whether a writer was killed there."""
    return path.read_bytes()[-1:] not in (b"", b"\n")


# ---- what was measured, stored ----


def read_lines(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The lines of such files, with the commit that holds the measured files; a line that a kill cut off is left out.

    Raises:
        ValueError: there is no row.
    """
    lines = []
    for path in paths:
        for number, text in enumerate(path.read_text().splitlines(), 1):
            try:
                line = json.loads(text)
                lines.append({key: line[key] for key in ("part", *provenance.KEYS, "row")})
            except (json.JSONDecodeError, KeyError, TypeError):
                print(f"{path}, line {number} is no row and is left out", file=sys.stderr)
    if not lines:
        raise ValueError("there is no row to store; run scripts/gpu_suite.sh on a GPU first")
    try:
        commits = {name: provenance.commit_of(name) for name in {line["commit"] for line in lines}}
    except subprocess.SubprocessError as error:
        raise ValueError("store rows in a checkout with git, which finds the commit that was measured") from error
    for name in sorted(set(commits.values())):
        if name.startswith(provenance.UNKNOWN):
            print(f"no commit of this repository holds the files that were measured: {name}", file=sys.stderr)
    return [line | {"commit": commits[line["commit"]]} for line in lines]


def worth_keeping(row: Mapping[str, Any], before: Mapping[str, Any] | None) -> bool:
    """Whether a row replaces the one before: not where it lost the number that there was."""
    return before is None or not any(key in row and key not in before for key in USELESS)


def store(paths: Sequence[Path], name: str = "gpu") -> Path:
    """Merge rows into results/NAME.json and write docs/benchmarks.md; a row replaces that of the same part and case,
    unless only the older one holds a number.

    Raises:
        ValueError: the rows are of several machines, or the file is of another machine; NAME is not gpu or gpu_...
    """
    if not re.fullmatch(r"gpu(_\w+)?", name):
        raise ValueError(f"--as {name!r}: give gpu, or gpu_ and a name")
    lines = read_lines(paths)
    machine, path = lines[0]["machine"], harness.RESULTS / f"{name}.json"
    stored = json.loads(path.read_text()) if path.exists() else {"machine": machine, "rows": []}
    if stored["machine"] != machine:
        raise ValueError(f"{path} is of another machine, {stored['machine']}; store these rows --as gpu_NAME")
    for line in lines:
        if line["machine"] != machine:
            raise ValueError(f"rows of two machines, {machine} and {line['machine']}: store each in a file of its own")
    rows = {(row.get("part"), row["case"]): row for row in stored["rows"]}
    for line in lines:
        key = line["part"], line["row"]["case"]
        if worth_keeping(line["row"], rows.get(key)):
            rows[key] = line["row"] | {key: line[key] for key in ("part", "commit", "changed")}
    order = {part: number for number, part in enumerate(PARTS)}
    found = sorted(rows.values(), key=lambda row: order.get(row.get("part", ""), len(order)))
    title = "One GPU" if name == "gpu" else f"One GPU, {name.removeprefix('gpu').strip('_-')}"
    latest = max(lines, key=lambda line: line["date"])
    origin = {key: latest[key] for key in provenance.KEYS}
    return harness.write_result({"benchmark": name, "title": title, **origin, "rows": found, "notes": list(NOTES)})


def main() -> int:
    """Measure one part, store, or list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", metavar="NAME", help="the part to measure in this process")
    parser.add_argument("--list", action="store_true", help="print the parts and stop")
    parser.add_argument("--out", type=Path, help="the file that rows are appended to")
    parser.add_argument("--store", type=Path, nargs="+", metavar="FILE", help="files of rows to store")
    parser.add_argument("--as", dest="name", default="gpu", help="with --store: the result's name, gpu or gpu_...")
    options = parser.parse_args()
    if options.list:
        print(*(f"{name:<24} {where}" for name, where in PARTS.items()), sep="\n")
        return 0
    try:
        if options.store:
            print(f"written: {store(options.store, options.name)}")
            return 0
        if options.part is None:
            raise ValueError("give the NAME of a part, --list or --store; scripts/gpu_suite.sh runs them all")
        if options.part not in PARTS and ":" not in options.part:
            raise ValueError(f"no part {options.part!r}; parts: {', '.join(PARTS)}")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    import torch

    if not torch.cuda.is_available() and options.part in PARTS:
        print(
            "needs a GPU: torch sees no CUDA device here (PYTHONPATH=. python -m labkit doctor says why)",
            file=sys.stderr,
        )
        return NEEDS_GPU
    run_part(options.part, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
