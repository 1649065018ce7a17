"""A transformer layer over a tensor-parallel group: f and g, their messages, each rank's tensors.

Under sequence parallelism an all-gather replaces f, and a reduce-scatter replaces g. The paper (arXiv 2205.05198,
4.2.2) names the two g and g-bar. Pictures here name them f_s and g_s, so that g keeps its meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.comm.ledger import CommRecord
from labkit.viz.figure import Figure
from labkit.viz.style import SEQUENCE, box, color, new_figure, nth_color, styled, text_color

PARTS = (("attention", ("qkv", "heads", "proj")), ("mlp", ("fc1", "act", "fc2")))
"""Sub-layers of a block, and the computations of a rank in each, in their order."""

MAX_LANES = 4
"""Ranks that are drawn; of a larger group the first ones and the last."""

_STEP = 1.0
_PART_WIDTH = 5 * _STEP + 0.6


def tensor_parallel_block(records: Sequence[CommRecord], layer: str = "layers.0") -> Figure:
    """Draw one layer: a lane per rank, f and g as bars across the lanes, and the ledger's calls under each bar.

    Args:
        records: entries of one rank's `CommLedger` during one forward and one backward.
        layer: name of the layer; its parts are `<layer>.attention` and `<layer>.mlp`.

    Raises:
        ValueError: the records hold nothing of that layer.
    """
    mine = [r for r in records if r.layer is not None and r.layer.startswith(f"{layer}.")]
    if not mine:
        raise ValueError(f"no communication of {layer!r} among {len(records)} records; is the group larger than 1?")
    size = mine[0].group_size
    lanes = list(range(size)) if size <= MAX_LANES else [*range(MAX_LANES - 1), size - 1]
    with styled():
        fig = new_figure(8.6, 1.7 + 0.5 * len(lanes))
        axes = fig.subplots()
        for index, (part, boxes) in enumerate(PARTS):
            _draw_part(axes, index * _PART_WIDTH, part, boxes, lanes, [r for r in mine if _part_of(r, layer) == part])
        _draw_frame(axes, len(lanes), 2.05)
    return Figure(fig, _sentence(mine, layer, size))


def _part_of(record: CommRecord, layer: str) -> str:
    assert record.layer is not None
    return record.layer.removeprefix(f"{layer}.").split(".")[0]


def _sentence(records: Sequence[CommRecord], layer: str, size: int) -> str:
    words = []
    for phase, operator in (("forward", "g"), ("backward", "f")):
        sizes = [r.bytes for r in records if r.phase == phase]
        each = f" of {sizes[0]:,} bytes each" if sizes and len(set(sizes)) == 1 else f", {sum(sizes):,} bytes in all"
        words.append(f"{len(sizes)} {phase} ({operator}){each}")
    return f"{layer} over tp {size}: all-reduces {words[0]}, {words[1]}."


def _draw_part(
    axes: Any, x: float, part: str, boxes: Sequence[str], lanes: Sequence[int], records: Sequence[CommRecord]
) -> None:
    """Draw one sub-layer: f, three boxes on each lane, g."""
    height = len(lanes)
    axes.text(x + 2 * _STEP, height + 0.15, part, ha="center", va="bottom", fontsize=10)
    for position, name in enumerate(boxes, start=1):
        for lane, rank in enumerate(lanes):
            shade = nth_color(lane)
            corner = (x + position * _STEP - 0.42, height - 1 - lane + 0.14)
            box(axes, corner, 0.84, 0.72, shade, f"{name} {rank}")
    for operator, position, name in (("f", 0, boxes[0]), ("g", len(boxes) + 1, boxes[-1])):
        mine = [r for r in records if r.layer is not None and r.layer.endswith(f".{name}")]
        _draw_operator(axes, x + position * _STEP, height, operator, mine)


def _draw_operator(axes: Any, x: float, height: int, operator: str, records: Sequence[CommRecord]) -> None:
    """Draw a bar across all lanes, and under the bar its operation in each direction."""
    bar = color("collective")
    box(axes, (x - 0.2, 0.04), 0.4, height - 0.08, bar)
    axes.text(x, height / 2, operator, ha="center", va="center", fontsize=12, style="italic", color=text_color(bar))
    lines = []
    for phase in ("forward", "backward"):
        calls = [r for r in records if r.phase == phase]
        kinds = sorted({r.operation for r in calls}, reverse=True)
        talk = "\n".join(f"{sum(r.operation == kind for r in calls)} x {kind}" for kind in kinds)
        lines.append(f"{phase}\n{talk}\n{sum(r.bytes for r in calls):,} B" if calls else f"{phase}\nidentity")
    for row, text in enumerate(lines):
        axes.text(x, -0.12 - 0.95 * row, text, ha="center", va="top", fontsize=7.5, linespacing=1.25)


def _draw_frame(axes: Any, height: int, below: float) -> None:
    right = len(PARTS) * _PART_WIDTH - 0.6 * _STEP
    axes.annotate(
        "", (right - 0.4, height + 0.62), (-0.5, height + 0.62), arrowprops={"arrowstyle": "->", "color": "#555555"}
    )
    axes.text(right / 2 - 0.45, height + 0.68, "forward, left to right", ha="center", va="bottom", fontsize=8)
    axes.set_xlim(-0.9, right - 0.1)
    axes.set_ylim(-below, height + 1.05)
    axes.axis("off")


# ---- the tensors that a rank holds ----

_STATIONS = ("x", "norm", "enter", "gathered", "fc1", "GeLU", "fc2", "leave", "dropout", "+ x")
"""A sublayer in the order of forward; `enter` and `leave` are f and g, or f_s and g_s. f gathers nothing."""
_ALIKE = "#BBBBBB"
"""Colour of numbers that are the same on every rank."""
_OPERATORS = {
    False: {"enter": ("f", "identity", "all-reduce"), "leave": ("g", "all-reduce", "identity")},
    True: {"enter": ("$f_s$", "all-gather", "reduce-\nscatter"), "leave": ("$g_s$", "reduce-\nscatter", "all-gather")},
}
"""Sequence parallel or not -> name of each operator, and its operations in forward and in backward."""


def split_sequence(s: int, b: int, h: int, inner: int, t: int, *, sequence_parallel: bool) -> Figure:
    """Draw a sublayer over t ranks, with or without sequence parallelism: each rank's part of each tensor, its shape.

    s, b, h: positions, samples and width between the tensor-parallel regions. inner: width inside.

    An outline is a whole tensor, with positions downwards and width to the right. A hatched area is one term of a sum,
    and a grey one has the same numbers on every rank. A dotted outline is a tensor that f_s has gathered.
    """
    lanes = list(range(t)) if t <= MAX_LANES else [*range(MAX_LANES - 1), t - 1]
    with styled():
        fig = new_figure(10.2 if sequence_parallel else 9.6, 1.35 + 0.55 * len(lanes))
        _draw_sublayer(fig.subplots(), lanes, t, (s, b, h), inner, split=sequence_parallel)
    between = (
        f"{_text_of((s // t, b, h))} with f_s and g_s" if sequence_parallel else f"{_text_of((s, b, h))} with f and g"
    )
    return Figure(
        fig,
        f"A sublayer over tp {t}: between the regions a rank holds {between}; inside {_text_of((s, b, inner // t))}.",
    )


def _text_of(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _draw_sublayer(
    axes: Any, lanes: Sequence[int], t: int, between: tuple[int, int, int], inner: int, *, split: bool
) -> None:
    s, b, h = between
    height = len(lanes)
    stations = [station for station in _STATIONS if split or station != "gathered"]
    for x, station in enumerate(stations):
        if station in _OPERATORS[split]:
            _draw_switch(axes, x, height, *_OPERATORS[split][station])
            continue
        inside = station in ("fc1", "GeLU")
        whole = station in ("gathered", "fc2") or not (inside or split)
        shape = (s, b, inner // t) if inside else (s, b, h) if whole else (s // t, b, h)
        for lane, rank in enumerate(lanes):
            part = (0, 0, 1, 1) if whole else (rank / t, 0, 1 / t, 1) if inside else (0, 1 - (rank + 1) / t, 1, 1 / t)
            _draw_held(axes, (x - 0.36, height - 1 - lane + 0.1), part, station, SEQUENCE[lane])
        axes.text(x, height + 0.08, station, ha="center", va="bottom", fontsize=9)
        axes.text(x, -0.06, _text_of(shape), ha="center", va="top", fontsize=7.5)
    for lane, rank in enumerate(lanes):
        axes.text(-0.55, height - 0.5 - lane, f"rank {rank}", ha="right", va="center", fontsize=9)
    title = "tensor and sequence parallel" if split else "tensor parallel"
    axes.set_title(f"{title} (grey: the same numbers on every rank)", loc="left", fontsize=10)
    axes.set(xlim=(-1.25, len(stations) - 0.4), ylim=(-1.35, height + 0.5))
    axes.axis("off")


def _draw_held(
    axes: Any, corner: tuple[float, float], part: tuple[float, float, float, float], station: str, own: str
) -> None:
    """Draw the outline of a whole tensor, and in it what a rank holds: corner and size, as shares of the whole.

    own: the rank's colour, for numbers that only this rank has.
    """
    held, (width, high) = (corner[0] + 0.72 * part[0], corner[1] + 0.8 * part[1]), (0.72 * part[2], 0.8 * part[3])
    if station == "gathered":
        box(axes, held, width, high, _ALIKE, linestyle=":", linewidth=1.6)
        return
    box(axes, corner, 0.72, 0.8, "#FFFFFF")
    if station == "fc2":
        box(axes, held, width, high, own, hatch="////", edgecolor=text_color(own))
    else:
        box(axes, held, width, high, _ALIKE if part[2:] == (1, 1) else own)


def _draw_switch(axes: Any, x: float, height: int, name: str, forward: str, backward: str) -> None:
    """Draw an operator as a bar across the lanes, with what it does in each direction."""
    bar = color("collective")
    box(axes, (x - 0.14, 0.04), 0.28, height - 0.08, bar)
    axes.text(x, height / 2, name, ha="center", va="center", fontsize=11, style="italic", color=text_color(bar))
    words = f"forward:\n{forward}\nbackward:\n{backward}"
    axes.text(x, -0.06, words, ha="center", va="top", fontsize=7.5, linespacing=1.15)
