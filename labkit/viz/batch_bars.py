"""The settings of a batch of chapters in one figure: seconds of each, and the numbers of their reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labkit.viz.figure import Figure
from labkit.viz.style import SEQUENCE, name_rows, new_figure, styled

MOST_PANELS = 4
"""Numbers that are drawn side by side, the seconds included."""


def batch_results(names: Sequence[str], numbers: Mapping[str, Sequence[float | None]]) -> Figure:
    """Draw a row of bars for each setting, with a panel and an axis of its own for each number.

    names: one for each setting. numbers: what -> its value in each setting; None where a setting has none.
    Numbers beyond MOST_PANELS are named in the sentence below the figure.

    Raises ValueError without a setting or a number.
    """
    if not names or not numbers:
        raise ValueError("batch_results needs at least one setting and one number")
    shown = dict(list(numbers.items())[:MOST_PANELS])
    with styled():
        fig = new_figure(9.0, 0.9 + 0.28 * len(names))
        panels = fig.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for axes, (what, values) in zip(panels, shown.items()):
            axes.barh(range(len(names)), [value or 0.0 for value in values], height=0.7, color=SEQUENCE[0])
            axes.set_title(what.replace("_", " "), loc="left")
            axes.locator_params(axis="x", nbins=4)
        name_rows(panels[0], list(names), bars=True)
    ends = {what: [value for value in values if value is not None] for what, values in shown.items()}
    spans = [f"{what.replace('_', ' ')} {min(v):.4g} to {max(v):.4g}" for what, v in ends.items() if v]
    left = f"; not drawn: {', '.join(list(numbers)[MOST_PANELS:])}" if len(numbers) > MOST_PANELS else ""
    return Figure(fig, f"{len(names)} settings: {', '.join(spans) or 'no number'}{left}.")
