"""Number formats in a training step: the type of each tensor on its way round, and gradients that a format loses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator

from labkit.viz.figure import Figure
from labkit.viz.style import INK, SEQUENCE, box, handle, new_figure, styled

PLACES = {
    "weight": (0, 1, "matrix products"),
    "activations": (1, 1, "output layer"),
    "logits": (2, 1, "softmax"),
    "loss": (3, 1, "times the scale"),
    "scaled loss": (4, 1, "backward"),
    "gradient of activations": (4, 0, "matrix products"),
    "gradient of a weight": (3, 0, "added up"),
    "summed gradient": (2, 0, "unscaled, clipped"),
    "Adam's moments": (1, 0, "update"),
    "main weight": (0, 0, "rounded"),
}
"""Tensor -> its column and row in the figure, and what happens on the way to the next one; the last leads to the
first."""
_WIDE, _HIGH, _STEP = 1.5, 0.62, 2.15
_COLORS = {16: "#88CCEE", 32: "#332288", 64: "#661100"}


def precision_flow(types: Mapping[str, str], *, title: str = "") -> Figure:
    """Draw the round of a training step: each tensor in the colour of its bits, an arrow for what makes the next.

    types: tensor, one of `PLACES`, -> its type, such as `bf16` or `fp32`. All of them, in any order.

    Raises ValueError for other names, and for a type that doesn't end in its number of bits.
    """
    if set(types) != set(PLACES):
        raise ValueError(f"the round has {', '.join(PLACES)}; given are {', '.join(types)}")
    bits = {name: int(kind[-2:]) if kind[-2:].isdigit() else 0 for name, kind in types.items()}
    if unknown := [types[name] for name, size in bits.items() if size not in _COLORS]:
        raise ValueError(f"{unknown[0]} does not end in {', '.join(map(str, _COLORS))}")
    with styled():
        fig = new_figure(9.0, 2.9)
        axes = fig.subplots()
        centre = {name: (_STEP * column + _WIDE / 2, 1.75 * row) for name, (column, row, _) in PLACES.items()}
        names = list(PLACES)
        for name, after in zip(names, [*names[1:], names[0]]):
            (x, y), (to_x, to_y) = centre[name], centre[after]
            box(axes, (x - _WIDE / 2, y - _HIGH / 2), _WIDE, _HIGH, _COLORS[bits[name]],
                f"{_two_lines(name)}\n{types[name]}", edgecolor=INK)  # fmt: skip
            across, up = np.sign(to_x - x), np.sign(to_y - y)
            ends = [(at + s * across * _WIDE / 2, level + s * up * _HIGH / 2)
                    for s, (at, level) in ((1, (x, y)), (-1, (to_x, to_y)))]  # fmt: skip
            axes.annotate("", ends[1], ends[0], arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.2})
            words = PLACES[name][2]
            if across:
                middle = (ends[0][0] + ends[1][0]) / 2
                axes.text(middle, y + _HIGH / 2 + 0.1, words, ha="center", va="bottom", fontsize=7.5)
            else:
                axes.text(x + 0.12, (ends[0][1] + ends[1][1]) / 2, words, ha="left", va="center", fontsize=7.5)
        axes.set(xlim=(-0.1, 4 * _STEP + _WIDE + 0.1), ylim=(-0.5, 2.4))
        axes.set_title(title, loc="left")
        axes.axis("off")
        held = sorted(set(bits.values()))
        fig.legend(handles=[handle(f"{size} bits", _COLORS[size]) for size in held], loc="outside lower right", ncols=3)
    said = "; ".join(f"{size} bits: {', '.join(name for name in PLACES if bits[name] == size)}" for size in held)
    return Figure(fig, f"{title + ': ' if title else ''}{said}.")


def _two_lines(name: str) -> str:
    first, _, rest = name.rpartition(" of ")
    return f"{first} of\n{rest}" if first else name


def gradient_range(panels: Mapping[str, Sequence[float]], lost: Mapping[str, Sequence[int]]) -> Figure:
    """Draw how many gradients have which power of two, a panel for each scale; those that are lost in red.

    panels: title -> gradients times their scale. lost: title -> positions of those that the format loses. Gradients
    of 0 are left out.

    Raises ValueError if the titles differ, or without a gradient other than 0.
    """
    if set(panels) != set(lost):
        raise ValueError(f"panels {', '.join(panels)} and lost {', '.join(lost)} have other titles")
    exponents = {title: _exponents(values) for title, values in panels.items()}
    found = np.concatenate([values[np.isfinite(values)] for values in exponents.values()])
    if not found.size:
        raise ValueError("gradient_range needs a gradient other than 0")
    bins = np.arange(found.min(), found.max() + 2) - 0.5
    with styled():
        fig = new_figure(7.2, 1.3 * len(panels) + 1.0)
        rows = fig.subplots(len(panels), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, (title, values) in zip(rows, exponents.items()):
            gone = np.zeros(len(values), bool)
            gone[list(lost[title])] = True
            shown = np.isfinite(values)
            parts = [values[shown & ~gone], values[shown & gone]]
            axes.hist(parts, bins, stacked=True, color=[SEQUENCE[5], SEQUENCE[1]])
            axes.axvline(-24.5, color=INK, lw=0.8, ls="--")
            axes.axvline(15.5, color=INK, lw=0.8, ls="--")
            axes.set_title(title, loc="left")
            axes.set_ylabel("gradients")
        rows[-1].set_xlabel("power of two of the scaled gradient; fp16 reaches from -24 to 15")
        rows[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        entries = [handle("kept", SEQUENCE[5]), handle("lost: 0 or infinite", SEQUENCE[1])]
        fig.legend(handles=entries, loc="outside upper right", ncols=2)
    said = "; ".join(f"{title} {len(lost[title]) / np.isfinite(values).sum():.0%} lost"
                     for title, values in exponents.items())  # fmt: skip
    return Figure(fig, f"Gradients other than 0 in fp16: {said}.")


def number_rulers(tensors: Mapping[str, Sequence[float]], formats: Mapping[str, Sequence[float]]) -> Figure:
    """Draw how many values of each tensor have which power of two, and below them a tick for each number of a format.

    tensors: name -> values; those of 0 are left out. formats: name -> its numbers, of which those above 0 are drawn.

    Raises ValueError without a tensor that has a value other than 0, or without a format.
    """
    exponents = {name: found[np.isfinite(found)] for name, found in ((n, _exponents(v)) for n, v in tensors.items())}
    if not formats or not exponents or not all(found.size for found in exponents.values()):
        raise ValueError("number_rulers needs a format, and tensors that have values other than 0")
    places = {name: np.log2([x for x in numbers if x > 0]) for name, numbers in formats.items()}
    ends = [end for each in (*exponents.values(), *places.values()) for end in (each.min(), each.max() + 1)]
    bins = np.arange(np.floor(min(ends)), np.ceil(max(ends)) + 1)
    rows = len(exponents) + len(places)
    with styled():
        fig = new_figure(7.2, 0.9 + 0.85 * len(exponents) + 0.5 * len(places))
        heights = [1.7] * len(exponents) + [0.8] * len(places)
        panels = fig.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for number, (axes, (name, found)) in enumerate(zip(panels, exponents.items())):
            axes.hist(found + 0.5, bins, color=SEQUENCE[number])
            axes.set_yticks([])
            axes.set_ylabel(name, rotation=0, ha="right", va="center")
        for axes, (name, at) in zip(panels[len(exponents) :], places.items()):
            axes.vlines(at, 0, 1, color=INK, lw=0.7)
            axes.set(ylim=(0, 1), yticks=[])
            axes.set_ylabel(name, rotation=0, ha="right", va="center")
            axes.spines[["left"]].set_visible(False)
        panels[-1].set_xlabel("power of two")
        panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        panels[-1].set_xlim(bins[0], bins[-1])
    said = [f"{name} from 2^{found.min():.0f} to 2^{found.max() + 1:.0f}" for name, found in exponents.items()]
    said += [f"{name} has {len(at)} numbers from 2^{at.min():.4g} to 2^{at.max():.4g}" for name, at in places.items()]
    return Figure(fig, f"{'; '.join(said)}.")


def _exponents(values: Sequence[float]) -> np.ndarray:
    """Return the floor of log2 of each size; infinite for 0."""
    sizes = np.abs(np.asarray(values, dtype=float))
    return np.floor(np.log2(sizes, out=np.full(sizes.shape, -np.inf), where=sizes > 0))
