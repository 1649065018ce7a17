"""Pictures of partial graphs: calls at capture and at replay, values at their end, and the cost of padding instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from labkit.viz.figure import Figure
from labkit.viz.style import INK, SEQUENCE, name_cells, name_rows, new_figure, nth_color, styled

_RAISED = SEQUENCE[7]
_PALE = "#C8C8C8"
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


def graph_outputs(ends: Mapping[str, Mapping[str, float]], unit: str) -> Figure:
    """Draw what a graph hands out for each step after which it may end, as a bar of its values.

    ends: step -> value -> its size. unit: of the sizes. A value below half a percent of the longest bar is drawn, and
    named in the sentence only.

    Raises ValueError without a step.
    """
    if not ends:
        raise ValueError("graph_outputs needs at least one step after which a graph may end")
    names = list(dict.fromkeys(name for out in ends.values() for name in out))
    looks = {name: nth_color(place) for place, name in enumerate(names)}
    longest = max(sum(out.values()) for out in ends.values())
    with styled():
        fig = new_figure(7.2, 1.2 + 0.34 * len(ends))
        axes = fig.subplots()
        for place, out in enumerate(ends.values()):
            left = 0.0
            for name, size in out.items():
                axes.barh(place, size, 0.66, left=left, color=looks[name], edgecolor=INK, linewidth=0.4)
                left += size
            axes.annotate(f"{left:,.1f}", (left, place), xytext=(4, 0), textcoords="offset points", va="center", size=8)
        name_rows(axes, [f"after {step}" for step in ends], bars=True)
        axes.set(xlim=(0, 1.12 * longest), xlabel=unit)
        axes.tick_params(axis="y", length=0)
        seen = [name for name in names if any(out.get(name, 0.0) > 0.005 * longest for out in ends.values())]
        fig.legend(handles=[Patch(facecolor=looks[name], label=name) for name in seen], loc="outside upper center",
                   ncols=5)  # fmt: skip
    said = "; ".join(f"after {step} {sum(out.values()):,.1f} ({', '.join(out)})" for step, out in ends.items())
    return Figure(fig, f"A graph hands out, in {unit}: {said}.")


@dataclass(frozen=True)
class PaddingCost:
    """Costs of one way to give experts their rows, in one forward of all ranks."""

    name: str
    flops: float
    """Operations of the experts, including those on empty rows."""
    sent_bytes: float
    """Bytes that go to another rank, there and back."""
    held_bytes: float
    """Bytes that the fullest rank keeps from forward to backward."""
    dropped: float
    """Share of all choices that no expert took."""


def padding_costs(costs: Sequence[PaddingCost]) -> Figure:
    """Draw ways to give experts their rows as bars next to each other: work, traffic, memory and lost choices.

    costs: the ways; the picture compares all others with the first. Raises ValueError for none, or two of one name.
    """
    if len({each.name for each in costs}) < len(costs):
        raise ValueError(f"two ways of one name among {[each.name for each in costs]}: name or draw each once")
    if not costs:
        raise ValueError("padding_costs needs at least one way to give experts their rows")
    first = costs[0]
    columns = {
        "work of the experts": [each.flops / (first.flops or 1.0) for each in costs],
        "bytes between ranks": [each.sent_bytes / (first.sent_bytes or 1.0) for each in costs],
        "bytes for the backward": [each.held_bytes / (first.held_bytes or 1.0) for each in costs],
        "choices dropped": [each.dropped for each in costs],
    }
    with styled():
        fig = new_figure(8.6, 0.9 + 0.32 * len(costs))
        panels = fig.subplots(1, len(columns), sharey=True, squeeze=False)[0]
        for axes, (title, values) in zip(panels, columns.items(), strict=True):
            _bars(axes, title, values, "{:.1%}" if title == "choices dropped" else "{:.2f}x")
        name_rows(panels[0], [each.name for each in costs], bars=True)
    return Figure(fig, _cost_words(columns, [each.name for each in costs]))


def _bars(axes: Any, title: str, values: Sequence[float], form: str) -> None:
    """Draw a column of bars with their numbers; the first way has a colour of its own."""
    for place, value in enumerate(values):
        axes.barh(place, value, 0.6, color=SEQUENCE[0 if place else 1], edgecolor=INK, linewidth=0.4)
        text: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 7.5}
        axes.annotate(form.format(value), (value, place), xytext=(2, 0), **text)
    axes.set_title(title, fontsize=8.5)
    axes.set_xlim(0, 1.5 * (max(values) or 1.0))
    axes.xaxis.set_major_locator(MaxNLocator(2))
    if "%" in form:
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.tick_params(axis="y", length=0)


def _cost_words(columns: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    parts = [
        f"{name} {flops:.2f} times the work, {sent:.2f} the traffic, {held:.2f} the memory, {dropped:.1%} dropped"
        for name, flops, sent, held, dropped in list(zip(names, *columns.values(), strict=True))[1:]
    ]
    return f"Against {names[0]}: {'; '.join(parts)}." if parts else f"{names[0]} alone."


# ---- the values that cross the end of a graph ----

Step = tuple[str, Sequence[str], Sequence[str]]
"""Name of a step, names that it reads, names that it writes; a name that is written again has a new value."""


class _Value(NamedTuple):
    """A value, the step that writes it (-1: the caller), and the last one that reads it (`len(steps)`: the result)."""

    name: str
    first: int
    last: int


def _values_of(steps: Sequence[Step]) -> list[_Value]:
    found: dict[int, _Value] = {}
    current: dict[str, int] = {}

    def begin(name: str, first: int) -> None:
        current[name] = len(found)
        found[len(found)] = _Value(name, first, first)

    def read(name: str, at: int) -> None:
        found[current[name]] = found[current[name]]._replace(last=at)

    for place, (_, reads, writes) in enumerate(steps):
        for name in reads:
            if name not in current:
                begin(name, -1)
            read(name, place)
        for name in writes:
            begin(name, place)
    for name in steps[-1][2]:
        read(name, len(steps))
    return list(found.values())


def values_at_the_end(steps: Sequence[Step], captured: int, given: Sequence[str], right: Sequence[str]) -> Figure:
    """Draw the life of each value of a forward, and what an answer lets out of a graph of its first steps.

    A row is a value, from the step that writes it to the last one that reads it. The line is the end of the graph.

    given, right: names of the values that come out of the graph, by the answer and in truth.
    """
    values = _values_of(steps)
    at_end = {value.name: value for value in values if value.first < captured}  # a later value takes the name
    with styled():
        fig = new_figure(8.6, 1.3 + 0.27 * len(values))
        axes = fig.subplots()
        for row, value in enumerate(values):
            crosses = at_end.get(value.name) is value and value.first >= 0
            face, edge, line = _PALE, "none", "-"
            if crosses and value.name in right:
                face, edge, line = (SEQUENCE[0], INK, "-") if value.name in given else ("white", _RAISED, "--")
            elif crosses and value.name in given:
                face, edge, line = _PALE, _RAISED, "-"
            width = value.last - value.first + (0.9 if value.last < len(steps) else 0.5)
            box = (value.first + 0.05, row + 0.15)
            axes.add_patch(Rectangle(box, width, 0.7, facecolor=face, edgecolor=edge, linewidth=1.4, linestyle=line))
        axes.axvline(captured, color=INK, linewidth=1.6)
        name_cells(axes, [step for step, _, _ in steps], [value.name for value in values])
        axes.set_xlim(-1, len(steps) + 0.6)
        axes.tick_params(axis="x", rotation=30)
        handles = [
            Patch(facecolor=SEQUENCE[0], edgecolor=INK, label="comes out, and must"),
            Patch(facecolor="white", edgecolor=_RAISED, linestyle="--", label="missing"),
            Patch(facecolor=_PALE, edgecolor=_RAISED, label="too much"),
        ]
        fig.legend(handles=handles, loc="outside upper right", ncols=3)
    missing = [name for name in right if name not in given]
    extra = [name for name in given if name not in right]
    words = f"A graph of {captured} of {len(steps)} steps gives out {', '.join(given) or 'nothing'}"
    words += f"; missing {', '.join(missing)}" if missing else ""
    return Figure(fig, words + (f"; too much {', '.join(extra)}" if extra else "") + ".")
