"""Chunks of tensors on ranks: before and after a collective.

A cell is one chunk, a row one rank. The colour of a cell names the rank whose numbers it contains. A sum has a stripe
for each rank in it, and a dark frame if every rank is in it once. The number in a cell says which chunk it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.patheffects import Normal, Stroke
from numpy.typing import NDArray

from labkit.viz.figure import Figure
from labkit.viz.style import ALERT, name_cells, new_figure, nth_color, styled, text_color

State = Sequence[Any]
"""An array [cells, ranks, chunks] per rank. Entry (r, c) of a cell counts how often chunk c of rank r was added."""
Cell = NDArray[Any]

_CELL = 0.29
"""Inches across a cell."""
_MARGIN, _HEAD = 0.55, 0.42
"""Inches next to and above the cells of a panel."""
_EMPTY, _MIXED, _COMPLETE = "#F0F0F0", ALERT, "#000000"


def before_and_after(operations: Mapping[str, tuple[State, State]]) -> Figure:
    """Draw what each rank has before an operation (above) and after it (below), with a column for each operation.

    operations: name -> (state before, state after).

    Raises ValueError without an operation, and for a state of another form.
    """
    states = {f"{name}, {when}": _checked(pair[at]) for name, pair in operations.items()
              for at, when in enumerate(("before", "after"))}  # fmt: skip
    if not states:
        raise ValueError("before_and_after needs at least one operation")
    ranks = len(next(iter(states.values())))
    width, height = (ranks * _CELL + extra for extra in (_MARGIN, _HEAD))
    with styled():
        fig = new_figure(max(len(operations) * width, 3.2), 2 * height)
        panels = fig.subplots(2, len(operations), squeeze=False)
        for axes, (title, state) in zip(panels.T.ravel(), states.items()):
            _draw(axes, state, title.replace(", ", "\n"), 8)
        for axes in panels[:, 0]:
            axes.set_ylabel("rank")
    told = [f"{name} {_cells(states[f'{name}, before'])} before and {_cells(states[f'{name}, after'])} after"
            for name in operations]  # fmt: skip
    return Figure(fig, f"Chunks of a rank, of {ranks} ranks: {'; '.join(told)}.")


def _checked(state: State) -> list[Cell]:
    """Return the state as arrays, or raise ValueError for another form."""
    arrays = [np.asarray(cells) for cells in state]
    ranks = len(arrays)
    for rank, cells in enumerate(arrays):
        if cells.ndim != 3 or cells.shape[1] != ranks or cells.shape[0] > cells.shape[2]:
            raise ValueError(
                f"rank {rank} holds an array {list(cells.shape)}; a state of {ranks} ranks has [cells, {ranks}, "
                "chunks] for each, with at most as many cells as chunks"
            )
    return arrays


def _all_cells(state: Sequence[Cell]) -> list[Cell]:
    return [cell for cells in state for cell in cells]


def _chunks_in(cell: Cell) -> list[int]:
    return np.flatnonzero(cell.any(axis=0)).tolist()


def _is_mixed(cell: Cell) -> bool:
    return len(_chunks_in(cell)) > 1


def _is_complete(cell: Cell) -> bool:
    """Return True for a sum that has one chunk of every rank once."""
    return not _is_mixed(cell) and bool((cell.sum(axis=1) == 1).all())


def _draw(axes: Any, state: Sequence[Cell], title: str, size: float) -> None:
    ranks, columns = len(state), state[0].shape[2]
    for rank, cells in enumerate(state):
        alone = len(cells) == 1 < columns
        for column in range(columns):
            axes.add_patch(Rectangle((column, rank), 1, 1, facecolor=_EMPTY, edgecolor="#FFFFFF", linewidth=1.0))
        for place, cell in enumerate(cells):
            column = (_chunks_in(cell) or [rank])[0] if alone else place
            _draw_cell(axes, column, rank, cell, size)
    name_cells(axes, [""] * columns, [f"{rank}" for rank in range(ranks)])
    axes.set_aspect("equal")
    axes.set_title(title, fontsize=8)


def _draw_cell(axes: Any, column: int, rank: int, cell: Cell, size: float) -> None:
    """Draw one stripe for each share in the cell, in the order of ranks, with the chunk's number in the middle."""
    shares = [owner for owner, count in enumerate(cell.sum(axis=1).astype(int)) for _ in range(count)]
    for place, owner in enumerate(shares):
        stripe = (column, rank + place / len(shares)), 1, 1 / len(shares)
        axes.add_patch(Rectangle(*stripe, facecolor=nth_color(owner), linewidth=0))
    edge = _MIXED if _is_mixed(cell) else _COMPLETE if _is_complete(cell) else "#FFFFFF"
    inset = 0.0 if edge == "#FFFFFF" else 0.05
    frame = (column + inset, rank + inset), 1 - 2 * inset, 1 - 2 * inset
    axes.add_patch(Rectangle(*frame, fill=False, edgecolor=edge, linewidth=1.0 if inset == 0 else 1.3))
    several = len(shares) > 1
    around = [Stroke(linewidth=2.2, foreground="#FFFFFF"), Normal()] if several else None
    ink = "#000000" if several or not shares else text_color(nth_color(shares[0]))
    axes.text(column + 0.5, rank + 0.5, "+".join(map(str, _chunks_in(cell))), ha="center", va="center", fontsize=size,
              color=ink, path_effects=around)  # fmt: skip


def _cells(state: Sequence[Cell]) -> str:
    """Return how many cells the ranks have: `4`, `1`, `4 sums`."""
    counts = sorted({len(cells) for cells in state})
    words = " or ".join(map(str, counts))
    sums = all(cell.sum() > 1 for cell in _all_cells(state))
    return f"{words} sum{'s' if counts[-1] > 1 else ''}" if sums else words
