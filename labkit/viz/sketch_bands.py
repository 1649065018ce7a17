"""Bands of sketches: where two documents agree, and which pairs share a band, by formula and as measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import Rectangle
from numpy.typing import ArrayLike

from labkit.viz.figure import Figure
from labkit.viz.style import INK, SEQUENCE, new_figure, nth_color, styled

_LINES = ("-", "--", ":", "-.")
_DIFFERENT = "#E6E6E6"


def band_curves(
    curves: Mapping[str, tuple[int, int]],
    *,
    threshold: float,
    measured: Sequence[tuple[float, float]] = (),
) -> Figure:
    """Draw the share of pairs that become candidates over the similarity of a pair.

    curves: name -> (bands, rows of a band), drawn by the formula 1 - (1 - s^rows)^bands. threshold: the similarity
    from which on a pair must be found. measured: (similarity, share of pairs that had a band in common) of real pairs.

    Raises ValueError without a curve.
    """
    if not curves:
        raise ValueError("band_curves needs at least one curve")
    similarity = np.linspace(0, 1, 201)
    with styled():
        fig = new_figure(6.6, 3.4)
        axes = fig.subplots()
        axes.axvspan(threshold, 1, color="#EEEEEE", lw=0, label="must be found")
        for place, (name, (bands, rows)) in enumerate(curves.items()):
            line, color = _LINES[place % len(_LINES)], nth_color(place)
            label = f"{name}: {bands} x {rows}"
            axes.plot(similarity, _share(similarity, bands, rows), line, lw=2, color=color, label=label)
        if measured:
            axes.plot(*zip(*measured), "o", ms=5, color=INK, label="measured")
        axes.set(xlim=(0, 1), ylim=(-0.02, 1.04), xlabel="Jaccard similarity of a pair")
        axes.set_ylabel("share that become candidates")
        axes.grid(axis="y")
        fig.legend(loc="outside lower center", ncols=2)
    return Figure(fig, f"{'; '.join(_words(name, *each, threshold) for name, each in curves.items())}.")


def _share(similarity: np.ndarray, bands: int, rows: int) -> np.ndarray:
    return np.asarray(1 - (1 - similarity**rows) ** bands)


def _words(name: str, bands: int, rows: int, threshold: float) -> str:
    low, high = (float(_share(np.array(each), bands, rows)) for each in (threshold / 2, threshold))
    return (
        f"{name}, {bands} bands of {rows}: {high:.1%} of the pairs with similarity {threshold:g} become candidates, "
        f"{low:.1%} of those with {threshold / 2:g}"
    )


def band_agreement(pairs: Mapping[str, ArrayLike]) -> Figure:
    """Draw the numbers of two sketches for each pair: a column is a band, coloured where both documents agree.

    A band that agrees in all its rows has a black frame: it's a drawer that both documents are in.

    pairs: name -> booleans [bands, rows], True where the numbers are equal.

    Raises ValueError without a pair.
    """
    grids = {name: np.asarray(agree, dtype=bool) for name, agree in pairs.items()}
    if not grids:
        raise ValueError("band_agreement needs at least one pair")
    with styled():
        fig = new_figure(7.2, 0.5 + 1.15 * len(grids))
        for axes, (name, agree) in zip(fig.subplots(len(grids), 1, squeeze=False)[:, 0], grids.items()):
            bands, rows = agree.shape
            for band, row in np.ndindex(bands, rows):
                fill = SEQUENCE[0] if agree[band, row] else _DIFFERENT
                axes.add_patch(Rectangle((band, row), 0.86, 0.92, facecolor=fill, edgecolor="none"))
            for band in np.flatnonzero(agree.all(1)):
                axes.add_patch(Rectangle((band - 0.07, -0.09), 1.0, rows + 0.1, fill=False, edgecolor=INK, lw=1.8))
            axes.set(xlim=(-0.2, bands + 0.1), ylim=(rows + 0.2, -0.3), xticks=[], yticks=[])
            axes.set_title(f"{name}: {_agreeing(agree)}", loc="left")
            axes.spines[:].set_visible(False)
            axes.set_xlabel("bands" if name == list(grids)[-1] else "")
    said = "; ".join(
        f"{name}: {agree.sum()} of {agree.size} numbers, {_agreeing(agree)}" for name, agree in grids.items()
    )
    return Figure(fig, f"Numbers of two sketches that agree. {said}.")


def _agreeing(agree: np.ndarray) -> str:
    return f"{agree.all(1).sum()} of {len(agree)} bands agree"
