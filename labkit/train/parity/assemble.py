"""From the snapshots of a run's ranks (`labkit.train.parity.snapshots`) back to the tensors of one process.

The comparing process joins the pieces with code of its own, and without collectives, so that a fault in the
communication or in a split cannot hide itself. The module undoes one axis after another:

| axis | outputs of blocks, (S, B, H)                      | parameters and gradients                          |
|------|---------------------------------------------------|---------------------------------------------------|
| tp   | alike, or parts of S (sequence parallel)          | parts along `partition_dim`, or alike; or both:   |
|      |                                                   | last rows alike on neighbours (`replicated`)      |
| cp   | two chunks of S, the r-th from the front and back | alike                                             |
| dp   | other samples: the first replica's are kept       | alike, or shards (distributed optimizer)          |
| pp   | other layers                                      | other layers; tied copies alike                   |

The same ranks divide experts along other axes, which do not concern outputs:

| axis | parameters and gradients of experts                                                  |
|------|--------------------------------------------------------------------------------------|
| ep   | other experts: parts along dim 0 (`expert_parallel`), else alike                     |
| etp  | parts of each expert along `partition_dim`, counted in the stacked tensor, or alike  |
| edp  | alike, or shards (distributed optimizer)                                             |

Copies of a tensor must be equal bit for bit. If they are not, the run disagrees with itself, and the report says so.

Shapes: S sequence, B micro batch, H hidden (of a router's output: experts).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from labkit.train.parity.snapshots import Shard, Snapshot


@dataclass
class FullRun:
    """A run with all ranks' pieces put together."""

    losses: list[float]
    """Loss of each step."""
    activations: dict[str, Tensor]
    """Block -> output (S, B, H), in order of execution."""
    gradients: dict[int, dict[str, Tensor]]
    """Step -> parameter -> gradient, in order of first use."""
    parameters: dict[int, dict[str, Tensor]]
    """Step -> parameter -> values, in order of first use."""
    disagreements: list[str]
    """Tensors that should be the same on several ranks, bit for bit, and are not."""
    routings: dict[str, list[Tensor]] = field(default_factory=dict)
    """Choices of experts of a run in one process (`labkit.train.parity.routing_trace`)."""


def join_shards(shards: Sequence[Tensor], dim: int, stride: int = 1) -> Tensor:
    """Join the parts of all tensor-parallel ranks to the full tensor; the inverse of slicing `stride` blocks."""
    blocks = [shard.chunk(stride, dim) for shard in shards]
    return torch.cat([part[block] for block in range(stride) for part in blocks], dim)


def join_replicated(shards: Sequence[Tensor], ranks: int, rows: int) -> tuple[Tensor, bool]:
    """Join parts of which each `ranks` neighbours share the last `rows` rows. Return True too if these rows are equal.

    If they differ, the function takes the first neighbour's.
    """
    pieces: list[Tensor] = []
    agree = True
    for first in range(0, len(shards), ranks):
        own, last = zip(*(shard.split([len(shard) - rows, rows]) for shard in shards[first : first + ranks]))
        pieces += [*own, last[0]]
        agree = agree and all(torch.equal(last[0], copy) for copy in last)
    return torch.cat(pieces), agree


def join_zigzag(parts: Sequence[Tensor]) -> Tensor:
    """Join the sequence, dim 0, from all context-parallel ranks; of 2 cp chunks rank r has r and 2 cp - 1 - r."""
    halves = [part.chunk(2) for part in parts]
    return torch.cat([front for front, _ in halves] + [back for _, back in reversed(halves)])


def join_replicas(replicas: Sequence[Shard]) -> tuple[Tensor, bool]:
    """Return the tensor that data-parallel ranks hold, and True if owners of the same element agree.

    An element without an owner becomes NaN, which differs from everything.
    """
    first = replicas[0].tensor
    if all(replica.owned is None for replica in replicas):
        return first, all(torch.equal(first, replica.tensor) for replica in replicas)
    joined = torch.full_like(first, math.nan).view(-1)
    written = torch.zeros(joined.shape, dtype=torch.bool)
    agree = True
    for replica in replicas:
        flat = replica.tensor.reshape(-1)
        for start, end in ((0, len(flat)),) if replica.owned is None else replica.owned:
            own, again = flat[start:end], written[start:end]
            agree = agree and torch.equal(joined[start:end][again], own[again])
            joined[start:end], written[start:end] = own, True
    return joined.view_as(first), agree


def assemble(snapshots: Sequence[Snapshot], *, sequence_parallel: bool = False) -> FullRun:
    """Join the snapshots of all ranks of one run; names join the stages."""
    ranks = sorted(snapshots, key=lambda s: (s.pp, s.dp, s.cp, s.tp))
    disagreements: list[str] = []
    activations: dict[str, Tensor] = {}
    for pp in sorted({s.pp for s in ranks}):
        stage = [s for s in ranks if s.pp == pp and s.dp == 0]
        joined = _join_activations(stage, sequence_parallel, disagreements)
        activations |= {name: output for name, output in joined.items() if name not in activations}
    gradients, parameters = (
        {step: _join_parameters(ranks, what, step, disagreements) for step in getattr(ranks[0], what)}
        for what in ("gradients", "parameters")
    )
    order = {name: place for place, name in enumerate(name for s in ranks for name in s.order)}
    for steps in (*gradients.values(), *parameters.values()):
        unused = len(order)
        ordered = sorted(steps.items(), key=lambda item: order.get(item[0], unused))
        steps.clear()
        steps.update(ordered)
    if any(s.losses != ranks[0].losses for s in ranks):
        disagreements.append("loss")
    return FullRun(ranks[0].losses, activations, gradients, parameters, disagreements, ranks[0].routings)


def _join_activations(stage: list[Snapshot], split: bool, disagreements: list[str]) -> dict[str, Tensor]:
    """Join the outputs of one stage over tp (parts of the sequence if `split`, else copies), then over cp."""
    joined = {}
    for name in stage[0].activations:
        parts = []
        for cp in sorted({s.cp for s in stage}):
            copies = [s.activations[name] for s in stage if s.cp == cp]
            parts.append(torch.cat(copies) if split else copies[0])
            label = f"{name} output (tp ranks)"
            if not split and not all(torch.equal(copies[0], copy) for copy in copies) and label not in disagreements:
                disagreements.append(label)
        joined[name] = join_zigzag(parts) if len(parts) > 1 else parts[0]
    return joined


def _join_parameters(ranks: list[Snapshot], what: str, step: int, disagreements: list[str]) -> dict[str, Tensor]:
    """Join the full tensors of one step. A copy on a later stage must equal the first stage's, and is dropped."""
    label = {"gradients": "gradient", "parameters": "parameter"}[what]
    whole: dict[str, Tensor] = {}
    copies: list[tuple[str, Tensor]] = []
    for pp in sorted({s.pp for s in ranks}):
        stage = [s for s in ranks if s.pp == pp]
        for name, first in getattr(stage[0], what)[step].items():
            held: list[tuple[Snapshot, Shard]] = [(s, getattr(s, what)[step][name]) for s in stage]
            full, differing = join_expert(held) if first.expert else join_dense(held)
            disagreements += [f"{name} {label} ({axis} replicas)" for axis in differing]
            full = full[: first.full_rows]
            if first.shared:
                copies.append((name, full))
            else:
                whole[name] = full
    for name, copy in copies:
        original = name.partition(" (")[0]  # a rank that holds both adds its path to the name of the second
        if not torch.equal(copy, whole[original]):
            disagreements.append(f"{name} {label} (tied copies)")
    return whole


def join_dense(held: Sequence[tuple[Snapshot, Shard]]) -> tuple[Tensor, list[str]]:
    """Return one parameter of one stage from all its ranks, and the axes along which copies differ."""
    return _join_axis(held, "tp", "dp")


def join_expert(held: Sequence[tuple[Snapshot, Shard]]) -> tuple[Tensor, list[str]]:
    """Do what `join_dense` does for experts: replicas over edp, parts over etp, other experts over ep (dim 0)."""
    by_ep = [[pair for pair in held if pair[0].ep == ep] for ep in sorted({s.ep for s, _ in held})]
    joined = [_join_axis(pairs, "etp", "edp") for pairs in by_ep]
    parts = [part for part, _ in joined]
    differing = [axis for axis in ("edp", "etp") if any(axis in axes for _, axes in joined)]
    if held[0][1].expert_parallel:
        return torch.cat(parts), differing
    alike = all(torch.equal(parts[0], part) for part in parts)
    return parts[0], [*differing, *([] if alike else ["ep"])]


def _join_axis(held: Sequence[tuple[Snapshot, Shard]], split: str, replicated: str) -> tuple[Tensor, list[str]]:
    """Join shards over the axis `split`, each with replicas over the axis `replicated`."""
    first = held[0][1]
    by_rank = [
        [shard for snapshot, shard in held if getattr(snapshot, split) == rank]
        for rank in sorted({getattr(snapshot, split) for snapshot, _ in held})
    ]
    joined = [join_replicas(replicas) for replicas in by_rank]
    parts = [part for part, _ in joined]
    differing = [] if all(agree for _, agree in joined) else [replicated]
    if first.replicated is not None:
        full, agree = join_replicated(parts, first.replicated.ranks, first.replicated.rows)
        return full, differing if agree else [*differing, split]
    if first.partition_dim is not None:
        return join_shards(parts, first.partition_dim, first.partition_stride), differing
    alike = all(torch.equal(parts[0], part) for part in parts)
    return parts[0], [*differing, *([] if alike else [split])]
