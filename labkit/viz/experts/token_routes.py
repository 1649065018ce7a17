"""The dispatch of a mixture of experts in pictures: rows from rank to rank, and the place of each row after each step.

A *row* is a token on its way to one of its experts: a token with k experts makes k rows. Counts of rows and routing
maps are plain arrays. Expert e is on rank e // (E / ep), as in the dispatchers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Rectangle
from numpy.typing import ArrayLike, NDArray

from labkit.viz.figure import Figure
from labkit.viz.style import INK, SEQUENCE, box, color, new_figure, styled, text_color

MOST_LETTERED = 16
"""Most ranks for which the cells of a send matrix show their numbers."""
MOST_ROWS = 128
"""Most rows that `dispatch_steps` draws, because more cannot be read."""
_PAPER = "#FFFFFF"
_TOKEN = "#D9D9D9"


# ---- the send matrix ----


def send_matrix_figure(rows: ArrayLike) -> Figure:
    """Draw the rows that each rank (down) sends to each rank (across), and above the rows that each rank computes.

    rows: [ep, ep] counts, `rows[r][s]` from rank r to rank s; rows of the diagonal stay on their rank.

    Raises:
        ValueError: a table that is not square, is empty, or has a negative count.
    """
    table = np.asarray(rows)
    if table.ndim != 2 or table.shape[0] != table.shape[1] or not table.size:
        raise ValueError(f"the rows that ranks send to each other are a square table, got shape {table.shape}")
    if (table < 0).any():
        raise ValueError(f"a rank cannot send {table.min()} rows")
    ep = len(table)
    with styled():
        fig = new_figure(1.9 + min(4.6, 0.62 * ep + 1.2), 2.5 + min(4.0, 0.42 * ep + 0.6))
        above, below = fig.subplots(2, 1, height_ratios=(1, 1.9), sharex=True)
        _draw_received(above, table.sum(axis=0))
        _draw_matrix(below, table)
    return Figure(fig, _matrix_sentence(table))


def _draw_received(axes: Any, received: NDArray[Any]) -> None:
    axes.bar(range(len(received)), received, 0.7, color=SEQUENCE[0], edgecolor=INK, linewidth=0.5)
    mean = received.mean()
    axes.axhline(mean, color=INK, lw=0.9, ls=(0, (6, 2)))
    axes.annotate(f"mean {mean:,.4g}", (1, mean), xycoords=("axes fraction", "data"), xytext=(3, 0),
                  textcoords="offset points", va="center", fontsize=8, annotation_clip=False)  # fmt: skip
    if len(received) <= MOST_LETTERED:
        for rank, count in enumerate(received):
            inside = count > 0.2 * received.max()
            axes.text(rank, 0.05 * received.max() if inside else count, f"{count:,}", ha="center", va="bottom",
                      fontsize=8, color=text_color(SEQUENCE[0]) if inside else INK)  # fmt: skip
    axes.set(ylim=(0, 1.1 * max(1, received.max())), ylabel="rows to\ncompute")
    axes.tick_params(axis="x", length=0, labelbottom=False)


def _draw_matrix(axes: Any, table: NDArray[Any]) -> None:
    """Draw cells that darken with their rows; a hatch marks rows that stay on their rank."""
    ep = len(table)
    shades = LinearSegmentedColormap.from_list("rows", [_PAPER, color("ep")])
    most = max(1, table.max())
    for sender in range(ep):
        for receiver in range(ep):
            red, green, blue, _ = (round(255 * part) for part in shades(table[sender, receiver] / most))
            face = f"#{red:02X}{green:02X}{blue:02X}"
            stays = sender == receiver
            axes.add_patch(
                Rectangle((receiver - 0.5, sender - 0.5), 1, 1, facecolor=_PAPER if stays else face,
                          hatch="...." if stays else "", edgecolor="#999999", linewidth=0.5)
            )  # fmt: skip
            if ep <= MOST_LETTERED:
                box = {"facecolor": _PAPER, "edgecolor": "none", "pad": 1.5} if stays else None
                axes.text(receiver, sender, f"{table[sender, receiver]:,}", ha="center", va="center", fontsize=8,
                          color=INK if stays else text_color(face), bbox=box)  # fmt: skip
    step = 1 if ep <= MOST_LETTERED else max(1, ep // 8)
    axes.set(xlim=(-0.5, ep - 0.5), ylim=(ep - 0.5, -0.5), xlabel="to rank (dotted: stays)", ylabel="from rank")
    axes.set_xticks(range(0, ep, step))
    axes.set_yticks(range(0, ep, step))
    axes.tick_params(length=0)


def _matrix_sentence(table: NDArray[Any]) -> str:
    total, stay, received = int(table.sum()), int(np.trace(table)), table.sum(axis=0)
    least, most = int(received.argmin()), int(received.argmax())
    fullest = (
        f"each computes {received[0]:,}"
        if received[least] == received[most]
        else f"rank {most} computes the most, {received[most]:,}, {received[most] / received.mean():.2f} times the "
        f"mean, rank {least} the least, {received[least]:,}"
    )
    return f"{total:,} rows over ep {len(table)}: {stay:,} stay on their rank, {total - stay:,} travel; {fullest}."


# ---- where rows are ----

_STEPS = (
    "1  route:\nby token",
    "2  permute:\nby expert",
    "3  all-to-all:\nby sender",
    "4  sort chunks:\nby local expert",
)
_X = (0.0, 1.0, 2.4, 3.4)
"""Places of the columns; the all-to-all has the widest space."""
_WIDTH = 0.34
_GAP = 1.4
"""Space between ranks, in heights of a row."""


@dataclass(frozen=True, order=True)
class _Row:
    """A token on its way to one expert."""

    sender: int
    token: int
    expert: int
    """Expert of the row; -1 for the token itself, before it is copied."""


@dataclass
class _Dispatch:
    """All rows in the order of each column, and the height of each row there."""

    maps: list[NDArray[np.bool_]]
    local: int
    """Experts per rank."""
    columns: list[list[_Row]] = field(default_factory=list)
    heights: list[dict[_Row, float]] = field(default_factory=list)

    def owner(self, row: _Row, column: int) -> int:
        """Return the rank that has a row in a column."""
        return row.sender if column < 2 else row.expert // self.local

    def travels(self, row: _Row) -> bool:
        """Return True if the row's expert is on another rank."""
        return row.sender != row.expert // self.local


def dispatch_steps(maps: Sequence[ArrayLike]) -> Figure:
    """Draw every row before and after each step of the way to the experts: one box per row, coloured by expert.

    maps: the routing map [T, E] of each rank, bool; tokens are numbered through over all ranks. The way back is the
        same picture read from right to left.

    Raises:
        ValueError: experts that the ranks do not divide, maps that disagree about them, or more than MOST_ROWS rows.
    """
    dispatch = _followed([np.asarray(each, dtype=bool) for each in maps])
    lowest = max((1 + height for places in dispatch.heights for height in places.values()), default=1.0)
    with styled():
        fig = new_figure(7.4, 0.7 + 0.155 * lowest)
        axes = fig.add_subplot()
        for column in range(3):
            _draw_ways(axes, dispatch, column)
        for column in range(4):
            _draw_boxes(axes, dispatch, column)
        _label_ranks(axes, dispatch)
        for x, words in zip(_X, _STEPS):
            axes.text(x, -1.0, words, ha="center", va="bottom", fontsize=9)
        axes.set(xlim=(-0.8, _X[-1] + 1.0), ylim=(lowest, -3.4))
        axes.axis("off")
    return Figure(fig, _steps_sentence(dispatch))


def _followed(maps: list[NDArray[np.bool_]]) -> _Dispatch:
    """Return the rows, their order in the four columns, and their places."""
    if not maps or any(each.ndim != 2 for each in maps) or len({each.shape[1] for each in maps}) != 1:
        raise ValueError(f"each rank gives a map [tokens, experts], got shapes {[each.shape for each in maps]}")
    experts = maps[0].shape[1]
    if experts % len(maps):
        raise ValueError(f"{experts} experts cannot be shared out equally over {len(maps)} ranks")
    first = np.cumsum([0, *(len(each) for each in maps)]).tolist()
    rows = [
        _Row(sender, first[sender] + int(token), int(expert))
        for sender, each in enumerate(maps)
        for token, expert in np.argwhere(each)
    ]
    if len(rows) > MOST_ROWS:
        raise ValueError(f"{len(rows)} rows cannot be drawn so that they can be read; give at most {MOST_ROWS}")
    found = _Dispatch(maps, experts // len(maps))
    found.columns = [
        [_Row(sender, first[sender] + token, -1) for sender, each in enumerate(maps) for token in range(len(each))],
        sorted(rows, key=lambda row: (row.sender, row.expert, row.token)),
        sorted(rows, key=lambda row: (found.owner(row, 2), row.sender, row.expert, row.token)),
        sorted(rows, key=lambda row: (row.expert, row.token)),
    ]
    _place(found)
    return found


def _place(dispatch: _Dispatch) -> None:
    """Place rows one below another, with a gap between ranks, and tokens evenly next to the rows of their rank."""
    dispatch.heights = [{} for _ in dispatch.columns]
    for column, order in enumerate(dispatch.columns):
        start = 0.0
        for rank, chosen in enumerate(dispatch.maps):
            mine = [row for row in order if dispatch.owner(row, column) == rank]
            taken = max(int(chosen.sum()), len(chosen)) if column < 2 else len(mine)
            step = taken / len(mine) if column == 0 and mine else 1.0
            dispatch.heights[column] |= {row: start + (place + 0.5) * step - 0.5 for place, row in enumerate(mine)}
            start += taken + _GAP


def _shade(expert: int) -> str:
    return _TOKEN if expert < 0 else SEQUENCE[expert % len(SEQUENCE)]


def _draw_ways(axes: Any, dispatch: _Dispatch, column: int) -> None:
    """Draw a curve from each row's box to its box in the next column; grey if the all-to-all leaves it on its rank."""
    bend = np.linspace(0, 1, 24)
    for row in dispatch.columns[column + 1]:
        before = _Row(row.sender, row.token, -1) if column == 0 else row
        y0, y1 = dispatch.heights[column][before], dispatch.heights[column + 1][row]
        x0, x1 = _X[column] + _WIDTH / 2, _X[column + 1] - _WIDTH / 2
        stays = column == 1 and not dispatch.travels(row)
        axes.plot(x0 + (x1 - x0) * bend, y0 + (y1 - y0) * (3 * bend**2 - 2 * bend**3), zorder=1,
                  lw=0.8 if stays else 1.0, color="#BBBBBB" if stays else _shade(row.expert))  # fmt: skip


def _draw_boxes(axes: Any, dispatch: _Dispatch, column: int) -> None:
    for row, y in dispatch.heights[column].items():
        face = _shade(row.expert)
        corner = (_X[column] - _WIDTH / 2, y - 0.44)
        box(axes, corner, _WIDTH, 0.88, face, str(row.token), size=7, linewidth=0.4, zorder=2)


def _label_ranks(axes: Any, dispatch: _Dispatch) -> None:
    """Write ranks at the left, where tokens start, and experts at the right, where they are computed."""
    for rank in range(len(dispatch.maps)):
        mine = [y for row, y in dispatch.heights[0].items() if row.sender == rank]
        if mine:
            middle = (min(mine) + max(mine)) / 2
            axes.text(_X[0] - 0.28, middle, f"rank {rank}", ha="right", va="center", fontsize=9)
    for expert in range(dispatch.local * len(dispatch.maps)):
        mine = [y for row, y in dispatch.heights[3].items() if row.expert == expert]
        if mine:
            words = f"expert {expert}, rank {expert // dispatch.local}"
            axes.text(_X[-1] + 0.26, (min(mine) + max(mine)) / 2, words, va="center", fontsize=8)


def _steps_sentence(dispatch: _Dispatch) -> str:
    rows, ep = dispatch.columns[1], len(dispatch.maps)
    by_rank = [sum(dispatch.owner(row, 2) == rank for row in rows) for rank in range(ep)]
    most, tokens, away = int(np.argmax(by_rank)), len(dispatch.columns[0]), sum(map(dispatch.travels, rows))
    return (
        f"{tokens} tokens of {ep} rank{'s' * (ep != 1)} make {len(rows)} rows for {dispatch.local * ep} experts: "
        f"{away} go{'es' * (away == 1)} to another rank, rank {most} gets the most, {by_rank[most]}."
    )
