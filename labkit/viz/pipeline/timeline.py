"""Timelines of a pipeline: predicted, measured, or both on one axis; a row per pipeline rank, time to the right.

Computations fill the row of a rank, labelled by direction and microbatch (`F0`). Waits and transfers are a strip under
the computations. What stays empty is the bubble. A panel below can show the activations in flight on the same axis.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes

from labkit.config.errors import counted
from labkit.events import Event
from labkit.schedules.bubble import explain_gap
from labkit.schedules.simulator import Timeline
from labkit.viz.figure import Figure
from labkit.viz.pipeline.timeline_bars import (
    WIDTH,
    Style,
    draw_frames,
    draw_memory,
    draw_needs,
    draw_rows,
    finish,
    legend,
    row_height,
)
from labkit.viz.pipeline.timeline_rows import COMPUTE, Rows, chunk_weights, measured_bubble, rows_of
from labkit.viz.style import label, new_figure, styled


def gantt(
    timeline: Timeline | Iterable[Event],
    *,
    name: str | None = None,
    memory: bool = False,
    numbers: bool = False,
    strips: bool = True,
    row: str = "rank",
    unit: str = "units of the costs",
    time_limit: float | None = None,
    memory_limit: float | None = None,
    needs: Callable[[str], Iterable[str]] | None = None,
    framed: Collection[str] = (),
) -> Figure:
    """Draw a simulated Timeline, or recorded Events.

    name: the first words of the sentence; None takes the schedule's name, or `measured`.
    memory: draw the activations in flight below the timeline, weighted by the costs of a Timeline.
    numbers: for Events, put the measured bubble and milliseconds into the sentence (they change from run to run).
    strips: draw waits, collectives and the like under the computations.
    row: name of a row. Use `stage` if several ranks share a row, because its number is then no global rank.
    unit: unit of a Timeline's time, as the axis names it, such as `forwards`; the axis of Events says ms.
    time_limit, memory_limit: where the axes end, in the Timeline's unit (seconds for Events) and in activations.
        Pictures with the same limits can be compared by eye; later events are cut off. None fits the picture.
    needs: arrows between the actions of a Timeline, as in `compare_timelines`.
    framed: names of actions that get a thick frame.

    The sentence of a Timeline is like "1F1B, 4 stages, 8 microbatches: bubble 27.3%, peak 4 in flight". Raises
    ValueError if there is nothing to draw.
    """
    rows = rows_of(timeline)
    predicted = isinstance(timeline, Timeline)
    scale = 1.0 if predicted else 1e3
    end = (rows.end if time_limit is None else time_limit) * scale
    inches, labels = row_height(len(rows.ranks)), _labels(rows, row)
    with styled():
        fig, panels = _figure(len(labels) * inches, 0.9, memory)
        style = Style(scale, end, inches, strips=strips)
        draw_rows(panels[0], rows, style)
        draw_frames(panels[0], rows, style, framed)
        finish(panels[0], labels, end, inches)
        if needs is not None:
            draw_needs(panels[0], rows, needs)
        if memory:
            draw_memory(panels[1], rows, scale, labels, memory_limit)
        panels[-1].set_xlabel(f"time ({unit if predicted else 'ms'})")
        legend(fig, rows, strips)
        sentence = _sentence_of(timeline, name) if predicted else _measured_sentence(rows, name, numbers, row)
    return Figure(fig, sentence)


def gantt_overlay(
    predicted: Timeline,
    measured: Iterable[Event],
    *,
    memory: bool = False,
    numbers: bool = False,
    row: str = "rank",
) -> Figure:
    """Draw prediction and measurement on one axis, two bars per row: predicted above, an outline; measured below.

    The costs of the prediction must be seconds. Their weights of activations also hold for the measured timeline. The
    sentence says whether every rank ran its row in the predicted order. With `numbers` it also gives the ratio of the
    two makespans and both bubbles. `row` is the name of a row, as in `gantt`. Raises ValueError if there are no Events,
    or if they belong to other ranks.
    """
    measured = list(measured)
    expected, found = rows_of(predicted), rows_of(measured)
    if len(found.ranks) != len(expected.ranks):
        raise ValueError(
            f"{len(found.ranks)} {row}s were measured, {len(expected.ranks)} predicted: use the same schedule"
        )
    found = replace(found, weights=chunk_weights(predicted))
    end = max(expected.end, found.end) * 1e3
    inches, labels = 1.5 * row_height(len(expected.ranks)), _labels(expected, row)
    with styled():
        fig, panels = _figure(len(labels) * inches, 1.0, memory)
        draw_rows(panels[0], expected, Style(1e3, end, inches, top=0.08, height=0.42, outline=True))
        draw_rows(panels[0], found, Style(1e3, end, inches, top=0.52, height=0.42))
        finish(panels[0], labels, end, inches)
        panels[0].set_title(f"each {row}: predicted above (outlines), measured below", loc="left")
        if memory:
            draw_memory(panels[1], found, 1e3, labels)
            panels[1].set_ylabel("in flight,\nmeasured")
        panels[-1].set_xlabel("time (ms)")
        legend(fig, expected, False)
    sentence = _overlay_sentence(predicted, expected, found, row)
    return Figure(fig, sentence + (_comparison(predicted, measured, found, row) if numbers else ""))


def compare_timelines(
    timelines: Sequence[Timeline],
    *,
    unit: str = "units of the costs",
    needs: Callable[[str], Iterable[str]] | None = None,
) -> Figure:
    """Draw simulated Timelines one above the other, on the same axis; `unit` is the unit of their times.

    needs: the name of an action -> the names of those whose results it needs. An arrow comes from each of them that is
        on another rank.

    The sentence gives the bubble and each rank's peak of activations in flight, schedule by schedule; no peaks for a
    table without backwards. Raises ValueError without a Timeline.
    """
    if not timelines:
        raise ValueError("no timeline to draw: give one or more, as simulate returns them")
    rows = [rows_of(timeline) for timeline in timelines]
    end = max(each.end for each in rows)
    heights = [len(each.ranks) * row_height(len(each.ranks)) for each in rows]
    with styled():
        fig = new_figure(WIDTH, sum(heights) + 0.5 * len(rows) + 0.6)
        panels = fig.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=[h + 0.3 for h in heights])[:, 0]
        for axes, timeline, each in zip(panels, timelines, rows, strict=True):
            inches = row_height(len(each.ranks))
            draw_rows(axes, each, Style(1.0, end, inches))
            finish(axes, _labels(each, "rank"), end, inches)
            if needs is not None:
                draw_needs(axes, each, needs)
            axes.set_title(_heading(timeline, None), loc="left")
        panels[-1].set_xlabel(f"time ({unit})")
        legend(fig, replace(rows[0], events=[event for each in rows for event in each.events]), True)
    return Figure(fig, "; ".join(map(_bubble_and_peaks, timelines)))


def _figure(rows_height: float, around: float, memory: bool) -> tuple[Any, list[Axes]]:
    """Return an empty figure with a panel for the rows and, with `memory`, one below it on the same axis."""
    fig = new_figure(WIDTH, rows_height + around + (1.6 if memory else 0.0))
    if not memory:
        return fig, [fig.subplots()]
    return fig, list(fig.subplots(2, 1, sharex=True, height_ratios=[rows_height + 0.5, 1.2]))


def _labels(rows: Rows, row: str) -> list[str]:
    return [f"{row} {rank}" for rank in rows.ranks]


# ---- sentences ----


def _sentence_of(timeline: Timeline, name: str | None) -> str:
    peak = max(timeline.peak_memory)
    return f"{_heading(timeline, name)}: bubble {timeline.bubble_fraction:.1%}, peak {peak:.4g} in flight"


def _bubble_and_peaks(timeline: Timeline) -> str:
    bubble = f"{_heading(timeline, None)}: bubble {timeline.bubble_fraction:.1%}"
    if not any(timeline.peak_memory):  # nothing is kept for a backward
        return bubble
    peaks = ", ".join(f"{peak:.4g}" for peak in timeline.peak_memory)
    return f"{bubble}, ranks keep {peaks} in flight"


def _heading(timeline: Timeline, name: str | None) -> str:
    schedule = timeline.schedule
    return f"{name or schedule.name}, {schedule.num_stages} stages, {counted(schedule.num_microbatches, 'microbatch')}"


def _measured_sentence(rows: Rows, name: str | None, numbers: bool, row: str) -> str:
    compute = [event for event in rows.events if event.kind in COMPUTE]
    parts = [(kind, sum(event.kind == kind for event in compute)) for kind in COMPUTE]
    ran = " and ".join(counted(count, f"{label(kind)} pass") for kind, count in parts if count) or "no computation"
    text = f"{name or 'measured'}, {counted(len(rows.ranks), row)}: {ran}, at most {rows.peak:.4g} in flight"
    return text + (f", bubble {measured_bubble(rows.events):.1%}, {rows.end * 1e3:.0f} ms" if numbers else "")


def _overlay_sentence(timeline: Timeline, expected: Rows, found: Rows, row: str) -> str:
    count = len(expected.ranks)
    differing = _differing(expected, found)
    if differing is not None:
        agree = f"{row} {differing} did not run its row in the predicted order"
    elif count == 1:
        agree = f"the one {row} ran its row in the predicted order"
    else:
        agree = f"{'both' if count == 2 else f'all {count}'} {row}s ran their rows in the predicted order"
    return f"{_heading(timeline, None)}: {agree}, peak {found.peak:.4g} in flight"


def _differing(expected: Rows, found: Rows) -> int | None:
    """Return the first row whose order differs from the prediction."""
    return next((r for r in range(len(expected.ranks)) if expected.names(r) != found.names(r)), None)


def _comparison(timeline: Timeline, measured: list[Event], found: Rows, row: str) -> str:
    """Return makespans and bubbles and, if the rows agree, where the largest difference is."""
    bubble = measured_bubble(found.events)
    text = f", makespan {found.end / timeline.makespan:.2f} of the prediction"
    text += f", measured bubble {bubble:.1%}, predicted {timeline.bubble_fraction:.1%}"
    if _differing(rows_of(timeline), found) is not None:
        return text
    return f"{text}; {explain_gap(timeline, measured).where(row)}"
