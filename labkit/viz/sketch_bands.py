"""Which pairs of documents share a band of their sketches, by their similarity: formula, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from labkit.viz.figure import Figure
from labkit.viz.style import INK, SEQUENCE, new_figure, styled

_LINES = ("-", "--", ":", "-.")


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
            line, color = _LINES[place % len(_LINES)], SEQUENCE[place % len(SEQUENCE)]
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
