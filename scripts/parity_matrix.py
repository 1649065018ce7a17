"""Hold every layout and every schedule of the matrix against one process and write the table docs/parity.md.

.venv/bin/python scripts/parity_matrix.py            # all presets and dtypes, half an hour on two cores
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

from labkit.config import RunConfig, presets
from labkit.train import ParityReport, compare

TARGET = Path(__file__).parents[1] / "docs" / "parity.md"
STEPS = 10
LAYOUTS = [
    {"tp": tp, "pp": pp, "world_size": tp * pp * dp}
    for tp, pp, dp in product((1, 2, 4), (1, 2, 4), (1, 2))
    if 1 < tp * pp * dp <= 8
]
MICROBATCHES, SCHEDULE_STEPS = 8, 3
SCHEDULES = [
    {"schedule.name": "gpipe"},
    {"schedule.name": "1f1b"},
    {"schedule.name": "interleaved", "vpp": 2},
    {"schedule.name": "interleaved", "vpp": 4},
    {"schedule.name": "zero_bubble_h1"},
    {"schedule.name": "zbv"},
    {"schedule.name": "dualpipe_v"},
]
"""Every schedule that has a name."""
STAGES = [
    {"pp": 4, "pipeline_layout": "E t*4 | ttt | t*5 | t*4 L"},
    {"pp": 4, "pipeline_layout": "E | t*8 | t*8 | L"},
    {"pp": 2, "vpp": 4, "pipeline_layout": "E | (ttt|)*4 tt | tt | L"},
    {"pp": 2, "schedule.name": "zbv", "pipeline_layout": "E | t*9 | t*7 | L"},
    {"pp": 4, "schedule.name": "dualpipe_v", "pipeline_layout": "Et | (tt|)*2 t | (ttt|)*3 tL"},
    {"pp": 2, "tp": 2, "schedule.name": "zero_bubble_h1", "standalone_embedding_stage": True},
]
"""Stages of different sizes, standalone embedding and loss stages."""
TRANSFERS = [
    {"pp": 2, "vpp": 2, "overlap_p2p_comm": True, "microbatch_group_size": 4},
    *[
        {"pp": 2, **schedule, **transfer}
        for schedule in (SCHEDULES[2], SCHEDULES[5])
        for transfer in ({"batch_p2p_comm": True}, {"batch_p2p_comm": False}, {"variable_seq_lengths": True})
    ],
]
"""How tensors move between stages."""
PRESETS = {"tiny": "GPT-2's blocks, tied embeddings", "llama_tiny": "Llama's blocks, untied output"}

INTRODUCTION = f"""# Parity of all layouts with one process

Each row trains the same model for several optimizer steps under a layout, with one process per rank (gloo, CPU), and
in one process; same data, same seed. A difference is ‖a − b‖ / max(‖b‖, floor) on whole tensors, gathered over ranks,
the largest over all tensors of the first and the last step; the floor is 1e-6 of the global norm for gradients and
lr·√n for parameters. "First difference" is the first tensor, in the order of training, that differs by more than
rounding: 1e-10 in float64, 1e-5 in float32. Layouts run {STEPS} steps. Schedules run {SCHEDULE_STEPS}, with 16 layers
and {MICROBATCHES} microbatches, so that pp4 vpp4 is 16 stages of one layer. Written by `scripts/parity_matrix.py`;
`make sweep` asserts the same rows.
"""


def small(preset: str) -> RunConfig:
    """A preset with its kinds of blocks at sizes that 8 ranks on two cores train in seconds."""
    shape = {"layers": 4, "hidden": 32, "heads": 4, "seq_length": 16, "global_batch_size": 4}
    if preset == "llama_tiny":
        shape |= {"kv_heads": 4, "heads": 8, "ffn_hidden": 64}
    return presets.get(preset).override(shape)


def deep(preset: str, *, dp: int = 1) -> RunConfig:
    """`small` with 16 layers, which 16 stages can share, and 8 microbatches."""
    return small(preset).override({"layers": 16, "global_batch_size": MICROBATCHES * dp})


def schedule_layouts(dp: int = 1) -> list[dict[str, Any]]:
    """Every schedule under {pp2, pp4} x {tp1, tp2}, up to 8 ranks."""
    return [
        {"tp": tp, "pp": pp, "world_size": tp * pp * dp, **schedule}
        for schedule, pp, tp in product(SCHEDULES, (2, 4), (1, 2))
        if tp * pp * dp <= 8
    ]


SWEEPS: dict[str, tuple[RunConfig, list[dict[str, Any]], str]] = {
    "Schedules, tied embeddings": (deep("tiny"), schedule_layouts(), "float64"),
    "Schedules, tied embeddings, two replicas": (deep("tiny", dp=2), schedule_layouts(dp=2), "float64"),
    "Schedules, tied embeddings, float32": (deep("tiny"), schedule_layouts(), "float32"),
    "Schedules, untied output": (deep("llama_tiny"), schedule_layouts(), "float64"),
    "Stages": (deep("tiny"), STAGES, "float64"),
    "Transfers": (deep("tiny"), TRANSFERS, "float64"),
}
"""Title -> configuration, layouts, dtype; 16 layers and 8 microbatches on every replica."""


def section(title: str, about: str, report: ParityReport) -> str:
    """One table in Markdown."""
    head = (
        "| layout | ranks | loss | worst gradient | worst parameter | first difference |\n|---|---|---|---|---|---|\n"
    )
    rows = ""
    for row in report.rows:
        name = row.name.replace("|", "\\|")  # a layout's text has them, and so have tables
        numbers = (f"{difference:.1e}" for difference in (row.loss_diff, row.grad_diff, row.param_diff))
        rows += f"| {' | '.join([name, str(row.world_size), *numbers, row.first_difference or 'none'])} |\n"
    return f"\n## {title}\n\n{about}{report.sentence}\n\n{head}{rows}"


def main() -> int:
    """Run everything; exit code 1 if a layout differs."""
    text, ok = INTRODUCTION, True
    planned = [
        (f"{preset}, {dtype}", f"{PRESETS[preset]}. ", small(preset), LAYOUTS, STEPS, dtype)
        for preset, dtype in product(PRESETS, ("float64", "float32"))
    ]
    planned += [
        (title, "", config, layouts, SCHEDULE_STEPS, dtype) for title, (config, layouts, dtype) in SWEEPS.items()
    ]
    for title, about, config, layouts, steps, dtype in planned:
        report = compare(config, layouts, steps=steps, dtype=dtype, on_row=lambda row: print(row.name, flush=True))
        print(report, flush=True)
        text += section(title, about, report)
        ok = ok and report.ok
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(text, encoding="utf-8")
    print(f"wrote {TARGET.name}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
