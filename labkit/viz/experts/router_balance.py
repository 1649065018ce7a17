"""What balances a router, in pictures: its loss next to the load, scores that hide a load, Sinkhorn's table, the price.

E experts; a load is the number of tokens of each expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from labkit.viz.figure import Figure
from labkit.viz.style import INK, LINES, SEQUENCE, new_figure, styled

_LAST = 10
"""Steps at the end over which a sentence averages."""


def loss_beside_load(
    losses: Mapping[str, Sequence[float]], loads: Mapping[str, ArrayLike], even: float = 1.0
) -> Figure:
    """Draw the balancing loss of runs by step, and next to it their fullest expert over the mean.

    losses: run -> loss of steps 1, 2, ... loads: run -> tokens of each expert by step, [steps, E]; a run without a loss
    is in the right panel only. even: the dotted line of the left panel.
    """
    ratios = {name: _fullest(load) for name, load in loads.items()}
    with styled():
        fig = new_figure(8.6, 3.1)
        panels = fig.subplots(1, 2)
        for axes, curves, level in zip(panels, (losses, ratios), (even, 1.0)):
            for name, values in curves.items():
                place = list(loads).index(name)
                style: dict[str, Any] = {"ls": LINES[place % 4], "color": SEQUENCE[place % 8], "lw": 1.6}
                axes.plot(range(1, len(values) + 1), values, label=name, **style)
            axes.axhline(level, color="#666666", lw=0.9, ls=":")
            axes.set(xlabel="step", ylim=(0, None))
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(axis="y")
        panels[0].set_title("balancing loss", loc="left")
        panels[1].set_title("fullest expert / mean", loc="left")
        fig.legend(*panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    ends = [f"{name} {np.mean(ratio[-_LAST:]):.1f}" for name, ratio in ratios.items()]
    last = [f"{name} {np.mean(values[-_LAST:]):.2f}" for name, values in losses.items()]
    return Figure(fig, f"At the end the balancing loss is {', '.join(last)}; the fullest expert has {', '.join(ends)}.")


def _fullest(load: ArrayLike) -> NDArray[np.float64]:
    table = np.asarray(load, dtype=float)
    return table.max(axis=-1) / table.mean(axis=-1)


def load_and_scores(load: ArrayLike, scores: ArrayLike) -> Figure:
    """Draw each expert's tokens, and below it the sum of its scores, both against an even share.

    load: tokens of each expert. scores: [tokens, E]. The sentence has the balancing loss with one expert per token.
    """
    counts, table = np.asarray(load, dtype=float), np.asarray(scores, dtype=float)
    mass, experts = table.sum(axis=0), len(counts)
    loss = experts / len(table) ** 2 * float(mass @ counts)
    with styled():
        fig = new_figure(7.2, 3.2)
        panels = fig.subplots(2, 1, sharex=True)
        for axes, values, title, shade in zip(
            panels, (counts, mass), ("tokens of each expert", "sum of its scores"), (SEQUENCE[0], SEQUENCE[2])
        ):
            axes.bar(range(experts), values, color=shade)
            axes.axhline(values.sum() / experts, color=INK, lw=0.9, ls=":")
            axes.set_title(title, loc="left")
            axes.set_ylim(0, 1.1 * max(counts.max(), mass.max()))
        panels[1].set_xlabel("expert")
        panels[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    full = counts.max() / counts.mean()
    return Figure(
        fig, f"The fullest of {experts} experts has {full:.2f} times the mean; the balancing loss is {loss:.3f}."
    )


def mass_tables(tables: Mapping[str, ArrayLike]) -> Figure:
    """Draw small tables of positive numbers side by side, each with the sums of its rows and columns.

    tables: title -> [tokens, E], at most 12 of each. Darker is more.

    Raises ValueError without a table, and for one that is too large to read.
    """
    arrays = {title: np.asarray(table, dtype=float) for title, table in tables.items()}
    if not arrays or any(table.ndim != 2 or max(table.shape) > 12 for table in arrays.values()):
        raise ValueError("mass_tables takes tables of at most 12 tokens and 12 experts, at least one")
    with styled():
        rows, columns = next(iter(arrays.values())).shape
        fig = new_figure(0.6 + (0.42 * columns + 0.75) * len(arrays), 1.1 + 0.3 * rows)
        panels = fig.subplots(1, len(arrays), squeeze=False)[0]
        for place, (axes, (title, table)) in enumerate(zip(panels, arrays.items())):
            axes.imshow(table, cmap="Blues", vmin=0, vmax=1.4 * table.max(), aspect="auto")
            for (row, column), value in np.ndenumerate(table):
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=6.5)
            for row, value in enumerate(table.sum(axis=1)):
                axes.text(columns - 0.35, row, f"{value:.2f}", va="center", fontsize=7, color="#AA3333")
            for column, value in enumerate(table.sum(axis=0)):
                axes.text(column, rows - 0.3, f"{value:.2f}", ha="center", va="top", fontsize=7, color="#AA3333")
            axes.set_title(title, loc="left")
            axes.set(xticks=[], yticks=range(rows) if place == 0 else [])
            axes.spines[:].set_visible(False)
        panels[0].set_ylabel("token")
    worst = [f"{title} {_fullest(table.sum(axis=0)):.2f}" for title, table in arrays.items()]
    return Figure(fig, f"Largest sum of a column over the mean: {', '.join(worst)}.")


def price_of_balance(runs: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> Figure:
    """Draw by how much the loss differs from the first rule's with the same seed, over the load of the fullest expert.

    runs: rule -> (fullest over mean by seed, loss by seed), as many seeds for each. The legend is in the order of the
    large marks, which are means over the seeds.
    """
    base = np.asarray(next(iter(runs.values()))[1], dtype=float)
    found = {
        name: (np.asarray(load, dtype=float), 100 * (np.asarray(loss, dtype=float) / base - 1))
        for name, (load, loss) in runs.items()
    }
    with styled():
        fig = new_figure(7.6, 3.6)
        axes = fig.subplots()
        axes.axvline(1, color="#666666", lw=0.9, ls=":")
        for place, (name, (load, change)) in enumerate(found.items()):
            shade, mark = SEQUENCE[place % 8], "os^Dv<>P"[place % 8]
            axes.plot(load, change, mark, color=shade, ms=4.5, alpha=0.75, mew=0)
            axes.plot(load.mean(), change.mean(), mark, color=shade, ms=9, mec="white", mew=0.8, label=name)
        axes.set(xlabel="fullest expert / mean, unseen text", ylabel=f"loss against {next(iter(found))}, %")
        axes.grid(axis="y")
        handles = dict(zip(found, axes.get_legend_handles_labels()[0]))
        order = sorted(found, key=lambda name: -found[name][1].mean())
        fig.legend([handles[name] for name in order], order, loc="outside right upper")
    words = [f"{name} {change.mean():+.2f}% at {load.mean():.1f}" for name, (load, change) in found.items()]
    return Figure(fig, f"Loss on unseen text, seed by seed, and fullest expert over mean: {'; '.join(words)}.")
