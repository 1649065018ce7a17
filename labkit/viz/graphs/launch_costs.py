"""CUDA graphs in pictures: operations and the memory that they write, launches on a timeline, numbers by call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from labkit.config.errors import counted
from labkit.graphs.study.launches import Launches, Run
from labkit.graphs.study.operation_log import Memory, Operation, OperationLog, memory_of
from labkit.viz.figure import Figure
from labkit.viz.style import (
    ACTIVITIES,
    LINES,
    SEQUENCE,
    color,
    legend_patches,
    name_rows,
    new_figure,
    nth_color,
    styled,
    text_color,
)

_INK, _PALE, _LEAVES = "#333333", 0.25, ".."
_OPERATION, _LAUNCH = SEQUENCE[:2]
_THINNEST = 150
"""A bar is at least as wide as this fraction of the axis, so that a bias is still visible next to a weight."""


# ---- operations and memory ----


class _Row(NamedTuple):
    part: str
    operation: Operation


class _Axis:
    """Places of a pool next to each other, without the gaps between them, in kB."""

    def __init__(self, places: Sequence[Memory]) -> None:
        self.ranges: list[list[int]] = []  # [first byte, byte after the last]
        for place in sorted(places):
            if self.ranges and place.address <= self.ranges[-1][1]:
                self.ranges[-1][1] = max(self.ranges[-1][1], place.address + place.nbytes)
            else:
                self.ranges.append([place.address, place.address + place.nbytes])

    @property
    def total(self) -> int:
        """Number of bytes."""
        return sum(end - start for start, end in self.ranges)

    def at(self, place: Memory) -> float:
        """Return the left end of a place, in kB."""
        before = 0
        for start, end in self.ranges:
            if start <= place.address < end:
                return (before + place.address - start) / 1e3
            before += end - start
        raise ValueError(f"{place} is not on the axis")


def graph_memory(
    logs: Mapping[str, OperationLog], given: Mapping[str, Tensor], results: Mapping[str, Tensor] | None = None
) -> Figure:
    """Draw operations from top to bottom with their reads and writes: outside tensors left, the pool right.

    A full bar is the write of a result. The pale bar under it is the result's life, up to the last operation that reads
    it (dotted if the result leaves the graph). A ring is a read. Full bars above each other use the same memory again.

    logs: part of a step, such as `forward`, -> its operations. given: name -> a tensor that existed before. results:
    name -> a tensor that leaves the graph; the last operation that wrote it gets this name.

    Raises:
        ValueError: nothing was logged.
    """
    rows = [_Row(part, operation) for part, log in logs.items() for operation in log.operations]
    if not rows:
        raise ValueError("graph_memory needs logs with at least one operation")
    names = {memory_of(tensor).address: name for name, tensor in given.items()}
    inside = [place for row in rows for place in row.operation.writes if place.address not in names]
    axis = _Axis(inside)
    with styled():
        fig = new_figure(8.6, 1.25 + 0.24 * len(rows))
        left, right = fig.subplots(1, 2, sharey=True, width_ratios=(max(2, len(names)), 12))
        for number, row in enumerate(rows):
            _draw_given(left, number, row, names)
            _draw_pool(right, number, rows, names, axis)
        left.set_xticks(range(len(names)), names.values(), rotation=90)
        left.set_xlim(-0.6, len(names) - 0.4)
        name_rows(left, _row_names(rows, results or {}))
        left.set_title("given", loc="left")
        right.set_title("pool", loc="left")
        right.set(xlabel="kB", xlim=(0, 1.01 * max(axis.total / 1e3, 1e-3)))
        for axes in (left, right):
            axes.tick_params(axis="y", length=0)
            axes.grid(axis="y", linewidth=0.4)
        fig.legend(handles=[_patch(part, i) for i, part in enumerate(logs)], loc="outside upper right", ncols=len(logs))
    return Figure(fig, _memory_sentence(logs, rows, names, axis))


def _row_names(rows: Sequence[_Row], results: Mapping[str, Tensor]) -> list[str]:
    """Number and operation of each row, and the name of the result that it leaves for good."""
    last = {place.address: number for number, row in enumerate(rows) for place in row.operation.writes}
    written = {last.get(memory_of(tensor).address): name for name, tensor in results.items()}
    names = [f"{number} {row.operation.name}" for number, row in enumerate(rows)]
    return [f"{name}: {written[number]}" if number in written else name for number, name in enumerate(names)]


def _shade(part: str, number: int = 0) -> str:
    return color(part) if part in ACTIVITIES else nth_color(number)


def _patch(part: str, number: int) -> Patch:
    return Patch(facecolor=_shade(part, number), label=part)


def _shade_of(rows: Sequence[_Row], number: int) -> str:
    parts = list(dict.fromkeys(row.part for row in rows))
    return _shade(rows[number].part, parts.index(rows[number].part))


def _ring(axes: Any, x: float, row: int) -> None:
    axes.plot(x, row + 0.5, "o", markersize=5.5, markerfacecolor="white", markeredgecolor=_INK, markeredgewidth=1.1)


def _draw_given(axes: Any, number: int, row: _Row, names: Mapping[int, str]) -> None:
    columns = list(names)
    for place in row.operation.writes:
        if place.address in names:
            axes.plot(columns.index(place.address), number + 0.5, "s", markersize=8, color=_INK)
    for place in row.operation.reads:
        if place.address in names:
            _ring(axes, columns.index(place.address), number)


def _draw_pool(axes: Any, number: int, rows: Sequence[_Row], names: Mapping[int, str], axis: _Axis) -> None:
    """Draw the results of one operation, with their lives, and its reads."""
    shade = _shade_of(rows, number)
    for place in rows[number].operation.writes:
        if place.address in names:
            continue
        x, width = axis.at(place), max(place.nbytes, axis.total / _THINNEST) / 1e3
        last = _last_read(place, rows, number)
        life, leaves = (last - number, "") if last is not None else (len(rows) - number, _LEAVES)
        axes.add_patch(
            Rectangle((x, number + 0.5), width, life, facecolor=shade, alpha=_PALE, linewidth=0, hatch=leaves)
        )
        axes.add_patch(
            Rectangle((x, number + 0.14), width, 0.72, facecolor=shade, edgecolor="white", linewidth=0.8, zorder=2)
        )
    for place in rows[number].operation.reads:
        if place.address not in names and any(place in row.operation.writes for row in rows[:number]):
            _ring(axes, axis.at(place) + place.nbytes / 2e3, number)


def _last_read(place: Memory, rows: Sequence[_Row], number: int) -> int | None:
    """Return the last operation that reads the result of operation `number` at `place`. None means that the result
    leaves the graph: no operation reads the result, and no other result takes its memory."""
    last = None
    for later in range(number + 1, len(rows)):
        operation = rows[later].operation
        if place in operation.reads:
            last = later
        if any(place.overlaps(other) for other in operation.writes):
            return number if last is None else last
    return last


def _memory_sentence(
    logs: Mapping[str, OperationLog], rows: Sequence[_Row], names: Mapping[int, str], axis: _Axis
) -> str:
    counts = " and ".join(f"{len(log.operations)} in {part}" for part, log in logs.items())
    read = {place.address for row in rows for place in row.operation.reads} & set(names)
    made = [
        place
        for row in rows
        for place in row.operation.writes
        if place.address not in names and place not in row.operation.reads
    ]
    again = sum(any(place.overlaps(other) for other in made[:number]) for number, place in enumerate(made))
    return (
        f"{counted(len(rows), 'operation')}, {counts}, read {counted(len(read), 'given tensor')} and make "
        f"{counted(len(made), 'result')}; {again} of these lie where an earlier one lay, so that the pool has "
        f"{axis.total / 1e3:.1f} kB instead of {sum(place.nbytes for place in made) / 1e3:.1f}."
    )


# ---- launches ----


def launch_timeline(runs: Mapping[str, Launches], work: str = "operation") -> Figure:
    """Draw host and device over time, a pair of lanes for each way of running the same operations.

    work: what the device runs, in the singular, for the legend and the sentence.

    Raises ValueError without operations.
    """
    if not runs or not all(each.device for each in runs.values()):
        raise ValueError("launch_timeline needs runs with at least one operation each")
    lanes = [
        (f"{name}\n{lane}" if both else name, shade, getattr(each, lane))
        for name, each in runs.items()
        for both in (bool(each.host),)
        for lane, shade in ((("host", _LAUNCH), ("device", _OPERATION)) if both else (("device", _OPERATION),))
    ]
    end = max(each.end for each in runs.values())
    with styled():
        fig = new_figure(8.6, 0.9 + 0.42 * len(lanes))
        axes = fig.subplots()
        for row, (_, shade, lane) in enumerate(lanes):
            _draw_lane(axes, row, shade, lane, end)
        name_rows(axes, [name for name, _, _ in lanes])
        axes.set(xlim=(0, end), xlabel="microseconds")
        axes.set_facecolor(color("idle"))
        for row in range(1, len(lanes)):
            axes.axhline(row, color="white", linewidth=2)
        handles = [Patch(facecolor=_OPERATION, label=work)]
        if any(each.host for each in runs.values()):
            handles.append(Patch(facecolor=_LAUNCH, label="launch"))
        fig.legend(handles=[*handles, *legend_patches(["idle"])], loc="outside upper right", ncols=3)
    told = [
        f"{name} {counted(len(each.device), work)}, device busy {each.busy:.0%} of {each.end:.0f} us"
        for name, each in runs.items()
    ]
    return Figure(fig, "; ".join(told) + ".")


def _draw_lane(axes: Any, row: int, shade: str, lane: Sequence[Run], end: float) -> None:
    following = [*(run.start for run in lane[1:]), end]
    for run, until in zip(lane, following, strict=True):
        width, letter = run.end - run.start, 0.0105 * end
        needs = (len(run.name) + 1) * letter
        axes.add_patch(Rectangle((run.start, row + 0.1), width, 0.8, facecolor=shade, edgecolor="white", linewidth=0.6))
        if needs - 0.7 * letter < width:
            middle = (run.start + width / 2, row + 0.52)
            axes.text(*middle, run.name, ha="center", va="center", fontsize=8, color=text_color(shade), clip_on=True)
        elif needs < until - run.end:  # the name of a narrow bar, in the idle time after it
            after = (run.end + needs / 2, row + 0.52)
            axes.text(*after, run.name, ha="center", va="center", fontsize=8, color=_INK, clip_on=True)


def times_by_duration(times: Mapping[str, Sequence[float]], durations: Sequence[float], *, launch: float) -> Figure:
    """Draw the time of each way to run the same operations, relative to the first way, over an operation's duration.

    times: way -> its time for each of `durations`, microseconds, which rise. The dotted line is the time of a launch.
    Raises ValueError for fewer than two ways.
    """
    if len(times) < 2:
        raise ValueError("times_by_duration compares ways: give two or more")
    first, *others = times
    ratios = {name: [t / base for t, base in zip(times[name], times[first], strict=True)] for name in others}
    with styled():
        fig = new_figure(7.2, 3.2)
        axes = fig.subplots()
        axes.axhline(1.0, color=_INK, linewidth=1.2, label=first)
        for number, (name, values) in enumerate(ratios.items()):
            axes.plot(durations, values, label=name, linewidth=2, color=SEQUENCE[number], linestyle=LINES[number % 4])
        axes.axvline(launch, color=_INK, linewidth=1, linestyle=":")
        top = max(1.0, *(max(values) for values in ratios.values()))
        axes.set(xlabel="microseconds of an operation", ylabel="time / time without graphs",
                 xlim=(0, durations[-1]), ylim=(0, 1.1 * top))  # fmt: skip
        fig.legend(loc="outside upper right", ncols=len(times))
    ends = f"{durations[0]:g} and {durations[-1]:g} us"
    said = [f"{name} {values[0]:.2f} and {values[-1]:.2f}" for name, values in ratios.items()]
    return Figure(fig, f"Time against {first} for operations of {ends}: {', '.join(said)}.")


# ---- numbers ----


def by_call(series: Mapping[str, Sequence[float]], what: str, *, captured: int = 0) -> Figure:
    """Draw a number after each call, a line for each way to keep it; `captured` calls come before the first replay.

    The sentence gives the last value of each. Raises ValueError without values.
    """
    if not series or not all(len(values) for values in series.values()):
        raise ValueError("by_call needs at least one line with values")
    with styled():
        fig = new_figure(6.4, 2.8)
        axes = fig.subplots()
        calls = max(len(values) for values in series.values())
        if captured:
            axes.axvspan(0.5, captured + 0.5, color=color("idle"), zorder=0, label="warm-up and capture")
        for number, (name, values) in enumerate(series.items()):
            axes.step(range(1, len(values) + 1), values, where="mid", label=name, linewidth=2,
                      color=SEQUENCE[number], linestyle=LINES[number % 4])  # fmt: skip
        axes.set(xlabel="call", ylabel=what, xlim=(0.5, calls + 0.5))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        fig.legend(loc="outside upper right", ncols=len(series) + 1)
    last = ", ".join(f"{name} {values[-1]:g}" for name, values in series.items())
    first = f" ({captured} of them warm-up and capture)" if captured else ""
    return Figure(fig, f"{what} after {counted(calls, 'call')}{first}: {last}.")
