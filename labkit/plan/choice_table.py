"""The numbers of `at_scale`, and their table as text and as HTML. No torch."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from labkit.plan.search import DIFFERENCE

Rest = Literal["same", "best"]
HEAD = ("", "ms per step", "GB per GPU", "GPU-hours of the run", "carried by", "layout")
WIDTH = 90
"""Characters of a line of text below the table."""
Cells = tuple[str, ...]
_CELL = "white-space: nowrap; padding: 0.1em 0.7em"


class Point(NamedTuple):
    """One value of the choice on one number of GPUs. The numbers are NaN if no layout has the value there."""

    gpus: int
    value: str
    layout: str
    """The whole layout, as `labkit plan` writes it; empty if there is none."""
    seconds: float
    """Predicted time of a step."""
    bytes: float
    """Peak of the fullest rank."""
    available: float
    """Bytes of a GPU that a rank may use."""
    gpu_hours: float
    """Of the whole run, which has `train.steps` steps."""
    link: str
    """The ranks that carry what the choice changes, and the link between them; empty if no rank sends anything."""
    link_seconds: float
    """Seconds of a step in which computation waits for messages of these ranks."""

    @property
    def fits(self) -> bool:
        """True if every rank has room."""
        return self.bytes <= self.available


@dataclass(frozen=True, repr=False)
class AtScale:
    """What a choice costs or saves; prints as a table, in Jupyter as one of HTML."""

    fields: tuple[str, ...]
    """The fields of the choice."""
    title: str
    rest: Rest
    interval: tuple[float, float]
    """Of a measured step over its prediction, 80 % are expected to be between these."""
    points: list[Point]

    def on(self, gpus: int) -> list[Point]:
        """Return the points on a number of GPUs, in the order of the values."""
        return [point for point in self.points if point.gpus == gpus]

    def __repr__(self) -> str:
        return _as_text(self)

    def _repr_html_(self) -> str:
        return _as_html(self)


def _as_text(found: AtScale) -> str:
    """Return the table in columns, a block for each number of GPUs."""
    blocks = list(_blocks(found))
    rows = [row for _, block in blocks for row in block]
    shown = [place for place in range(len(HEAD)) if any(row[place] for row in rows)]
    widths = {place: max(len(row[place]) for row in [HEAD, *rows]) for place in shown}

    def line(row: Cells) -> str:
        cells = [
            row[place].rjust(widths[place]) if 1 <= place <= 3 else row[place].ljust(widths[place]) for place in shown
        ]
        return "  " + "  ".join(cells).rstrip()

    lines = [", ".join(found.fields), found.title, line(HEAD)]
    for name, block in blocks:
        lines += [name, *map(line, block)]
    return "\n".join([*lines, *textwrap.wrap(_note(found), WIDTH)])


def _as_html(found: AtScale) -> str:
    """Return the table for Jupyter. It sets no colours, so that it is readable on a dark theme."""
    blocks = list(_blocks(found))
    shown = [place for place in range(len(HEAD)) if any(row[place] for _, block in blocks for row in block)]

    def cells(row: Cells, tag: str) -> str:
        sides = ["right" if 1 <= place <= 3 else "left" for place in shown]
        texts = [html.escape(row[place]) for place in shown]
        return "".join(
            f'<{tag} style="{_CELL}; text-align: {side}">{text}</{tag}>'
            for side, text in zip(sides, texts, strict=True)
        )

    body = ""
    for name, block in blocks:
        body += f'<tr><th colspan="{len(shown)}" style="text-align: left">{html.escape(name)}</th></tr>'
        body += "".join(f"<tr>{cells(row, 'td')}</tr>" for row in block)
    caption = f"<b>{html.escape(', '.join(found.fields))}</b>: {html.escape(found.title)}"
    return (
        f"<p>{caption}</p><table><thead><tr>{cells(HEAD, 'th')}</tr></thead><tbody>{body}</tbody></table>"
        f'<p style="max-width: 60em">{html.escape(_note(found))}</p>'
    )


def _blocks(found: AtScale) -> Iterator[tuple[str, list[Cells]]]:
    """Yield a heading and rows for each number of GPUs; the last row is the change from the first to the last value."""
    for gpus in dict.fromkeys(point.gpus for point in found.points):
        points = found.on(gpus)
        legal = [point for point in points if point.layout]
        common = [part for part in legal[0].layout.split(",") if all(part in each.layout.split(",") for each in legal)
                  ] if found.rest == "same" and legal else []  # fmt: skip
        rows = [_row(point, found.rest == "best") for point in points]
        if len(legal) > 1:
            rows.append(_difference(legal[0], legal[-1]))
        yield f"{gpus} GPU{'s' if gpus > 1 else ''}" + (f": {','.join(common)}" if common else ""), rows


def _row(point: Point, with_layout: bool) -> Cells:
    if not point.layout:
        return (point.value, "", "", "", "no legal layout", "")
    memory = f"{point.bytes / 1e9:,.1f}"
    times = f"{point.seconds * 1e3:,.0f}", f"{point.gpu_hours:,.0f}"
    if not point.fits:
        memory = f"does not fit: {memory} of {point.available / 1e9:,.1f}"
        times = f"({times[0]})", f"({times[1]})"
    link = f"{point.link}: {point.link_seconds * 1e3:,.0f} ms exposed" if point.link else ""
    return (point.value, times[0], memory, times[1], link, point.layout if with_layout else "")


def _difference(first: Point, last: Point) -> Cells:
    seconds, hours = last.seconds - first.seconds, last.gpu_hours - first.gpu_hours
    link = f"{(last.link_seconds - first.link_seconds) * 1e3:+,.0f} ms" if first.link or last.link else ""
    return (
        "change", f"{seconds * 1e3:+,.0f} ({seconds / first.seconds:+.1%})",
        f"{(last.bytes - first.bytes) / 1e9:+,.1f}", f"{hours:+,.0f}", link, "",
    )  # fmt: skip


def _note(found: AtScale) -> str:
    rests = {
        "same": "The rest of the layout is the same for all values: the fastest that is legal with each of them.",
        "best": "Each value has the fastest layout that it allows.",
    }
    notes = [rests[found.rest]]
    legal: Sequence[Point] = [point for point in found.points if point.layout]
    if any(not any(point.fits for point in found.on(gpus)) for gpus in {point.gpus for point in legal}):
        notes.append("Where no value fits, it is the smallest layout.")
    if any(not point.fits for point in legal):
        notes.append("In parentheses: what a step would take if there were room.")
    low, high = found.interval
    notes.append(
        f"Predicted, not measured: of measured steps, 80 % are expected at {low:.2f} to {high:.2f} times this, and of "
        f"changes within {DIFFERENCE:.0%} of a step."
    )
    return " ".join(notes)
