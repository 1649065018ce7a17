"""Loss curves of several runs over the same steps, and the distance between the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from labkit.viz.figure import Figure
from labkit.viz.style import SEQUENCE, new_figure, styled

_LINES: Any = (("-", 3.2), ("--", 1.6), (":", 2.2), ("-.", 1.4), ((0, (1, 6)), 2.4))
"""Line style and width by curve. The first curve is broad, so that its edges show under a curve on top of it."""
_RINGS = (8.5, 5.5, 3.0)
"""Size of a curve's marks in points. Each curve has smaller marks than the one before, so that all marks show."""
_SIDESTEP = 0.2
"""Steps between the marks of two runs that are drawn side by side."""
_LEAST = 1e-17
"""Start of the logarithmic axis of differences; exact agreement is drawn at this value."""


def loss_curves(
    curves: Mapping[str, Sequence[float]],
    *,
    levels: Mapping[str, float] | None = None,
    tolerance: float | None = None,
    last: int = 1,
    side_by_side: bool = False,
    title: str = "Training loss",
    unit: str = "nats per token",
) -> Figure:
    """Draw losses by step, one line per run; below them each run's relative difference from the first.

    curves: name -> loss of steps 1, 2, ..., in `unit`.
    levels: horizontal lines to compare with, such as the unigram entropy.
    tolerance: largest relative difference that counts as the same; the lower panel shows it, and the sentence says
        whether it holds. None draws no lower panel.
    last: how many losses from the end the sentence averages for its comparison with the levels; one batch is noisy.
    side_by_side: move each run's marks in the lower panel a little sideways, for runs that are about equally far off.
    Raises ValueError without curves, for an empty curve, and if a tolerance is given for curves that cannot be
    compared step by step.
    """
    if last < 1:
        raise ValueError(f"last is {last}: at least one loss is compared with a level")
    if not curves or not all(len(values) for values in curves.values()):
        raise ValueError("loss_curves needs at least one curve with at least one loss")
    compared = _relative_differences(curves) if tolerance is not None else {}
    with styled():
        fig = new_figure(7.2, 4.2 if compared else 3.0)
        ratios = (3, 1) if compared else (1,)
        panels = fig.subplots(len(ratios), 1, sharex=True, height_ratios=ratios, squeeze=False)[:, 0]
        _draw_curves(panels[0], curves, levels or {}, title)
        panels[0].set_ylabel(unit)
        if compared:
            _draw_differences(panels[1], compared, list(curves), tolerance or 0.0, _SIDESTEP if side_by_side else 0.0)
        panels[-1].set_xlabel("optimizer step")
        panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    return Figure(fig, _sentence(curves, levels or {}, compared, tolerance, last, title))


def _relative_differences(curves: Mapping[str, Sequence[float]]) -> dict[str, np.ndarray]:
    """Return |loss - first| / |first| by step, for every curve but the first."""
    first = np.asarray(next(iter(curves.values())), dtype=float)
    others = {name: np.asarray(values, dtype=float) for name, values in list(curves.items())[1:]}
    lengths = {name: len(values) for name, values in curves.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"curves of {lengths} steps cannot be compared step by step; cut them to the same steps")
    return {name: np.abs(values - first) / np.abs(first) for name, values in others.items()}


def _draw_curves(axes: Any, curves: Mapping[str, Sequence[float]], levels: Mapping[str, float], title: str) -> None:
    for number, (name, losses) in enumerate(curves.items()):
        style, width = _LINES[number % len(_LINES)]
        marker = "o" if len(losses) == 1 else None
        axes.plot(
            range(1, len(losses) + 1), losses, ls=style, color=SEQUENCE[number % 8], lw=width, marker=marker, label=name
        )
    for name, value in levels.items():
        _mark_level(axes, value, f"{name}\n{value:.2f}")
    axes.set_title(title, loc="left")
    axes.grid(axis="y")
    axes.margins(x=0.01)
    axes.legend(loc="upper right", bbox_to_anchor=(1.0, 1.0))


def _draw_differences(
    axes: Any, differences: Mapping[str, np.ndarray], names: list[str], tolerance: float, sidestep: float
) -> None:
    largest = tolerance
    for name, values in differences.items():
        number = names.index(name)
        mark: dict[str, Any] = {"ls": "", "marker": "o", "color": SEQUENCE[number % 8], "mew": 0}
        steps = np.arange(1, len(values) + 1) + sidestep * (number - len(names) / 2)
        size = min(_RINGS) + 2 if sidestep else _RINGS[(number - 1) % len(_RINGS)]
        axes.plot(steps, np.maximum(values, _LEAST), ms=size, **mark)
        largest = max(largest, float(values.max()))
    _mark_level(axes, tolerance, f"tolerance\n{tolerance:.0e}")
    floor = min((float(v[v > 0].min()) for v in differences.values() if (v > 0).any()), default=_LEAST)
    exact = any((values == 0).any() for values in differences.values())
    axes.set(yscale="log", ylim=(_LEAST / 5 if exact else max(_LEAST, floor / 10), largest * 50))
    if exact:
        _name_level(axes, _LEAST, "exactly\nequal")
    axes.set_ylabel(f"relative to\n{names[0]}")
    axes.grid(axis="y")


def _mark_level(axes: Any, value: float, name: str) -> None:
    axes.axhline(value, color="#666666", lw=0.9, ls=(0, (6, 2)))
    _name_level(axes, value, name)


def _name_level(axes: Any, value: float, name: str) -> None:
    """Write the name to the right of the panel, where there are no curves."""
    axes.annotate(name, (1, value), xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points",
                  va="center", fontsize=8, color="#444444")  # fmt: skip


def _sentence(
    curves: Mapping[str, Sequence[float]],
    levels: Mapping[str, float],
    differences: Mapping[str, np.ndarray],
    tolerance: float | None,
    last: int,
    title: str,
) -> str:
    runs = "; ".join(f"{name} {values[0]:.2f} to {values[-1]:.2f}" for name, values in curves.items())
    parts = [f"{title} over {max(map(len, curves.values()))} steps: {runs}"]
    if differences and tolerance is not None:
        apart = {name: float(values.max()) for name, values in differences.items()}
        worst = max(apart, key=lambda name: apart[name])
        if apart[worst] <= tolerance:
            parts.append(f"no step differs by more than {tolerance:.0e} of the loss")
        else:
            parts.append(f"{worst} differs from {next(iter(curves))} by up to {apart[worst]:.1e} of the loss")
    for name, value in levels.items():
        ends = [float(np.mean(values[-last:])) for values in curves.values()]
        where = "below" if max(ends) < value else "not below" if min(ends) >= value else "partly below"
        subject = "the last is" if last == 1 else f"the last {last} are on average"
        parts.append(f"{subject} {where} the {name}, {value:.2f}")
    return "; ".join(parts) + "."
