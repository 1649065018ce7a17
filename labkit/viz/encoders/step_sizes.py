"""By how much one step moves the output of a stack, by depth: a reader's factor of the halves next to the factor 1."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.patches import Patch

from labkit.viz.figure import Figure
from labkit.viz.style import SEQUENCE, new_figure, styled

_BAND = "#D9D9D9"


def step_sizes(yours: Mapping[int, float], plain: Mapping[int, float], aim: tuple[float, float]) -> Figure:
    """Draw two bars for each depth, in percent of the output, before the band of the aim.

    yours, plain: layers -> by how much a step moves the output, relative to it, with the reader's factor and with 1.
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
        axes.set(xlabel="layers", ylabel="% of the output")
        handles, _ = axes.get_legend_handles_labels()
        fig.legend(handles=[*handles, Patch(facecolor=_BAND, label="the aim")], loc="outside upper right", ncols=3)
    inside = [layers for layers, value in yours.items() if aim[0] <= value <= aim[1]]
    return Figure(
        fig,
        f"One step moves the output by {aim[0]:.0%} to {aim[1]:.0%} at {len(inside)} of {len(yours)} depths; with "
        f"factor 1 by {min(plain.values()):.0%} to {max(plain.values()):.0%}.",
    )
