"""Pictures of the router lab: policies side by side, in a live notebook with controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import Tensor

from labkit.viz.experts.router_lab import Policy, Replayed, replay, replay_policies
from labkit.viz.figure import Figure
from labkit.viz.live import LiveFigure, is_live, wide
from labkit.viz.style import INK, SEQUENCE, color, name_rows, new_figure, styled

_FULL, _PART = SEQUENCE[0], color("idle")
_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("bytes", 1))


def compare_policies(replayed: Sequence[Replayed], *, hidden: int, element_size: int = 2) -> Figure:
    """Draw policies as rows, and the balance and the costs of one recording as columns.

    The first column shows the fullest expert's choices and the fullest rank's rows, relative to the mean. The second
    shows dropped choices and their weight. The third shows choices that are the token's own best. The fourth shows
    bytes sent in a forward: row by row, and once for each token and rank.

    hidden, element_size: values in a row, and bytes of a value. Raises ValueError without a policy.
    """
    if not replayed:
        raise ValueError("compare_policies needs at least one replayed policy")
    with styled():
        fig = new_figure(8.6, 0.95 + 0.33 * len(replayed))
        panels = fig.subplots(1, 4, sharey=True, width_ratios=(1.25, 1, 0.8, 1.1))
        _balance(panels[0], replayed)
        _dropped(panels[1], replayed)
        _own(panels[2], replayed)
        _bytes(panels[3], replayed, hidden, element_size)
        name_rows(panels[0], [each.name for each in replayed], bars=True)
        for axes in panels:
            axes.tick_params(axis="y", length=0)
            axes.margins(x=0.22)
            axes.set_xlim(left=0)
            axes.xaxis.set_major_locator(MaxNLocator(3))
    return Figure(fig, _sentence(replayed, hidden, element_size))


def _pair(axes: Any, above: Sequence[float], below: Sequence[float], labels: tuple[str, str], show: str) -> None:
    """Draw two thin bars per row, each with its number."""
    for offset, values, label, face, pattern in (
        (-0.19, above, labels[0], _FULL, ""),
        (0.19, below, labels[1], _PART, "////"),
    ):
        places = [place + offset for place in range(len(values))]
        axes.barh(places, values, 0.36, color=face, hatch=pattern, edgecolor=INK, linewidth=0.4, label=label)
        for place, value in zip(places, values):
            axes.annotate(show.format(value), (value, place), xytext=(2, 0), textcoords="offset points", va="center",
                          fontsize=7)  # fmt: skip
    axes.legend(loc="lower left", bbox_to_anchor=(-0.03, 1.0), fontsize=7.5, handlelength=1.2, borderpad=0)


def _balance(axes: Any, replayed: Sequence[Replayed]) -> None:
    experts, ranks = [each.fullest_expert for each in replayed], [each.fullest_rank for each in replayed]
    _pair(axes, experts, ranks, ("fullest expert, chosen", "fullest rank, computed"), "{:.2f}")
    axes.axvline(1, color=INK, lw=0.8, ls=":")
    axes.set_xlabel("of the mean")


def _dropped(axes: Any, replayed: Sequence[Replayed]) -> None:
    rows, weight = [each.dropped for each in replayed], [each.weight_dropped for each in replayed]
    axes.update_datalim([(0.1, 0)])  # an axis needs a width above 0 even if no policy drops a row
    _pair(axes, rows, weight, ("choices dropped", "their weight"), "{:.1%}")
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel("of all")


def _own(axes: Any, replayed: Sequence[Replayed]) -> None:
    values = [each.own_choice for each in replayed]
    axes.barh(range(len(values)), values, 0.5, color=_FULL, edgecolor=INK, linewidth=0.4, label="own best")
    for place, value in enumerate(values):
        axes.annotate(f"{value:.0%}", (value, place), xytext=(2, 0), textcoords="offset points", va="center",
                      fontsize=7)  # fmt: skip
    axes.legend(loc="lower left", bbox_to_anchor=(-0.03, 1.0), fontsize=7.5, handlelength=1.2, borderpad=0)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel("of the choices")


def _bytes(axes: Any, replayed: Sequence[Replayed], hidden: int, element_size: int) -> None:
    rows = [each.sent_bytes(hidden, element_size) for each in replayed]
    once = [each.sent_once_bytes(hidden, element_size) for each in replayed]
    name, size = next(((name, size) for name, size in _UNITS if max(rows) >= size), _UNITS[-1])
    above, below = ([value / size for value in values] for values in (rows, once))
    _pair(axes, above, below, ("sent row by row", "once per rank"), "{:.3g}")
    axes.set_xlabel(f"{name}, all ranks, one forward")


def _sentence(replayed: Sequence[Replayed], hidden: int, element_size: int) -> str:
    ranks, tokens, experts = replayed[0].maps.shape
    free = [each for each in replayed if each.capacity is None] or replayed
    balance = ", ".join(f"{each.name} {each.fullest_expert:.2f}" for each in free)
    dropping = [f"{each.name} {each.dropped:.1%} ({each.weight_dropped:.1%} of the weight)"
                for each in replayed if each.dropped]  # fmt: skip
    parts = [f"fullest expert against the mean: {balance}"]
    parts += [f"dropped: {', '.join(dropping)}"] if dropping else []
    parts += [_traffic_words({each.name: each.sent_bytes(hidden, element_size) for each in replayed})]
    return f"{ranks} rank{'s' * (ranks != 1)} of {tokens} tokens, {experts} experts; {'; '.join(parts)}."


def _traffic_words(sent: Mapping[str, int]) -> str:
    least, most = min(sent, key=lambda name: sent[name]), max(sent, key=lambda name: sent[name])
    if sent[least] == sent[most]:
        return f"every policy sends {_amount(sent[least])}"
    return f"sent {_amount(sent[least])} ({least}) to {_amount(sent[most])} ({most})"


def _amount(size: int) -> str:
    name, unit = next(((name, unit) for name, unit in _UNITS if size >= unit), _UNITS[-1])
    return f"{size / unit:.3g} {name}"


# ---- controls ----


def explore_policies(logits_NRTE: Tensor, policies: Mapping[str, Policy], *, hidden: int, element_size: int = 2) -> Any:
    """Return `compare_policies` of a recording; in a live notebook add controls for top_k, capacity and bias rate.

    A control sets its field in every policy that has this field. The picture leaves out policies that cannot take the
    value, and the words below it give the reason. If no policy is possible, the picture is hidden.

    Returns a Figure, or in a live notebook an ipywidgets box that shows the same figure. Raises ValueError for
    impossible policies.
    """
    sizes = {"hidden": hidden, "element_size": element_size}
    figure = compare_policies(replay_policies(logits_NRTE, policies), **sizes)
    if not is_live():
        return figure

    def drawn(changes: Mapping[str, Any]) -> tuple[Figure | None, list[str]]:
        """Draw the possible policies, and return the reasons against the others."""
        replayed, refused = [], []
        for name, policy in policies.items():
            changed = {field: changes.get(field, value) for field, value in policy.items()}
            try:
                replayed.append(replay(logits_NRTE, changed, name=name))
            except ValueError as problem:
                refused.append(f"left out: {problem}")
        return (compare_policies(replayed, **sizes) if replayed else None), refused

    return _controls(figure, drawn, policies, logits_NRTE.shape[-1])


def _inputs(policies: Mapping[str, Policy], experts: int) -> dict[str, Any]:
    """Build a slider for each field of any policy, at the value of the first policy with this field."""
    import ipywidgets as widgets

    look: dict[str, Any] = {"style": {"description_width": "170px"}, "layout": wide("460px")}
    look["continuous_update"] = False  # a redraw routes the whole recording again
    kinds: dict[str, tuple[Any, dict[str, float]]] = {
        "top_k": (widgets.IntSlider, {"min": 1, "max": experts}),
        "capacity_factor": (widgets.FloatSlider, {"min": 0.25, "max": 4.0, "step": 0.25}),
        "expert_bias_update_rate": (widgets.FloatLogSlider, {"min": -4, "max": 0, "step": 0.25}),
    }
    first = {field: value for policy in reversed([*policies.values()]) for field, value in policy.items()}
    return {
        field: kind(value=first[field], description=field, **limits, **look)
        for field, (kind, limits) in kinds.items()
        if first.get(field) is not None
    }


def _controls(figure: Figure, drawn: Any, policies: Mapping[str, Policy], experts: int) -> Any:
    import ipywidgets as widgets

    shown, inputs, moved = LiveFigure(figure), _inputs(policies, experts), {}

    def redraw(change: Any) -> None:
        moved[change["owner"].description] = change["new"]
        shown.show(*drawn(moved))

    for control in inputs.values():
        control.observe(redraw, names="value")
    return widgets.VBox([*inputs.values(), *shown.parts])
