"""Bytes that cross nodes in one training step, by kind of group and by order string. No torch.

The model counts the bytes of one optimizer step that leave one node for another:

    tp   4 all-reduces per layer and microbatch (f and g, forward and backward; arXiv 1909.08053, section 3) of s/cp b h
    cp   ring attention (arXiv 2310.01889): keys and values of s/cp tokens go cp - 1 hops forward, and backward again
         together with their gradients: 3 (cp - 1) 2 s/cp b h/tp per layer and microbatch over every link of the ring.
         Gradients have the type of keys, as in Transformer Engine; labkit's ring sends them in 4 bytes
    ep   4 all-to-alls per layer and microbatch (dispatch and combine, forward and backward): every rank sends
         s b top_k / (cp tp) tokens of h values, an equal share of them to every rank of its group
    dp   1 all-reduce per step of the gradients of one rank: dense parameters / (tp pp) in 4 bytes, over dp cp
    edp  the same for expert parameters / (etp ep pp), over edp
    pp   s/cp b h per microbatch to the next stage, and its gradient back; each tp rank sends the whole of it

An all-reduce of N bytes over g ranks is a ring in group order (Patarasuk and Yuan 2009). Each of its g links carries
2 (g - 1)/g N bytes. A link counts if its two ends are on different nodes. The model leaves out tied embeddings and
norms. A model without experts has only dense groups, so every order of its axes is allowed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from labkit.comm.rank_generator import AXES as LAYOUT_AXES
from labkit.comm.rank_generator import DEFAULT_ORDER, RankGenerator, rank_generators

KINDS = ("tp", "cp", "ep", "dp", "edp", "pp")
"""Kinds of groups that the model counts."""


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
    """Experts per layer; 0 means a dense model."""
    top_k: int = 2
    """Experts to which a token is sent."""

    @property
    def dense_parameters(self) -> int:
        """12 L h^2 of a dense transformer; 4 L h^2 (attention) if the MLPs are experts. Embeddings are left out."""
        return (4 if self.num_experts else 12) * self.layers * self.hidden**2

    @property
    def expert_parameters(self) -> int:
        """8 L h^2 times the experts of a layer."""
        return 8 * self.layers * self.hidden**2 * self.num_experts


def bytes_between_nodes(
    model: TransformerTraffic, sizes: Mapping[str, Any], *, world_size: int, gpus_per_node: int = 8
) -> dict[str, float]:
    """Return kind of group -> bytes that cross from node to node in one step, over the whole world, by the model above.

    `sizes` are those of `rank_generators`. Raises ValueError if the batch does not split over dp, and for ep or etp in
    a model without experts.
    """
    dense, expert = _generators(model, sizes, world_size)
    return _crossing(model, dense, expert, np.arange(world_size) // gpus_per_node)


def placement_traffic(
    model: TransformerTraffic, placement: Sequence[Mapping[str, int]], nodes: Sequence[int]
) -> dict[str, float]:
    """Return kind of group -> bytes that cross from node to node in one step, if ranks are placed one by one.

    placement: for each GPU, node after node, the digits of its rank, such as {"tp": 3, "dp": 0, "pp": 1}. nodes: GPUs
        of each node. Rings follow the digits, wherever the ranks are. Dense models only.

    Raises ValueError if there is no GPU, or more than one, for some digits.
    """
    axes = [axis for axis in LAYOUT_AXES if axis in placement[0]]
    sizes = {axis: 1 + max(digits[axis] for digits in placement) for axis in axes}
    generator = RankGenerator(**sizes, order=DEFAULT_ORDER)
    ranks = [sum(digits[axis] * generator.strides[axis] for axis in axes) for digits in placement]
    if sorted(ranks) != list(range(generator.world_size)) or len(ranks) != sum(nodes):
        shape = " ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ValueError(f"{shape} on {sum(nodes)} GPUs: each combination of digits must be on one GPU")
    node_of = np.empty(len(ranks), dtype=int)
    node_of[ranks] = np.repeat(np.arange(len(nodes)), nodes)
    return _crossing(model, generator, None, node_of)


def _crossing(
    model: TransformerTraffic, dense: RankGenerator, expert: RankGenerator | None, node_of: np.ndarray
) -> dict[str, float]:
    """Return kind of group -> bytes between nodes; `node_of` has the node of each rank, counted from 0."""
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
    own = model.dense_parameters / (tp * pp) * model.gradient_bytes

    def nodes(generator: RankGenerator, token: str) -> np.ndarray:
        return node_of[generator.rank_array(token) - generator.rank_offset]

    crossing = {
        "tp": _ring(nodes(dense, "tp")) * 4 * passes * _all_reduce(activation, tp),
        "cp": _ring(nodes(dense, "cp")) * passes * 3 * (cp - 1) * 2 * activation / tp,
        "ep": 0.0,
        "dp": _ring(nodes(dense, "dp-cp")) * _all_reduce(own, dp * cp),
        "edp": 0.0,
        "pp": _chain(nodes(dense, "pp")) * microbatches * 2 * activation,
    }
    if expert is not None:
        etp, ep, edp = (expert.sizes[axis] for axis in ("tp", "ep", "dp"))
        own = model.expert_parameters / (etp * ep * pp) * model.gradient_bytes
        crossing["ep"] = _pairs(nodes(expert, "ep")) * 4 * passes * activation / tp * model.top_k / ep
        crossing["edp"] = _ring(nodes(expert, "dp")) * _all_reduce(own, edp)
    return crossing


def _generators(
    model: TransformerTraffic, sizes: Mapping[str, Any], world_size: int
) -> tuple[RankGenerator, RankGenerator | None]:
    """Build the dense generator, and the experts' if the model has experts, because only two can disagree."""
    if model.num_experts:
        return rank_generators(world_size=world_size, **sizes)
    if given := [f"{name} {sizes[name]}" for name in ("ep", "etp") if (sizes.get(name) or 1) > 1]:
        raise ValueError(f"{', '.join(given)} for a model without experts; give num_experts, or leave out ep and etp")
    plain = {name: size for name, size in sizes.items() if name not in ("order", "ep", "etp")}
    dense, _ = rank_generators(world_size=world_size, **plain)  # the usual order never disagrees: this finds dp
    return RankGenerator(**dense.sizes, order=sizes.get("order", dense.order), rank_offset=dense.rank_offset), None


def _all_reduce(size: float, ranks: int) -> float:
    """Return the bytes over each link of a ring all-reduce of `size` bytes."""
    return 2 * (ranks - 1) / ranks * size


def _ring(nodes: np.ndarray) -> int:
    """Count the links of all rings (groups in rows, nodes of members) that leave a node; two ranks have two links."""
    return int((nodes != np.roll(nodes, -1, axis=1)).sum())


def _chain(nodes: np.ndarray) -> int:
    """Count the links of all open chains that leave a node."""
    return int((nodes[:, 1:] != nodes[:, :-1]).sum())


def _pairs(nodes: np.ndarray) -> int:
    """Count the ordered pairs of members of one group that are on different nodes."""
    return int((nodes[:, :, None] != nodes[:, None, :]).sum())


def order_traffic(
    model: TransformerTraffic,
    sizes: Mapping[str, Any],
    orders: Sequence[str] | None = None,
    *,
    world_size: int,
    gpus_per_node: int = 8,
) -> dict[str, dict[str, float]]:
    """Return order string -> kind -> bytes between nodes, from the least total to the most.

    Without `orders` it tries every order of the axes larger than 1. Orders that the dense layers and the experts cannot
    share are left out.
    """
    rows: dict[str, dict[str, float]] = {}
    for order in orders or every_order(model, sizes, world_size):
        layout = {**sizes, "order": order}
        try:
            _generators(model, layout, world_size)
        except ValueError as problem:
            if "disagree" not in str(problem):
                raise
            continue
        rows[order] = bytes_between_nodes(model, layout, world_size=world_size, gpus_per_node=gpus_per_node)
    return dict(sorted(rows.items(), key=lambda row: (sum(row[1].values()), _distance_from_default(row[0]))))


def _distance_from_default(order: str) -> list[int]:
    """Return a sort key that puts the usual order first among orders of equal traffic."""
    return [LAYOUT_AXES.index(axis) for axis in order.split("-")]


def every_order(model: TransformerTraffic, sizes: Mapping[str, Any], world_size: int) -> list[str]:
    """Return every order string of the layout's axes, for a comparison of the bytes that cross nodes."""
    dense, expert = _generators(model, {k: v for k, v in sizes.items() if k != "order"}, world_size)
    used = [axis for axis in LAYOUT_AXES if any(part and part.sizes[axis] > 1 for part in (dense, expert))]
    return ["-".join(axes) for axes in itertools.permutations(used)]
