"""The control by which a reader places a bet in a notebook: choices or a number, and a button that commits it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labkit.check.boxed import boxed

if TYPE_CHECKING:
    from labkit.check.predictions import Bet


def bet_control(bet: Bet) -> Any:
    """Return a widget. Its button commits what is chosen, and neither can be changed afterwards."""
    import ipywidgets as widgets

    head = widgets.HTML(boxed("open", bet.name, bet.prediction.question))
    wide: Any = widgets.Layout(width="max-content")
    if bet.choices:
        field: Any = widgets.RadioButtons(options=list(bet.choices), value=None, layout=wide)
    else:
        field = widgets.Text(placeholder="a number", layout=widgets.Layout(width="9em"))
    button, said = widgets.Button(description="Place bet"), widgets.HTML()

    def commit(_button: Any) -> None:
        try:
            bet.place(_chosen(field.value, number=not bet.choices))
        except ValueError as problem:
            said.value = str(problem)
            return
        field.disabled = button.disabled = True
        said.value = f"{bet.terms()[0]} Run the next cells to settle it."

    button.on_click(commit)
    row = [field, widgets.Label(bet.prediction.unit)] if bet.prediction.unit else [field]
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
