"""Time of a collective, by its bytes, its ranks, and the levels of the network that they span. No torch.

A group of n ranks with `stride` between neighbours has r ranks in each node. Inside a node a ring of NCCL moves

    all-reduce                   2 (n - 1) / n x bytes
    all-gather, reduce-scatter       (n - 1) / n x bytes        (bytes of the whole tensor)

out of each rank at the link's bus bandwidth. Beyond a node NCCL builds a ring through each of the r adapters that
the group's ranks have in a node, so the same bytes leave at min(link, r x adapter). That is why data parallelism
beside tp = 8 has one adapter, and a group over whole nodes has eight.

Each hop of a ring costs a latency, n - 1 hops one way and n - 1 back. An all-reduce may take a tree instead, whose
depth is log2 of the nodes (NCCL's own model, nccl/src/graph/tuning.cc). The faster one counts. For small messages the
hops are the whole time, so leaving the node costs far more than the ratio of the bandwidths.

A switch that adds (NVLS) takes the bytes of each rank once and returns the sum once, so that in an all-reduce
(1 + 1 / n) x leave a rank, where a ring sends 2 (n - 1) / n x. An all-gather still brings (n - 1) / n x into each rank,
and a reduce-scatter takes as much out of it. These two gain nothing, and NCCL expects less of NVLS there than of a ring
(nccl/src/tuning/nvls.cc).

A long message is sent in chunks, so that all hops work at once. With the best number of chunks this costs another
2 sqrt(latency x bytes / bandwidth); measured curves show less (`Level.ramp`).

In an all-to-all a rank sends (r - 1) / n of its bytes over the link and (n - r) / n through its adapter, both at once.

A level whose collectives were measured (`Level.measured`) has their times by size instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from labkit.plan.machine import Level, Machine
from labkit.plan.measured import ring_seconds, transfer_seconds
from labkit.plan.terms import Term


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that talk to each other: how many, and the distance between neighbours in the numbering of all ranks."""

    size: int
    stride: int = 1

    def per_node(self, machine: Machine) -> int:
        """Return the number of these ranks in one node."""
        node = machine.node.ranks
        if self.size * self.stride <= node:
            return self.size
        return max(1, min(self.size, int(node // self.stride)))

    def nodes(self, machine: Machine) -> int:
        """Return the number of nodes that these ranks span."""
        return -(-self.size // self.per_node(machine))


_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Collective -> how often its bytes go round the ring."""


def collective_seconds(machine: Machine, kind: str, size: float, group: Group) -> float:
    """Return the time of one collective of `size` bytes.

    size: bytes of the whole tensor; of an all-to-all and of `p2p` the bytes that one rank sends, itself included.
    """
    if group.size <= 1 or size <= 0:
        return 0.0
    per_node, nodes = group.per_node(machine), group.nodes(machine)
    measured = _outermost(machine, nodes).measured.get(kind)
    if measured:
        return transfer_seconds(measured, size) if kind == "p2p" else ring_seconds(measured, size, group.size)
    if kind == "all_to_all":
        return _all_to_all(machine, size, group.size, per_node)
    if kind == "p2p":
        level = _outermost(machine, nodes)
        return level.latency + level.hop + size / level.bandwidth
    passes = _PASSES[kind]
    moved = passes * (group.size - 1) / group.size * size
    latency = _latency(machine, passes, group.size, nodes, per_node)
    streaming = moved / _bandwidth(machine, kind, per_node, nodes)
    return latency + streaming + _outermost(machine, nodes).ramp * math.sqrt(latency * streaming)


def _outermost(machine: Machine, nodes: int) -> Level:
    return machine.levels[-1] if nodes > 1 and len(machine.levels) > 1 else machine.node


def _bandwidth(machine: Machine, kind: str, per_node: int, nodes: int) -> float:
    """Return the bytes per second that leave a rank in a large ring of this group."""
    node = machine.node
    inside = node.all_reduce_bandwidth if kind == "all_reduce" else node.bandwidth
    if kind == "all_reduce" and node.ranks > per_node:  # the switch adds only where a whole node takes part
        inside = node.bandwidth
    if nodes == 1:
        return inside
    return min(inside, per_node * _outermost(machine, nodes).bandwidth)


def _latency(machine: Machine, passes: int, size: int, nodes: int, per_node: int) -> float:
    """Return the time of an empty collective: its start, and the hops of a ring or, if it is faster, of a tree."""
    node, outer = machine.node, _outermost(machine, nodes)
    if nodes == 1:
        return node.latency + passes * (size - 1) * node.hop
    ring = passes * (nodes * outer.hop + (size - nodes) * node.hop)
    tree = 2 * (math.ceil(math.log2(nodes)) * outer.hop + (per_node - 1) * node.hop)
    return outer.latency + (min(ring, tree) if passes == 2 else ring)


def _all_to_all(machine: Machine, size: float, ranks: int, per_node: int) -> float:
    node, outer = machine.node, machine.levels[-1]
    inside = size * (per_node - 1) / ranks / node.bandwidth
    if per_node == ranks:
        return node.latency + inside
    return outer.latency + max(inside, size * (ranks - per_node) / ranks / outer.bandwidth)


class Beside(NamedTuple):
    """Computation that runs beside a collective."""

    seconds: float = 0.0
    """Its time."""
    slowdown: float = 0.0
    """Seconds by which each second of hidden communication slows it (`Software.overlap_slowdown`)."""


ALONE = Beside()
"""Nothing runs beside."""


def collective(
    machine: Machine,
    name: str,
    axis: str,
    kind: str,
    size: float,
    group: Group,
    *,
    beside: Beside = ALONE,
    count: int = 1,
    part: str = "",
) -> Term:
    """Return the exposed time of `count` collectives on `axis`; zero for a group of one rank.

    beside: what computes meanwhile, for each of them.
    """
    whole = collective_seconds(machine, kind, size, group)
    covered = min(whole, beside.seconds)
    seconds = count * (whole - covered + beside.slowdown * covered)
    formula = f"count x (whole - hidden + slowdown x hidden), {kind} of the bytes over n ranks"
    inputs = (
        ("count", count), ("bytes", size), ("n", group.size), ("nodes", group.nodes(machine)), ("whole", whole),
        ("hidden", covered), ("slowdown", beside.slowdown),
    )  # fmt: skip
    return Term(name, axis, seconds, formula, inputs, part, count if group.size > 1 else 0)
