"""The process groups of one rank (first form)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from labkit.config import ParallelConfig
from labkit.parallel.rank_generator import RankGenerator


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other, seen from one of them. A group of size 1 is the identity of every collective."""

    name: str
    """Axis or combination of axes: `tp`, `dp_cp`, ..."""
    ranks: tuple[int, ...]
    """Global ranks, in group order."""
    rank: int
    """Position of this process in `ranks`; -1 where it is not a member."""
    process_group: Any = None
    """torch's ProcessGroup; None where size is 1 or this rank is not a member."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


@dataclass(frozen=True)
class ParallelGroups:
    """Every group that this rank belongs to, and its place in the pipeline."""

    rank: int
    world_size: int
    config: ParallelConfig
    world: Group
    tp: Group
    cp: Group
    dp: Group
    dp_cp: Group
    pp: Group
    ep: Group
    etp: Group
    edp: Group
    tp_ep: Group
    tp_ep_pp: Group
    tp_cp: Group
    tp_dp_cp: Group
    mp: Group
    embd: Group
    pos_embd: Group


def initialize_model_parallel(config: ParallelConfig, *, rank: int | None = None, world_size: int | None = None) -> ParallelGroups:  # noqa: E501
    """Create this rank's groups."""
    initialised = dist.is_initialized()
    rank = rank if rank is not None else (dist.get_rank() if initialised else 0)
    world_size = world_size if world_size is not None else (dist.get_world_size() if initialised else 1)
    etp = config.etp or config.tp
    dense = RankGenerator(config.tp, 1, world_size // (config.tp * config.cp * config.pp), config.pp, config.cp, config.order)
    expert = RankGenerator(etp, config.ep, world_size // (etp * config.ep * config.pp), config.pp, 1, config.order)

    def make(name: str, all_ranks: list[list[int]]) -> Group:
        mine = next((tuple(r) for r in all_ranks if rank in r), None)
        if mine is None:
            return Group(name, (), -1)
        handle = dist.new_group(list(mine), use_local_synchronization=True) if len(mine) > 1 and initialised else None
        return Group(name, mine, mine.index(rank), handle)

    stages = dense.get_ranks("pp")
    return ParallelGroups(
        rank, world_size, config,
        make("world", [list(range(world_size))]),
        make("tp", dense.get_ranks("tp")), make("cp", dense.get_ranks("cp")), make("dp", dense.get_ranks("dp")),
        make("dp_cp", dense.get_ranks("dp-cp")), make("pp", stages),
        make("ep", expert.get_ranks("ep")), make("etp", expert.get_ranks("tp")), make("edp", expert.get_ranks("dp")),
        make("tp_ep", expert.get_ranks("tp-ep")), make("tp_ep_pp", expert.get_ranks("tp-ep-pp")),
        make("tp_cp", dense.get_ranks("tp-cp")), make("tp_dp_cp", dense.get_ranks("tp-dp-cp")),
        make("mp", dense.get_ranks("tp-pp")),
        make("embd", [list(dict.fromkeys([r[0], r[-1]])) for r in stages]), make("pos_embd", [[r[0]] for r in stages]),
    )  # fmt: skip
