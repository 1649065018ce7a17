"""Controls for a live notebook: how the size of buckets, and what the link costs, decide what a backward hides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.parallel.bucket_plan import ParameterSpec, plan_buckets
from labkit.parallel.overlap import BackwardPiece, Link, predict_step
from labkit.viz.figure import Figure
from labkit.viz.overlap import overlap_gantt
from labkit.viz.widgets import is_live, spoken

_ROWS = 10
"""Rows for buckets, whatever their number: a picture that grows would push away what stands below it."""
_SLIDERS = {
    "bucket_mb": ("bucket size (MB)", -1.0, 3.0),
    "latency_us": ("latency (\u00b5s)", 0.0, 4.0),
    "gigabytes_per_second": ("bandwidth (GB/s)", -1.0, 3.0),
}
"""Setting -> (what its slider is called, powers of ten from which to which it goes)."""


@dataclass(frozen=True)
class _Model:
    """What the controls do not change."""

    parameters: Sequence[ParameterSpec]
    backward: Sequence[BackwardPiece]
    dp: int
    element_bytes: int

    def drawn(self, setting: dict[str, float], limit: float | None) -> Figure:
        """The step at these settings, with `limit` seconds of axis."""
        size = max(1, round(setting["bucket_mb"] * 1e6 / self.element_bytes))
        plan = plan_buckets(self.parameters, dp=self.dp, bucket_size=size)
        link = Link(setting["latency_us"] / 1e6, setting["gigabytes_per_second"] * 1e9)
        events = predict_step(plan, self.backward, link=link, element_bytes=self.element_bytes)
        name = f"buckets of {setting['bucket_mb']:.3g} MB or more"
        return overlap_gantt({name: events}, numbers=True, time_limit=limit, bucket_rows=_ROWS)


def explore_buckets(
    parameters: Sequence[ParameterSpec],
    backward: Sequence[BackwardPiece],
    *,
    dp: int = 8,
    bucket_mb: float = 32.0,
    latency_us: float = 50.0,
    gigabytes_per_second: float = 10.0,
    element_bytes: int = 4,
    time_limit: float | None = None,
) -> Any:
    """A predicted step with these buckets; in a live notebook with a slider for their size and for the link.

    parameters: in the order of registration. backward: its pieces (`labkit.parallel.overlap`). time_limit: seconds at
    which the axis ends and stays, so that pictures can be compared by eye.

    Returns a Figure, or in a live notebook an ipywidgets box: sliders, and below them the same figure. Its height does
    not change with the settings; of many buckets the first and the last are drawn.
    """
    model = _Model(parameters, backward, dp, element_bytes)
    start = {"bucket_mb": bucket_mb, "latency_us": latency_us, "gigabytes_per_second": gigabytes_per_second}
    figure = model.drawn(start, time_limit)
    return _controls(model, figure, start, time_limit) if is_live() else figure


def _controls(model: _Model, figure: Figure, start: dict[str, float], limit: float | None) -> Any:
    import ipywidgets as widgets

    picture = widgets.Image(value=figure.png, format="png")
    words = widgets.HTML(value=spoken(figure.sentence))
    look: dict[str, Any] = {"style": {"description_width": "160px"}, "layout": widgets.Layout(width="460px")}
    inputs = {
        name: widgets.FloatLogSlider(value=start[name], min=low, max=high, step=0.1, description=text, **look)
        for name, (text, low, high) in _SLIDERS.items()
    }

    def redraw(_change: Any) -> None:
        drawn = model.drawn({name: control.value for name, control in inputs.items()}, limit)
        picture.value, words.value = drawn.png, spoken(drawn.sentence)

    for control in inputs.values():
        control.observe(redraw, names="value")
    return widgets.VBox([*inputs.values(), words, picture])
