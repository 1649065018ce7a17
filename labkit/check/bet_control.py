"""The control by which a reader places a bet in a notebook: choices or a number, and a button that commits it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from labkit.check.boxed import boxed


def bet_control(name: str, question: str, choices: Sequence[str], unit: str, place: Callable[[Any], str]) -> Any:
    """Return a widget whose button commits what is chosen, after which neither can be changed.

    choices: empty for a number. place: takes the answer and returns a sentence about the bet, or raises ValueError.
    """
    import ipywidgets as widgets

    wide: Any = widgets.Layout(width="max-content")
    if choices:
        field: Any = widgets.RadioButtons(options=list(choices), value=None, layout=wide)
    else:
        field = widgets.Text(placeholder="a number", layout=widgets.Layout(width="9em"))
    button, said = widgets.Button(description="Place bet"), widgets.HTML()

    def commit(_button: Any) -> None:
        try:
            placed = place(_chosen(field.value, number=not choices))
        except ValueError as problem:
            said.value = escape(str(problem))
            return
        field.disabled = button.disabled = True
        said.value = escape(f"{placed} Run the next cells to settle it.")

    button.on_click(commit)
    row = [field, widgets.Label(unit)] if unit else [field]
    head = widgets.HTML(boxed("open", name, question))
    return widgets.VBox([head, widgets.HBox(row), widgets.HBox([button, said])])


def _chosen(value: Any, *, number: bool) -> Any:
    """Return the answer in a field. Raises ValueError where nothing, or no number, is in it."""
    if value in (None, ""):
        raise ValueError("Choose an answer first.")
    if not number:
        return value
    try:
        found = float(str(value).replace(",", ""))
    except ValueError:
        raise ValueError(f"{value} is not a number.") from None
    return int(found) if found.is_integer() else found
