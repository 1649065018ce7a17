"""Controls for a live notebook: explore the rank groups of any layout."""

from __future__ import annotations

import html
import os
from typing import Any

from labkit.parallel.rank_generator import DEFAULT_ORDER
from labkit.viz.figure import Figure
from labkit.viz.ranks import rank_grid


def is_live() -> bool:
    """Whether somebody sits at the notebook: JupyterLab sets JPY_SESSION_NAME; papermill and nbval do not."""
    return bool(os.environ.get("JPY_SESSION_NAME"))


def explore_layout(
    *,
    world_size: int = 16,
    gpus_per_node: int = 8,
    tp: int = 4,
    cp: int = 1,
    pp: int = 2,
    ep: int = 1,
    etp: int = 1,
    order: str = DEFAULT_ORDER,
    kinds: tuple[str, ...] = ("tp", "dp", "pp"),
) -> Any:
    """The rank grid of the given layout; in a live notebook with controls for every size, the order and the kinds.

    Returns a Figure, or in a live notebook an ipywidgets box that shows the same figure first. A layout that cannot be
    keeps the last picture and shows the reason.
    """
    sizes = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp, "order": order}
    figure = rank_grid(sizes, kinds, world_size=world_size, gpus_per_node=gpus_per_node)
    if not is_live():
        return figure
    return _controls(figure, {"world_size": world_size, "gpus_per_node": gpus_per_node, **sizes}, kinds)


def _spoken(sentence: str) -> str:
    """The sentence for a screen reader alone: it is drawn in the picture, which as a widget has no alternative text."""
    return f'<span style="position: absolute; left: -9999px">{html.escape(sentence)}</span>'


def _controls(figure: Figure, start: dict[str, Any], kinds: tuple[str, ...]) -> Any:
    import ipywidgets as widgets

    picture = widgets.Image(value=figure.png, format="png")
    words = widgets.HTML(value=_spoken(figure.sentence))
    narrow, labels = widgets.Layout(width="180px"), {"description_width": "100px"}
    inputs: dict[str, Any] = {
        name: widgets.BoundedIntText(value=value, min=1, max=2**20, description=name, layout=narrow, style=labels)
        for name, value in start.items()
        if name != "order"
    }
    inputs["order"] = widgets.Text(value=start["order"], description="order", continuous_update=False)
    inputs["kinds"] = widgets.Text(value=" ".join(kinds), description="kinds", continuous_update=False)

    def redraw(_change: Any) -> None:
        given = {name: control.value for name, control in inputs.items()}
        shown, world, per_node = given.pop("kinds").split(), given.pop("world_size"), given.pop("gpus_per_node")
        try:
            drawn = rank_grid(given, shown, world_size=world, gpus_per_node=per_node)
        except ValueError as problem:
            words.value = f"<b>{html.escape(str(problem))}</b>"
            return
        picture.value, words.value = drawn.png, _spoken(drawn.sentence)

    for control in inputs.values():
        control.observe(redraw, names="value")
    numbers = [control for name, control in inputs.items() if name not in ("order", "kinds")]
    rows = [widgets.HBox(numbers[i : i + 4]) for i in range(0, len(numbers), 4)]
    return widgets.VBox([picture, words, *rows, widgets.HBox([inputs["order"], inputs["kinds"]])])
