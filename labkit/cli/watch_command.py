"""`labkit watch`: live or finished runs on a terminal, from the files in their folders alone. It needs no torch.

Each run has a line with its state and its last step, and a plot of its loss by step. The plots of several runs are next
to each other and share their axes, so that they can be compared. A terminal is redrawn every few seconds until the runs
are over. A file or pipe gets the picture once.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from labkit.cli.arguments import Arguments, Command, Option
from labkit.config.errors import counted
from labkit.train.reporting.progress_bar import columns
from labkit.train.reporting.progress_line import all_lines, one_line
from labkit.train.reporting.run_records import RunRecords, names_of, pause, runs_in

NARROWEST = 38
"""Fewest columns of a plot, and of a terminal that is redrawn."""
HIGHEST, LOWEST = 10, 3
"""Most and fewest rows of a plot."""
_AXIS = 10
"""Columns to the left of a plot, for a number and the line of the axis."""
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character by row and column of its dots; Unicode has it at U+2800 plus the sum of its bits."""


class Watched:
    """The runs in the given folders, as far as their files have been read."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders, self._by_path = folders, dict[Path, RunRecords]()
        self.runs: list[RunRecords] = []

    def refresh(self) -> list[str]:
        """Read what is new, including runs that have begun since. Return a sentence for each folder without a run."""
        found, problems = runs_in(self._folders)
        known = {path: self._by_path.get(path) or RunRecords(path) for path in found}
        self._by_path = known | {path: run for path, run in self._by_path.items() if path not in known}
        self.runs = list(self._by_path.values())
        for run in self.runs:
            run.refresh()
        return problems


def execute(arguments: Arguments) -> int:
    """Show the runs once, or until they are over. Ctrl-C ends the command without a message."""
    if not arguments.words:
        arguments.problems.append("DIR: nothing to watch; give the train.output_dir of one or more runs")
    watched = Watched(arguments.words)
    arguments.refuse(watched.refresh())
    if arguments.options["once"] or not is_screen():
        print("\n".join(frame(watched.runs, columns(sys.stdout) or None)))
        return 0
    try:
        follow(watched, arguments.options["interval"])
    except KeyboardInterrupt:
        return 130
    return 0


def is_screen() -> bool:
    """Return True if standard output is a terminal on which lines can be redrawn."""
    return (columns(sys.stdout) or 0) >= NARROWEST and os.environ.get("TERM") != "dumb"


def follow(watched: Watched, interval: float) -> None:
    """Draw the runs every `interval` seconds until all are over; the last picture stays."""
    drawn, size = 0, os.terminal_size((0, 0))
    while True:
        before, size = size, os.get_terminal_size(sys.stdout.fileno())
        lines = frame(watched.runs, size.columns - 1, size.lines - 1)  # a full line or screen would scroll
        start = f"\x1b[{drawn}F" if drawn and size == before else "\x1b[2J\x1b[H" if drawn else ""
        sys.stdout.write(start + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
        sys.stdout.flush()
        drawn = len(lines)
        if all(run.over for run in watched.runs):
            return
        pause(interval)
        watched.refresh()


# ---- the picture ----


def frame(runs: Sequence[RunRecords], width: int | None = None, height: int | None = None) -> list[str]:
    """Return the lines of the picture, at most `height` of at most `width` columns.

    If width is None, the line of a run stays whole, and plots take the width that COLUMNS gives, or 100.
    """
    names = names_of([run.folder for run in runs])
    if len(runs) == 1 and width is not None:
        state = _state(runs[0], width)
        lines = [f"{_short(names[0], width - 2 - len(state))}  {state}", *_wrapped(runs[0], width)]
    else:
        longest = min(max(map(len, names)), 100 if width is None else width // 4)
        lines = [_line(run, name, longest, width) for run, name in zip(runs, names, strict=True)]
    if height is not None and len(lines) > height:
        more = f"{counted(len(lines) - height + 1, 'more line')}; a taller terminal shows them"
        return [*lines[: height - 1], more[:width]]
    room = None if height is None else height - len(lines)
    wide = shutil.get_terminal_size((100, 24)).columns if width is None else width
    return lines + plots(runs, names, max(wide, NARROWEST), room)


def _wrapped(run: RunRecords, width: int) -> list[str]:
    """Return all values of the last step of the only run, on as many lines as they need."""
    values = run.values()
    return all_lines(values, width) if values else [_no_step(run)]


def _line(run: RunRecords, name: str, longest: int, width: int | None) -> str:
    """Return name, state, and those values of the last step that fit."""
    head = f"{_short(name, longest):<{longest}}  {_state(run, width):<10}  "
    values = run.values()
    if not values:
        return f"{head}{_no_step(run)}"[:width]
    return (head + (all_lines(values)[0] if width is None else one_line(values, width - len(head))))[:width]


def _state(run: RunRecords, width: int | None) -> str:
    """Return the state, with the steps of a stopped run where there is room."""
    return run.words if width is None or width >= 80 else run.state


def _no_step(run: RunRecords) -> str:
    """Return the words for a run without a step, with its seconds while it starts."""
    return f"no step yet, started {run.age():.0f} s ago" if run.state == "starting" else "no step yet"


def _short(name: str, longest: int) -> str:
    """Return the end of a name that is too long; the ends of paths differ."""
    return name if len(name) <= longest else f"...{name[3 - longest :]}"


def plots(runs: Sequence[RunRecords], names: Sequence[str], width: int, room: int | None) -> list[str]:
    """Return a plot of the loss of each run that has one, as many in a row as fit, in at most `room` lines."""
    drawn = [(run, name, points) for run, name in zip(runs, names, strict=True) if (points := _finite(run))]
    if not drawn:
        return []
    across = max(1, min(len(drawn), width // NARROWEST))
    rows = math.ceil(len(drawn) / across)
    high = HIGHEST if room is None else min(HIGHEST, room // rows - 3)  # an empty line, the title, the steps
    if high < LOWEST:
        rows, high = (room or 0) // (LOWEST + 3), LOWEST
    x, y = _range([step for *_, points in drawn for step, _ in points]), _range([v for *_, p in drawn for _, v in p])
    wide = width // across - 2
    cells = [[_title(run, name, wide), *plot(points, wide, high, x, y)] for run, name, points in drawn]
    lines = []
    for start in range(0, min(len(cells), rows * across), across):
        beside = cells[start : start + across]
        lines += ["", *("  ".join(f"{part:<{wide}}" for part in parts).rstrip() for parts in zip(*beside, strict=True))]
    return lines


def _finite(run: RunRecords) -> list[tuple[int, float]]:
    """Return the losses of the run; empty if none of them is finite."""
    points = run.series.get("loss", [])
    return points if any(math.isfinite(value) for _, value in points) else []


def _range(values: Sequence[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)]
    return min(finite), max(finite)


def _title(run: RunRecords, name: str, width: int) -> str:
    words = f": loss by step{f', {run.layout}' if run.layout else ''}"
    return (_short(name, max(width // 2, width - len(words))) + words)[:width]


def plot(
    points: Sequence[tuple[float, float]], width: int, height: int, x: tuple[float, float], y: tuple[float, float]
) -> list[str]:
    """Return `height` rows of `width` columns with a line through the points, and a row that names both ends of x.

    x, y: ends of the axes. The line has gaps where a value is not finite. Characters are braille, of 2 x 4 dots; a
    terminal without Unicode gets one star in place of the dots.
    """
    across = width - _AXIS
    dots = _dots(points, 2 * across, 4 * height, x, y)
    cells: dict[tuple[int, int], int] = {}
    for column, row in dots:
        place = column // 2, row // 4
        cells[place] = cells.get(place, 0) | _DOTS[row % 4][column % 2]
    braille = _can_write("\u2800│")
    lines = []
    for row in range(height):
        label = f"{y[1]:.3g}" if row == 0 else f"{y[0]:.3g}" if row == height - 1 else ""
        marks = (cells.get((column, row), 0) for column in range(across))
        text = "".join(chr(0x2800 + bits) if braille and bits else "*" if bits else " " for bits in marks)
        lines.append(f"{label:>{_AXIS - 1}}{'│' if braille else '|'}{text}")
    first, last = f"{x[0]:g}", f"{x[1]:g}"
    return [*lines, f"{'':{_AXIS}}{first}{last:>{across - len(first)}}"]


def _dots(
    points: Sequence[tuple[float, float]], width: int, height: int, x: tuple[float, float], y: tuple[float, float]
) -> set[tuple[int, int]]:
    """Return (column, row) of the dots of a line through the points; rows count from the top."""

    def place(step: float, value: float) -> tuple[float, float] | None:
        if not math.isfinite(value):
            return None
        return (width - 1) * _share(step, *x), (height - 1) * (1 - _share(value, *y))

    places = [place(step, value) for step, value in points]
    dots = {(round(at[0]), round(at[1])) for at in places if at is not None}
    for start, end in pairwise(places):
        if start is not None and end is not None:
            count = math.ceil(max(abs(end[0] - start[0]), abs(end[1] - start[1])))
            for part in range(1, count):
                share = part / count
                dots.add((round(start[0] + share * (end[0] - start[0])), round(start[1] + share * (end[1] - start[1]))))
    return dots


def _share(value: float, low: float, high: float) -> float:
    """Return where a value is between two ends, from 0 to 1; 0.5 if the ends are equal."""
    return (value - low) / (high - low) if high > low else 0.5


def _can_write(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


COMMAND = Command(
    name="watch",
    summary="Show live or finished runs from the files in their folders: state, last step, a plot of the loss. On a "
    "terminal the picture is updated until the runs have ended; Ctrl-C stops it. Pass a parent folder to see every run "
    "in it.",
    options=(
        Option("interval", "float", "seconds between two pictures", 2.0, ge=0.1, le=3600),
        Option("once", "bool", "show the runs once and exit, as when writing to a file or pipe", False),
    ),
    execute=execute,
    example="labkit watch runs/first runs/second",
    words="DIR...",
    paths=True,
)
