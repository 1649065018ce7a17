"""Times of what a rank does after its last backward: reduction of gradients, optimizer, gathered weights. No torch.

    gradients            reduce-scatter (distributed optimizer) or all-reduce over the ranks with the same parameters
    optimizer            bytes per parameter / memory rate, on a rank's share
    weights              all-gather of the updated weights (distributed optimizer)
    tied embedding       all-reduce between first and last stage

Buckets leave during the backward of the last microbatch (`optim.overlap_grad_reduce`), and weights come back during the
next forward (`optim.overlap_param_gather`); the last bucket is always exposed. Fully sharded data parallelism has
reduced everything already, layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from labkit.config import ModelConfig, MoEConfig, RunConfig
from labkit.plan.action_times import StageKind
from labkit.plan.collectives import Beside, Group, collective, collective_seconds
from labkit.plan.kernels import memory_bound, software_rate
from labkit.plan.layout import Layout
from labkit.plan.machine import Machine
from labkit.plan.parameters import expert_parameters, layer_parameters, stage_parameters
from labkit.plan.sizes import padded_vocab
from labkit.plan.terms import Term

_DEFAULT_BUCKET = 40_000_000
"""Elements of a gradient bucket, at least (Megatron's default)."""


@dataclass(frozen=True, slots=True)
class LastPasses:
    """Seconds of one microbatch through all stages of a rank, which hide transfers."""

    forward: float
    backward: float


def update_terms(config: RunConfig, layout: Layout, machine: Machine, held: Sequence[StageKind], passes: LastPasses,
                 *, fsdp: bool, shares_table: bool) -> list[Term]:  # fmt: skip
    """Return the terms of a rank that holds these stages.

    shares_table: it keeps one of two copies of the tied word embedding.
    """
    dense, experts = rank_shares(config, held)
    terms = []
    if not fsdp:
        for name, count, group in (("gradients", dense, layout.dp), ("gradients of experts", experts, layout.edp)):
            if count:
                terms += _reduced(config, layout, machine, name, count, group, passes)
        if shares_table:
            terms.append(_tied_embedding(config, layout, machine))
    shares = fsdp or config.optim.distributed_optimizer
    count = dense / layout.dp.size + experts / layout.edp.size if shares else dense + experts
    terms.append(memory_bound(machine, "optimizer", count, layout.software.optimizer_bytes, kind="optimizer"))
    host = software_rate(machine, layout.software.name, "host")
    terms.append(Term("host", "host", host, "constant of the software", launches=0))
    return terms


def rank_shares(config: RunConfig, held: Sequence[StageKind]) -> tuple[int, int]:
    """Return the parameters of a rank outside and inside routed experts."""
    parallel, moe = config.parallel, config.moe
    sizes = _parameters(config.model, moe, parallel.tp, parallel.ep, parallel.expert_tp)
    outside = inside = 0
    for stage in held:
        outside += sizes.ends[stage.embedding, stage.loss] + stage.dense * sizes.dense + stage.experts * sizes.beside
        inside += stage.experts * sizes.experts
    return outside, inside


class _Parameters(NamedTuple):
    """Parameters on one rank."""

    dense: int
    """Of a layer without experts."""
    beside: int
    """Of a layer with experts, outside of them."""
    experts: int
    """Of its experts."""
    ends: dict[tuple[bool, bool], int]
    """(embedding, loss) -> those of a stage without layers."""


@lru_cache(maxsize=4096)
def _parameters(model: ModelConfig, moe: MoEConfig, tp: int, ep: int, etp: int) -> _Parameters:
    index = next((index for index in range(model.layers) if moe.is_moe_layer(index)), None)
    with_experts = experts = 0
    if index is not None:
        experts = moe.num_experts // ep * (expert_parameters(model, moe) // etp)
        with_experts = layer_parameters(model, tp, moe=moe, index=index, ep=ep, etp=etp)
    ends = {
        (first, last): stage_parameters(model, layers=0, pre_process=first, post_process=last, tp=tp)
        for first, last in product((False, True), repeat=2)
    }
    return _Parameters(layer_parameters(model, tp), with_experts - experts, experts, ends)


def gradient_bytes(config: RunConfig, layout: Layout) -> int:
    """Return the bytes of one gradient on the wire."""
    if config.optim.grad_reduce_in_bf16:
        return 2
    return layout.software.fp16_gradient_bytes if config.optim.precision == "fp16" else 4


def _reduced(config: RunConfig, layout: Layout, machine: Machine, name: str, count: int, group: Group,
             passes: LastPasses) -> list[Term]:  # fmt: skip
    """Return the reduction of `count` gradients, and the gather of their weights."""
    optim, slowdown = config.optim, layout.software.overlap_slowdown
    kind = "reduce_scatter" if optim.distributed_optimizer else "all_reduce"
    bucket = min(count, optim.bucket_size or max(_DEFAULT_BUCKET, 1_000_000 * layout.dp.size))
    size = count * gradient_bytes(config, layout)
    before_the_last = collective_seconds(machine, kind, size * (1 - bucket / count), group)
    hidden = min(passes.backward, before_the_last) if optim.overlap_grad_reduce else 0.0
    terms = [collective(machine, name, "dp", kind, size, group, beside=Beside(hidden, slowdown))]
    if optim.distributed_optimizer:
        hidden = passes.forward if optim.overlap_param_gather else 0.0
        size = count * layout.element_bytes
        name = f"weights after {name}"
        terms.append(collective(machine, name, "dp", "all_gather", size, group, beside=Beside(hidden, slowdown)))
    return terms


def _tied_embedding(config: RunConfig, layout: Layout, machine: Machine) -> Term:
    """Return Megatron's sum: a rank sends all its rows, also under the distributed optimizer (labkit: its shard)."""
    t = layout.tp.size
    size = padded_vocab(config.model, t) // t * config.model.hidden * gradient_bytes(config, layout)
    pair = Group(2, layout.pp.stride * (layout.pp.size - 1))
    return collective(machine, "tied embedding", "pp", "all_reduce", size, pair)
