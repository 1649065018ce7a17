"""The process groups of one rank: `initialize_model_parallel(config.parallel) -> ParallelGroups`, passed on explicitly.

Each rank creates only its own groups, so a rank of a world of 100,000 pays for the sum of its groups' sizes. All ranks
create their groups in one order of kinds, and a rank is in at most one group of a kind. So a rank that creates a group
waits only for ranks that are busy with an earlier kind, and no deadlock can arise. A group of size 1 gets no process
group: its collectives return their input. Layouts share process groups and free them when the layouts are closed or
collected (`group_registry.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from labkit.comm.group_mesh import check_mesh_dims, mesh_dims, mesh_of
from labkit.comm.group_plan import GROUP_KINDS, IN_LINE, groups_of_rank, purpose
from labkit.comm.group_registry import LayoutLeases, Lease, closed_layout
from labkit.comm.mixed_radix import as_size, check_listable
from labkit.config import ParallelConfig
from labkit.launch import rank_info
from labkit.launch.info import torch_timeout


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, seen from one of them. In a group of size 1 a collective returns its input."""

    name: str
    """Axis or combination of axes: `tp`, `dp_cp`, ..."""
    ranks: tuple[int, ...]
    """Global ranks, in group order; empty if this rank is in no such group (`embd` on a middle stage)."""
    rank: int
    """Position of this process in `ranks`; -1 if it is not a member."""
    lease: Any = field(default=None, repr=False)
    """The layout's `Lease` of a communicator, or a process group of torch; None for a group without either."""

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def process_group(self) -> Any:
        """torch's ProcessGroup; None if size is 1, this rank is not a member, or torch.distributed is not initialised.

        Raises RuntimeError after the layout was closed.
        """
        if not isinstance(self.lease, Lease):
            return self.lease
        if self.lease.process_group is None:
            raise RuntimeError(closed_layout(self.name, self.ranks))
        return self.lease.process_group


@dataclass(frozen=True)
class ParallelGroups:
    """All groups of this rank, and its place in the pipeline.

    `close()` or the end of a `with` block closes the groups. Groups that nobody refers to close by themselves.
    """

    rank: int
    """Global rank of this process."""
    world_size: int
    """Ranks of this layout."""
    config: ParallelConfig
    """The layout that the groups were made from."""
    world: Group
    """All ranks of the layout."""
    tp: Group
    """Tensor parallel: the shards of one layer."""
    cp: Group
    """Context parallel: the pieces of one sequence."""
    dp: Group
    """Data parallel: ranks with the same parameters and different samples."""
    dp_cp: Group
    """dp x cp: the ranks that reduce gradients of dense parameters together."""
    pp: Group
    """Pipeline: the stages of one model."""
    ep: Group
    """Expert parallel: ranks with different experts."""
    etp: Group
    """Tensor parallel inside an expert."""
    edp: Group
    """Expert data parallel: the ranks that reduce gradients of the same experts together."""
    tp_ep: Group
    """All shards of all experts of a layer."""
    tp_ep_pp: Group
    """All shards of all experts of the model."""
    tp_cp: Group
    """Ranks that see the pieces of one sample."""
    tp_dp_cp: Group
    """One whole pipeline stage."""
    mp: Group
    """Model parallel: one copy of the dense parameters (tp x pp)."""
    embd: Group
    """Ranks that hold the word embedding (those of the first and the last stage)."""
    pos_embd: Group
    """Rank that holds the position embedding (first stage; in an encoder-decoder model also the decoder's first)."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """The device of this rank's tensors."""
    backend: str = "none"
    """torch.distributed's backend, or `none` in a process without it."""
    leases: LayoutLeases | None = field(default=None, repr=False, compare=False)
    """The communicators that these groups use; None if the groups have no process group."""

    def close(self) -> None:
        """Release all communicators, without waiting for other ranks. A second call does nothing.

        A later collective over these groups raises RuntimeError. Groups of size 1 still work.
        """
        if self.leases is not None:
            self.leases.close()

    def __enter__(self) -> ParallelGroups:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_first_stage(self, chunk: int = 0) -> bool:
        """Return True if model chunk `chunk` of this rank is the first stage of the model, which embeds tokens.

        `is_first_stage` and `is_last_stage` assume that stage s is on rank s mod pp. For schedules with another
        placement ask `schedule.placement(stage)`.
        """
        return self._known_chunk(chunk) == 0 and self.pp.rank == 0

    def is_last_stage(self, chunk: int = 0) -> bool:
        """Return True if model chunk `chunk` of this rank is the last stage of the model, which computes the loss."""
        return self._known_chunk(chunk) == self.config.vpp - 1 and self.pp.rank == self.pp.size - 1

    def _known_chunk(self, chunk: int) -> int:
        vpp = self.config.vpp
        if not 0 <= chunk < vpp:
            raise ValueError(f"chunk {chunk} does not exist; a rank holds vpp = {vpp} chunks, counted from 0")
        return chunk

    def device_mesh(self, *names: str) -> DeviceMesh:
        """Return a torch DeviceMesh with one dim per named group, over ranks with this rank's other coordinates.

        DTensor, FSDP2 and distributed checkpoints take it: `groups.device_mesh("dp_cp", "tp")["tp"]`. Without names the
        dims are `pp`, `dp`, `cp`, `tp` in the layout's order, slowest first. The mesh uses the existing process groups
        and keeps them open. Every rank of the layout must call this.

        Raises ValueError if torch.distributed is not initialised, or names that share an axis, mix dense with
        expert groups or are not a product of axes (`embd`).
        """
        names = names or mesh_dims(self.config.order)
        if self.leases is None:
            raise ValueError("a DeviceMesh needs torch.distributed; call this inside labkit.launch.run or torchrun")
        check_mesh_dims(names)
        alone = self.leases.lease("alone", (self.rank,))  # dims of size 1 need a process group too
        chosen: list[Group] = [getattr(self, name) for name in names]
        dims = [(group.name, group.ranks, group.process_group or alone.process_group) for group in chosen]
        return mesh_of(self.rank, self.device.type, dims, self.leases)


def initialize_model_parallel(
    config: ParallelConfig,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    device: torch.device | str | None = None,
    ends: tuple[int, int] | None = None,
) -> ParallelGroups:
    """Create this rank's groups. All ranks of the layout call this with the same arguments and in the same order.

    Only the ranks of the layout call this, also if the layout is a part of the world (`config.rank_offset`).

    rank, world_size: this rank, and the number of ranks of the layout; by default from torch.distributed, with all
        ranks from `config.rank_offset` on. In a process without torch.distributed the groups have ranks and no process
        group. They are then of a single rank, or of any given rank of any given world.
    device: the device of models and batches made from these groups. The default is this rank's device from the
        launcher, and the CPU in a process without torch.distributed, even with a GPU.
    ends: pipeline ranks of the first and the last stage, which `embd` joins. The default is 0 and pp - 1; a V schedule
        has both stages on rank 0.

    Raises ValueError as `rank_generators` does, if this rank is not in the layout, and if `config.distributed_backend`
    is not the running backend.
    """
    live = dist.is_initialized() and rank in (None, dist.get_rank())
    rank = rank if rank is not None else (dist.get_rank() if live else config.rank_offset)
    if world_size is None:
        world_size = dist.get_world_size() - config.rank_offset if live else 1
        if world_size < 1:
            there = dist.get_world_size()
            raise ValueError(f"rank_offset is {config.rank_offset} and there are {there} ranks; no rank is left")
    check_listable(as_size("world_size", world_size), "the group of all ranks")
    if config.distributed_timeout_minutes <= 0:
        raise ValueError(f"distributed_timeout_minutes is {config.distributed_timeout_minutes}; it must be above 0")
    plan = groups_of_rank(rank, config, world_size, ends)
    backend = _check_backend(config) if live else "none"
    members = {"world": tuple(range(config.rank_offset, config.rank_offset + world_size))}
    members |= {kind: tuple(plan[kind].tolist()) for kind in GROUP_KINDS}
    leases = None
    if live:
        leases = LayoutLeases(torch_timeout(60.0 * config.distributed_timeout_minutes, dist.get_backend()))
        leases.use_world(IN_LINE)
    groups: dict[str, Any] = {}
    for kind, ranks in members.items():
        lease = None
        if leases is not None and len(ranks) > 1:
            lease = leases.lease(purpose(kind), ranks)
        groups[kind] = Group(kind, ranks, ranks.index(rank) if ranks else -1, lease)
    where = torch.device(device) if device is not None else rank_info().device if live else torch.device("cpu")
    return ParallelGroups(rank, world_size, config, **groups, device=where, backend=backend, leases=leases)


def single_process_groups(
    config: ParallelConfig | None = None, *, device: torch.device | str = "cpu"
) -> ParallelGroups:
    """Return groups of size 1 for a single process. The sizes of the layout in `config` are ignored.

    Their device is the CPU unless `device` names another, also inside a rank.
    """
    sizes = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": None, "rank_offset": 0, "split_rank": None}
    alone = replace(config or ParallelConfig(), **sizes, distributed_backend="auto")  # pyright: ignore[reportArgumentType]
    groups: dict[str, Any] = {kind: Group(kind, (0,), 0) for kind in ("world", *GROUP_KINDS)}
    return ParallelGroups(0, 1, alone, **groups, device=torch.device(device))


def further_communicator(groups: ParallelGroups, group: Group, name: str) -> Group:
    """Return `group` with another process group, created once for each name. Every member of `group` calls this."""
    if group.size < 2 or groups.leases is None:
        return group
    return replace(group, lease=groups.leases.lease(name, group.ranks))


def cut_group(groups: ParallelGroups, group: Group, parts: int) -> tuple[Group, Group]:
    """Cut `group` into `parts` runs of neighbours: return this rank's run, and the ranks at its place in every run.

    Every rank of the layout calls this for its own group of that name. The groups are created once. With one part the
    result is the group itself and a group of this rank alone. Raises ValueError if `parts` does not divide the group.
    """
    if parts < 1 or group.size % parts:
        raise ValueError(f"{group.name} has {group.size} ranks, which cannot be cut into {parts} equal parts")
    width = group.size // parts
    part, place = divmod(group.rank, width)
    across = Group(f"{group.name}_across", group.ranks[place::width], part)
    if parts == 1:
        return group, across
    within = Group(f"{group.name}_within", group.ranks[part * width :][:width], place)
    return further_communicator(groups, within, within.name), further_communicator(groups, across, across.name)


def half_of_pipeline(groups: ParallelGroups) -> Group:
    """Return the pipeline ranks of this rank's half of an encoder-decoder: those before `split_rank`, or the others.

    Every rank of the half calls this. The communicator is created once.
    """
    pp, split = groups.pp, groups.config.split_rank
    first, end = (0, split) if split is not None and pp.rank < split else (split or 0, pp.size)
    half = Group("pp_half", pp.ranks[first:end], pp.rank - first)
    return further_communicator(groups, half, half.name)


def _check_backend(config: ParallelConfig) -> str:
    running = dist.get_backend()
    wanted = config.distributed_backend
    if running in ("gloo", "nccl") and wanted not in ("auto", running):
        raise ValueError(
            f"distributed_backend is {wanted!r}, but torch.distributed runs {running!r}; "
            "start the ranks with the backend of the config, or set it to 'auto'"
        )
    return running
