"""An encoder-decoder: what each pipeline stage holds and computes, and the buckets of relative distances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from labkit.viz.figure import Figure
from labkit.viz.style import INK, SEQUENCE, box, color, handle, name_cells, new_figure, styled

_HALVES = {"encoder": SEQUENCE[0], "decoder": SEQUENCE[1]}
_LOGITS = SEQUENCE[3]
_COPIES = {
    "words": ("embd", color("embd")),
    "positions": ("pos_embd", SEQUENCE[3]),
    "encoder's biases": ("pp_half", SEQUENCE[5]),
    "decoder's biases": ("pp_half", SEQUENCE[2]),
}
"""Table -> (group that adds up its gradients, colour)."""
_UNSEEN = "#E6E6E6"
_MOST_NUMBERS = 20
"""Most positions for which a map of distances shows its numbers."""


def split_stages(encoder: Sequence[int], decoder: Sequence[int], copies: Mapping[str, Sequence[int]]) -> Figure:
    """Draw a column for each pipeline stage: its layers, its copies of shared tables, and a line between equal copies.

    encoder, decoder: layers of each stage of the half; the decoder's stages follow the encoder's. copies: `words`,
    `positions`, `encoder's biases` or `decoder's biases` -> stages that have a copy. Biases of both halves share a row.

    Raises ValueError if a half has no stage, for another table, and for a stage that does not exist.
    """
    stages = [("encoder", count) for count in encoder] + [("decoder", count) for count in decoder]
    if not encoder or not decoder:
        raise ValueError("an encoder-decoder has at least one stage in each half")
    if unknown := set(copies) - set(_COPIES):
        raise ValueError(f"no table {min(unknown)!r}; the tables are {', '.join(_COPIES)}")
    if outside := [s for held in copies.values() for s in held if not 0 <= s < len(stages)]:
        raise ValueError(f"stage {outside[0]} is not one of the {len(stages)} stages")
    groups = list(dict.fromkeys(_COPIES[table][0] for table in copies))
    with styled():
        fig = new_figure(7.4, 1.2 + 0.5 * (1 + len(groups)))
        axes = fig.subplots()
        for stage, (half, count) in enumerate(stages):
            _box(axes, stage, 0, f"{half}: {count} layer{'s' * (count != 1)}", _HALVES[half], len(stages))
        for table, held in copies.items():
            row = 1 + groups.index(_COPIES[table][0])
            axes.hlines(row + 0.5, min(held) + 0.5, max(held) + 0.5, color="#000000", linewidth=2.0)
            for stage in held:
                _box(axes, stage, row, table, _COPIES[table][1], len(stages))
        name_cells(axes, [f"stage {stage}" for stage in range(len(stages))], ["layers", *groups])
    held = "; ".join(
        f"{table} on stage{'s' * (len(stages_) > 1)} {_listed(stages_)}" for table, stages_ in copies.items()
    )
    return Figure(fig, f"{len(stages)} stages, the decoder from stage {len(encoder)} on: {held}.")


def _listed(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def _box(axes: Any, stage: int, row: int, text: str, fill: str, stages: int) -> None:
    size = 8.0 if stages <= 4 else 6.0
    words = text.replace(": ", ":\n").replace("'s ", "'s\n") if stages > 4 else text
    box(axes, (stage + 0.06, row + 0.16), 0.88, 0.68, fill, words, size=size, edgecolor="none", zorder=2)


# ---- work ----


def stage_work(cuts: Mapping[str, Sequence[tuple[str, float, float]]], *, unit: str) -> Figure:
    """Draw a panel for each cut of an encoder-decoder into stages, with a bar for each stage and a line at the highest.

    cuts: name of a cut -> (`encoder` or `decoder`, work of its layers, work of its output layer) for each stage.
    unit: of the work.

    Raises ValueError without a cut, and for a cut without a stage.
    """
    if not cuts or not all(cuts.values()):
        raise ValueError("stage_work needs at least one cut, and a stage in each")
    slowest = {name: max(layers + logits for _, layers, logits in stages) for name, stages in cuts.items()}
    with styled():
        fig = new_figure(7.4, 3.0)
        every = fig.subplots(1, len(cuts), sharey=True, squeeze=False)[0]
        for axes, (name, stages) in zip(every, cuts.items()):
            for stage, (half, layers, logits) in enumerate(stages):
                axes.bar(stage, layers, 0.8, color=_HALVES[half])
                axes.bar(stage, logits, 0.8, layers, color=_LOGITS)
            axes.axhline(slowest[name], color=INK, linestyle="--", linewidth=1.0)
            axes.set_title(f"{name}: {slowest[name]:.1f}", loc="left")
            axes.set(xlabel="stage")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        every[0].set(ylabel=unit, ylim=(0, 1.08 * max(slowest.values())))
        keys: list[Any] = [handle(f"layers of the {half}", fill) for half, fill in _HALVES.items()]
        keys += [handle("output layer", _LOGITS), Line2D([], [], color=INK, linestyle="--", label="slowest stage")]
        fig.legend(handles=keys, loc="outside lower center", ncols=4)
    said = "; ".join(
        f"{name}, {slowest[name]:.1f} on stage {[a + b for _, a, b in stages].index(slowest[name])}"
        for name, stages in cuts.items()
    )
    return Figure(fig, f"Slowest stage in {unit}: {said}.")


# ---- distances ----


def distance_buckets(maps: Mapping[str, Any]) -> Figure:
    """Draw a square for each half: rows are queries, columns keys, and the number is the bucket of their distance.

    maps: name -> integers [queries, keys], all of one shape; a negative number is a key that the query never sees.

    Raises ValueError without a map, and for maps of several shapes.
    """
    squares = {name: np.asarray(values) for name, values in maps.items()}
    if not squares or len({square.shape for square in squares.values()}) != 1:
        raise ValueError("distance_buckets needs at least one map, and all of one shape")
    last = max(int(square.max()) for square in squares.values())
    queries, keys = next(iter(squares.values())).shape
    with styled():
        fig = new_figure(7.4, 4.1)
        for axes, (name, square) in zip(fig.subplots(1, len(squares), squeeze=False)[0], squares.items()):
            axes.imshow(np.ma.masked_less(square, 0), cmap="viridis", vmin=0, vmax=max(1, last))
            axes.set_facecolor(_UNSEEN)
            if max(queries, keys) <= _MOST_NUMBERS:
                for row, column in np.argwhere(square >= 0):
                    value = square[row, column]
                    bright = value > 0.6 * max(1, last)
                    axes.text(column, row, str(value), ha="center", va="center", fontsize=6,
                              color="#000000" if bright else "#FFFFFF")  # fmt: skip
            axes.set_title(name, loc="left")
            axes.set(xlabel="key", ylabel="query")
            axes.tick_params(length=2)
    used = "; ".join(
        f"{name}: {len(np.unique(square[square >= 0]))} buckets in use" for name, square in squares.items()
    )
    return Figure(fig, f"Buckets of {queries} x {keys} pairs of positions. {used}.")
