"""Hold every layout of the matrix against one process and write the table docs/parity.md.

.venv/bin/python scripts/parity_matrix.py            # all presets and dtypes, a quarter of an hour on two cores
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

from labkit.config import RunConfig, presets
from labkit.train import ParityReport, compare

TARGET = Path(__file__).parents[1] / "docs" / "parity.md"
STEPS = 10
LAYOUTS = [
    {"tp": tp, "pp": pp, "world_size": tp * pp * dp}
    for tp, pp, dp in product((1, 2, 4), (1, 2, 4), (1, 2))
    if 1 < tp * pp * dp <= 8
]
PRESETS = {"tiny": "GPT-2's blocks, tied embeddings", "llama_tiny": "Llama's blocks, untied output"}

INTRODUCTION = f"""# Parity of all layouts with one process

Each row trains the same model for {STEPS} optimizer steps under a layout, with one process per rank (gloo, CPU), and
in one process; same data, same seed. A difference is ‖a − b‖ / max(‖b‖, floor) on whole tensors, gathered over ranks,
the largest over all tensors of the first and the last step; the floor is 1e-6 of the global norm for gradients and
lr·√n for parameters. "First difference" is the first tensor, in the order of training, that differs by more than
rounding: 1e-10 in float64, 1e-5 in float32. Written by `scripts/parity_matrix.py`; `make sweep` asserts the same rows.
"""


def small(preset: str) -> RunConfig:
    """A preset with its kinds of blocks at sizes that 8 ranks on two cores train in seconds."""
    shape = {"layers": 4, "hidden": 32, "heads": 4, "seq_length": 16, "global_batch_size": 4}
    if preset == "llama_tiny":
        shape |= {"kv_heads": 4, "heads": 8, "ffn_hidden": 64}
    return presets.get(preset).override(shape)


def section(preset: str, report: ParityReport) -> str:
    """One table in Markdown."""
    head = (
        "| layout | ranks | loss | worst gradient | worst parameter | first difference |\n|---|---|---|---|---|---|\n"
    )
    rows = "".join(
        f"| {row.name} | {row.world_size} | {row.loss_diff:.1e} | {row.grad_diff:.1e} | {row.param_diff:.1e} "
        f"| {row.first_difference or 'none'} |\n"
        for row in report.rows
    )
    return f"\n## {preset}, {report.dtype}\n\n{PRESETS[preset]}. {report.sentence}\n\n{head}{rows}"


def main() -> int:
    """Run everything; exit code 1 if a layout differs."""
    text, ok = INTRODUCTION, True
    for preset, dtype in product(PRESETS, ("float64", "float32")):
        report = compare(
            small(preset), LAYOUTS, steps=STEPS, dtype=dtype, on_row=lambda row: print(row.name, flush=True)
        )
        print(report, flush=True)
        text += section(preset, report)
        ok = ok and report.ok
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(text, encoding="utf-8")
    print(f"wrote {TARGET.name}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
