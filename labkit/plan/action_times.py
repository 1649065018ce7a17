"""Times of the actions of each stage, F, I, W and B, as lists of terms. No torch.

F    embedding on the first stage, the stage's layers, logits and loss on the last
I    gradients of the stage's inputs, and before them what is computed again
W    gradients of its weights
B    I and W together
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from labkit.config import ModelConfig, MoEConfig, RunConfig
from labkit.plan.collectives import Group, collective_seconds
from labkit.plan.layer_times import layer_passes
from labkit.plan.layout import Layout
from labkit.plan.machine import Machine
from labkit.plan.pieces import Passes, Pieces, Terms
from labkit.plan.sharding_times import Layers, sharding_terms
from labkit.plan.sizes import padded_vocab
from labkit.plan.stages import stage_contents
from labkit.plan.terms import Term, seconds_by_kind
from labkit.plan.workload import Workload
from labkit.schedules import Schedule

_GRAPH_LAUNCH = 0.55
"""Gap between kernels inside a CUDA graph over the gap between launches: (3.4 - 2.9) / (3.8 - 2.9) us in NVIDIA's blog
"Getting Started with CUDA Graphs" (V100, CUDA 10.1; its numbers as others quote them). An assumption: it takes all that
is left over a kernel of 2.9 us as gaps, although part of it is the host, which waits once per 20 kernels there."""
LOSS_BYTES = (26, 14)
"""Bytes that the vocabulary-parallel loss moves per logit, forward and backward: a copy in fp32 (6), maximum (4),
subtraction (8), exponential (8); then its gradient and the copy back."""


@dataclass(frozen=True)
class Timed:
    """Terms with their counts: how often each tuple of terms runs in an action."""

    counted: tuple[tuple[int, Terms], ...]
    by_kind: dict[str, float] = field(init=False, repr=False)
    """Seconds of each kind."""
    seconds: float = field(init=False)
    """Their sum: the duration of the action."""

    def __post_init__(self) -> None:
        totals: defaultdict[str, float] = defaultdict(float)
        for count, terms in self.counted:
            for kind, seconds in seconds_by_kind(terms).items():
                totals[kind] += count * seconds
        object.__setattr__(self, "by_kind", dict(totals))
        object.__setattr__(self, "seconds", sum(totals.values()))

    def terms(self) -> Iterator[tuple[int, Term]]:
        """Yield each term with its count."""
        for count, terms in self.counted:
            for term in terms:
                yield count, term


@dataclass(frozen=True)
class StageTimes:
    """Durations of the actions of one stage for one microbatch."""

    forward: Timed
    input_grad: Timed
    """I, without what it computes again."""
    weight_grad: Timed
    """W."""
    recompute: Timed
    """What the backward computes again before it starts."""

    @property
    def backward(self) -> float:
        """Seconds of B, with recomputation."""
        return self.input_grad.seconds + self.weight_grad.seconds + self.recompute.seconds


class StageKind(NamedTuple):
    """What the times of a stage depend on, beside the layout. Stages of one kind share their times."""

    dense: int
    """Its layers without experts."""
    experts: int
    """Its layers with experts."""
    embedding: bool
    loss: bool
    sends: bool
    """Its activation goes to another rank."""
    receives: bool
    """Its activation comes from another rank, and the gradient goes back there."""


def stage_kinds(config: RunConfig, schedule: Schedule) -> list[StageKind]:
    """Return the kind of every stage."""
    kinds, moe = [], config.moe
    rank_of = schedule.placement_of_stages.tolist()
    crossed = [False, *(one != other for one, other in pairwise(rank_of)), False]
    for stage, held in enumerate(stage_contents(config, schedule.num_stages)):
        experts = sum(map(moe.is_moe_layer, held.layers)) if moe.num_experts else 0
        dense = len(held.layers) - experts
        kinds.append(StageKind(dense, experts, held.embedding, held.loss, crossed[stage + 1], crossed[stage]))
    return kinds


def stage_times(workload: Workload, machine: Machine, layout: Layout, kind: StageKind) -> StageTimes:
    """Return the times of a stage of this kind."""
    model, moe = workload.config.model, workload.config.moe
    kept = _recomputed_share(model, kind.dense + kind.experts)
    sharded = workload.fsdp, workload.reshard_after_forward
    if workload.config.schedule.overlap_p2p_comm:
        kind = kind._replace(sends=False, receives=False)
    return _stage_times(model, moe, layout if workload.fsdp else layout.of_stage(), machine, kind, kept, sharded)


def _recomputed_share(model: ModelConfig, layers: int) -> int:
    """Return how many of a stage's layers are computed again."""
    if model.recompute_granularity == "full" and model.recompute_method == "block":
        return min(layers, model.recompute_num_layers)
    return layers


@lru_cache(maxsize=8192)
def _stage_times(model: ModelConfig, moe: MoEConfig, layout: Layout, machine: Machine, kind: StageKind,
                 recomputed: int, sharded: tuple[bool, bool]) -> StageTimes:  # fmt: skip
    """Return the times of a stage; sharded: fully, and gathered again for backward."""
    layers = [
        Layers(count, experts, layer_passes(model, moe if experts else None, layout, machine))
        for count, experts in ((kind.dense, False), (kind.experts, True))
        if count
    ]
    pieces = [(each.count, each.passes) for each in layers]
    if kind.embedding:
        pieces.append((1, embedding_passes(model, layout, machine)))
    if kind.loss:
        pieces.append((1, loss_passes(model, layout, machine)))
    again = [(min(count, recomputed), each.recompute) for count, each in pieces]
    forward, backward = [(n, each.forward) for n, each in pieces], [(n, each.input_grad) for n, each in pieces]
    weights = [(n, each.weight_grad) for n, each in pieces]
    if sharded[0]:
        ahead, back = sharding_terms(model, moe, layout, machine, layers, reshards=sharded[1])
        forward.append((1, ahead))
        backward.append((1, back))
    for where, wait in zip((forward, backward), (kind.sends, kind.receives), strict=True):
        if wait:
            where.append((1, (stage_transfer(model, layout, machine),)))
    return StageTimes(
        _launched(layout, machine, forward),
        _launched(layout, machine, backward),
        _launched(layout, machine, weights),
        _launched(layout, machine, again),
    )


def _launched(layout: Layout, machine: Machine, counted: list[tuple[int, Terms]]) -> Timed:
    """Return the terms with the gaps between kernels, and what the host needs beyond the device's time."""
    launches = sum(count * term.launches for count, terms in counted for term in terms)
    if not launches:
        return Timed(())
    gap = machine.kernel_launch * (_GRAPH_LAUNCH if layout.graphed else 1.0)
    device = sum(count * term.seconds for count, terms in counted for term in terms) + launches * gap
    host = 0.0 if layout.graphed else launches * machine.host_launch
    inputs = (("kernels", launches), ("gap", gap))
    made = [Term("gaps between kernels", "launch", launches * gap, "kernels x gap", inputs, launches=0)]
    if host > device:
        inputs = (("kernels", launches), ("launch", machine.host_launch), ("device", device))
        made.append(Term("host", "host", host - device, "kernels x launch - device", inputs, launches=0))
    return Timed((*counted, (1, tuple(made))))


def embedding_passes(model: ModelConfig, layout: Layout, machine: Machine) -> Passes:
    """Return the times of the embedding: a row of the table per token, summed over tp; its gradient adds into fp32."""
    return _embedding_passes(model, layout.of_attention(), machine)


@lru_cache(maxsize=8192)
def _embedding_passes(model: ModelConfig, layout: Layout, machine: Machine) -> Passes:
    pieces = Pieces(model, layout, machine)
    e, elements = pieces.element, pieces.tokens * model.hidden
    positions = 3 * e if model.position == "learned" else 0
    dropout = 2 * e + 1 if model.embedding_dropout or model.hidden_dropout else 0
    pieces.moves(pieces.forward, "embedding", elements, 2 * e + positions + dropout, launches=3)
    kind = "reduce_scatter" if layout.sequence_parallel else "all_reduce"
    pieces.sends(pieces.forward, "embedding, sum", "tp", kind, elements * e, layout.tp)
    if layout.sequence_parallel:
        pieces.sends(pieces.input_grad, "embedding, all-gather", "tp", "all_gather", elements * e, layout.tp)
    pieces.moves(pieces.weight_grad, "embedding, gradient", elements, e + 8 + dropout, launches=3)
    return pieces.passes()


def loss_passes(model: ModelConfig, layout: Layout, machine: Machine) -> Passes:
    """Return the times of final norm, logits and vocabulary-parallel loss (arXiv 1909.08053, section 3)."""
    return _loss_passes(model, layout.of_attention(), machine)


@lru_cache(maxsize=8192)
def _loss_passes(model: ModelConfig, layout: Layout, machine: Machine) -> Passes:
    pieces = Pieces(model, layout, machine)
    t, e = layout.tp.size, pieces.element
    columns, h = padded_vocab(model, t) // t, model.hidden
    pieces.moves(pieces.forward, "final norm", pieces.between * h, 2 * e)
    pieces.moves(pieces.input_grad, "final norm, backward", pieces.between * h, 4 * e, launches=2)
    size = pieces.tokens * h * e
    if layout.sequence_parallel:
        pieces.sends(pieces.forward, "logits, all-gather", "tp", "all_gather", size, layout.tp)
    rows = pieces.tokens
    pieces.forward.append(pieces.gemm("logits", (rows, columns, h), linear=False))
    pieces.input_grad.append(pieces.gemm("logits, input gradient", (rows, h, columns), linear=False))
    pieces.weight_grad.append(
        pieces.gemm("logits, weight gradient", (h, columns, rows), linear=False, weight_gradient=True)
    )
    weight_grad = pieces.weight_grad[-1].seconds
    kind = "reduce_scatter" if layout.sequence_parallel else "all_reduce"
    hidden = weight_grad if layout.software.overlaps_input_gradient and not layout.splits_backward else 0.0
    pieces.sends(pieces.input_grad, "logits, sum of input gradients", "tp", kind, size, layout.tp, hidden=hidden)
    pieces.moves(pieces.forward, "loss", rows * columns, LOSS_BYTES[0], launches=8)
    pieces.moves(pieces.input_grad, "loss, backward", rows * columns, LOSS_BYTES[1], launches=4)
    pieces.sends(pieces.forward, "loss, maximum", "tp", "all_reduce", rows * 4, layout.tp)
    pieces.sends(pieces.forward, "loss, sums", "tp", "all_reduce", rows * 8, layout.tp)
    return pieces.passes()


def stage_transfer(model: ModelConfig, layout: Layout, machine: Machine) -> Term:
    """Return the time of an activation, or its gradient, from one stage to the next."""
    size = transfer_bytes(model, layout)
    seconds = collective_seconds(machine, "p2p", size, Group(2, layout.pp.stride))
    whole = size * layout.tp.size
    gather = 0.0
    if layout.software.scatters_transfers and not layout.sequence_parallel:
        gather = collective_seconds(machine, "all_gather", whole, layout.tp)
    inputs = (("bytes", size), ("gather", gather))
    return Term("transfer to the next stage", "pp", seconds + gather, "latency + bytes / bandwidth + gather", inputs)


def transfer_bytes(model: ModelConfig, layout: Layout) -> float:
    """Return the bytes that one rank sends to the next stage: s b h e / cp, over tp where each rank sends a share."""
    tokens = layout.micro_batch * model.seq_length / layout.cp.size
    shared = layout.sequence_parallel or layout.software.scatters_transfers
    return tokens * model.hidden * layout.element_bytes / (layout.tp.size if shared else 1)
