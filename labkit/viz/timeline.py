"""Timelines of a pipeline: predicted, measured, or both on one axis; a row per pipeline rank, time to the right.

What a rank computes fills its row and is labelled by direction and microbatch (`F0`); waits and transfers are a strip
under it; what is empty is the bubble. The activations in flight can be drawn below, on the same axis.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from labkit.events import Event
from labkit.schedules.ir import ACTION
from labkit.schedules.simulator import Timeline
from labkit.viz.figure import Figure
from labkit.viz.style import SEQUENCE, color, hatch, label, legend_patches, new_figure, styled, text_color

COMPUTE = ("forward", "backward", "input_grad", "weight_grad")
_STRIP = ("wait", "collective", "optimizer", "data")
_LETTER = {"forward": "F", "backward": "B", "input_grad": "I", "weight_grad": "W"}
_WIDTH, _POINT = 9.0, 1 / 72
_LETTER_WIDTH, _SMALLEST = 0.8, 7.0
"""Room for a letter of a label in font sizes, its margin included; the smallest font size in points. No label is
better than a squeezed one."""


@dataclass(frozen=True)
class _Rows:
    """Events ready to draw: times from 0, ranks renumbered to rows."""

    events: list[Event]
    ranks: list[int]

    @property
    def end(self) -> float:
        return max((event.end for event in self.events), default=1.0)


def gantt(
    timeline: Timeline | Iterable[Event],
    *,
    name: str | None = None,
    memory: bool = False,
    numbers: bool = False,
    strips: bool = True,
    row: str = "rank",
    time_limit: float | None = None,
    memory_limit: float | None = None,
) -> Figure:
    """Draw a simulated Timeline, or recorded Events.

    name: what the sentence calls it; None takes the schedule's name, or `measured`.
    memory: draw the activations in flight under the timeline; those of a Timeline weigh what its costs say.
    numbers: for Events, put the measured bubble and milliseconds into the sentence (they change from run to run).
    strips: draw waits, collectives and the like under what the rank computes.
    row: what a row is called; `stage` where ranks of one stage share it, so that its number is not a rank of the world.
    time_limit, memory_limit: where the axes end, in the Timeline's unit (seconds for Events) and in activations.
        Pictures with the same limits can be compared by eye; what lies beyond is not shown. None fits the picture.

    The sentence is, for a Timeline, "1F1B, 4 stages, 8 microbatches: bubble 27.3%, peak 4 in flight". Raises ValueError
    where there is nothing to draw.
    """
    rows = _rows(timeline)
    predicted = isinstance(timeline, Timeline)
    scale, unit = (1.0, "time (units of the costs)") if predicted else (1e3, "time (ms)")
    with styled():
        height = len(rows.ranks) * (0.42 if len(rows.ranks) <= 8 else 0.24)
        fig = new_figure(_WIDTH, height + 0.9 + (1.5 if memory else 0))
        panels = _panels(fig, height + 0.5, memory)
        end = (rows.end if time_limit is None else time_limit) * scale
        _draw_rows(panels[0], rows, scale, strips=strips, width=end)
        _finish(panels[0], _labels(rows, row), end)
        if memory:
            _draw_memory(panels[1], rows, scale, _labels(rows, row), memory_limit, timeline if predicted else None)
        panels[-1].set_xlabel(unit)
        _legend(fig, rows, strips)
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
    """Prediction and measurement on one axis, two bars per row: predicted above, pale; measured below.

    The costs of the prediction must be seconds. The sentence says whether every rank ran its row in the predicted
    order; with `numbers` also the ratio of the two makespans and both bubbles. `row` is what a row is called, as in
    `gantt`. Raises ValueError where nothing was measured or other ranks were.
    """
    expected, found = _rows(predicted), _rows(measured)
    if len(found.ranks) != len(expected.ranks):
        raise ValueError(
            f"{len(found.ranks)} {row}s were measured, {len(expected.ranks)} predicted: use the same schedule"
        )
    end = max(expected.end, found.end) * 1e3
    with styled():
        tall = 0.62 * len(expected.ranks)
        fig = new_figure(_WIDTH, tall + 1.0 + (1.5 if memory else 0))
        panels = _panels(fig, tall + 0.5, memory)
        _draw_rows(panels[0], expected, 1e3, strips=False, width=end, top=0.08, height=0.42, pale=True)
        _draw_rows(panels[0], found, 1e3, strips=False, width=end, top=0.52, height=0.42)
        _finish(panels[0], _labels(expected, row), end)
        panels[0].set_title(f"each {row}: predicted above (pale), measured below", loc="left")
        if memory:
            _draw_memory(panels[1], found, 1e3, _labels(expected, row))
        panels[-1].set_xlabel("time (ms)")
        _legend(fig, expected, False)
    return Figure(fig, _overlay_sentence(predicted, expected, found, numbers, row))


# ---- sentences ----


def _sentence_of(timeline: Timeline, name: str | None) -> str:
    peak = max(timeline.peak_memory)
    return f"{_heading(timeline, name)}: bubble {timeline.bubble_fraction:.1%}, peak {peak:.4g} in flight"


def _heading(timeline: Timeline, name: str | None) -> str:
    schedule = timeline.schedule
    return f"{name or schedule.name}, {schedule.num_stages} stages, {_count(schedule.num_microbatches, 'microbatch')}"


def _count(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith(("ch", "ss")) else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


def _measured_sentence(rows: _Rows, name: str | None, numbers: bool, row: str) -> str:
    compute = [event for event in rows.events if event.kind in COMPUTE]
    parts = [(kind, sum(event.kind == kind for event in compute)) for kind in COMPUTE]
    ran = " and ".join(_count(count, f"{label(kind)} pass") for kind, count in parts if count) or "no computation"
    text = f"{name or 'measured'}, {_count(len(rows.ranks), row)}: {ran}, at most {max(_peaks(rows))} in flight"
    return text + (f", bubble {measured_bubble(rows.events):.1%}, {rows.end * 1e3:.0f} ms" if numbers else "")


def _overlay_sentence(timeline: Timeline, expected: _Rows, found: _Rows, numbers: bool, row: str) -> str:
    count = len(expected.ranks)
    differing = [rank for rank in range(count) if _names(expected, rank) != _names(found, rank)]
    if differing:
        agree = f"{row} {differing[0]} did not run its row in the predicted order"
    elif count == 1:
        agree = f"the one {row} ran its row in the predicted order"
    else:
        agree = f"{'both' if count == 2 else f'all {count}'} {row}s ran their rows in the predicted order"
    text = f"{_heading(timeline, None)}: {agree}, peak {max(_peaks(found))} in flight"
    if not numbers:
        return text
    ratio, bubble = found.end / expected.end, measured_bubble(found.events)
    bubbles = f"measured bubble {bubble:.1%}, predicted {timeline.bubble_fraction:.1%}"
    return f"{text}, makespan {ratio:.2f} of the prediction, {bubbles}"


def _names(rows: _Rows, row: int) -> list[str]:
    mine = [event for event in rows.events if event.rank == rows.ranks[row] and event.kind in COMPUTE]
    return [event.name for event in sorted(mine, key=lambda event: event.start)]


def measured_bubble(events: Iterable[Event]) -> float:
    """Share of the time from the first computation to the last in which ranks do not compute, mean over ranks."""
    compute = [event for event in _without_details(list(events)) if event.kind in COMPUTE]
    if not compute:
        return 0.0
    span = max(event.end for event in compute) - min(event.start for event in compute)
    ranks = len({event.rank for event in compute})
    return 1 - sum(event.duration for event in compute) / (ranks * span)


# ---- drawing ----


def _rows(timeline: Timeline | Iterable[Event]) -> _Rows:
    """Times are moved so that the first computation starts at 0; what ended before it is left out."""
    given = timeline.events if isinstance(timeline, Timeline) else list(timeline)
    events = [event for event in _without_details(given) if event.kind in (*COMPUTE, *_STRIP)]
    if not events:
        raise ValueError("there is nothing to draw: no event is a computation, a wait or a collective")
    origin = min((event.start for event in events if event.kind in COMPUTE), default=min(e.start for e in events))
    moved = [
        Event(e.rank, e.name, e.kind, max(e.start - origin, 0.0), e.end - origin, e.microbatch, e.chunk, e.bytes)
        for e in events
        if e.end > origin
    ]
    return _Rows(moved, sorted({event.rank for event in moved}))


def _without_details(events: list[Event]) -> list[Event]:
    """Drop the gradients that single layers report, where a schedule's actions, which contain them, are there too."""
    if not any(_is_action(event) for event in events):
        return events
    return [event for event in events if event.kind not in COMPUTE or _is_action(event)]


def _is_action(event: Event) -> bool:
    return event.kind in COMPUTE and ACTION.fullmatch(event.name) is not None


def _panels(fig: Any, rows_height: float, memory: bool) -> list[Axes]:
    if not memory:
        return [fig.subplots()]
    return list(fig.subplots(2, 1, sharex=True, height_ratios=[rows_height, 1.2]))


def _draw_rows(
    axes: Axes,
    rows: _Rows,
    scale: float,
    *,
    strips: bool,
    width: float,
    top: float = 0.07,
    height: float = 0.86,
    pale: bool = False,
) -> None:
    """Bars of every rank; row r spans r to r + 1, downwards. `width` of the axis decides what labels fit."""
    has_strip = strips and any(event.kind in _STRIP for event in rows.events)
    body = height * (0.74 if has_strip else 1.0)
    row_of = {rank: row for row, rank in enumerate(rows.ranks)}
    inches = (_WIDTH - 1.0) / width
    longest = 1 + max(len(str(event.microbatch or 0)) for event in rows.events)
    for kind in dict.fromkeys(event.kind for event in rows.events):
        if kind in _STRIP and not strips:
            continue
        offset, tall = (body + 0.02, height - body - 0.02) if kind in _STRIP else (0.0, body)
        mine = [event for event in rows.events if event.kind == kind]
        bars = [Rectangle((e.start * scale, row_of[e.rank] + top + offset), e.duration * scale, tall) for e in mine]
        axes.add_collection(
            PatchCollection(
                bars,
                facecolor=[_shade(kind, event.chunk, pale) for event in mine],
                hatch=hatch(kind),
                edgecolor="#FFFFFF" if kind in COMPUTE else "#555555",
                linewidth=0.6,
            )
        )
        if kind in COMPUTE:
            for event in mine:
                _write(axes, event, row_of[event.rank] + top + tall / 2, scale * inches / longest, scale, tall, pale)


def _write(axes: Axes, event: Event, middle: float, letter: float, scale: float, tall: float, pale: bool) -> None:
    """The label, if it can be read; `letter` is the room for one letter, in inches per second of the bar."""
    text = f"{_LETTER[event.kind]}{'' if event.microbatch is None else event.microbatch}"
    size = min(8.5, tall * 0.42 / _POINT * 0.6, event.duration * letter / _LETTER_WIDTH / _POINT)
    if size < _SMALLEST:
        return
    shade = _shade(event.kind, event.chunk, pale)
    axes.text((event.start + event.end) / 2 * scale, middle, text, ha="center", va="center_baseline", fontsize=size,
              color=text_color(shade), clip_on=True)  # fmt: skip


def _shade(kind: str, chunk: int | None, pale: bool) -> str:
    """The colour of a kind, mixed with white for predictions and for later chunks of a rank."""
    share = (0.55 if pale else 0.0) + min(0.5, 0.22 * (chunk or 0)) * (0.5 if pale else 1)
    base = np.array([int(color(kind)[i : i + 2], 16) for i in (1, 3, 5)])
    mixed = np.rint(base + (255 - base) * share).astype(int)
    return "#" + "".join(f"{value:02X}" for value in mixed)


def _labels(rows: _Rows, row: str) -> list[str]:
    return [f"{row} {rank}" for rank in rows.ranks]


def _finish(axes: Axes, labels: list[str], end: float) -> None:
    axes.set_xlim(0, end)
    axes.set_ylim(len(labels), 0)
    axes.set_yticks([row + 0.5 for row in range(len(labels))], labels)
    axes.tick_params(axis="y", length=0)
    axes.set_facecolor(color("idle"))
    axes.spines["left"].set_visible(False)
    for row in range(1, len(labels)):
        axes.axhline(row, color="#FFFFFF", linewidth=1.5)


def _in_flight(rows: _Rows, rank: int) -> tuple[list[float], list[int]]:
    """Activations alive on a rank: one more at each forward's start, one fewer at the end of what frees it."""
    mine = [event for event in rows.events if event.rank == rank]
    split = {(e.chunk, e.microbatch) for e in mine if e.kind == "weight_grad"}
    has_backward = any(event.kind in ("backward", "weight_grad") for event in mine)
    changes = [(e.start, 1) for e in mine if e.kind == "forward" and has_backward]
    changes += [(e.end, -1) for e in mine if e.kind == "weight_grad"]
    changes += [(e.end, -1) for e in mine if e.kind == "backward" and (e.chunk, e.microbatch) not in split]
    times, counts = [0.0], [0]
    for time, together in groupby(sorted(changes), key=lambda change: change[0]):
        times.append(time)
        counts.append(counts[-1] + sum(step for _, step in together))
    return times, counts


def _peaks(rows: _Rows) -> list[int]:
    return [max(_in_flight(rows, rank)[1]) for rank in rows.ranks]


def _weighed(timeline: Timeline, rank: int) -> tuple[list[float], list[float]]:
    """`Timeline.memory` with one amount at each time, or what is freed as something starts would show as a spike."""
    times, amounts = timeline.memory(rank)
    last = np.append(times[1:] != times[:-1], True)
    return times[last].tolist(), amounts[last].tolist()


def _draw_memory(
    axes: Axes,
    rows: _Rows,
    scale: float,
    labels: list[str],
    limit: float | None = None,
    timeline: Timeline | None = None,
) -> None:
    """A step line per rank: activations in flight, weighed by the costs where a Timeline knows them."""
    curves = [_in_flight(rows, rank) if timeline is None else _weighed(timeline, rank) for rank in rows.ranks]
    for row, (times, counts) in enumerate(curves):
        axes.step(np.array([*times, rows.end]) * scale, [*counts, counts[-1]], where="post",
                  color=SEQUENCE[row % len(SEQUENCE)], linewidth=1.4, label=labels[row])  # fmt: skip
    axes.set_ylabel("in flight")
    axes.set_ylim(0, max(max(counts) for _, counts in curves) + 0.5 if limit is None else limit)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    if len(rows.ranks) <= 8:  # white behind the words, since lines may pass there
        axes.legend(loc="upper right", ncols=2, frameon=True, framealpha=0.85, edgecolor="none")


def _legend(fig: Any, rows: _Rows, strips: bool) -> None:
    kinds = [kind for kind in (*COMPUTE, *(_STRIP if strips else ())) if any(e.kind == kind for e in rows.events)]
    fig.legend(handles=legend_patches([*kinds, "idle"]), loc="outside upper right", ncols=len(kinds) + 1)
