"""Dropout masks of the ranks of a group, side by side: which draw the same, and which their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from labkit.viz.figure import Figure
from labkit.viz.style import SEQUENCE, new_figure, styled


def dropout_masks(masks: Mapping[str, Sequence[np.ndarray]]) -> Figure:
    """One row of pictures for each kind of dropout, one picture a rank; dark is dropped.

    masks: what is dropped (`attention output`) -> the rank's mask, two-dimensional and true where a value stays.

    Raises ValueError where the kinds do not all have a mask of every rank.
    """
    counts = {len(by_rank) for by_rank in masks.values()}
    if len(counts) != 1 or 0 in counts:
        raise ValueError("dropout_masks needs one mask a rank for each kind")
    ranks = counts.pop()
    with styled():
        fig = new_figure(1.2 + 1.9 * ranks, 0.4 + 1.5 * len(masks))
        panels = fig.subplots(len(masks), ranks, squeeze=False)
        for row, (kind, by_rank) in enumerate(masks.items()):
            for rank, mask in enumerate(by_rank):
                axes = panels[row][rank]
                picture = np.where(np.asarray(mask)[..., None], (1.0, 1.0, 1.0), _rgb(SEQUENCE[row]))
                axes.imshow(picture, interpolation="nearest", aspect="auto")
                axes.spines[:].set_visible(True)
                axes.set_xticks([])
                axes.set_yticks([])
                axes.set_title(f"{kind}, rank {rank}", fontsize=8)
    return Figure(fig, "; ".join(f"{kind}: {_agreement(by_rank)}" for kind, by_rank in masks.items()) + ".")


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))


def _agreement(by_rank: Sequence[np.ndarray]) -> str:
    """Whether all ranks drop the same, in words."""
    first = np.asarray(by_rank[0])
    if len(by_rank) == 1:
        return "one rank"
    if all(np.array_equal(first, mask) for mask in by_rank[1:]):
        return f"the same mask on all {len(by_rank)} ranks"
    if any(np.array_equal(a, b) for i, a in enumerate(by_rank) for b in by_rank[i + 1 :]):
        return "some ranks share a mask"
    return f"a mask of its own on each of {len(by_rank)} ranks"
