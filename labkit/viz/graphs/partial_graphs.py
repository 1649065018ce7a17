"""Pictures of partial graphs: the calls at capture and at replay, and the cost of padding instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from labkit.viz.figure import Figure
from labkit.viz.style import INK, SEQUENCE, color, handle, name_rows, new_figure, styled

_RAISED = SEQUENCE[7]
_HELD = "held by the fullest rank"
_ROW = 0.26
"""Inches per call."""
_EDGE = -1.0
"""Place of the lifeline that stands for all other callers."""


_PAPER = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
"""Box around a name that is longer than the space between two lifelines."""


class Call(Protocol):
    """A recorded call, as `labkit.graphs.study.call_trace` makes it."""

    @property
    def source(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def raised(self) -> bool: ...


def sequence_diagram(traces: Mapping[str, Sequence[Call]], participants: Sequence[str]) -> Figure:
    """Draw recorded calls as arrows between lifelines, from top to bottom, with one panel per trace.

    traces: title -> calls. participants: from left to right; all other calls come from the left edge.

    Raises:
        ValueError: no calls.
    """
    if not traces or not all(traces.values()):
        raise ValueError("sequence_diagram needs at least one call in every trace")
    lengths = [len(calls) for calls in traces.values()]
    with styled():
        fig = new_figure(8.6, 0.75 * len(traces) + _ROW * sum(lengths))
        panels = fig.subplots(len(traces), 1, squeeze=False, height_ratios=[n + 1.6 for n in lengths])[:, 0]
        for axes, (title, calls) in zip(panels, traces.items(), strict=True):
            _panel(axes, title, calls, participants)
    return Figure(fig, "; ".join(_words(title, calls, participants) for title, calls in traces.items()) + ".")


def _panel(axes: Any, title: str, calls: Sequence[Call], participants: Sequence[str]) -> None:
    place = {name: x for x, name in enumerate(participants)}
    for name, x in place.items():
        axes.plot([x, x], [0.2, -len(calls) - 0.4], color="#BBBBBB", lw=0.8, zorder=0)
        axes.annotate(name, (x, 0.35), ha="center", va="bottom", fontsize=8.5, annotation_clip=False)
    for row, call in enumerate(calls, start=1):
        _arrow(axes, -row, place.get(call.source, _EDGE), place.get(call.target, _EDGE), call)
    axes.set_title(title, loc="left", pad=16)
    axes.set_xlim(_EDGE - 0.05, len(participants) - 0.3)
    axes.set_ylim(-len(calls) - 0.5, 0.6)
    axes.axis("off")


def _arrow(axes: Any, y: float, source: float, target: float, call: Call) -> None:
    """Draw a call from one lifeline to the other, with its name in front of the first lifeline on the way.

    A call to the caller itself goes around a corner.
    """
    face = _RAISED if call.raised else SEQUENCE[0]
    text: dict[str, Any] = {"fontsize": 7.5, "color": face if call.raised else INK}
    line: dict[str, Any] = {"color": face, "lw": 1.2, "ls": "--" if call.raised else "-"}
    if source == target:
        source += 0.16
        axes.plot([target, source, source], [y + 0.25, y + 0.25, y - 0.05], **line)
        axes.annotate(call.message, (source + 0.05, y + 0.08), ha="left", va="center", **text, bbox=_PAPER)
    else:
        middle = source + (0.5 if target > source else -0.5)
        axes.annotate(call.message, (middle, y + 0.04), ha="center", va="bottom", **text, bbox=_PAPER)
    arrow = {"arrowstyle": "->", "shrinkA": 0, "shrinkB": 0, **line}
    axes.annotate("", (target, y - 0.05), (source, y - 0.05), arrowprops=arrow)


def _words(title: str, calls: Sequence[Call], participants: Sequence[str]) -> str:
    called = [name for name in participants if any(call.target == name and not call.raised for call in calls)]
    never = [name for name in participants if name not in called]
    signals = [call.message for call in calls if call.raised]
    words = f"{title}: {sum(not call.raised for call in calls)} calls to {', '.join(called)}"
    words += f", ended by {signals[0]}" if signals else ""
    return words + (f", none to {', '.join(never)}" if never else "")


@dataclass(frozen=True)
class PaddingCost:
    """Costs of one way to give experts their rows, on one routing, in one forward of all ranks."""

    name: str
    flops: float
    """Operations of the experts, including those on empty rows."""
    sent_bytes: float
    """Bytes that go to another rank, there and back."""
    held: Mapping[str, float]
    """Part -> bytes that the fullest rank keeps for it from forward to backward; the same parts in each."""
    dropped: float
    """Share of all choices that no expert took."""
    loss: float | None = None
    """Loss of the model with this routing."""

    @property
    def held_bytes(self) -> float:
        """Held bytes of all parts together."""
        return sum(self.held.values())


def padding_costs(costs: Sequence[PaddingCost]) -> Figure:
    """Draw ways to give experts their rows as bars next to each other: work, traffic, memory and lost choices.

    costs: the ways; the picture compares all others with the first. Raises ValueError for none, or two of one name.
    """
    if len({each.name for each in costs}) < len(costs):
        raise ValueError(f"two ways of one name among {[each.name for each in costs]}: name or draw each once")
    if not costs:
        raise ValueError("padding_costs needs at least one way to give experts their rows")
    columns = [
        ("FLOPs of experts", [each.flops for each in costs]),
        ("bytes between ranks", [each.sent_bytes for each in costs]),
        (_HELD, [each.held_bytes for each in costs]),
        ("choices dropped", [each.dropped for each in costs]),
    ]
    if all(each.loss is not None for each in costs):
        columns.append(("loss", [float(each.loss or 0.0) for each in costs]))
    with styled():
        fig = new_figure(8.6, 1.15 + 0.32 * len(costs))
        panels = fig.subplots(1, len(columns), sharey=True, squeeze=False)[0]
        for axes, (title, values) in zip(panels, columns, strict=True):
            _bars(axes, title, values, relative=title not in ("choices dropped", "loss"), plain=title == _HELD)
            if title == _HELD:
                fig.legend(handles=_stacks(axes, costs), loc="outside upper right", ncols=len(costs[0].held))
        name_rows(panels[0], [each.name for each in costs], bars=True)
    return Figure(fig, _cost_words(costs))


def _stacks(axes: Any, costs: Sequence[PaddingCost]) -> list[Patch]:
    """Draw the parts of the held bytes one after another, and return their legend."""
    unit = costs[0].held_bytes or 1.0
    shades = (SEQUENCE[5], SEQUENCE[1], color("idle"))
    for place, each in enumerate(costs):
        left = 0.0
        for number, nbytes in enumerate(each.held.values()):
            shade = shades[number % len(shades)]
            axes.barh(place, nbytes / unit, 0.6, left=left, color=shade, edgecolor=INK, linewidth=0.4)
            left += nbytes / unit
    return [handle(name, shades[number % len(shades)]) for number, name in enumerate(costs[0].held)]


def _bars(axes: Any, title: str, values: Sequence[float], *, relative: bool, plain: bool) -> None:
    """Draw a column; the first value of a relative column is 1. plain: draw numbers without bars."""
    unit = values[0] if relative and values[0] else 1.0
    shown = [value / unit for value in values]
    low = 0.0 if title != "loss" else min(shown) - 0.3 * (max(shown) - min(shown) or 1.0)  # differences count
    form = "{:.2f}x" if relative else "{:.1%}" if title != "loss" else "{:.3f}"
    for place, value in enumerate(shown):
        face, pattern = (color("idle"), "////") if place else (SEQUENCE[0], "")
        bar: dict[str, Any] = {"color": face, "hatch": pattern, "edgecolor": INK, "linewidth": 0.4}
        if not plain:
            axes.barh(place, value - low, 0.6, left=low, **bar)
        text: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 7.5}
        axes.annotate(form.format(value), (value, place), xytext=(2, 0), **text)
    axes.set_title(title, fontsize=8.5)
    axes.set_xlim(low, low + 1.5 * (max(shown) - low or 1.0))
    axes.xaxis.set_major_locator(MaxNLocator(2))
    axes.tick_params(axis="y", length=0)


def _cost_words(costs: Sequence[PaddingCost]) -> str:
    first = costs[0]
    parts = []
    for each in costs[1:]:
        ratios = [getattr(each, what) / (getattr(first, what) or 1.0) for what in ("flops", "sent_bytes", "held_bytes")]
        words = f"{each.name} {ratios[0]:.2f} times the FLOPs, {ratios[1]:.2f} the traffic, {ratios[2]:.2f} the memory"
        words += f", {each.dropped:.1%} dropped"
        parts.append(words if each.loss is None else f"{words}, loss {each.loss:.3f}")
    base = first.name if first.loss is None else f"{first.name} (loss {first.loss:.3f})"
    return f"Against {base}: {'; '.join(parts)}." if parts else f"{base} alone."
