"""Order strings of a layout, drawn by the bytes that cross nodes in one step (`labkit.plan.node_traffic`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.ticker import FuncFormatter, MaxNLocator

from labkit.comm.rank_generator import AXES as LAYOUT_AXES
from labkit.config import ParallelConfig
from labkit.plan.node_traffic import KINDS, TransformerTraffic, every_order, order_traffic
from labkit.viz.figure import Figure
from labkit.viz.style import color, hatch, label, new_figure, styled

SHOWN = 4
"""Orders that are drawn from each end of the list."""


def compare_orders(
    model: TransformerTraffic,
    sizes: Mapping[str, Any],
    orders: Sequence[str] | None = None,
    *,
    world_size: int,
    gpus_per_node: int = 8,
) -> Figure:
    """Draw `order_traffic` on one axis that begins at 0: the 4 orders of the least and, below a line, of the most.

    A row is an order: its bar has a part for each kind of group, and the sum at its end.
    """
    rows = order_traffic(model, sizes, orders, world_size=world_size, gpus_per_node=gpus_per_node)
    least, most = list(rows)[:SHOWN], list(rows)[SHOWN:][-SHOWN:]
    kinds = [kind for kind in KINDS if any(rows[order][kind] for order in rows)]
    with styled():
        fig = new_figure(7.2, 1.1 + 0.28 * len(least + most))
        axes = fig.subplots()
        _bars(axes, {order: rows[order] for order in least + most}, kinds)
        if most:
            axes.axhline(len(least) - 0.5, color="#333333", linewidth=0.8)
        fig.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(kinds))
    tried = len(orders or every_order(model, sizes, world_size))
    place = f"{world_size} ranks on nodes of {gpus_per_node}, {_layout(sizes)}"
    return Figure(fig, f"{place}: {_verdict(rows, tried - len(rows))}")


def _bars(axes: Any, rows: Mapping[str, Mapping[str, float]], kinds: Sequence[str]) -> None:
    """Draw one stacked bar per order, with its sum in words at its right end."""
    totals = [sum(row.values()) for row in rows.values()]
    places = range(len(rows))
    done = [0.0] * len(rows)
    for kind in kinds:
        sent = [row[kind] / 1e9 for row in rows.values()]
        axes.barh(places, sent, 0.7, left=done, color=color(kind), hatch=hatch(kind), edgecolor="#333333",
                  linewidth=0.5, label=f"{kind} ({label(kind)})")  # fmt: skip
        done = [start + size for start, size in zip(done, sent, strict=True)]
    for place, total in zip(places, totals, strict=True):
        axes.annotate(_amount(total), (total / 1e9, place), xytext=(6, 0), textcoords="offset points", va="center",
                      fontsize=8)  # fmt: skip
    axes.set(xlim=(0, 1.25 * max(max(totals) / 1e9, 1e-9)), xlabel="GB between nodes in one step")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(places, list(rows))
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _amount(size: float) -> str:
    """Return bytes in words: GB with one decimal below 1,000 GB, else TB with two."""
    return f"{size / 1e12:,.2f} TB" if size >= 999.95e9 else f"{size / 1e9:,.1f} GB"


def _verdict(rows: Mapping[str, Mapping[str, float]], rejected: int) -> str:
    """Say in words what the cheapest and the most expensive order send, and how many orders there are."""
    totals = {order: sum(row.values()) for order, row in rows.items()}
    (best, least), (worst, most) = next(iter(totals.items())), list(totals.items())[-1]
    ties = sum(math.isclose(total, least, rel_tol=1e-9) for total in totals.values()) - 1
    notes = [f"{ties} other{'s tie' if ties > 1 else ' ties'}"] if ties else []
    notes += [f"{rejected} more are rejected: the experts' pipelines would differ"] if rejected else []
    beside = f" ({'; '.join(notes)})" if notes else ""
    times = f", {most / least:,.{0 if most > 10 * least else 1}f} times as much" if least else ""
    return (
        f"{best} sends {_amount(least)} between nodes in a step, the least of {len(rows)} orders{beside}; "
        f"{worst} sends {_amount(most)}{times}."
    )


def _layout(sizes: Mapping[str, Any] | ParallelConfig) -> str:
    items = sizes.items() if isinstance(sizes, Mapping) else vars(sizes).items()
    return " ".join(f"{axis} {size}" for axis, size in items if axis in (*LAYOUT_AXES, "etp") and size and size > 1)
