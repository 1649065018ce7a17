"""All gradients of a stack of transformer layers in one table: which are wrong, and by how much."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from labkit.viz.figure import Figure
from labkit.viz.style import INK, box, color, mixed, name_rows, new_figure, styled, text_color

_WRONG, _RIGHT = "#AA1111", "#EEEEEE"
_INPUT = "x"
_ROUNDING = 1e-9
"""Relative errors up to this are rounding in float64."""
_ORDER = ("norm", "qkv", "proj", "fc1", "fc2")
"""Modules of a sublayer, as forward meets them."""


def gradient_table(errors: Mapping[str, float]) -> Figure:
    """Draw a row per layer, the last one on top, and a column per parameter, from the input to the output.

    A cell has the relative error of a gradient; a backward goes from the right to the left, and from the top down. f
    and g are drawn at their places in the layer, and the input x below the first layer.

    errors: `<layer>.<attention or mlp>.<module>.<weight or bias>`, or `x` -> relative error of the gradient.

    Raises ValueError if no name is one of a layer.
    """
    layers: dict[str, dict[str, float]] = {}
    for name, error in errors.items():
        layer, _, parameter = name.partition(".")
        layers.setdefault(layer, {})[parameter] = error
    first = layers.pop(_INPUT, None)
    if not all(layer.isdigit() for layer in layers) or not layers:
        raise ValueError(f"no gradients of numbered layers among {', '.join(errors)}")
    columns = sorted(next(iter(layers.values())), key=_place)
    rows = sorted(layers, key=int, reverse=True)
    with styled():
        fig = new_figure(9.2, 0.95 + 0.3 * (len(rows) + (first is not None)))
        axes = fig.subplots()
        for y, row in enumerate(rows):
            for column, parameter in enumerate(columns):
                _cell(axes, column, y, layers[row][parameter])
        if first is not None:
            _cell(axes, 0, len(rows), first[""])
            axes.text(4, len(rows) + 0.5, "← backward: to the left, and down", ha="center", va="center", fontsize=8)
        name_rows(axes, [f"layer {row}" for row in rows] + ["input x"] * (first is not None))
        _name_columns(axes, columns)
        axes.set(xlim=(0, len(columns)), ylim=(len(rows) + (first is not None), -1.35))
        axes.set_xticks([])
        axes.spines[:].set_visible(False)
    return Figure(fig, _sentence(errors))


def _place(parameter: str) -> tuple[str, int]:
    """Return the place of `<sublayer>.<module>.<kind>` in a layer; a stable sort keeps the order of the kinds."""
    sublayer, module, _ = parameter.split(".")
    return sublayer, _ORDER.index(module)


def _cell(axes: Any, column: int, row: int, error: float) -> None:
    wrong = error > _ROUNDING
    fill = mixed(_WRONG, 1 - min(1.0, 0.25 + 0.75 * error)) if wrong else _RIGHT
    box(axes, (column, row), 1, 1, fill, f"{error:.0%}" if wrong else "", edgecolor="#FFFFFF", linewidth=1.5)


def _name_columns(axes: Any, columns: list[str]) -> None:
    """Name the parameters above their columns, and draw f before qkv and fc1, g after proj and fc2."""
    for column, parameter in enumerate(columns):
        _, module, kind = parameter.split(".")
        axes.text(column + 0.5, -0.08, f"{module}\n{kind}", ha="center", va="bottom", fontsize=7.5)
    modules = [parameter.rpartition(".")[0] for parameter in columns]
    for x in range(1, len(columns) + 1):
        before, after = modules[x - 1], modules[x] if x < len(modules) else ""
        operator = "f" if after != before and after.endswith((".qkv", ".fc1")) else ""
        operator = "g" if after != before and before.endswith((".proj", ".fc2")) else operator
        if operator:
            axes.axvline(x, ymax=0.8, color=INK, linewidth=1.2)
            frame = {"boxstyle": "round,pad=0.2", "facecolor": color("collective"), "edgecolor": INK, "linewidth": 0.5}
            axes.text(x, -1.1, operator, ha="center", va="center", fontsize=8, style="italic", bbox=frame,
                      color=text_color(color("collective")), clip_on=False)  # fmt: skip
    start = 0
    for sublayer, group in groupby(columns, key=lambda parameter: parameter.partition(".")[0]):
        count = len(list(group))
        axes.text(start + count / 2, -1.1, sublayer, ha="center", va="center", fontsize=9)
        start += count


def _sentence(errors: Mapping[str, float]) -> str:
    wrong = {name: error for name, error in errors.items() if error > _ROUNDING}
    worst = max(wrong, key=lambda name: wrong[name], default="")
    most = f", most of all {worst}, by {wrong[worst]:.0%}" if wrong else ""
    return f"{len(wrong)} of {len(errors)} gradients are wrong{most}."
