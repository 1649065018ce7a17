"""How much of the input arrives at the output past all sublayers, by depth: a reader's factor next to the factor 1."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.patches import Patch

from labkit.viz.figure import Figure
from labkit.viz.style import SEQUENCE, new_figure, styled

_BAND = "#D9D9D9"


def path_widths(yours: Mapping[int, float], plain: Mapping[int, float], aim: tuple[float, float]) -> Figure:
    """Draw two bars for each depth, in percent, before the band of the aim.

    yours, plain: layers -> what share of the input arrives on the direct path, with the reader's factor and with 1.
    aim: least and most.

    Raises ValueError if the depths of the two differ.
    """
    if list(yours) != list(plain):
        raise ValueError(f"depths {list(yours)} and {list(plain)} differ")
    with styled():
        fig = new_figure(7.2, 2.9)
        axes = fig.subplots()
        axes.axhspan(100 * aim[0], 100 * aim[1], color=_BAND, lw=0, zorder=0)
        for shift, values, shade, name in ((-0.2, plain, SEQUENCE[1], "factor 1"), (0.2, yours, SEQUENCE[0], "yours")):
            places = [place + shift for place in range(len(values))]
            axes.bar(places, [100 * value for value in values.values()], 0.36, color=shade, label=name, zorder=2)
        axes.set_xticks(range(len(yours)), [str(layers) for layers in yours])
        axes.set(xlabel="layers", ylabel="% of the input that arrives")
        handles, _ = axes.get_legend_handles_labels()
        fig.legend(handles=[*handles, Patch(facecolor=_BAND, label="the aim")], loc="outside upper right", ncols=3)
    inside = [layers for layers, value in yours.items() if aim[0] <= value <= aim[1]]
    return Figure(
        fig,
        f"{aim[0]:.0%} to {aim[1]:.0%} of the input arrive at {len(inside)} of {len(yours)} depths; with factor 1 "
        f"{min(plain.values()):.2g} to {max(plain.values()):.2g} of it.",
    )
