"""Layers whose weights are gathered when they are needed: what a rank computes, its messages, and what is whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.config.errors import counted
from labkit.events import Event, shift_to_zero
from labkit.plan.overlap import COMPUTES
from labkit.viz.figure import Figure
from labkit.viz.style import box, color, handle, hatch, legend_patches, new_figure, styled, text_color

_WIDTH = 9.0
"""Inches of the figure."""
_ROW = 0.3
"""Inches of a row."""
_WHOLE = "#DDDDDD"
_SHORT = {"all_gather": "AG", "reduce_scatter": "RS"}
"""Collective -> its letters in a bar."""


def layer_gathers(lines: Mapping[str, Sequence[Event]]) -> Figure:
    """Draw the layers of each run, its messages below them, and below these a bar for as long as a layer is whole.

    lines: name -> Events of one rank. A name that ends in a number has it in its bar. The link carries one message
        after another, so a bar begins when the link is free. Events of kind `data` say how long a layer is whole; at
        most as many bars are above each other as layers are whole at a time.

    The sentence gives the collectives of each run and the most layers that are whole. Raises ValueError for a run that
    computes nothing.
    """
    runs = {name: shift_to_zero(_drawn(name, events)) for name, events in lines.items()}
    whole = {name: _lanes([event for event in run if event.kind == "data"]) for name, run in runs.items()}
    end = max(event.end for run in runs.values() for event in run) * 1e3
    with styled():
        rows = [2 + len(lanes) for lanes in whole.values()]
        fig = new_figure(_WIDTH, _ROW * sum(rows) + 0.42 * len(rows) + 0.8)
        panels = fig.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
        for axes, (name, run) in zip(panels, runs.items(), strict=True):
            _draw_run(axes, run, whole[name], end)
            axes.set_title(name, loc="left", fontsize=9)
        panels[-1].set_xlabel("time (ms)")
        kinds = {event.kind for run in runs.values() for event in run}
        handles = legend_patches([kind for kind in ("forward", "backward") if kind in kinds])
        operations = {event.name.split()[0] for run in runs.values() for event in run if event.kind == "collective"}
        words = ", ".join(f"{_SHORT[name]} {name.replace('_', '-')}" for name in _SHORT if name in operations)
        handles.append(handle(f"message: {words}", color("collective"), hatch("collective")))
        if any(whole.values()):
            handles.append(handle("weights whole", _WHOLE))
        fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return Figure(fig, "; ".join(f"{name}: {_words(run, whole[name])}" for name, run in runs.items()) + ".")


def _drawn(name: str, events: Sequence[Event]) -> list[Event]:
    found = [event for event in events if event.kind in (*COMPUTES, "collective", "data")]
    if not any(event.kind in COMPUTES for event in found):
        raise ValueError(f"{name}: nothing was computed in {len(events)} Events; give those of a rank's whole step")
    return found


def _lanes(spans: Sequence[Event]) -> list[list[Event]]:
    """Sort spans into as few lanes as possible, in which none overlaps another."""
    lanes: list[list[Event]] = []
    for span in sorted(spans, key=lambda event: event.start):
        free = next((lane for lane in lanes if lane[-1].end <= span.start + 1e-9), None)
        if free is None:
            lanes.append(free := [])
        free.append(span)
    return lanes


def _draw_run(axes: Any, run: Sequence[Event], lanes: Sequence[Sequence[Event]], end: float) -> None:
    for event in run:
        if event.kind in COMPUTES:
            _bar(axes, event, 0, color(event.kind), _number(event), end)
    free = 0.0
    for event in sorted((event for event in run if event.kind == "collective"), key=lambda event: event.start):
        begins = min(max(event.start, free), event.end)
        text = f"{_SHORT.get(event.name.split()[0], '')} {_number(event)}".strip()
        _bar(axes, event, 1, color("collective"), text, end, begins=begins, pattern=hatch("collective"))
        free = event.end
    for row, lane in enumerate(lanes, start=2):
        for event in lane:
            _bar(axes, event, row, _WHOLE, _number(event), end)
    names = ["computes", "messages", *["whole"] * bool(lanes)]
    middle = [0.5, 1.5, 2 + len(lanes) / 2]
    axes.set_yticks(middle[: len(names)], names)
    axes.set(xlim=(0, 1.01 * end), ylim=(2.05 + len(lanes), -0.05))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _bar(
    axes: Any, event: Event, row: int, fill: str, text: str, end: float, *, begins: float | None = None,
    pattern: str = "",
) -> None:  # fmt: skip
    start = event.start if begins is None else begins
    width = (event.end - start) * 1e3
    fits = width / end * (_WIDTH - 1.2) > 0.09 * len(text) + 0.04
    box(axes, (start * 1e3, row + 0.07), width, 0.86, fill, text if fits and not pattern else "", hatch=pattern)
    if fits and pattern:
        pad = {"facecolor": fill, "edgecolor": "none", "pad": 0.8}
        axes.text(start * 1e3 + width / 2, row + 0.5, text, ha="center", va="center", fontsize=8,
                  color=text_color(fill), bbox=pad)  # fmt: skip


def _number(event: Event) -> str:
    last = event.name.split()[-1]
    return last if last.isdigit() else ""


def _words(run: Sequence[Event], lanes: Sequence[Sequence[Event]]) -> str:
    count = {name: sum(e.kind == "collective" and e.name.startswith(name) for e in run) for name in _SHORT}
    parts = [counted(count["all_gather"], "all-gather")]
    if count["reduce_scatter"]:
        parts.append(counted(count["reduce_scatter"], "reduce-scatter"))
    if lanes:
        parts.append(f"at most {counted(len(lanes), 'layer')} whole")
    return ", ".join(parts)
