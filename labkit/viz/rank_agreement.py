"""Two pictures of ranks that should agree: dropout masks of positions, and parameters that drift apart in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import MaxNLocator

from labkit.viz.figure import Figure
from labkit.viz.style import INK, SEQUENCE, new_figure, styled

_LOOKS = (("-", 4.0), ("--", 2.2), (":", 2.0))
"""Line style and width by curve; the first one is broad, so that it shows under a curve on top of it."""


def replica_drift(losses: Mapping[str, Sequence[float]], apart: Mapping[str, Sequence[float]], what: str) -> Figure:
    """Draw the loss of several runs by step, and next to it how far the replicas of a parameter are apart.

    losses: run -> loss of steps 1, 2, ... apart: run -> relative distance of its replicas, by step. what: the
    parameter's name.
    """
    with styled():
        fig = new_figure(8.6, 3.1)
        panels = fig.subplots(1, 2)
        for axes, curves, unit in zip(panels, (losses, apart), (1.0, 100.0)):
            for name, values in curves.items():
                place = list(losses).index(name)
                style, width = _LOOKS[place % len(_LOOKS)]
                steps = range(1, len(values) + 1)
                axes.plot(steps, unit * np.asarray(values), style, lw=width, color=SEQUENCE[place], label=name)
            axes.set_xlabel("optimizer step")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(axis="y")
        panels[1].set_ylim(bottom=-0.02 * panels[1].get_ylim()[1])  # a line at 0 shows above the axis
        panels[0].set_title("loss", loc="left")
        panels[1].set_title(f"{what}: % by which the ranks differ", loc="left")
        fig.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    ends = ", ".join(f"{name} {values[-1]:.1%}" for name, values in apart.items())
    last = ", ".join(f"{name} {values[-1]:.3g}" for name, values in losses.items())
    return Figure(fig, f"After {len(next(iter(losses.values())))} steps the ranks' {what} differ: {ends}; loss {last}.")


def mask_agreement(masks: Mapping[str, np.ndarray], ranks: int) -> Figure:
    """Draw for each pair of positions the share of values at which their dropout masks agree.

    masks: name -> the masks of all positions, [positions, values of a position], true where a value stays. The first
    positions are those of rank 0, then come as many of rank 1, and so on.

    The colour begins at the share at which independent masks agree.
    """
    shares = {name: _agreement(np.asarray(mask, dtype=float)) for name, mask in masks.items()}
    kept = np.mean([np.mean(mask) for mask in masks.values()])
    chance = float(kept**2 + (1 - kept) ** 2)
    with styled():
        fig = new_figure(0.9 + 3.5 * len(masks), 3.7)
        panels = fig.subplots(1, len(masks), squeeze=False)[0]
        shades = LinearSegmentedColormap.from_list("agreement", ["#FFFFFF", SEQUENCE[0]])
        for axes, (name, share) in zip(panels, shares.items()):
            axes.imshow(share, cmap=shades, vmin=chance, vmax=1.0, interpolation="nearest")
            _frame_ranks(axes, len(share), ranks)
            axes.set_title(name)
        bar = fig.colorbar(panels[0].images[0], ax=list(panels), shrink=0.8)
        bar.set_ticks([chance, 1.0], labels=[f"{chance:.0%}: by chance", "100%: the same mask"])
    return Figure(fig, f"{'; '.join(f'{name}: {_shared(share)}' for name, share in shares.items())}.")


def _agreement(mask: np.ndarray) -> np.ndarray:
    return (mask @ mask.T + (1 - mask) @ (1 - mask).T) / mask.shape[1]


def _frame_ranks(axes: Any, positions: int, ranks: int) -> None:
    """Separate the positions of the ranks by lines, and name them."""
    size = positions / ranks
    for rank in range(1, ranks):
        for line in (axes.axhline, axes.axvline):
            line(rank * size - 0.5, color=INK, lw=0.8)
    middles = [(rank + 0.5) * size - 0.5 for rank in range(ranks)]
    names = [f"rank {rank}" if ranks <= 4 else f"{rank}" for rank in range(ranks)]
    axes.set_xticks(middles, names)
    axes.set_yticks(middles, names, rotation=90, va="center")
    axes.tick_params(length=0)
    axes.set_xlabel("position")
    axes.set_ylabel("position")
    axes.spines[:].set_visible(True)


def _shared(share: np.ndarray) -> str:
    """Say in words which positions have the same mask."""
    rows, columns = np.nonzero(np.triu(share, 1) >= 1 - 1e-9)
    if not len(rows):
        return "no two positions have the same mask"
    distances = ", ".join(f"{distance}" for distance in np.unique(columns - rows))
    return f"{len(rows)} pairs of positions have the same mask, {distances} positions apart"
