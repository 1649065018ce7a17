"""The reference's choice of experts for every token of a run, repeated for the tokens of a layout's ranks.

A record of `labkit.moe.replay` has the layout of a microbatch's tokens. The reference, one process, writes a record for
each microbatch of the global batch, step after step. A rank reads the records of its own microbatches and keeps its own
positions, along the axes that place tokens:

| axis           | part of the records on a rank                                                  |
|----------------|--------------------------------------------------------------------------------|
| dp             | microbatches dp_rank, dp_rank + dp, .. of each step (`data.batches`)           |
| cp             | chunks cp_rank and 2 cp - 1 - cp_rank of S                                     |
| tp             | part tp_rank of these chunks (sequence parallel), else all                     |
| pp, ep, etp    | its own layers; the place of experts does not change a choice                  |

Shapes: S sequence, B micro batch, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from labkit.comm.groups import ParallelGroups
from labkit.config import RunConfig
from labkit.schedules.ir import Schedule

Routings = dict[str, list[Tensor]]
"""Router (`layers.3.mlp.router`) -> [S, B, E] of every microbatch of the global batch, step after step."""


def record_routings(chunks: Sequence[nn.Module]) -> Routings:
    """Return lists that the routers of one process fill while they run, once for each microbatch."""
    from labkit.moe.router import routers_of

    routings: Routings = {}
    for router in routers_of(chunks):
        router.record = routings.setdefault(router.name, [])
    return routings


def replay_routings(
    routings: Routings, config: RunConfig, groups: ParallelGroups, chunks: Sequence[nn.Module], schedule: Schedule
) -> None:
    """Make all routers of a rank choose as the reference did.

    Raises:
        ValueError: the reference has no such router.
    """
    from labkit.moe.replay import RoutingReplay
    from labkit.moe.router import routers_of

    rank = groups.pp.rank
    passes = [action for action in schedule.actions(rank) if action.kind == "F"]
    for chunk, stage in zip(chunks, schedule.stages_of(rank), strict=True):
        forwards = [action.microbatch for action in passes if action.stage == stage]
        for router in routers_of([chunk]):
            if router.name not in routings:
                raise ValueError(f"the reference has no {router.name}; it has {', '.join(routings) or 'no router'}")
            router.replay = RoutingReplay(list(own_records(routings[router.name], config, groups, forwards)))


def own_records(
    records: Sequence[Tensor], config: RunConfig, groups: ParallelGroups, forwards: Sequence[int]
) -> Iterator[Tensor]:
    """Yield a rank's part of one router's records, [S/(cp tp), B, E] each, in the order of its forwards.

    forwards: the rank's microbatches in the order in which the stage computes them, the same in every step.
    """
    dp, batch = groups.dp, config.train.global_batch_size // config.train.micro_batch_size
    if len(forwards) * dp.size != batch or len(records) % batch:
        raise ValueError(
            f"{len(records)} records and {len(forwards)} microbatches per rank do not fit {batch} microbatches per "
            f"step on {dp.size} replicas"
        )
    for start in range(0, len(records), batch):
        for microbatch in forwards:
            record = _zigzag_part(records[start + microbatch * dp.size + dp.rank], groups.cp.size, groups.cp.rank)
            if config.parallel.sequence_parallel:
                record = record.chunk(groups.tp.size)[groups.tp.rank]
            yield record


def _zigzag_part(record: Tensor, cp: int, rank: int) -> Tensor:
    """Return a rank's two chunks of the sequence, dim 0; the inverse of `labkit.train.parity.assemble.join_zigzag`."""
    chunks = record.chunk(2 * cp)
    return torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]]) if cp > 1 else record
