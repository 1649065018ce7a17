"""Figures under controls, for a notebook with a person in front of it.

An explorer builds its controls and passes a function that draws a Figure from their values:

    return LiveFigure(figure).panel(inputs, draw)       # each change of a control draws anew
"""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labkit.viz.figure import Figure

FITS = "calc(100% - 4px)"
"""Most width of a widget, which with its margins then is no wider than its cell."""


def is_live() -> bool:
    """Return True if a person sits at the notebook: JupyterLab sets JPY_SESSION_NAME; papermill and nbval do not."""
    return bool(os.environ.get("JPY_SESSION_NAME"))


class LiveFigure:
    """A Figure as two widgets: the picture, and the words for a screen reader."""

    def __init__(self, figure: Figure) -> None:
        import ipywidgets as widgets

        as_drawn = widgets.Layout(align_self="flex-start", max_width=FITS)  # not stretched, which blurs it
        self.picture = widgets.Image(value=figure.png, format="png", layout=as_drawn)
        self._spoken = _spoken(figure.sentence)
        self.words = widgets.HTML(value=self._spoken)

    @property
    def parts(self) -> tuple[Any, Any]:
        """The picture, then the words, because a reason is below the picture, the last one that could be drawn."""
        return self.picture, self.words

    def show(self, figure: Figure | None, reasons: Sequence[str] = ()) -> None:
        """Show a figure, with the reasons for what it leaves out below it; without a figure keep the last one."""
        if figure:
            self.picture.value, self._spoken = figure.png, _spoken(figure.sentence)
        else:
            reasons = [*reasons, "The picture above is that of the last settings that fit."]
        self.words.value = "<br>".join(f"<b>{html.escape(reason)}</b>" for reason in reasons) + self._spoken

    def try_to_show(self, draw: Callable[[], Figure]) -> None:
        """Show the figure that `draw` returns, or the reason of its ValueError."""
        try:
            self.show(draw())
        except ValueError as problem:
            self.show(None, [str(problem)])

    def follow(self, inputs: Mapping[str, Any], draw: Callable[[dict[str, Any]], Figure]) -> None:
        """Draw the figure again from the values of all controls, by name, whenever one of them changes."""

        def redraw(_change: Any) -> None:
            self.try_to_show(lambda: draw({name: control.value for name, control in inputs.items()}))

        for control in inputs.values():
            control.observe(redraw, names="value")

    def panel(
        self,
        inputs: Mapping[str, Any],
        draw: Callable[[dict[str, Any]], Figure],
        rows: Sequence[Sequence[str]] = (),
    ) -> Any:
        """Return one widget: the controls, and below them the figure, which follows them.

        rows: names of the controls that are side by side; without rows each control has a row of its own.
        """
        import ipywidgets as widgets

        self.follow(inputs, draw)
        above = [side_by_side([inputs[name] for name in row]) for row in rows] or [*inputs.values()]
        return widgets.VBox([*above, *self.parts])


def side_by_side(controls: Sequence[Any]) -> Any:
    """Return controls in a row; those that a narrow window has no room for are below the others."""
    import ipywidgets as widgets

    return widgets.HBox([*controls], layout=widgets.Layout(flex_flow="row wrap"))


def wide(width: str) -> Any:
    """Return the layout of a control of this width, or less in a narrow cell, so that its number stays visible."""
    import ipywidgets as widgets

    return widgets.Layout(width=width, max_width=FITS)


def whole_number(name: str, value: int, most: int) -> Any:
    """Return a control for a whole number from 1 to `most`."""
    import ipywidgets as widgets

    look: dict[str, Any] = {"layout": wide("190px"), "style": {"description_width": "100px"}}
    return widgets.BoundedIntText(value=value, min=1, max=most, description=name, **look)


def words(name: str, value: str) -> Any:
    """Return a control for a text, which draws the figure again when the reader has finished typing."""
    import ipywidgets as widgets

    return widgets.Text(value=value, description=name, continuous_update=False)


def _spoken(sentence: str) -> str:
    """Return the sentence for a screen reader only: the picture draws it, but its widget has no alternative text."""
    return f'<span style="position: absolute; left: -9999px">{html.escape(sentence)}</span>'
