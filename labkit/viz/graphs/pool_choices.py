"""Where two ways of choosing put the blocks of a pool: time to the right, bytes upwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from labkit.graphs.study.free_ranges import Held
from labkit.viz.figure import Figure
from labkit.viz.style import new_figure, nth_color, styled, text_color


def pool_choices(pools: Mapping[str, Sequence[Held]], *, what: str = "") -> Figure:
    """Draw a panel for each pool: a block from the request that takes it to the one that gives it back.

    A dashed line is the size of the pool. Blocks have the same number and colour in all panels.

    pools: name -> its blocks, in the order in which they were taken. what: the first words of the sentence.

    Raises ValueError for a pool without blocks.
    """
    if not pools or not all(pools.values()):
        raise ValueError("pool_choices needs pools with at least one block each")
    sizes = {name: max(one.start + one.nbytes for one in held) for name, held in pools.items()}
    end = max(one.until for held in pools.values() for one in held)
    with styled():
        fig = new_figure(8.6, 2.9)
        panels = fig.subplots(1, len(pools), sharey=True, squeeze=False)[0]
        for axes, (name, held) in zip(panels, pools.items()):
            for number, one in enumerate(held, start=1):
                shade = nth_color(number - 1)
                corner, width = (one.since, one.start), one.until - one.since
                axes.add_patch(Rectangle(corner, width, one.nbytes, facecolor=shade, edgecolor="white", linewidth=1))
                if one.nbytes > 0.07 * max(sizes.values()):
                    middle = (one.since + width / 2, one.start + one.nbytes / 2)
                    axes.text(*middle, str(number), ha="center", va="center", fontsize=8, color=text_color(shade))
            axes.axhline(sizes[name], color="#000000", linewidth=1, linestyle="--")
            axes.set_title(f"{name}: {sizes[name]:,} bytes", loc="left")
            axes.set(xlim=(0, end), ylim=(0, 1.06 * max(sizes.values())), xlabel="request")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        panels[0].set_ylabel("byte of the pool")
    told = ", ".join(f"{name} {size:,} bytes" for name, size in sizes.items())
    return Figure(fig, f"{what + ': ' if what else ''}{told}.")
