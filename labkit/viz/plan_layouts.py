"""The best layouts of a plan: where their step goes, and memory against time with the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.plan.layouts import in_words
from labkit.plan.ranking import GB
from labkit.plan.search import Ranked
from labkit.viz.figure import Figure
from labkit.viz.machine_scaling import parts_bar, parts_legend
from labkit.viz.style import INK, color, new_figure, styled


def ranked_layouts(best: Sequence[Ranked], simulated: Sequence[Ranked], front: Sequence[Ranked]) -> Figure:
    """Draw the parts of the best layouts' steps as stacked bars, and next to them memory against time.

    simulated: further layouts for the second panel. front: layouts that are the fastest for the memory they need.
    """
    with styled():
        fig = new_figure(12.5, 2.0 + 0.36 * max(8, len(best)))
        bars, plane = fig.subplots(1, 2, width_ratios=(3, 2))
        _bars(bars, best)
        _plane(plane, best, simulated, front)
    winner, least = best[0], front[-1]
    first, last = (f"{in_words(each.row)}: {each.prediction.seconds:.4g} s and {each.memory.bytes / GB:.1f} GB on the "
                   "fullest rank" for each in (winner, least))  # fmt: skip
    sentence = f"Of {len(simulated)} simulated layouts the fastest is {first}; the front ends at {last}."
    return Figure(fig, sentence)


def _bars(axes: Any, best: Sequence[Ranked]) -> None:
    for place, each in enumerate(best):
        end = parts_bar(axes, place, each.prediction.parts)
        low, high = each.prediction.low, each.prediction.high
        axes.errorbar(each.prediction.seconds, place, xerr=[[end - low], [high - end]], color=INK, capsize=3, lw=1)
    axes.set_yticks(range(len(best)), [in_words(each.row).replace(",", " ") for each in best], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("seconds per step, with the 80 % interval")
    axes.set_title("where the step of the best layouts goes")
    patches = parts_legend([each.prediction.parts for each in best])
    axes.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.4, -0.14), ncols=4)


def _plane(axes: Any, best: Sequence[Ranked], simulated: Sequence[Ranked], front: Sequence[Ranked]) -> None:
    def points(layouts: Sequence[Ranked]) -> tuple[list[float], list[float]]:
        return [each.prediction.seconds for each in layouts], [each.memory.bytes / GB for each in layouts]

    fastest = best[0].prediction.seconds
    slowest = max(each.prediction.seconds for each in (*front, *best))
    near = [each for each in simulated if each.prediction.seconds <= slowest]
    axes.scatter(*points(near), s=14, color=color("wait"), label="simulated")
    axes.step(*points(front), where="post", color=color("backward"), lw=1.5, label="Pareto front")
    axes.scatter(*points(front), s=20, color=color("backward"))
    axes.scatter(*points(best), s=24, color=color("forward"), label=f"the best {len(best)}", zorder=3)
    margin = 0.05 * (slowest - fastest) or 0.05 * fastest
    axes.set_xlim(fastest - margin, slowest + margin)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds per step")
    axes.set_ylabel("GB on the fullest rank")
    axes.set_title("memory against time")
    axes.legend(loc="upper right")
