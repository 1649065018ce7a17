"""Bytes that cross nodes in one training step, by kind of group and order string.

A volume model, stated so that it can be doubted. Of one optimizer step it counts what leaves one node for another:

    tp   4 all-reduces per layer and microbatch (f and g, forward and backward; arXiv 1909.08053, section 3) of s/cp b h
    cp   ring attention (arXiv 2310.01889): keys and values of s/cp tokens go cp - 1 hops forward, and backward again
         together with their gradients: 3 (cp - 1) 2 s/cp b h/tp per layer and microbatch over every link of the ring
    ep   4 all-to-alls per layer and microbatch (dispatch and combine, forward and backward): every rank sends
         s b top_k / (cp tp) tokens of h values, an equal share of them to every rank of its group
    dp   1 all-reduce per step of the gradients of one rank: dense parameters / (tp pp) in 4 bytes, over dp cp
    edp  the same for expert parameters / (etp ep pp), over edp
    pp   s/cp b h per microbatch to the next stage, and its gradient back

An all-reduce of N bytes over g ranks is a ring in group order: each of its g links carries 2 (g - 1)/g N bytes
(Patarasuk and Yuan 2009). A link counts when its two ends are on different nodes. Not counted: tied embeddings, norms.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from labkit.config import ParallelConfig
from labkit.parallel.group_plan import all_groups
from labkit.parallel.rank_generator import AXES as LAYOUT_AXES
from labkit.parallel.rank_generator import rank_generators
from labkit.viz.figure import Figure
from labkit.viz.style import color, hatch, label, new_figure, styled

KINDS = ("tp", "cp", "ep", "dp", "edp", "pp")
"""Kinds that the model counts."""


@dataclass(frozen=True, kw_only=True)
class TransformerTraffic:
    """Sizes that the volume model needs; defaults are the 8.3B model of arXiv 1909.08053, batch 512."""

    layers: int = 72
    """Transformer layers of the model."""
    hidden: int = 3072
    """Width of the residual stream, h."""
    seq_length: int = 1024
    """Tokens of a sample, s."""
    micro_batch_size: int = 1
    """Samples of a microbatch, b."""
    global_batch_size: int = 512
    """Samples of a step over all data-parallel ranks."""
    activation_bytes: int = 2
    """Bytes of an activation (bf16)."""
    gradient_bytes: int = 4
    """Bytes of a gradient (fp32)."""
    num_experts: int = 0
    """Experts per layer; 0 is a dense model."""
    top_k: int = 2
    """Experts a token is sent to."""

    @property
    def dense_parameters(self) -> int:
        """12 L h^2 of a dense transformer; 4 L h^2 (attention) where the MLPs are experts. Embeddings are left out."""
        return (4 if self.num_experts else 12) * self.layers * self.hidden**2

    @property
    def expert_parameters(self) -> int:
        """8 L h^2 for each expert of a layer."""
        return 8 * self.layers * self.hidden**2 * self.num_experts


def bytes_between_nodes(
    model: TransformerTraffic, sizes: Mapping[str, Any], *, world_size: int, gpus_per_node: int = 8
) -> dict[str, float]:
    """Kind of group -> bytes that cross from node to node in one step, over the whole world, by the model above.

    `sizes` are those of `all_groups`. Raises ValueError where the batch does not split over dp.
    """
    dense, expert = rank_generators(world_size=world_size, **{k: v for k, v in sizes.items() if k != "split_rank"})
    tp, cp, dp, pp = (dense.sizes[axis] for axis in ("tp", "cp", "dp", "pp"))
    samples = dp * model.micro_batch_size
    if model.global_batch_size % samples:
        raise ValueError(
            f"global_batch_size {model.global_batch_size} is not a multiple of dp {dp} x micro_batch_size "
            f"{model.micro_batch_size} = {samples}"
        )
    microbatches = model.global_batch_size // samples
    tokens = model.seq_length * model.micro_batch_size / cp
    activation = tokens * model.hidden * model.activation_bytes
    passes = microbatches * model.layers / pp
    plan = all_groups(sizes, world_size)
    nodes = {kind: (groups - dense.rank_offset) // gpus_per_node for kind, groups in plan.items()}
    own_dense = model.dense_parameters / (tp * pp) * model.gradient_bytes
    own_expert = model.expert_parameters / (expert.sizes["tp"] * expert.sizes["ep"] * pp) * model.gradient_bytes
    routed = activation / tp * model.top_k if model.num_experts else 0.0
    return {
        "tp": _ring(nodes["tp"]) * 4 * passes * _all_reduce(activation, tp),
        "cp": _ring(nodes["cp"]) * passes * 3 * (cp - 1) * 2 * activation / tp,
        "ep": _pairs(nodes["ep"]) * 4 * passes * routed / expert.sizes["ep"],
        "dp": _ring(nodes["dp_cp"]) * _all_reduce(own_dense, dp * cp),
        "edp": _ring(nodes["edp"]) * _all_reduce(own_expert, expert.sizes["dp"]),
        "pp": _chain(nodes["pp"]) * microbatches * 2 * activation,
    }


def _all_reduce(size: float, ranks: int) -> float:
    """Bytes over each link of a ring all-reduce of `size` bytes."""
    return 2 * (ranks - 1) / ranks * size


def _ring(nodes: np.ndarray) -> int:
    """Links of all rings (groups in rows, node of each member) that leave a node; two ranks have two links."""
    return int((nodes != np.roll(nodes, -1, axis=1)).sum())


def _chain(nodes: np.ndarray) -> int:
    """Links of all open chains that leave a node."""
    return int((nodes[:, 1:] != nodes[:, :-1]).sum())


def _pairs(nodes: np.ndarray) -> int:
    """Ordered pairs of members of one group that are on different nodes."""
    return int((nodes[:, :, None] != nodes[:, None, :]).sum())


def order_traffic(
    model: TransformerTraffic,
    sizes: Mapping[str, Any],
    orders: Sequence[str] | None = None,
    *,
    world_size: int,
    gpus_per_node: int = 8,
) -> dict[str, dict[str, float]]:
    """Order string -> kind -> bytes between nodes, from the least to the most in all.

    Without `orders`: every order of the axes larger than 1. Orders that the two generators cannot share are left out.
    """
    rows: dict[str, dict[str, float]] = {}
    for order in orders or _every_order(sizes, world_size):
        layout = {**sizes, "order": order}
        try:
            rank_generators(world_size=world_size, **{k: v for k, v in layout.items() if k != "split_rank"})
        except ValueError as problem:
            if "disagree" not in str(problem):
                raise
            continue
        rows[order] = bytes_between_nodes(model, layout, world_size=world_size, gpus_per_node=gpus_per_node)
    return dict(sorted(rows.items(), key=lambda row: (sum(row[1].values()), _distance_from_default(row[0]))))


def _distance_from_default(order: str) -> list[int]:
    """Sorts orders of equal traffic: the usual one first."""
    return [LAYOUT_AXES.index(axis) for axis in order.split("-")]


def _every_order(sizes: Mapping[str, Any], world_size: int) -> list[str]:
    plain = {k: v for k, v in sizes.items() if k not in ("split_rank", "order")}
    dense, expert = rank_generators(world_size=world_size, **plain)
    used = [axis for axis in LAYOUT_AXES if dense.sizes[axis] > 1 or expert.sizes[axis] > 1]
    return ["-".join(axes) for axes in itertools.permutations(used)]


def compare_orders(
    model: TransformerTraffic,
    sizes: Mapping[str, Any],
    orders: Sequence[str] | None = None,
    *,
    world_size: int,
    gpus_per_node: int = 8,
) -> Figure:
    """Bars of `order_traffic`, stacked by kind of group; at most 12 orders, the least and the most among them."""
    rows = order_traffic(model, sizes, orders, world_size=world_size, gpus_per_node=gpus_per_node)
    shown = list(rows) if len(rows) <= 12 else [*list(rows)[:8], *list(rows)[-4:]]
    kinds = [kind for kind in KINDS if any(rows[order][kind] for order in rows)]
    with styled():
        fig = new_figure(7.2, 0.9 + 0.27 * len(shown))
        axes = fig.subplots()
        left = np.zeros(len(shown))
        for kind in kinds:
            amount = np.array([rows[order][kind] for order in shown]) / 1e9
            axes.barh(shown, amount, left=left, color=color(kind), hatch=hatch(kind), edgecolor="#333333",
                      linewidth=0.5, label=f"{kind} ({label(kind)})")  # fmt: skip
            left += amount
        for row, total in enumerate(left):
            axes.text(total + 0.01 * left.max(), row, f"{total:,.1f}", va="center", fontsize=8)
        axes.set(xlabel="GB between nodes in one step", xlim=(0, 1.12 * left.max() or 1))
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.legend(loc="upper right")
    best, worst = next(iter(rows)), list(rows)[-1]
    least, most = sum(rows[best].values()), sum(rows[worst].values())
    times = f", {most / least:,.0f} times as much" if least else ""
    return Figure(
        fig,
        f"{world_size} ranks on nodes of {gpus_per_node}, {_layout(sizes)}: {best} sends {least / 1e9:,.1f} GB between "
        f"nodes in a step, as little as any of {len(rows)} orders; {worst} sends {most / 1e9:,.1f} GB{times}.",
    )


def _layout(sizes: Mapping[str, Any] | ParallelConfig) -> str:
    items = sizes.items() if isinstance(sizes, Mapping) else vars(sizes).items()
    return " ".join(f"{axis} {size}" for axis, size in items if axis in (*LAYOUT_AXES, "etp") and size and size > 1)
