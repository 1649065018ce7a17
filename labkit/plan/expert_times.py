"""Times of a layer's experts on one rank, term by term: router, permutation, all-to-all, grouped products. No torch.

A rank's T' tokens leave as T' k rows; ep ranks share the experts, and etp ranks each expert. A rank's experts work on
T' k etp rows on average, and the busiest rank on `routing_skew` times as many. Everybody waits for it.

With fp8 operands the rows of each expert are filled up to a multiple of 16 before the first product, and what was added
is removed after the second: a copy each. Rows travel in 16 bits. Casts of rows are those of any linear layer; those of
weights, once per step, are left out.
"""

from __future__ import annotations

from labkit.config import MoEConfig
from labkit.plan.collectives import Group
from labkit.plan.float8 import PADDING_ROWS
from labkit.plan.pieces import Pieces
from labkit.plan.sizes import expert_width, gate_and_up
from labkit.plan.terms import Term

_ROUTER_BYTES = 60
"""Bytes that the router moves for each token and expert: scores in fp32, softmax, top-k and the balancing loss, each
reading and writing them once or twice."""


def add_experts(pieces: Pieces, moe: MoEConfig) -> None:
    """Append the terms of a layer of experts."""
    model, layout, e = pieces.model, pieces.layout, pieces.element
    tokens, h = pieces.between, model.hidden
    _router(pieces, moe)
    if moe.shared_expert_ffn_hidden is not None:
        _shared(pieces, moe.shared_expert_ffn_hidden)
    sent = tokens * moe.top_k
    skew = _skew(moe, layout.routing_skew)
    for where in (pieces.forward, pieces.input_grad):
        pieces.moves(where, "permutation", sent * h, 2 * e, part="moe")
        _transfers(pieces, moe, where, sent * skew)
    rows = int(sent * layout.etp.size * skew)
    experts = max(1, moe.num_experts // layout.ep.size)
    width = expert_width(model, moe) // layout.etp.size
    if experts > 1:
        for where in (pieces.forward, pieces.input_grad):
            pieces.moves(where, "rows sorted by expert", rows * h, 4 * e, part="moe", launches=2)
    if layout.linear_precision == "fp8":
        rows += round(PADDING_ROWS * experts)
        for where in (pieces.forward, pieces.input_grad):
            pieces.moves(where, "rows filled up for fp8", rows * h, 4 * e, part="moe", launches=2)
    each = max(1, rows // experts)
    pieces.linear("experts fc1", each, width * gate_and_up(model), h, part="moe", groups=experts)
    pieces.activation(rows * width, part="moe")
    pieces.linear("experts fc2", each, h, width, part="moe", groups=experts)
    for where in (pieces.forward, pieces.input_grad):
        pieces.moves(where, "rows added up", sent * h, e * (1 + 1 / moe.top_k), part="moe", launches=2)


def _skew(moe: MoEConfig, skew: float) -> float:
    """Return the rows of the busiest rank over the mean: a capacity drops what is above it, or pads everybody to it."""
    if moe.capacity_factor is None:
        return skew
    return moe.capacity_factor if moe.pad_to_capacity else min(skew, moe.capacity_factor)


def _router(pieces: Pieces, moe: MoEConfig) -> None:
    tokens, h = pieces.between, pieces.model.hidden
    pieces.moves(pieces.forward, "router product", tokens * h, pieces.element + 4, part="moe", launches=2)
    pieces.moves(pieces.input_grad, "router product, backward", 2 * tokens * h, pieces.element + 4, launches=3)
    pieces.moves(pieces.forward, "router scores", tokens * moe.num_experts, _ROUTER_BYTES, part="moe", launches=12)
    pieces.moves(pieces.input_grad, "router scores, backward", tokens * moe.num_experts, _ROUTER_BYTES, launches=8)


def _transfers(pieces: Pieces, moe: MoEConfig, where: list[Term], rows: float) -> None:
    """Append dispatch and combine, each an all-to-all over ep and a gather or scatter over etp.

    The all-gather dispatcher brings all tokens of ep x etp to every rank, and adds up the results with one scatter.
    """
    layout, h, e = pieces.layout, pieces.model.hidden, pieces.element
    if moe.dispatcher == "allgather":
        group = Group(layout.ep.size * layout.etp.size, min(layout.ep.stride, layout.etp.stride))
        size = pieces.between * group.size * h * e
        pieces.sends(where, "dispatch of all tokens", "ep", "all_gather", size, group, part="moe")
        pieces.sends(where, "combine of all tokens", "ep", "reduce_scatter", size, group, part="moe")
        return
    for name, kind in (("dispatch", "all_gather"), ("combine", "reduce_scatter")):
        pieces.sends(where, f"{name} of rows", "ep", "all_to_all", rows * h * e, layout.ep, part="moe")
        size = rows * layout.etp.size * h * e
        pieces.sends(where, f"{name} over etp", "tp", kind, size, layout.etp, part="moe")


def _shared(pieces: Pieces, width: int) -> None:
    """Append the experts that every token passes through."""
    model, t = pieces.model, pieces.layout.tp.size
    pieces.linear(
        "shared experts fc1", pieces.tokens, width * gate_and_up(model) // t, model.hidden, part="shared_experts"
    )
    pieces.activation(pieces.tokens * width / t, part="shared_experts")
    pieces.linear("shared experts fc2", pieces.tokens, model.hidden, width // t, part="shared_experts")
    size = pieces.tokens * model.hidden * pieces.element
    if pieces.layout.sequence_parallel:
        for where in (pieces.forward, pieces.input_grad):
            pieces.sends(where, "shared experts, all-gather", "tp", "all_gather", size, pieces.layout.tp)
            pieces.sends(where, "shared experts, reduce-scatter", "tp", "reduce_scatter", size, pieces.layout.tp)
