"""The foldings of arXiv 2504.14960, Tables 1 to 5: experts with a layout of their own on 64 to 1,024 H100."""

from __future__ import annotations

from scale_page.compared import Timed, named, planned_rows, stated_rows
from site_pages.tables import table

from labkit.plan.device_memory import gpu_memory
from labkit.plan.machine import load_machine
from labkit.plan.workload import Workload

ORDER = ("FSDP", "FSDP+EP", "TP+EP+DP", "MCore", "MCore folding")
"""Strategies in the paper's order."""
MODELS = ("Mixtral-8x22B", "Llama3-8x70B", "Qwen2-57B-A14B", "Mixtral-8x22B-G8T8")


def strategy(each: Timed) -> str:
    """Return a row's strategy: the beginning of its note."""
    return each.stated["note"].partition(";")[0]


def _place(each: Timed) -> tuple[int, int, int, int]:
    stated = each.stated
    return (MODELS.index(stated["model"]), ORDER.index(strategy(each)), int(stated["gpus"]), int(stated["seq"]))


def layout(workload: Workload) -> str:
    """Return a layout with that of the experts."""
    parallel = workload.config.parallel
    sizes = {"tp": parallel.tp, "cp": parallel.cp, "pp": parallel.pp, "vpp": parallel.vpp, "ep": parallel.ep,
             "etp": parallel.expert_tp}  # fmt: skip
    named_sizes = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    return f"{'FSDP,' if workload.fsdp else ''} {named_sizes}".strip() or "dp alone"


def foldings(prefix: str) -> str:
    """Rows of one of the paper's tables, by model, strategy and GPUs."""
    head = ("model", "strategy", "layout as planned", "GPUs", "sequence", "published / predicted", "peak GB, predicted",
            "error of the step")  # fmt: skip
    rows = []
    for each in sorted(named(prefix), key=_place):
        stated = each.stated
        assert each.row.workload is not None
        unit, rate = ("% MFU", float(stated["mfu_pct"])) if stated["mfu_pct"] else (
            "TFLOP/s", float(stated["tflops_gpu"]))  # fmt: skip
        rows.append([
            stated["model"], f"{strategy(each)}{' fp8' if 'fp8' in stated['precision'] else ''}",
            layout(each.row.workload), f"{int(stated['gpus']):,}", f"{int(stated['seq']):,}",
            f"{rate:.1f} / {rate * each.ratio:.1f} {unit}", f"{_peak(each.row.workload) / 1e9:.0f}", each.verdict,
        ])  # fmt: skip
    return table(head, rows)


def _peak(workload: Workload) -> int:
    """Return the bytes of the fullest rank at its peak."""
    return max(gpu_memory(workload, place).peak for place in range(workload.config.parallel.pp))


def too_large() -> str:
    """Return the rows whose predicted peak exceeds the GPU's memory, with what the paper says of them."""
    found = []
    for name, stated in stated_rows().items():
        row = planned_rows()[name]
        if not name.startswith("fold_") or row.workload is None or row.machine is None:
            continue
        peak = _peak(row.workload)
        if peak > load_machine(row.machine).memory_bytes:
            published = "out of memory" if stated["mfu_pct"] == "OOM" else f"{stated['mfu_pct']} % MFU"
            strategy_of = stated["note"].partition(";")[0]
            found.append([stated["model"], strategy_of, stated["gpus"], f"{peak / 1e9:.0f}", published])
    return table(("model", "strategy", "GPUs", "peak GB, predicted", "published"), found)
