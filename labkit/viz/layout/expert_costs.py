"""Bytes of a rank's experts, and of their rows and gradients in a step, for several layouts on one axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.viz.figure import Figure
from labkit.viz.style import SEQUENCE, color, counted_mark, handle, hatch, new_figure, styled

_PARTS = {
    "weights": (SEQUENCE[0], "", "weights kept"),
    "rows": (color("ep"), hatch("ep"), "rows given to all-to-alls (ep)"),
    "gradients": (color("edp"), hatch("edp"), "gradients given to all-reduces (edp)"),
}
"""Part -> (colour, hatch, label)."""


def expert_costs(
    expected: Mapping[str, Mapping[str, float]], counted: Mapping[str, Mapping[str, float]] | None = None
) -> Figure:
    """Draw three bars for each layout: bytes of a rank's experts, and what it gives to collectives in a step.

    expected: words for a layout -> bytes of `weights`, `rows` and `gradients`, by a formula, drawn as bars.
    counted: the same from a run, drawn as diamonds on the bars.

    Raises ValueError without a layout, and if `counted` has other layouts than `expected`.
    """
    if not expected or (counted is not None and set(counted) != set(expected)):
        raise ValueError(f"expected has the layouts {list(expected)}, counted {list(counted or ())}; give the same")
    places = {(name, part): 3.6 * i + j for i, name in enumerate(expected) for j, part in enumerate(_PARTS)}
    largest = max(max(row.values()) for row in expected.values())
    with styled():
        fig = new_figure(7.4, 0.62 * len(expected) + 1.2)
        axes = fig.add_subplot()
        for (name, part), y in places.items():
            fill, pattern, _ = _PARTS[part]
            size = expected[name][part]
            axes.barh(y, size, 0.9, color=fill, hatch=pattern, edgecolor="#333333", linewidth=0.5)
            axes.annotate(f"{size:,.0f}", (size, y), (7, 0), textcoords="offset points", va="center", fontsize=8)
            if counted is not None:
                axes.plot(counted[name][part], y, "D", ms=5, color="#FFFFFF", markeredgecolor="#000000", zorder=3)
        axes.set_yticks([places[name, "rows"] for name in expected], list(expected))
        axes.set(xlabel="bytes of a rank", xlim=(-0.01 * largest, 1.15 * largest))
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        handles: list[Any] = [handle(name, fill, pattern) for fill, pattern, name in _PARTS.values()]
        if counted is not None:
            handles.append(counted_mark(5.0))
        fig.legend(handles=handles, loc="outside upper center", ncols=2)
    rows = [f"{name}: {_in_words(row)}" for name, row in expected.items()]
    return Figure(fig, f"Bytes of a rank's experts; {'; '.join(rows)}{_agreement(expected, counted)}.")


def _in_words(row: Mapping[str, float]) -> str:
    return ", ".join(f"{row[part]:,.0f} {part}" for part in _PARTS)


def _agreement(expected: Mapping[str, Any], counted: Mapping[str, Any] | None) -> str:
    if counted is None:
        return ""
    same = all(expected[name][part] == counted[name][part] for name in expected for part in _PARTS)
    return "; counted the same" if same else "; the counted bytes differ"
