"""A vocabulary cut over ranks: which rank owns an id, the softmax of one token in parts, and the memory of a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from labkit.viz.figure import Figure
from labkit.viz.style import ALERT, INK, PADDING, box, name_cells, new_figure, nth_color, styled, text_color

_WIDTH = 7.4
_OUTLINE: dict[str, Any] = {"fill": False, "edgecolor": "#333333", "linestyle": (0, (4, 2))}
_FOREIGN = "#F0F0F0"


# ---- owners of ids ----


def vocabulary_shards(vocab_size: int, rows: int, ranks: int, ids: Sequence[int]) -> Figure:
    """Draw the padded table with the rows of each rank, and below it which rank answers each id.

    vocab_size: words before padding.
    rows: rows of each rank's part, padding included.
    ids: a few ids, each drawn as a column.

    Raises ValueError if the parts are smaller than the vocabulary, and for an id outside of it.
    """
    if rows * ranks < vocab_size:
        raise ValueError(f"{ranks} parts of {rows} rows are fewer than {vocab_size} words")
    if outside := [each for each in ids if not 0 <= each < vocab_size]:
        raise ValueError(f"id {outside[0]} is outside the vocabulary 0..{vocab_size - 1}")
    with styled():
        fig = new_figure(_WIDTH, 1.5 + 0.24 * ranks)
        table, owners = fig.subplots(2, 1, height_ratios=(1.0, 0.7 * ranks))
        _draw_table(table, vocab_size, rows, ranks)
        _draw_owners(owners, rows, ranks, ids)
        if rows * ranks > vocab_size:
            fig.legend(handles=[Patch(**PADDING, label="padding")], loc="outside upper right")
    return Figure(fig, _shards_sentence(vocab_size, rows, ranks, ids))


def _draw_table(axes: Any, vocab_size: int, rows: int, ranks: int) -> None:
    for rank in range(ranks):
        first, end = rank * rows, min((rank + 1) * rows, vocab_size)
        shade = nth_color(rank)
        box(axes, (first, 0), rows, 1, shade, edgecolor="#FFFFFF", linewidth=1.0)
        if end < first + rows:
            start = max(first, end)
            axes.add_patch(Rectangle((start, 0), first + rows - start, 1, **PADDING))
        axes.text(first + max(end - first, 0) / 2, 0.5, f"rank {rank}", ha="center", va="center", fontsize=8,
                  color=text_color(shade))  # fmt: skip
    axes.set(xlim=(0, rows * ranks), ylim=(0, 1), yticks=[])
    axes.set_xticks([rank * rows for rank in range(ranks)])
    axes.set_title("rows of the table: first id of each rank", loc="left", fontsize=9)
    axes.tick_params(length=2)
    axes.spines[["left", "bottom"]].set_visible(False)


def _draw_owners(axes: Any, rows: int, ranks: int, ids: Sequence[int]) -> None:
    for column, each in enumerate(ids):
        for rank in range(ranks):
            own = each // rows == rank
            shade = nth_color(rank) if own else _FOREIGN
            text, ink = (f"{each}", "") if own else ("0", "#777777")
            box(axes, (column, rank), 1, 1, shade, text, size=7.5, ink=ink, edgecolor="#FFFFFF", linewidth=1.0)
    name_cells(axes, [""] * max(1, len(ids)), [f"rank {rank}" for rank in range(ranks)])
    axes.set_title("the row that each rank adds for a token: row of the id, or zeros", loc="left", fontsize=9)


def _shards_sentence(vocab_size: int, rows: int, ranks: int, ids: Sequence[int]) -> str:
    padding = rows * ranks - vocab_size
    owned = [sum(each // rows == rank for each in ids) for rank in range(ranks)]
    words = ", ".join(f"rank {rank} owns {count}" for rank, count in enumerate(owned))
    return (
        f"{vocab_size:,} words in a table of {rows * ranks:,} rows over {ranks} ranks: {rows:,} rows each, "
        f"{padding} of them padding in all; of {len(ids)} ids {words}."
    )


# ---- one token's softmax ----


def split_softmax(logits: Sequence[float], ranks: int, label: int) -> Figure:
    """Draw the logits of one token with each rank's maximum, and their gradient, softmax minus one-hot.

    logits: one for each column of the vocabulary; every rank has equally many.
    label: column of the correct word.

    Raises ValueError if the ranks do not divide the columns, and for a label outside of them.
    """
    values = np.asarray(logits, dtype=float)
    if values.size % ranks:
        raise ValueError(f"{values.size} columns cannot be cut over {ranks} ranks")
    if not 0 <= label < values.size:
        raise ValueError(f"label {label} is outside the columns 0..{values.size - 1}")
    parts = values.reshape(ranks, -1)
    sums = np.exp(parts - values.max()).sum(axis=1)
    gradient = np.exp(values - values.max()) / sums.sum()
    gradient[label] -= 1
    with styled():
        fig = new_figure(_WIDTH, 4.2)
        above, below = fig.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        _draw_columns(above, values, ranks, label)
        _draw_maxima(above, parts)
        _draw_columns(below, gradient, ranks, label)
        above.set_ylabel("logit")
        below.set(ylabel="gradient", xlabel="column of the vocabulary")
        handles = [Patch(facecolor=nth_color(rank), label=f"rank {rank}") for rank in range(ranks)]
        fig.legend(handles=handles, loc="outside upper center", ncols=min(8, ranks))
    return Figure(fig, _softmax_sentence(parts, sums, label, gradient))


def _draw_columns(axes: Any, values: Any, ranks: int, label: int) -> None:
    shades = [nth_color(column * ranks // len(values)) for column in range(len(values))]
    bars = axes.bar(range(len(values)), values, width=0.8, color=shades)
    bars[label].set(edgecolor="#000000", linewidth=1.6)
    below = values[label] >= 0  # on the side of the axis where the bar is not
    axes.annotate("label", (label, 0), xytext=(0, -3 if below else 3), textcoords="offset points", ha="center",
                  va="top" if below else "bottom", fontsize=8)  # fmt: skip
    axes.axhline(0, color="#333333", linewidth=0.6)
    axes.margins(y=0.18)
    axes.set_xticks(range(len(values)))


def _draw_maxima(axes: Any, parts: Any) -> None:
    """Draw a dash over the columns of each rank at its maximum, and a line through all of them at the largest."""
    each = parts.shape[1]
    for rank, most in enumerate(parts.max(axis=1)):
        axes.hlines(most, rank * each - 0.5, (rank + 1) * each - 0.5, color=nth_color(rank), linewidth=1.6, zorder=3)
    axes.axhline(parts.max(), color="#333333", linewidth=0.9, linestyle=(0, (6, 2)))
    axes.annotate("largest of all ranks", (1, parts.max()), xycoords=("axes fraction", "data"), xytext=(-2, 3),
                  textcoords="offset points", ha="right", fontsize=8, color="#444444")  # fmt: skip


def _softmax_sentence(parts: Any, sums: Any, label: int, gradient: Any) -> str:
    top, owner = parts.max(), label // parts.shape[1]
    target = parts.reshape(-1)[label]
    added = " + ".join(f"{each:.2f}" for each in sums)
    return (
        f"{parts.size} logits over {len(parts)} ranks: the largest is {top:.2f}, sums of exp(logit - {top:.2f}) are "
        f"{added} = {sums.sum():.2f}; label {label} on rank {owner} has {target:.2f}, so the loss is "
        f"{np.log(sums.sum()) + top - target:.2f} and the label's gradient {gradient[label]:.2f}."
    )


# ---- what a reader's lookup adds ----


def added_rows(yours: Sequence[Sequence[int]], ids: Sequence[int], rows: int) -> Figure:
    """Draw which row of the table each rank adds for each id, as the reader's lookup has it, and as it should be.

    yours: for each rank and id the row that it adds, or -1 for zeros. rows: rows of each rank's part.

    A wrong cell has a red frame.
    """
    right = [[each if each // rows == rank else -1 for each in ids] for rank in range(len(yours))]
    wrong = sum(mine != own for line, lines in zip(yours, right) for mine, own in zip(line, lines))
    with styled():
        fig = new_figure(_WIDTH, 0.9 + 0.26 * len(yours))
        for axes, title, table in zip(fig.subplots(1, 2), ("yours", "right"), (yours, right)):
            for rank, line in enumerate(table):
                for column, row in enumerate(line):
                    look: dict[str, Any] = {"edgecolor": "#FFFFFF", "linewidth": 1.0}
                    if row != right[rank][column]:
                        look = {"edgecolor": ALERT, "linewidth": 2.0, "zorder": 3}
                    shade, ink = (_FOREIGN, "#777777") if row < 0 else (nth_color(rank), "")
                    box(axes, (column, rank), 1, 1, shade, f"{max(row, 0)}", size=8, ink=ink, **look)
            name_cells(axes, [f"{each}" for each in ids], [f"rank {rank}" for rank in range(len(yours))])
            axes.set_title(f"{title}: row that is added, by id", loc="left", fontsize=9)
    return Figure(fig, f"Of {len(ids)} ids on {len(yours)} ranks {wrong or 'no'} cells are wrong.")


# ---- memory of a loss ----

_SMALL = 0.1
"""Share of the common axis below which a peak is enlarged."""


def memory_of_losses(
    ways: Mapping[str, Sequence[float]],
    predicted: Mapping[str, float],
    unit: str,
    forward: Mapping[str, int] | None = None,
) -> Figure:
    """Draw what is in memory after each operation, a panel for each way to compute the same, on one axis.

    ways: name -> what is in memory after each operation, forward and backward. predicted: name -> its peak. unit: what
    both are counted in. forward: name -> operations of forward, after which a dotted line is drawn.

    What is small on the common axis is shown in an inset, too, on an axis of its own.
    """
    highest = max(*predicted.values(), *(max(moments) for moments in ways.values()))
    with styled():
        fig = new_figure(8.6, 3.1)
        panels = fig.subplots(1, len(ways), sharey=True, squeeze=False)[0]
        for number, (axes, (name, moments)) in enumerate(zip(panels, ways.items())):
            peak = max(*moments, predicted[name])
            views = [axes, axes.inset_axes((0.2, 0.25, 0.78, 0.6))] if peak < _SMALL * highest else [axes]
            for view in views:
                view.fill_between(range(len(moments)), moments, step="post", color=nth_color(number), linewidth=0)
                view.add_patch(Rectangle((0, 0), len(moments), predicted[name], linewidth=1.2, **_OUTLINE))
                view.set(xlim=(0, len(moments)), xticks=[])
            for inset in views[1:]:
                inset.set(ylim=(0, 1.1 * peak))
                inset.set_title("the same, enlarged", fontsize=8)
            if forward and name in forward:
                axes.axvline(forward[name], color=INK, linestyle=":", linewidth=1.2)
            axes.set_title(f"{name}\npeak {max(moments):.2f}", loc="left", fontsize=9)
            axes.set_xlabel("operations, first to last")
            axes.grid(axis="y")
        panels[0].set(ylabel=unit, ylim=(0, 1.06 * highest))
        handles: list[Artist] = [
            Patch(facecolor="#999999", label="measured, after each operation"),
            Patch(label="predicted peak", **_OUTLINE),
        ]
        if forward:
            handles.append(Line2D([], [], color=INK, linestyle=":", linewidth=1.2, label="end of forward"))
        fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    said = ", ".join(f"{name} {max(moments):.2f} of {predicted[name]:.2f} predicted" for name, moments in ways.items())
    return Figure(fig, f"Peaks in {unit}: {said}.")
