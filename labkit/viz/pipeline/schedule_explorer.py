"""The schedule explorer: timeline and memory of any known schedule, with controls in a live notebook."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.config import ScheduleConfig
from labkit.config.choices import SCHEDULES
from labkit.schedules.builders import build_schedule
from labkit.schedules.ir import Schedule
from labkit.schedules.simulator import Costs, Timeline, simulate
from labkit.viz.figure import Figure
from labkit.viz.live import LiveFigure, is_live, side_by_side, wide
from labkit.viz.pipeline.timeline import gantt


@dataclass
class _Axes:
    """Ends of the axes. The axes stay while the controls move, so that a reader can compare two pictures by eye. But a
    picture that does not fit doubles an axis."""

    time: float
    memory: float
    """End of the memory axis in microbatches, each with the activations of a rank's whole share of the model."""

    def hold(self, timeline: Timeline) -> None:
        """Make room for `timeline`."""
        while timeline.makespan > self.time:
            self.time *= 2
        while max(timeline.peak_memory) > self.memory:
            self.memory *= 2

    def fit(self, timeline: Timeline) -> None:
        """End the axes where `timeline` ends."""
        self.time, self.memory = timeline.makespan, max(timeline.peak_memory)


def _pieces(schedule: Schedule) -> float:
    """Return the number of stages per rank."""
    return schedule.num_stages / schedule.pp


def explore_schedule(
    *,
    builder: str = "1f1b",
    pp: int = 4,
    vpp: int = 2,
    microbatches: int = 8,
    group_size: int = 0,
    forward: float = 1.0,
    input_grad: float = 1.0,
    weight_grad: float = 1.0,
    message: float = 0.0,
) -> Any:
    """Draw timeline and memory of a schedule; in a live notebook add controls for everything that shapes them.

    builder: a name in `SCHEDULES` (`config/choices.py`). Only `interleaved` uses vpp and group_size (0: pp).
    forward, input_grad, weight_grad: time of one microbatch through a rank's whole share of the model. The stages of a
        rank divide this time equally, so that all schedules do the same work.
    message: time of a message between two ranks.

    Returns a Figure, or in a live notebook an ipywidgets box that shows the same figure first. The axes stay while the
    controls move. If the builder rejects a setting, its sentence is below the picture of the last setting that fit.
    """
    setting = {
        "builder": builder, "pp": pp, "vpp": vpp, "microbatches": microbatches, "group_size": group_size,
        "forward": forward, "input_grad": input_grad, "weight_grad": weight_grad, "message": message,
    }  # fmt: skip
    timeline = _simulated(setting)
    room = 1.5 if is_live() else 1.0
    axes = _Axes(time=room * timeline.makespan, memory=float(microbatches))
    axes.hold(timeline)
    figure = _schedule_picture(timeline, axes)
    return _schedule_controls(figure, setting, axes) if is_live() else figure


def _simulated(setting: dict[str, Any]) -> Timeline:
    """Build and simulate the schedule. Raises ValueError with one sentence if the builder rejects it."""
    config = ScheduleConfig(name=setting["builder"], microbatch_group_size=setting["group_size"] or None)
    vpp = setting["vpp"] if _interleaves(setting["builder"]) else 1
    schedule = build_schedule(config, pp=setting["pp"], vpp=vpp, microbatches=setting["microbatches"])
    share = 1 / _pieces(schedule)
    costs = Costs(
        forward=setting["forward"] * share,
        input_grad=setting["input_grad"] * share,
        weight_grad=setting["weight_grad"] * share,
        latency=setting["message"],
        activation=share,
    )
    return simulate(schedule, costs)


def _schedule_picture(timeline: Timeline, axes: _Axes) -> Figure:
    drawn = gantt(timeline, memory=True, time_limit=axes.time, memory_limit=axes.memory + 0.5)
    return Figure(drawn.fig, f"{drawn.sentence}, {timeline.makespan:.4g} units of time")


def _schedule_controls(figure: Figure, setting: dict[str, Any], axes: _Axes) -> Any:
    import ipywidgets as widgets

    shown, inputs = LiveFigure(figure), _schedule_inputs(setting)
    fit = widgets.Button(description="fit axes", tooltip="end the axes where this picture ends")

    def draw(given: dict[str, Any], move_axes: Callable[[Timeline], None] = axes.hold) -> Figure:
        _disable_unused(inputs)
        timeline = _simulated(given)
        move_axes(timeline)
        return _schedule_picture(timeline, axes)

    def fit_axes(_click: Any) -> None:
        setting = {name: control.value for name, control in inputs.items()}
        shown.try_to_show(lambda: draw(setting, axes.fit))

    shown.follow(inputs, draw)
    fit.on_click(fit_axes)
    sizes = [inputs[name] for name in ("builder", "pp", "vpp", "microbatches", "group_size")]
    times = [inputs[name] for name in ("forward", "input_grad", "weight_grad", "message")]
    return widgets.VBox([*shown.parts, side_by_side([widgets.VBox(sizes), widgets.VBox([*times, fit])])])


def _schedule_inputs(start: dict[str, Any]) -> dict[str, Any]:
    """Return a control for each entry of the setting, by its name."""
    import ipywidgets as widgets

    style = {"description_width": "130px"}
    look: dict[str, Any] = {"style": style, "layout": wide("420px")}
    counts = {"pp": 1, "vpp": 1, "microbatches": 1, "group_size": 0}
    most = {"pp": 8, "vpp": 4, "microbatches": 32, "group_size": 32}
    times = {"forward": 0.25, "input_grad": 0.25, "weight_grad": 0.25, "message": 0.0}
    inputs: dict[str, Any] = {
        "builder": widgets.Dropdown(options=tuple(SCHEDULES), value=start["builder"], description="builder", **look)
    }
    for name, least in counts.items():
        inputs[name] = widgets.IntSlider(
            value=start[name], min=least, max=max(most[name], start[name]), description=name, **look
        )
    for name, least in times.items():
        inputs[name] = widgets.FloatSlider(
            value=start[name], min=least, max=max(4.0, start[name]), step=0.25, description=name, **look
        )
    _disable_unused(inputs)
    return inputs


def _disable_unused(inputs: dict[str, Any]) -> None:
    """Grey out the controls that the chosen builder does not use."""
    for name in ("vpp", "group_size"):
        inputs[name].disabled = not _interleaves(inputs["builder"].value)


def _interleaves(builder: str) -> bool:
    """Return True if a schedule runs vpp chunks on each rank; False also for a name that `build_schedule` rejects."""
    return builder in SCHEDULES and SCHEDULES[builder].chunks is None
