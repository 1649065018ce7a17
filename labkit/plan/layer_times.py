"""Times of one transformer layer on one rank, term by term: forward, input gradients, weight gradients. No torch.

T is the number of tokens of a rank's microbatch inside tensor-parallel regions (samples x sequence / cp), and T'
between them (T / tp with sequence parallelism). h is the hidden size, t = tp, e the bytes of an element.

    forward     norm, qkv, attention, proj, residual, norm, fc1, activation, fc2, residual
    backward    the same in reverse; each product becomes two, one per operand

Collectives of a dense layer (arXiv 1909.08053, section 3; arXiv 2205.05198, section 4.2), each of T h e bytes:

                       forward                                backward
    tp                 all-reduce after proj, fc2             all-reduce after the input gradient of qkv, fc1
    tp with sp         all-gather before qkv, fc1;            all-gather of the gradient before proj, fc2, and of the
                       reduce-scatter after proj, fc2         input of qkv, fc1; reduce-scatter of their input gradient
"""

from __future__ import annotations

from functools import lru_cache

from labkit.config import ModelConfig, MoEConfig
from labkit.plan.expert_times import add_experts
from labkit.plan.kernels import fused_attention, memory_bound, software_rate
from labkit.plan.layout import Layout, layout_of
from labkit.plan.machine import Machine
from labkit.plan.pieces import Passes, Pieces, Terms
from labkit.plan.sizes import fc1_width, ffn_width, kv_width, qkv_width
from labkit.plan.terms import Term
from labkit.plan.workload import Workload


def layer_passes(model: ModelConfig, moe: MoEConfig | None, layout: Layout, machine: Machine) -> Passes:
    """Return the times of one layer; `moe` None for a layer without experts."""
    return _layer_passes(model, moe, layout.of_layer(), machine)


@lru_cache(maxsize=8192)
def _layer_passes(model: ModelConfig, moe: MoEConfig | None, layout: Layout, machine: Machine) -> Passes:
    first, second = attention_half(model, layout, machine), mlp_half(model, moe, layout, machine)
    forward = first.forward + second.forward
    return Passes(
        forward,
        first.input_grad + second.input_grad,
        first.weight_grad + second.weight_grad,
        repeated_terms(model, layout, forward),
    )


def layer_terms(workload: Workload, machine: Machine) -> Terms:
    """Return every kernel of the forward and backward of one layer without experts."""
    passes = layer_passes(workload.config.model, None, layout_of(workload), machine)
    return (*passes.forward, *passes.input_grad, *passes.weight_grad)


def attention_half(model: ModelConfig, layout: Layout, machine: Machine) -> Passes:
    """Return the times of a layer's first half: norm, attention and residual addition; without recomputation."""
    return _attention_half(model, layout.of_attention(), machine)


@lru_cache(maxsize=8192)
def _attention_half(model: ModelConfig, layout: Layout, machine: Machine) -> Passes:
    pieces = Pieces(model, layout, machine)
    _norm(pieces, "attention norm")
    _attention(pieces)
    _residual(pieces, "attention")
    return pieces.passes()


def mlp_half(model: ModelConfig, moe: MoEConfig | None, layout: Layout, machine: Machine) -> Passes:
    """Return the times of a layer's second half: norm, MLP or experts, and residual addition.

    It sees tokens, whose samples and places do not matter. So layouts that cut a batch in other ways share it.
    """
    tokens = layout.micro_batch * model.seq_length // layout.cp.size
    return _mlp_half(model, moe, layout.of_tokens(experts=moe is not None), machine, tokens)


@lru_cache(maxsize=8192)
def _mlp_half(model: ModelConfig, moe: MoEConfig | None, layout: Layout, machine: Machine, tokens: int) -> Passes:
    pieces = Pieces(model, layout, machine, tokens)
    _norm(pieces, "mlp norm")
    if moe is None:
        _mlp(pieces)
    else:
        add_experts(pieces, moe)
    _residual(pieces, "mlp")
    return pieces.passes()


_AFTER_LAST_SAVED = (
    "fc2",
    "fc2, cast to fp8",
    "fc2, sum",
    "experts fc2",
    "combine of rows",
    "rows added up",
    "mlp residual",
)
"""Terms of a forward whose results no backward reads."""


def repeated_terms(model: ModelConfig, layout: Layout, forward: Terms) -> Terms:
    """Return what the backward computes again of a layer that recomputation covers."""
    if model.recompute_granularity == "full":
        left_out = _AFTER_LAST_SAVED if layout.software.stops_recomputation_early else ()
        return tuple(term for term in forward if term.name not in left_out)
    share = layout.software.selective_share
    if model.recompute_granularity == "selective" and share is not None:
        moved = [term for term in forward if term.kind == "memory"]
        products = sum(term.seconds for term in forward if term.kind == "gemm")
        inputs = (("share", share), ("products", products))
        return (*moved, Term("products again", "gemm", share * products, "share x products", inputs))
    if model.recompute_granularity == "selective":
        return tuple(term for term in forward if term.part in model.recompute_modules)
    return ()


def _norm(pieces: Pieces, name: str) -> None:
    """A norm reads its input and writes its output; backward reads both gradients and the input, and writes one.

    The gradient of the residual branch is added afterwards: two reads and a write.
    """
    elements, e = pieces.between * pieces.model.hidden, pieces.element
    pieces.moves(pieces.forward, name, elements, 2 * e, part="layernorm")
    pieces.moves(pieces.input_grad, f"{name}, backward", elements, 6 * e, launches=3)


def _residual(pieces: Pieces, name: str) -> None:
    """Bias, dropout and the addition to the residual stream: one fused kernel, or one each."""
    model, e = pieces.model, pieces.element
    elements = pieces.between * model.hidden
    mask = 1 if model.hidden_dropout else 0
    steps = 1 + bool(mask) + model.bias
    fused = pieces.layout.software.fused_elementwise
    per_element = 3 * e + mask if fused else 3 * e + 2 * e * (steps - 1) + mask
    pieces.moves(pieces.forward, f"{name} residual", elements, per_element, launches=1 if fused else steps)
    backward = (2 * e + 1 if mask else 0) + (e if model.bias else 0)
    if backward:
        pieces.moves(pieces.input_grad, f"{name} residual, backward", elements, backward, launches=2)


def _column(pieces: Pieces, name: str, columns: int, *, part: str = "") -> None:
    """A column-parallel layer from T' (or T) x h, with its collectives on both sides."""
    model, layout = pieces.model, pieces.layout
    size = pieces.tokens * model.hidden * pieces.element
    gathers, software = layout.sequence_parallel, layout.software
    made = pieces.linear(name, pieces.tokens, columns, model.hidden, part=part)
    if gathers:
        hidden = made.forward.seconds if software.overlaps_tensor_parallel else 0.0
        pieces.sends(
            pieces.forward, f"{name}, all-gather", "tp", "all_gather", size, layout.tp, hidden=hidden, part=part
        )
        hidden = made.input_grad.seconds if software.overlaps_input_gradient else 0.0
        pieces.sends(pieces.input_grad, f"{name}, all-gather again", "tp", "all_gather", size, layout.tp, hidden=hidden)
    kind = "reduce_scatter" if gathers else "all_reduce"
    hidden = made.weight_grad.seconds if software.overlaps_input_gradient and not layout.splits_backward else 0.0
    pieces.sends(pieces.input_grad, f"{name}, sum of input gradients", "tp", kind, size, layout.tp, hidden=hidden)


def _row(pieces: Pieces, name: str, depth: int, *, part: str = "") -> None:
    """A row-parallel layer to T x h, with its sum over ranks."""
    model, layout = pieces.model, pieces.layout
    size = pieces.tokens * model.hidden * pieces.element
    made = pieces.linear(name, pieces.tokens, model.hidden, depth, part=part)
    overlaps = layout.software.overlaps_tensor_parallel and layout.sequence_parallel  # an all-reduce has no such kernel
    hidden = made.forward.seconds if overlaps else 0.0
    kind = "reduce_scatter" if layout.sequence_parallel else "all_reduce"
    pieces.sends(pieces.forward, f"{name}, sum", "tp", kind, size, layout.tp, hidden=hidden, part=part)
    if layout.sequence_parallel:
        pieces.sends(
            pieces.input_grad, f"{name}, all-gather of the gradient", "tp", "all_gather", size, layout.tp, hidden=hidden
        )


def _attention(pieces: Pieces) -> None:
    """Projections, positions and core attention of a rank's heads."""
    model, t = pieces.model, pieces.layout.tp.size
    _column(pieces, "qkv", qkv_width(model, t))
    if model.position == "rope":
        elements = pieces.tokens * (model.hidden // t + kv_width(model, t))
        for where in (pieces.forward, pieces.input_grad):
            pieces.moves(where, "rotary positions", elements, 2 * pieces.element, launches=2)
    before = len(pieces.forward), len(pieces.input_grad)
    if model.attention_backend in ("unfused", "math"):
        _unfused_attention(pieces)
    else:
        _fused_attention(pieces)
    if pieces.layout.cp.size > 1:
        _ring(pieces, *before)
    _row(pieces, "proj", model.hidden // t)


def _fused_attention(pieces: Pieces) -> None:
    model, layout = pieces.model, pieces.layout
    s, t = model.seq_length, layout.tp.size
    pairs = layout.micro_batch * s * (s + 1) // 2 / layout.cp.size
    heads = max(1, model.heads // t)
    rate = software_rate(pieces.machine, layout.software.name, "attention")
    for where, name, backward in (
        (pieces.forward, "attention", False),
        (pieces.input_grad, "attention, backward", True),
    ):
        where.append(
            fused_attention(
                pieces.machine,
                name,
                pairs=pairs,
                width=model.hidden / t,
                blocks=layout.micro_batch * heads * pieces.model.seq_length / layout.cp.size / 128,
                backward=backward,
                rate=rate,
                dtype=layout.precision,
            )
        )


def _unfused_attention(pieces: Pieces) -> None:
    """Separate kernels: q k^T, softmax with scale and mask, dropout, probabilities x v. They compute all s^2 pairs."""
    model, layout, e = pieces.model, pieces.layout, pieces.element
    s, head = model.seq_length, model.hidden // model.heads
    batch = layout.micro_batch * max(1, model.heads // layout.tp.size)
    rows = s // layout.cp.size
    scores, part = batch * rows * s, "core_attn"

    def product(where: list[Term], name: str, shape: tuple[int, int, int]) -> None:
        term = pieces.gemm(name, shape, part=part, groups=batch, linear=False)
        where.append(term._replace(kind="attention"))

    fused = layout.software.fused_softmax
    softmax = (2 * e, 1) if fused else (8 * e, 4)
    softmax_back = (3 * e, 1) if fused else (7 * e, 3)
    product(pieces.forward, "q k^T", (rows, s, head))
    _scores(pieces, pieces.forward, "softmax", scores, *softmax)
    if model.attention_dropout:
        _scores(pieces, pieces.forward, "attention dropout", scores, 2 * e + 1)
        _scores(pieces, pieces.input_grad, "attention dropout, backward", scores, 2 * e + 1)
    product(pieces.forward, "probabilities x v", (rows, head, s))
    _scores(pieces, pieces.forward, "context copy", pieces.tokens * model.hidden / layout.tp.size, 2 * e)
    product(pieces.input_grad, "gradient of v", (s, head, rows))
    product(pieces.input_grad, "gradient of probabilities", (rows, s, head))
    _scores(pieces, pieces.input_grad, "softmax, backward", scores, *softmax_back)
    product(pieces.input_grad, "gradient of q", (rows, head, s))
    product(pieces.input_grad, "gradient of k", (s, head, rows))


def _scores(
    pieces: Pieces, where: list[Term], name: str, elements: float, per_element: float, launches: int = 1
) -> None:
    """Append a kernel over the scores; it counts as attention."""
    term = memory_bound(pieces.machine, name, elements, per_element, kind="attention", part="core_attn",
                        launches=launches)  # fmt: skip
    where.append(term)


def _ring(pieces: Pieces, forward: int, input_grad: int) -> None:
    """Context parallelism: keys and values of the other ranks, by a ring during attention or by one all-gather.

    Backward moves their gradients, too, in the type of keys and values, and each hop has a block to hide behind. That
    is Transformer Engine's ring (AttnFuncWithCPAndKVP2P, without fp8), whose backward computes a rank's own keys last.
    labkit's ring (parallel/context/ring_attention.py) sends gradients in float32, and its last hop is not hidden.
    forward, input_grad: where the terms of attention begin.
    """
    layout = pieces.layout
    cp, size = layout.cp, 2 * pieces.tokens * kv_width(pieces.model, layout.tp.size) * pieces.element
    for where, begin, copies in ((pieces.forward, forward, 1), (pieces.input_grad, input_grad, 2)):
        if layout.cp_gathers:
            pieces.sends(where, "keys and values", "cp", "all_gather", size * cp.size, cp, count=copies)
        else:
            step = sum(term.seconds for term in where[begin:]) / cp.size
            name = "keys and values round the ring"
            pieces.sends(where, name, "cp", "p2p", copies * size, cp, hidden=step, count=cp.size - 1)


def _mlp(pieces: Pieces) -> None:
    """A dense MLP of a rank's columns."""
    model, t = pieces.model, pieces.layout.tp.size
    _column(pieces, "fc1", fc1_width(model) // t, part="mlp")
    pieces.activation(pieces.tokens * ffn_width(model) / t, part="mlp")
    _row(pieces, "fc2", ffn_width(model) // t, part="mlp")
