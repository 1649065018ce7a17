"""Time lines of one layer: what a rank computes, and below it the messages for which it may have to wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from matplotlib.patches import Patch

from labkit.events import Event
from labkit.plan.timed_layer import is_between, unhidden
from labkit.viz.figure import Figure
from labkit.viz.style import INK, SEQUENCE, color, handle, hatch, legend_patches, new_figure, styled, text_color

_WIDTH = 9.4
"""Inches of the figure."""
_SHORT = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS"}
"""Collective -> its letters in a bar."""
_BETWEEN = SEQUENCE[0]
"""Colour of norms and residual additions."""
_MESSAGE = color("collective"), hatch("collective")
_NARROW = 0.28
"""Inches from which on a bar has letters."""
_LETTERS = 0.15
"""The same for one or two letters."""
_UPRIGHT = 0.088
"""Inches from which on a product's bar has letters that run upwards."""
_GAP = "#D9D9D9"
"""Line between two bars: not white, which means that nothing is computed."""
_PASSES = {", input gradient": " dx", ", weight gradient": " dW"}
"""End of a kernel's name -> what its bar says."""


def layer_timelines(lines: Mapping[str, Sequence[Event]], *, unit: str = "ms") -> Figure:
    """Draw timelines of a layer one above the other on one axis, predicted or measured.

    lines: name -> Events of one rank, of `labkit.plan.layer_timeline` or recorded. Times are counted from the first
    start of each line, and its waits are left out: they are the gaps. In lines with a backward after the forward a
    dotted line is the end of the forward. The sentence gives for each line the milliseconds of the layer and those in
    which the rank only waits for a message. A message with a thick outline has nothing beside it. In backward, `fc1 dx`
    is the gradient of fc1's input, `fc1 dW` that of its weight. unit: what a thousandth of a second stands for.
    """
    lines = {name: _from_zero(events) for name, events in lines.items()}
    end = max(event.end for events in lines.values() for event in events) * 1e3
    kinds = list(dict.fromkeys(e.kind for events in lines.values() for e in events if not is_between(e)))
    turned = False
    with styled():
        fig = new_figure(_WIDTH, 0.8 + 1.2 * len(lines))
        panels = fig.subplots(len(lines), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, events) in zip(panels, lines.items(), strict=True):
            waited = unhidden(events)
            for event in events:
                _draw(axes, event, end, outlined=event in waited)
            turn = max((event.end for event in events if event.kind == "forward"), default=0.0)
            if turn <= min((event.start for event in events if event.kind == "backward"), default=-1.0):
                turned = True
                axes.axvline(turn * 1e3, color=INK, linewidth=1.2, linestyle=":")
            axes.set(xlim=(0, 1.01 * end), ylim=(2.05, -0.05), yticks=(0.5, 1.5), yticklabels=("computes", "messages"))
            axes.set_title(name, loc="left")
            axes.tick_params(axis="y", length=0)
            axes.spines["left"].set_visible(False)
        panels[-1].set_xlabel(f"time ({unit})" + ("; the dotted line is the end of the forward" if turned else ""))
        handles = legend_patches([kind for kind in kinds if kind != "collective"])
        between = any(is_between(event) for events in lines.values() for event in events)
        handles += [handle("norm, residual", _BETWEEN)] * between
        short = any(_operation(event) in _SHORT for events in lines.values() for event in events)
        words = "message: AR all-reduce, AG all-gather, RS reduce-scatter" if short else "message"
        handles.append(handle(words, *_MESSAGE))
        handles.append(Patch(facecolor="none", edgecolor=INK, linewidth=1.4, label="nothing beside it"))
        fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return Figure(fig, "; ".join(f"{name}: {_words(events, unit)}" for name, events in lines.items()) + ".")


def _from_zero(events: Sequence[Event]) -> list[Event]:
    """Return the events without waits, with times from the first start."""
    start = min(event.start for event in events)
    return [replace(e, start=e.start - start, end=e.end - start) for e in events if e.kind != "wait"]


def _draw(axes: Any, event: Event, end: float, *, outlined: bool) -> None:
    """Draw one bar: computations above, messages below."""
    is_message = event.kind == "collective"
    fill = _BETWEEN if is_between(event) else color(event.kind)
    start, width, top = event.start * 1e3, event.duration * 1e3, 1.05 if is_message else 0.05
    inches = width / end * (_WIDTH - 1)
    edge = INK if outlined else _GAP if inches > 0.05 else fill
    axes.broken_barh([(start, width)], (top, 0.9), facecolor=fill, edgecolor=edge, linewidth=1.4 if outlined else 0.6,
                     hatch=hatch(event.kind) if is_message else "")  # fmt: skip
    text = _SHORT.get(_operation(event), event.name) if is_message else _label(event)
    size, angle = _lettering(text, inches, upright=not is_message and not is_between(event))
    if size:
        pad = {"facecolor": fill, "edgecolor": "none", "pad": 0.8} if is_message else None
        axes.text(start + width / 2, top + 0.45, text, ha="center", va="center", fontsize=size, rotation=angle,
                  color=text_color(fill), bbox=pad)  # fmt: skip


def _lettering(text: str, inches: float, *, upright: bool) -> tuple[float, int]:
    """Return size and angle of a bar's letters; size 0 where they have no room."""
    for size, room in ((7.5, 0.075), (6.5, 0.054)):
        if inches >= max(_NARROW if len(text) > 2 else _LETTERS, room * len(text)):
            return size, 0
    return (6.0, 90) if upright and inches >= _UPRIGHT and len(text) <= 7 else (0.0, 0)


def _label(event: Event) -> str:
    """Return the letters of a kernel, whether its name is the plan's or, as `layers.0.mlp.fc1 input_grad`, recorded."""
    name = event.name.removesuffix(f" {event.kind}").rpartition(".")[2]
    end = next((end for end in _PASSES if name.endswith(end)), "")
    return name.removesuffix(end) + _PASSES[end] if end else name.partition(",")[0]


def _operation(event: Event) -> str:
    return event.name.partition(" ")[0]


def _words(events: Sequence[Event], unit: str) -> str:
    whole = max(event.end for event in events)
    return f"{whole * 1e3:.1f} {unit}, of which {_exposed(events) * 1e3:.1f} only waiting"


def _exposed(events: Sequence[Event]) -> float:
    """Return the seconds in which a message is on its way and nothing is computed."""
    times = sorted({time for event in events for time in (event.start, event.end)})
    found = 0.0
    for start, end in pairwise(times):
        running = {event.kind == "collective" for event in events if event.start < end and event.end > start}
        found += (end - start) * (running == {True})
    return found
