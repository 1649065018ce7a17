"""Parameters and saved activations of multi-latent attention (arXiv 2405.04434, section 2.1) in Megatron-LM. No torch.

Tokens go down to r_q columns for queries, and to r_kv for keys and values, beside which there are p columns of one key
with positions. Every rank of tensor parallelism has these two matrices whole, and with sequence parallelism computes
them for its tokens. From there a rank's heads go up: a query of d + p columns, a key of d + p, a value of v.

Source: megatron/core/transformer/multi_latent_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.config import ModelConfig
from labkit.plan.activations import Share


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Sizes of multi-latent attention; the defaults are Megatron-LM's."""

    query_rank: int | None = None
    """r_q; None projects queries directly."""
    rank: int = 512
    """r_kv."""
    head: int = 128
    """d, columns of a query or key without positions."""
    position_head: int = 64
    """p, their columns with rotary positions."""
    value_head: int = 128
    """v."""


def latent_matrices(model: ModelConfig, latent: Latent, tp: int = 1) -> list[int]:
    """Return the elements of the matrices on one rank: proj, down and up of queries, down and up of keys and values."""
    heads, query = model.heads // tp, latent.head + latent.position_head
    down = [model.hidden * latent.query_rank] if latent.query_rank else []
    return [
        heads * latent.value_head * model.hidden,
        *down,
        (latent.query_rank or model.hidden) * heads * query,
        model.hidden * (latent.rank + latent.position_head),
        latent.rank * heads * (latent.head + latent.value_head),
    ]


def latent_parameters(model: ModelConfig, latent: Latent, tp: int = 1, *, norms: bool = False) -> int:
    """Return the parameters of one attention on one rank. norms: norms of both latents (--qk-layernorm)."""
    each = 2 if model.norm == "layernorm" else 1
    normed = (latent.rank + (latent.query_rank or 0)) * each if norms else 0
    return sum(latent_matrices(model, latent, tp)) + model.hidden * model.bias + normed


def latent_saved(model: ModelConfig, share: Share, latent: Latent, *, norms: bool = False) -> dict[str, int]:
    """Return tensor -> bytes that one attention keeps of its projections: what q, k, v and proj's input are elsewhere.

    The projection of keys and values is kept whole, because the values are a view of it; queries and keys are copies.
    """
    e, inside, outside = share.element_bytes, share.tokens(model), share.tokens_between(model)
    heads, query = model.heads // share.tp, latent.head + latent.position_head
    copies = 2 if norms else 1
    return {
        "latents": outside * ((latent.query_rank or 0) * copies + latent.rank * copies + latent.position_head) * e,
        "queries and keys": 2 * inside * heads * query * e,
        "keys and values": inside * heads * (latent.head + latent.value_head) * e,
        "proj input": inside * heads * latent.value_head * e,
    }
