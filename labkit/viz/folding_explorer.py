"""Controls for a live notebook: any layout of attention and experts over one grid of ranks."""

from __future__ import annotations

import html
from typing import Any

from labkit.parallel.rank_generator import DEFAULT_ORDER
from labkit.viz.figure import Figure
from labkit.viz.folding import fold_grid
from labkit.viz.widgets import is_live, spoken

_SIZES = ("tp", "cp", "pp", "etp", "ep")


def explore_folding(
    *,
    world_size: int = 16,
    gpus_per_node: int = 8,
    tp: int = 2,
    cp: int = 2,
    pp: int = 2,
    ep: int = 4,
    etp: int = 1,
    order: str = DEFAULT_ORDER,
    folded: bool = True,
) -> Any:
    """`fold_grid` of the given layout; in a live notebook with controls for every size, the order, and folding.

    Returns a Figure, or in a live notebook an ipywidgets box that shows the same figure first. A layout that cannot be
    hides the picture and shows the reason.
    """
    sizes = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp}
    setting = {"world_size": world_size, "gpus_per_node": gpus_per_node, **sizes, "order": order, "folded": folded}
    figure = _drawn(setting)
    return _controls(figure, setting) if is_live() else figure


def _drawn(setting: dict[str, Any]) -> Figure:
    room = {name: setting[name] for name in ("world_size", "gpus_per_node", "folded")}
    return fold_grid({name: setting[name] for name in (*_SIZES, "order")}, **room)


def _controls(figure: Figure, start: dict[str, Any]) -> Any:
    import ipywidgets as widgets

    picture = widgets.Image(value=figure.png, format="png")
    words = widgets.HTML(value=spoken(figure.sentence))
    look: dict[str, Any] = {"layout": widgets.Layout(width="190px"), "style": {"description_width": "100px"}}
    inputs: dict[str, Any] = {
        name: widgets.BoundedIntText(value=start[name], min=1, max=2**12, description=name, **look)
        for name in ("world_size", "gpus_per_node", *_SIZES)
    }
    inputs["order"] = widgets.Text(value=start["order"], description="order", continuous_update=False)
    inputs["folded"] = widgets.Checkbox(value=start["folded"], description="folded")

    def redraw(_change: Any) -> None:
        try:
            drawn = _drawn({name: control.value for name, control in inputs.items()})
        except ValueError as problem:
            words.value, picture.layout.visibility = f"<b>{html.escape(str(problem))}</b>", "hidden"
            return
        picture.value, words.value, picture.layout.visibility = drawn.png, spoken(drawn.sentence), "visible"

    for control in inputs.values():
        control.observe(redraw, names="value")
    rows = (("world_size", "gpus_per_node"), ("tp", "cp", "pp"), ("etp", "ep"), ("order", "folded"))
    return widgets.VBox([*(widgets.HBox([inputs[name] for name in row]) for row in rows), words, picture])
