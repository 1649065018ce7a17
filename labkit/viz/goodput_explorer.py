"""The goodput explorer: how often to save on a cluster that fails, and where the rest of the time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from matplotlib.ticker import LogLocator, NullLocator

from labkit.plan.checkpoint_intervals import daly_interval, young_interval
from labkit.plan.cluster import Checkpoint, Cluster
from labkit.plan.goodput import SHARES, ClusterRun, Goodput, best_goodput, duration, interval_curve, simulate_goodput
from labkit.viz.figure import Figure
from labkit.viz.live import LiveFigure, is_live, wide
from labkit.viz.style import INK, SEQUENCE, color, handle, new_figure, styled

_LINES = {"yours": "-", "simulated best": "--", "Young (1974)": ":", "Daly (2006)": "-."}
"""Whose interval -> style of its line."""
_LOSSES = tuple(name for name in SHARES if name != "useful")
_STOPS: Mapping[str, tuple[float, ...]] = {
    "gpus": tuple(2**power for power in range(3, 18)),
    "gpu_mtbf_hours": (2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000),
    "checkpoint_seconds": (1, 2, 5, 10, 20, 30, 60, 120, 300, 600),
    "interval_minutes": (1, 2, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 480, 720, 1440),
}
"""Slider -> its values."""


@dataclass
class _Axes:
    """Ends of the axes. They only ever grow while the controls move, so that pictures can be compared by eye."""

    minutes: list[float] = field(default_factory=list)
    lost: float = 0.25

    def hold(self, curve: Sequence[Goodput], marked: Sequence[Goodput]) -> None:
        """Make room for a picture."""
        found = [each.interval / 60 for each in (*curve, *marked)]
        self.minutes = [min([*self.minutes, *found]), max([*self.minutes, *found])]
        while max(1 - each.goodput for each in marked) > self.lost and self.lost < 1:
            self.lost *= 2


def explore_goodput(
    *,
    gpus: int = 16384,
    gpu_mtbf_hours: float = 50_000,
    checkpoint_seconds: float = 30,
    interval_minutes: float = 30,
    communication: float = 0.1,
    cluster: Cluster | None = None,
) -> Any:
    """Draw goodput against the interval between checkpoints, and the losses at four intervals; in a live notebook add
    sliders.

    gpus: ranks of the run. gpu_mtbf_hours: mean hours between two failures of one GPU. checkpoint_seconds: a checkpoint
        blocks training for so long. interval_minutes: training between two checkpoints.
    communication: share of a step that is exposed communication, which jitters.
    cluster: the other constants, such as the time of a restart; its `gpu_mtbf_hours` does not matter.

    Returns a Figure, or in a live notebook an ipywidgets box: sliders above the same figure. Raises ConfigError for
    impossible values, and for a run that makes no progress; the live figure then shows the reason.
    """
    setting = {
        "gpus": gpus, "gpu_mtbf_hours": gpu_mtbf_hours, "checkpoint_seconds": checkpoint_seconds,
        "interval_minutes": interval_minutes,
    }  # fmt: skip
    axes = _Axes()

    def draw(given: dict[str, Any]) -> Figure:
        others = replace(cluster or Cluster(), gpu_mtbf_hours=given["gpu_mtbf_hours"])
        run = ClusterRun(int(given["gpus"]), Checkpoint(given["checkpoint_seconds"]), others, communication)
        return _picture(run, given["interval_minutes"] * 60, axes)

    figure = draw(setting)
    return LiveFigure(figure).panel(_sliders(setting), draw) if is_live() else figure


def _sliders(start: dict[str, Any]) -> dict[str, Any]:
    import ipywidgets as widgets

    look: dict[str, Any] = {"style": {"description_width": "160px"}, "layout": wide("460px")}
    return {
        name: widgets.SelectionSlider(
            options=[(f"{stop:,g}", stop) for stop in sorted({*stops, start[name]})], value=start[name],
            description=name, continuous_update=False, **look,
        )
        for name, stops in _STOPS.items()
    }  # fmt: skip


def _picture(run: ClusterRun, interval: float, axes: _Axes) -> Figure:
    blocking, curve = run.checkpoint.blocking, interval_curve(run)
    marked = {
        "yours": simulate_goodput(run, interval),
        "simulated best": best_goodput(run, curve),
        "Young (1974)": simulate_goodput(run, young_interval(blocking, run.mtbf)),
        "Daly (2006)": simulate_goodput(run, daly_interval(blocking, run.mtbf)),
    }
    axes.hold(curve, list(marked.values()))
    with styled():
        fig = new_figure(11.0, 4.2)
        left, right = fig.subplots(1, 2, width_ratios=(5, 4))
        _curve(left, curve, marked, axes)
        _bars(right, marked, axes)
    return Figure(fig, _sentence(run, marked))


def _sentence(run: ClusterRun, marked: Mapping[str, Goodput]) -> str:
    yours, best = marked["yours"], marked["simulated best"]
    others = ", ".join(f"{name} {duration(marked[name].interval)}" for name in ("Young (1974)", "Daly (2006)"))
    return (
        f"{run.gpus:,} GPUs fail every {duration(run.mtbf)}: with a checkpoint of {duration(run.checkpoint.blocking)} "
        f"every {duration(yours.interval)} the goodput is {yours.goodput:.1%}, and at the best interval of "
        f"{duration(best.interval)} it is {best.goodput:.1%} ({others})."
    )


def _curve(axes: Any, curve: Sequence[Goodput], marked: Mapping[str, Goodput], ends: _Axes) -> None:
    minutes = [each.interval / 60 for each in curve]
    low, high = [100 * each.low for each in curve], [100 * each.high for each in curve]
    axes.fill_between(minutes, low, high, color=color("graph_replay"), alpha=0.5, label="80 % of runs", linewidth=0)
    axes.plot(minutes, [100 * each.goodput for each in curve], color=color("forward"), lw=2, label="goodput")
    for name, each in marked.items():
        axes.axvline(each.interval / 60, color=INK, ls=_LINES[name], lw=1.6 if name == "yours" else 1.1,
                     label=f"{name}: {duration(each.interval)}, {each.goodput:.1%}")  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(*ends.minutes)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _place: f"{value:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, 100)
    axes.set_xlabel("minutes of training between two checkpoints")
    axes.set_ylabel("% of the time in useful steps")
    axes.set_title("goodput against the interval")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


def _bars(axes: Any, marked: Mapping[str, Goodput], ends: _Axes) -> None:
    for place, each in enumerate(marked.values()):
        left = 0.0
        for loss, fill in zip(_LOSSES, SEQUENCE, strict=False):
            width = 100 * each.shares[loss]
            axes.barh(place, width, left=left, color=fill, edgecolor=INK, linewidth=0.4, height=0.6)
            left += width
        axes.text(left, place, f" {left:.1f} %", va="center", fontsize=8)
    axes.set_yticks(range(len(marked)), list(marked))
    axes.invert_yaxis()
    axes.set_xlim(0, 100 * ends.lost)
    axes.set_xlabel("% of the time lost")
    axes.set_title("where the rest goes")
    patches = [handle(SHARES[loss], fill) for loss, fill in zip(_LOSSES, SEQUENCE, strict=False)]
    axes.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.4, -0.16), ncols=2)
