"""Communication during computation: one rank's backward, the buckets that leave it, and the exposed time.

Predicted and measured runs look alike and share one axis, so that a reader can compare them by eye.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.patches import Patch, Rectangle

from labkit.events import Event, shift_to_zero
from labkit.parallel.data_parallel.bucket_layout import ParameterSpec, plan_buckets
from labkit.plan.overlap import COMPUTES, BackwardPiece, BucketSize, Link, exposed_seconds, predict_step
from labkit.viz.figure import Figure
from labkit.viz.live import LiveFigure, is_live, wide
from labkit.viz.style import color, handle, hatch, legend_patches, new_figure, nth_color, styled

_ROW = 0.27
"""Inches per row."""
_MANY = 12
"""Most buckets that all have a name; of more buckets only the first and the last have names."""
_OUTLINE: dict[str, Any] = {"fill": False, "edgecolor": "#000000", "linewidth": 1.3, "zorder": 3}
"""Look of what is predicted."""
QUEUED = "#F7DCCB"
"""Colour of a bucket that has left while the link still carries the bucket before it."""


@dataclass(frozen=True)
class _Run:
    """One rank's Events of one step, with times from 0."""

    name: str
    computes: list[Event]
    buckets: list[Event]
    waits: list[Event]
    exposed: float

    @property
    def phase(self) -> str:
        """Name of the last computation, whose end the dashed line marks."""
        return "forward" if all(event.kind == "forward" for event in self.computes) else "backward"

    @property
    def transfer(self) -> str:
        """Word for a collective of this run."""
        gathers = [event.name.startswith("all_gather") for event in self.buckets]
        return "gather" if gathers and all(gathers) else "reduction"

    @property
    def compute_end(self) -> float:
        return max(event.end for event in self.computes)

    @property
    def end(self) -> float:
        return max(event.end for event in (*self.computes, *self.buckets))

    @property
    def early(self) -> int:
        """Number of buckets that leave before the last computation ends."""
        return sum(event.start < self.compute_end for event in self.buckets)

    def on_the_link(self, row: int) -> float:
        """Return each bucket's start on the link, one bucket after another; a wait too short to see counts as none."""
        start, free = self.buckets[row].start, self.buckets[row - 1].end if row else 0.0
        return free if free - start > 1e-3 * self.end else start


def overlap_gantt(
    runs: Mapping[str, Iterable[Event]],
    *,
    numbers: bool = False,
    time_limit: float | None = None,
    bucket_rows: int | None = None,
    outlines: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Figure:
    """Draw steps of one rank: its computations, and below a row for each reduction from start to end.

    All reductions share one link. A reduction is pale until the reduction before it ends. Gathers of parameters during
    a forward are drawn in the same way.

    runs: name -> Events of one rank during one step; collectives are drawn in the order of their start.

    numbers: put the exposed milliseconds into the sentence (measured ones change from run to run).

    time_limit: seconds at which the axis ends, with a mark where a run goes on; None fits the picture.

    bucket_rows: number of rows that each run has for its reductions, at least 3. A fixed number gives all pictures one
    height; of more reductions the first and the last are drawn. None takes a row for each reduction.

    outlines: name of a run -> the predicted (start, end) of each of its reductions, in seconds from its first
    computation on, drawn as outlines over the measured ones.

    The sentence says for each run how many reductions start before the backward ends. Raises ValueError for a run that
    computes nothing, and for fewer than 3 bucket_rows.
    """
    if bucket_rows is not None and bucket_rows < 3:
        raise ValueError(f"bucket_rows is {bucket_rows}: give 3 or more, for the first, the last and those between")
    steps = [_run(name, events) for name, events in runs.items()]
    heights = [1 + (len(step.buckets) if bucket_rows is None else bucket_rows) for step in steps]
    outlines = outlines or {}
    last = [*(step.end for step in steps), *(end for pairs in outlines.values() for _, end in pairs)]
    end = max(last) if time_limit is None else time_limit
    with styled():
        fig = new_figure(9.0, 1.0 + _ROW * (sum(heights) + len(steps)))
        axes = fig.subplots()
        ticks: list[tuple[float, str]] = []
        top = 0.0
        for step, height in zip(steps, heights, strict=True):
            ticks += _draw_run(axes, step, top, height - 1)
            for row, (start, stop) in enumerate(outlines.get(step.name, ()), start=1):
                axes.add_patch(Rectangle((start * 1e3, top + row + 0.08), (stop - start) * 1e3, 0.84, **_OUTLINE))
            if step.end > end:
                axes.text(1.0, top + 0.5, f"to {step.end * 1e3:,.0f} ms \u25b6", transform=axes.get_yaxis_transform(),
                          ha="right", va="center", fontsize=8, bbox={"facecolor": "#FFFFFF", "pad": 1.5})  # fmt: skip
            top += 1 + height
        _finish(axes, ticks, top - 1, end, steps[0].phase)
        handles = _handles(steps) + ([Patch(label="predicted", **_OUTLINE)] if outlines else [])
        fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return Figure(fig, "; ".join(_words(step, numbers) for step in steps) + ".")


def _handles(steps: Sequence[_Run]) -> list[Patch]:
    """Return the legend: the kinds that occur, and the queue if there is one."""
    kinds = [k for k in ("forward", "backward", "collective", "wait") if any(_has(step, k) for step in steps)]
    handles = legend_patches(kinds)
    if any(step.on_the_link(row) > step.buckets[row].start for step in steps for row in range(len(step.buckets))):
        handles.append(handle("queued after the previous bucket", QUEUED))
    return handles


def _run(name: str, events: Iterable[Event]) -> _Run:
    found = shift_to_zero(event for event in events if event.kind in (*COMPUTES, "collective", "wait"))
    computes = [event for event in found if event.kind in COMPUTES]
    if not computes:
        raise ValueError(f"{name}: nothing was computed in {len(found)} Events; give those of a rank's whole step")
    buckets, waits = ([event for event in found if event.kind == kind] for kind in ("collective", "wait"))
    return _Run(name, computes, buckets, waits, exposed_seconds(found))


def _has(step: _Run, kind: str) -> bool:
    return any(event.kind == kind for event in (*step.computes, *step.buckets, *step.waits))


def _draw_run(axes: Any, step: _Run, top: float, rows: int) -> list[tuple[float, str]]:
    """Draw the bars of one run from row `top` on; return (height, label) of its rows."""
    for event in (*step.computes, *step.waits):
        _bar(axes, event, top)
    drawn = _drawn(len(step.buckets), rows)
    for row, bucket in enumerate(drawn, start=1):
        if bucket is not None:
            _draw_bucket(axes, step, bucket, top + row)
    edge = step.compute_end * 1e3
    axes.plot([edge, edge], [top, top + 1 + len(drawn)], color="#333333", lw=1.0, ls=(0, (4, 2)))
    axes.text(0, top - 0.12, step.name, fontsize=9, ha="left", va="bottom")
    named = [(row, bucket) for row, bucket in enumerate(drawn) if len(drawn) <= _MANY or row in (0, len(drawn) - 1)]
    hidden = len(step.buckets) - sum(bucket is not None for bucket in drawn)
    noun = "gather" if step.transfer == "gather" else "bucket"
    labels = [f"{hidden} more" if bucket is None else f"{noun} {bucket}" for _, bucket in named]
    return [(top + 0.5, "computes"), *((top + 1.5 + row, text) for (row, _), text in zip(named, labels, strict=True))]


def _drawn(count: int, rows: int) -> list[int | None]:
    """Return the bucket that is drawn in each row; None is the row that stands for those left out."""
    if count <= rows:
        return list(range(count))
    last = (rows - 1) // 2
    return [*range(rows - 1 - last), None, *range(count - last, count)]


def _draw_bucket(axes: Any, step: _Run, bucket: int, row: float) -> None:
    event, begins = step.buckets[bucket], step.on_the_link(bucket)
    if begins > event.start:
        axes.broken_barh([(event.start * 1e3, (begins - event.start) * 1e3)], (row + 0.08, 0.84),
                         facecolor=QUEUED, edgecolor="#555555", linewidth=0.6)  # fmt: skip
    _bar(axes, replace(event, start=begins), row)


def _bar(axes: Any, event: Event, row: float) -> None:
    axes.broken_barh([(event.start * 1e3, event.duration * 1e3)], (row + 0.08, 0.84), facecolor=color(event.kind),
                     hatch=hatch(event.kind), edgecolor="#FFFFFF" if event.kind in COMPUTES else "#555555",
                     linewidth=0.6)  # fmt: skip


def _finish(axes: Any, ticks: list[tuple[float, str]], bottom: float, end: float, phase: str) -> None:
    axes.set_ylim(bottom + 0.1, -0.9)
    axes.set_xlim(0, 1.01 * end * 1e3)
    axes.set_yticks([height for height, _ in ticks], [text for _, text in ticks])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"time (ms); the dashed line is the end of the {phase}")


def _words(step: _Run, numbers: bool) -> str:
    count, when = len(step.buckets), f"before the {step.phase} ends"
    early = step.early
    if step.transfer == "gather":
        when = "after the first has arrived"
        early = sum(event.start >= step.buckets[0].end for event in step.buckets)
    which = "none starts" if not early else "it starts" if count == 1 else f"{early} of them start"
    noun = step.transfer if count == 1 else f"{step.transfer}s"
    text = f"{step.name}: {count} {noun}, {which}{'s' if early == 1 and count > 1 else ''} {when}"
    return f"{text}, {step.exposed * 1e3:.1f} ms exposed" if numbers else text


# ---- bucket size ----


def bucket_size_curve(
    swept: Mapping[str, Sequence[BucketSize]], *, element_bytes: int = 4, title: str = "Exposed communication"
) -> Figure:
    """Draw the exposed time over the bucket size, one curve per name, each with its best size marked.

    The sentence gives each curve's best size, and what one bucket of everything exposes. Raises ValueError without
    curves, or for an empty one.
    """
    if not swept or not all(swept.values()):
        raise ValueError("bucket_size_curve needs at least one curve with at least one size")
    with styled():
        fig = new_figure(7.2, 3.6)
        axes = fig.subplots()
        for number, (name, points) in enumerate(swept.items()):
            _draw_curve(axes, number, name, points, element_bytes)
        axes.set(xscale="log", xlabel="bucket size (MB)", ylabel="exposed (ms)")
        axes.set_ylim(0)
        axes.set_title(title, loc="left")
        axes.grid(axis="y")
        fig.legend(loc="outside lower center", ncols=2)
    words = "; ".join(f"{name}: {_compared(points, element_bytes)}" for name, points in swept.items())
    return Figure(fig, f"{title}, the best and the largest size: {words}.")


def _best(points: Sequence[BucketSize]) -> BucketSize:
    """Return the size that exposes least; of equal ones the largest, because it needs the fewest collectives."""
    return min(points, key=lambda point: (point.exposed, -point.size))


def _draw_curve(axes: Any, number: int, name: str, points: Sequence[BucketSize], element_bytes: int) -> None:
    shade, style, best = nth_color(number), ("-", "--", ":", "-.")[number % 4], _best(points)
    megabytes = [point.size * element_bytes / 1e6 for point in points]
    label = f"{name}: least with {_buckets(best.buckets)}"
    axes.plot(megabytes, [point.exposed * 1e3 for point in points], style, color=shade, label=label, lw=1.8)
    axes.plot(best.size * element_bytes / 1e6, best.exposed * 1e3, "o", color=shade, ms=7)


def _compared(points: Sequence[BucketSize], element_bytes: int) -> str:
    best, last = _best(points), points[-1]
    least = f"{best.exposed * 1e3:.1f} ms with {_buckets(best.buckets)} of {best.size * element_bytes / 1e6:.3g} MB"
    return f"{least} or more, {last.exposed * 1e3:.1f} ms with {_buckets(last.buckets)}"


def _buckets(count: int) -> str:
    return f"{count} bucket{'' if count == 1 else 's'}"


# ---- controls ----

_BUCKET_ROWS = 10
"""Rows for buckets, however many there are, because a growing picture would push the page below it away."""
_SLIDERS = {
    "bucket_mb": ("bucket size (MB)", -1, 3),
    "latency_us": ("latency (\u00b5s)", 0, 4),
    "gigabytes_per_second": ("bandwidth (GB/s)", -1, 3),
}
"""Setting -> (label of its slider, smallest and largest power of ten)."""
_STOPS = (1, 2, 3, 4, 5, 6, 8)
"""Stops of a slider in each power of ten. They are round numbers, but the one that the caller gave stays as it is."""


@dataclass(frozen=True)
class _Model:
    """Inputs that no control changes."""

    elements: Mapping[str, int]
    backward: Sequence[BackwardPiece]
    dp: int
    element_bytes: int

    def drawn(self, setting: dict[str, float], limit: float | None) -> Figure:
        """Draw the step at these settings, with `limit` seconds on the axis."""
        size = max(1, round(setting["bucket_mb"] * 1e6 / self.element_bytes))
        parameters = [ParameterSpec(name, numel) for name, numel in self.elements.items()]
        plan = plan_buckets(parameters, dp=self.dp, bucket_size=size)
        link = Link(setting["latency_us"] / 1e6, setting["gigabytes_per_second"] * 1e9)
        events = predict_step(plan, self.backward, link=link, element_bytes=self.element_bytes)
        name = f"buckets of {setting['bucket_mb']:.3g} MB or more"
        return overlap_gantt({name: events}, numbers=True, time_limit=limit, bucket_rows=_BUCKET_ROWS)


def explore_buckets(
    elements: Mapping[str, int],
    backward: Sequence[BackwardPiece],
    *,
    dp: int = 8,
    bucket_mb: float = 32.0,
    latency_us: float = 50.0,
    gigabytes_per_second: float = 10.0,
    element_bytes: int = 4,
    time_limit: float | None = None,
) -> Any:
    """Draw a predicted step with these buckets; in a live notebook add sliders for their size and for the link.

    elements: parameter -> its size, in the order of registration. backward: its pieces (`labkit.plan.overlap`).

    time_limit: seconds at which the axis always ends, so that pictures can be compared by eye.

    Returns a Figure, or in a live notebook an ipywidgets box: sliders above the same figure. The height of the figure
    does not change with the settings; of many buckets the figure shows the first and the last.
    """
    model = _Model(elements, backward, dp, element_bytes)
    start = {"bucket_mb": bucket_mb, "latency_us": latency_us, "gigabytes_per_second": gigabytes_per_second}
    figure = model.drawn(start, time_limit)
    return _controls(model, figure, start, time_limit) if is_live() else figure


def _stops(start: float, low: int, high: int) -> list[float]:
    """Return the values of a slider, with `start` among them."""
    powers = (float(f"{stop}e{power}") for power in range(low, high) for stop in _STOPS)
    return sorted({*powers, float(f"1e{high}"), start})


def _controls(model: _Model, figure: Figure, start: dict[str, float], limit: float | None) -> Any:
    import ipywidgets as widgets

    look: dict[str, Any] = {"style": {"description_width": "160px"}, "layout": wide("460px")}
    inputs = {
        name: widgets.SelectionSlider(
            options=[(f"{stop:g}", stop) for stop in _stops(start[name], low, high)], value=start[name],
            description=text, continuous_update=False, **look,
        )
        for name, (text, low, high) in _SLIDERS.items()
    }  # fmt: skip
    return LiveFigure(figure).panel(inputs, lambda setting: model.drawn(setting, limit))
