"""The page's figures: the error of every row by source, and Figure 5 predicted next to what was published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.lines import Line2D
from scale_page.belief import by_source
from scale_page.compared import Timed, summary
from scale_page.megatron_tables import per_gpu, weak_scaling_rows

from labkit.viz.figure import Figure
from labkit.viz.machine_scaling import Rate, published_rates
from labkit.viz.style import INK, SEQUENCE, new_figure, styled

MARKS = {"fitted": ("x", SEQUENCE[1], SEQUENCE[1]), "kept out": ("o", SEQUENCE[0], SEQUENCE[0]),
         "kept out, source says too little": ("o", "none", SEQUENCE[0])}  # fmt: skip
"""Kind of a row -> mark, its face and its edge."""


def _kind(each: Timed) -> str:
    if each.fitted:
        return "fitted"
    return "kept out" if each.row.specified else "kept out, source says too little"


def errors() -> Figure:
    """Draw the error of every row, one line per source and GPU."""
    groups = by_source()
    names = [f"{source}, {gpu}" for source, gpu, _ in groups]
    with styled():
        fig = new_figure(8.0, 0.27 * len(groups) + 1.2)
        axes = fig.subplots()
        axes.axvspan(-10, 10, color="#F0F0F0", zorder=0)
        axes.axvline(0, color=INK, linewidth=0.8)
        for place, rows in enumerate(groups.values()):
            for kind, (mark, face, edge) in MARKS.items():
                found = [100 * each.error for each in rows if _kind(each) == kind]
                axes.plot(found, [place] * len(found), ls="", marker=mark, mfc=face, mec=edge, ms=4.5, mew=0.9,
                          alpha=0.8, zorder=4 if kind == "fitted" else 3)  # fmt: skip
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel("error of the predicted step (%); left: predicted too fast; grey: within 10 %")
        axes.legend(handles=_legend(), loc="upper center", bbox_to_anchor=(0.4, 1.0 + 0.9 / len(groups)), ncols=3)
    return Figure(fig, _sentence([each for rows in groups.values() for each in rows]))


def _sentence(rows: Sequence[Timed]) -> str:
    found = summary(each for each in rows if each.row.specified and not each.fitted)
    assert found is not None
    return (
        f"{found.count} rows of well-specified sources took no part in the fit: their median error is "
        f"{100 * found.median:.1f} %, the mean {100 * found.mean:.1f} %, the worst {100 * found.worst:.0f} %."
    )


def _legend() -> list[Any]:
    return [Line2D([], [], ls="", marker=mark, mfc=face, mec=edge, label=kind)
            for kind, (mark, face, edge) in MARKS.items()]  # fmt: skip


def weak_scaling() -> Figure:
    """Draw FLOP/s of a GPU in Figure 5: published as filled bars, predicted as outlines with their intervals."""
    rows = weak_scaling_rows()
    panels = {
        "model parallel": [_rate(each) for each in rows if _gpus(each) <= 8],
        "model parallel x 64 data parallel": [_rate(each) for each in rows if _gpus(each) > 8],
    }
    last = _rate(rows[-1])
    sentence = (f"Weak scaling of arXiv 1909.08053, Figure 5: on {_gpus(rows[-1])} V100 the paper reaches "
                f"{last.published:.1f} TFLOP/s per GPU, the model predicts {last.predicted:.1f}.")  # fmt: skip
    return published_rates(panels, unit="TFLOP/s per GPU,\nrecomputation counted",
                           below="V100 GPUs, about 1 billion parameters on each", sentence=sentence)  # fmt: skip


def _gpus(each: Timed) -> int:
    return int(each.stated["gpus"])


def _rate(each: Timed) -> Rate:
    published, predicted = (rate / 1e12 for rate in per_gpu(each))
    low, high = (predicted * each.step.seconds / end for end in (each.step.high, each.step.low))
    return Rate(f"{_gpus(each)}\n{each.row.model.removeprefix('GPT-2 ')}", published, predicted, low, high)
