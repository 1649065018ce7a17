"""How far each gradient of a model is from the right one, against what the loss and the gradient norm show of it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from labkit.viz.figure import Figure
from labkit.viz.style import ALERT, new_figure, nth_color, styled

_EQUAL = "equal"


def gradient_errors(
    errors: Mapping[str, float], levels: Mapping[str, float], *, stressed: str, what: str = ""
) -> Figure:
    """Draw a point per parameter on a logarithmic axis, and a line per level, as relative errors (1 is 100 %).

    Gradients that are equal to the bit lie in a strip of their own below the axis's decades.

    errors: parameter -> relative error of its gradient, in the order in which they are drawn.
    levels: name -> relative error of another number of the same run, such as its loss.
    stressed: end of the names of the parameters that are drawn large.
    what: the first words of the sentence.

    Raises:
        ValueError: no gradient is wrong, or a level is not positive, so a logarithmic axis has no place for it.
    """
    wrong = {name: error for name, error in errors.items() if error > 0}
    if not wrong or min(levels.values(), default=1.0) <= 0:
        raise ValueError(f"a logarithmic axis needs a wrong gradient and positive levels, not {dict(levels)}")
    lowest = min(*wrong.values(), *levels.values())
    floor = lowest / 30  # where equal gradients are drawn
    with styled():
        fig = new_figure(9.0, 3.8)
        axes = fig.subplots()
        _draw_points(axes, errors, stressed, floor)
        for name, level in levels.items():
            axes.axhline(level, color=ALERT, linewidth=1.4)
            axes.annotate(f"{name}\n{level:.1e}", (1, level), xycoords=("axes fraction", "data"), xytext=(4, 0),
                          textcoords="offset points", va="center", fontsize=9, color=ALERT)  # fmt: skip
        worst = max(wrong, key=lambda name: wrong[name])
        axes.annotate(f"{worst}: {wrong[worst]:.0%}", (list(errors).index(worst), wrong[worst]), xytext=(8, 9),
                      textcoords="offset points", ha="right", va="bottom", fontsize=9)  # fmt: skip
        axes.set(yscale="log", ylim=(floor / 3, max(wrong.values()) * 12), ylabel="relative error")
        axes.annotate(_EQUAL, (0, floor), xycoords=("axes fraction", "data"), xytext=(-4, 0),
                      textcoords="offset points", ha="right", va="center", fontsize=9)  # fmt: skip
        axes.axhspan(floor / 3, floor * 3, color="#EEEEEE", zorder=0)
        axes.yaxis.set_major_locator(_decades(lowest))
        _name_layers(axes, list(errors))
        fig.legend(loc="outside upper center", ncols=2)
    return Figure(fig, _sentence(errors, wrong, levels, worst, what))


def _draw_points(axes: Any, errors: Mapping[str, float], stressed: str, floor: float) -> None:
    for large, label in ((False, "other parameters"), (True, f"*.{stressed}")):
        places = [(x, max(error, floor)) for x, (name, error) in enumerate(errors.items())
                  if name.endswith(stressed) is large]  # fmt: skip
        color, size = nth_color(int(large)), 60 if large else 14
        axes.scatter(*zip(*places), s=size, color=color, label=label, zorder=3) if places else None


def _decades(lowest: float) -> Any:
    """Return ticks at the decades, none in the strip of the equal gradients."""
    from math import ceil, log10

    from matplotlib.ticker import FixedLocator

    return FixedLocator([10.0**power for power in range(ceil(log10(lowest)) - 1, 1)])


def _name_layers(axes: Any, names: list[str]) -> None:
    """Separate the layers by lines, and name each below the axis."""
    ticks = []
    start = 0
    for layer, group in groupby(names, key=_layer_of):
        count = len(list(group))
        if layer:
            ticks.append((start + (count - 1) / 2, layer))
        axes.axvline(start - 0.5, color="#CCCCCC", linewidth=0.6, zorder=0)
        start += count
    axes.set_xticks([place for place, _ in ticks], [layer for _, layer in ticks])
    axes.set(xlim=(-1.5, len(names) + 0.5), xlabel="layer, in the order of a backward")
    axes.tick_params(axis="x", length=0)


def _layer_of(name: str) -> str:
    parts = name.split(".")
    return parts[1] if parts[0] == "layers" else ""


def _sentence(
    errors: Mapping[str, float], wrong: Mapping[str, float], levels: Mapping[str, float], worst: str, what: str
) -> str:
    hidden = "; ".join(
        f"{sum(error > level for error in wrong.values())} are further off than the {name} ({level:.1e})"
        for name, level in levels.items()
    )
    return (
        f"{what + ': ' if what else ''}{len(wrong)} of {len(errors)} gradients are wrong, most of all {worst}, by "
        f"{wrong[worst]:.0%}; {hidden}."
    )
