"""Bytes that a layer's experts keep for backward, tensor by tensor; the part of `activation_bytes.py` behind the norm.

With T tokens of a rank, k experts a token, R rows that the rank's experts work on (T k in the mean over ranks, times
etp), h hidden, g width of an expert and elements of e bytes, grouped experts with a gate keep

| tensor                              | bytes              |
|-------------------------------------|--------------------|
| the layer's input                   | T h e              |
| the rows, as experts get them       | R h e              |
| what fc1 makes: gate and up         | R 2g e / etp       |
| what fc2 takes                      | R g e / etp        |
| weights, and places of rows         | R w + 16 T k       |
| scores and choice                   | T E (w + 1)        |

and what shared experts keep, which are an MLP. A routing moves R from rank to rank, and only its mean is known before.
w is 4, or more with a wider router.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from labkit.config import ModelConfig, MoEConfig
from labkit.models.counts import expert_width, gate_and_up

if TYPE_CHECKING:
    from labkit.models.activation_bytes import Share

INDEX_BYTES = 8
"""Of the place of a row."""


def moe_saved(model: ModelConfig, moe: MoEConfig, share: Share) -> dict[str, int]:
    """Tensor -> bytes kept behind the norm of a layer with experts when nothing is recomputed, in order of the forward.

    Raises:
        ValueError: a capacity without padding, which leaves a number of rows that only routing tells.
    """
    tokens, e, h = share.tokens_between(model), share.element_bytes, model.hidden
    sent, rows = _rows(moe, share, tokens)
    inner = expert_width(model, moe) // share.etp
    jitter = 2 if moe.input_jitter else 0  # the numbers drawn, and their product with the input, which takes its place
    input_is_kept = not jitter or moe.shared_expert_ffn_hidden is not None
    permuted = rows if moe.dispatcher == "allgather" else sent
    return {
        "mlp layer input": tokens * h * e if input_is_kept else 0,
        **_shared_experts(model, moe, share),
        "mlp router jitter": jitter * tokens * h * e,
        "mlp router scores": _router(moe, share, tokens),
        "mlp permutation": 2 * permuted * INDEX_BYTES,
        "mlp experts fc1 input": rows * h * e,
        "mlp experts activation input": _expert_activation(model, moe, inner, e) * rows,
        "mlp experts weights": rows * _router_bytes(moe, share),
        "mlp experts fc2 input": rows * inner * e,
    }


def _rows(moe: MoEConfig, share: Share, tokens: int) -> tuple[int, int]:
    """Rows that leave this rank, and rows that its experts work on."""
    if moe.pad_to_capacity:
        assert moe.capacity_factor is not None
        capacity = min(math.ceil(tokens * moe.top_k / moe.num_experts * moe.capacity_factor), tokens)
        return moe.num_experts * capacity, moe.num_experts * capacity * share.etp
    if moe.capacity_factor is not None:
        raise ValueError(
            "moe.capacity_factor without moe.pad_to_capacity leaves a number of rows that only the routing tells; set "
            "pad_to_capacity, or leave the capacity out for the most that can be kept"
        )
    sent = tokens * moe.top_k
    return sent, sent * share.etp if share.expert_rows is None else share.expert_rows


def _router_bytes(moe: MoEConfig, share: Share) -> int:
    """Of a weight that leaves the router."""
    return max({"fp32": 4, "fp64": 8}.get(moe.router_dtype, 0), share.element_bytes)


def _router(moe: MoEConfig, share: Share, tokens: int) -> int:
    """Scores and choice, and what losses and a capacity add; T E elements each, or T for sums over experts."""
    wide, experts = max(_router_bytes(moe, share), 4), moe.num_experts
    sinkhorn = moe.load_balancing == "sinkhorn"
    summed = moe.score_function == "sigmoid" and not sinkhorn  # sigmoids are divided by their sum
    divided = summed and moe.top_k > 1
    kept = experts * (wide + 1) + ((experts + 1) * wide if divided else 0)
    if moe.z_loss_coeff:
        kept += (experts + 1) * wide
    if moe.load_balancing.endswith("aux_loss") and moe.aux_loss_coeff:
        kept += (experts + summed) * wide
    if moe.capacity_factor is not None:
        kept += experts
    return tokens * kept + _counts(moe, share, wide)


def _counts(moe: MoEConfig, share: Share, wide: int) -> int:
    """Tokens of each expert, by which the load-balancing loss multiplies."""
    if not (moe.load_balancing.endswith("aux_loss") and moe.aux_loss_coeff):
        return 0
    return moe.num_experts * wide * (share.samples if moe.load_balancing == "seq_aux_loss" else 1)


def _expert_activation(model: ModelConfig, moe: MoEConfig, inner: int, e: int) -> int:
    """A row of what fc1 makes and of what the weight of the row multiplies. Grouped SwiGLU makes the second again."""
    gated = gate_and_up(model) == 2
    if gated and moe.grouped_gemm:
        return 2 * inner * e
    return ((4 if gated else 2) * inner) * e


def _shared_experts(model: ModelConfig, moe: MoEConfig, share: Share) -> dict[str, int]:
    """The input is the layer's, unless it is gathered ahead for the overlap."""
    width = moe.shared_expert_ffn_hidden
    if width is None:
        return {}
    inside, e, t = share.tokens(model), share.element_bytes, share.tp
    gate = share.tokens_between(model) * (model.hidden + 1) * e if moe.shared_expert_gate else 0
    gathered = inside * model.hidden * e if moe.shared_expert_overlap and t > 1 else 0
    return {
        "mlp shared experts gathered input": gathered,
        "mlp shared experts activation input": inside * width * (3 if gate_and_up(model) == 2 else 1) // t * e,
        "mlp shared experts fc2 input": inside * width // t * e,
        "mlp shared experts gate": gate,
    }


def moe_kept(saved: dict[str, int], model: ModelConfig, share: Share, modules: tuple[str, ...]) -> dict[str, int]:
    """`saved`, of a whole layer, without what the selected parts of its experts throw away."""
    if "moe" in modules:
        behind = ("mlp shared", "mlp router", "mlp permutation", "mlp experts")
        saved = {name: 0 if name.startswith(behind) else size for name, size in saved.items()}
        saved["mlp layer input"] = share.tokens_between(model) * model.hidden * share.element_bytes
    if "shared_experts" in modules:
        saved = {name: 0 if name.startswith("mlp shared") else size for name, size in saved.items()}
    return saved
