"""How long some tensors stay in memory, kernel by kernel, for several ways of computing the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labkit.viz.figure import Figure
from labkit.viz.style import INK, new_figure, nth_color, styled

Moments = Sequence[tuple[str, Sequence[str]]]


def tensor_lifetimes(ways: Mapping[str, Moments], labels: Sequence[str], forward: int, unit: str) -> Figure:
    """Draw a panel per way: a column per moment, and a block for each watched tensor that is in memory then.

    ways: name -> the moments of `Lifetimes`. labels: what computes at each moment. forward: how many of them are in
    forward. unit: what the height of a block is.
    """
    names = list(dict.fromkeys(name for moments in ways.values() for _, here in moments for name in here))
    with styled():
        fig = new_figure(7.6, 0.9 + 1.15 * len(ways))
        panels = fig.subplots(len(ways), 1, sharex=True, squeeze=False)[:, 0]
        most = max((len(here) for moments in ways.values() for _, here in moments), default=1)
        for axes, (title, moments) in zip(panels, ways.items()):
            for place, (_, here) in enumerate(moments):
                for level, name in enumerate(sorted(here, key=names.index)):
                    shade = nth_color(names.index(name))
                    axes.bar(place, 1.0, 1.0, bottom=level, color=shade, label=name)
            axes.axvline(forward - 0.5, color=INK, lw=1.2, ls=":", zorder=5)
            axes.set(xlim=(-0.5, len(labels) - 0.5), ylim=(0, most + 0.1), yticks=range(most + 1))
            axes.set_title(title, loc="left")
        panels[-1].set_xticks(range(len(labels)), labels)
        ends = ((forward / 2 - 0.5, "forward"), ((forward + len(labels)) / 2 - 0.5, "backward"))
        for middle, name in ends:
            panels[-1].annotate(name, (middle, 0.0), (0, -20), xycoords=("data", "axes fraction"),
                                textcoords="offset points", ha="center", va="top", fontsize=9)  # fmt: skip
        fig.supylabel(unit, fontsize=9)
        handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels())}
        fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    lives = "; ".join(f"{title}: {_lives(moments, names)}" for title, moments in ways.items())
    return Figure(fig, f"Kernels, of {len(labels)}, after which a tensor is in memory: {lives}.")


def _lives(moments: Moments, names: Sequence[str]) -> str:
    return ", ".join(f"{name} {sum(name in here for _, here in moments)}" for name in names)
