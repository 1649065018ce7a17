"""Values before and after a change, as a line from one to the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labkit.viz.figure import Figure
from labkit.viz.style import INK, SEQUENCE, name_rows, new_figure, styled


def moved_values(rows: Mapping[str, Sequence[tuple[float, float]]], names: tuple[str, str], x: str) -> Figure:
    """Draw for each row a line from every value before a change (hollow) to the one after it (filled).

    rows: name -> (before, after) of each try. names: what is before and after. x: label of the axis, which begins at 0.

    Raises ValueError without a row, and for a row without a try.
    """
    if not rows or not all(rows.values()):
        raise ValueError("moved_values needs at least one row, and a try in each")
    with styled():
        fig = new_figure(7.2, 1.2 + 0.5 * len(rows))
        axes = fig.subplots()
        for row, tries in enumerate(rows.values()):
            for number, (before, after) in enumerate(tries):
                place = row + 0.6 * ((number + 0.5) / len(tries) - 0.5)
                axes.plot([before, after], [place, place], color=SEQUENCE[0], lw=1.6, zorder=1)
                axes.plot(before, place, "o", ms=6, color="#FFFFFF", markeredgecolor=INK, zorder=2)
                axes.plot(after, place, "o", ms=6, color=SEQUENCE[0], zorder=2)
        name_rows(axes, list(rows), bars=True)
        axes.set(xlim=(0, 1.05 * max(max(pair) for tries in rows.values() for pair in tries)), xlabel=x)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        axes.plot([], [], "o", ms=6, color="#FFFFFF", markeredgecolor=INK, label=names[0])
        axes.plot([], [], "o", ms=6, color=SEQUENCE[0], label=names[1])
        fig.legend(loc="outside upper right", ncols=2)
    said = "; ".join(
        f"{name} {', '.join(f'{before:.3f} to {after:.3f}' for before, after in tries)}" for name, tries in rows.items()
    )
    return Figure(fig, f"{x}, from {names[0]} to {names[1]}: {said}.")
