"""The process groups of one rank: `initialize_model_parallel(config.parallel) -> ParallelGroups`, passed on explicitly.

Each rank creates the groups it belongs to and no other (`use_local_synchronization`), so a rank of a world of 100,000
pays for the sum of its groups' sizes. Three things make that safe:

* All ranks create their groups in one order of kinds, and a rank is in at most one group of a kind. Whoever waits,
  waits for ranks that are busy with an earlier kind, so no circle of waiting can close.
* torch names such a group after its ranks *and the number of process groups this process has made before*. Ranks that
  are in no embedding group (middle stages) therefore make a group of one instead, or all later names would disagree.
* A group of size 1 is the identity of every collective and gets no process group.

Groups that are equal as sets of ranks may share one communicator only if every member issues their operations in the
same order. That holds for what a layer or the end of a step calls in line (tp, etp, tp_cp, tp_ep, tp_dp_cp, mp, ...);
equal ones of these share. It does not hold for what runs beside the program: pipeline send/receive (`pp`; with two
stages `embd` has the same ranks), the ring of `cp`, the all-to-all of `ep`, the gradient buckets of `dp`/`dp_cp` and
of `edp`, whose order follows the backward pass. NCCL runs one communicator's operations in order of issue and would
deadlock there, so these have their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from labkit.config import ParallelConfig
from labkit.launch import rank_info
from labkit.launch.info import torch_timeout
from labkit.parallel.group_plan import GROUP_KINDS, GROUP_TOKENS, embedding_columns, groups_of_rank
from labkit.parallel.rank_generator import as_size, check_listable

_OWN_COMMUNICATOR = {
    "pp": "pipeline",
    "cp": "context",
    "ep": "expert",
    "dp": "gradients",
    "dp_cp": "gradients",
    "edp": "expert gradients",
    "embd": "word embedding",
    "pos_embd": "position embedding",
}
"""Kinds that share a communicator only within the named use; all others may share the one called `in line`."""


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other, seen from one of them. A group of size 1 is the identity of every collective."""

    name: str
    """Axis or combination of axes: `tp`, `dp_cp`, ..."""
    ranks: tuple[int, ...]
    """Global ranks, in group order; empty where this rank is in no such group (`embd` on a middle stage)."""
    rank: int
    """Position of this process in `ranks`; -1 where it is not a member."""
    process_group: Any = None
    """torch's ProcessGroup; None where size is 1, this rank is no member, or torch.distributed is not initialised."""

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


@dataclass(frozen=True)
class ParallelGroups:
    """Every group that this rank belongs to, and its place in the pipeline."""

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
    """Data parallel: the same parameters, other samples."""
    dp_cp: Group
    """Over which gradients of dense parameters are reduced."""
    pp: Group
    """Pipeline: the stages of one model."""
    ep: Group
    """Expert parallel: ranks with different experts."""
    etp: Group
    """Tensor parallel inside an expert."""
    edp: Group
    """Over which gradients of expert parameters are reduced."""
    tp_ep: Group
    """All shards of all experts of a layer."""
    tp_ep_pp: Group
    """One whole model of experts."""
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
    """Where this rank's tensors live."""
    backend: str = "none"
    """torch.distributed's backend, or `none` in a process without it."""
    _singles: list[Any] = field(default_factory=list, repr=False, compare=False)
    _cut: dict[tuple[str, int], tuple[Group, Group]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def prev_rank(self) -> int:
        """Global rank of the stage before this one; the first stage's is the last (a ring)."""
        return self.pp.ranks[(self.pp.rank - 1) % self.pp.size]

    @property
    def next_rank(self) -> int:
        """Global rank of the stage after this one; the last stage's is the first (a ring)."""
        return self.pp.ranks[(self.pp.rank + 1) % self.pp.size]

    def is_first_stage(self, chunk: int = 0) -> bool:
        """Whether model chunk `chunk` of this rank is the first stage of the model (it embeds tokens), where stage s is
        on rank s mod pp. A schedule with another placement answers for itself: `schedule.placement(0)`."""
        return self._known_chunk(chunk) == 0 and self.pp.rank == 0

    def is_last_stage(self, chunk: int = 0) -> bool:
        """Whether model chunk `chunk` of this rank is the last stage of the model (it computes the loss), where stage s
        is on rank s mod pp."""
        return self._known_chunk(chunk) == self.config.vpp - 1 and self.pp.rank == self.pp.size - 1

    def _known_chunk(self, chunk: int) -> int:
        if not 0 <= chunk < self.config.vpp:
            raise ValueError(
                f"chunk {chunk} does not exist; a rank holds vpp = {self.config.vpp} chunks, counted from 0"
            )
        return chunk

    def device_mesh(self, *names: str) -> DeviceMesh:
        """The ranks that share this rank's other coordinates, as a torch DeviceMesh with one dim per named group.

        For DTensor, FSDP2 and distributed checkpoints: `groups.device_mesh("dp_cp", "tp")["tp"]`. Without names: `pp`,
        `dp`, `cp`, `tp` in the layout's order, slowest first. The mesh uses the process groups that exist already.
        Every rank of the layout must call this, as for making a group. Raises ValueError for names that share an axis,
        mix dense with expert groups or are no product of axes (`embd`), and where torch.distributed is not initialised.
        """
        names = names or tuple(a for a in reversed(self._axes_in_order()) if a != "ep")
        self._check_mesh_names(names)
        chosen: list[Group] = [getattr(self, name) for name in names]
        mesh = torch.tensor(self.rank)
        for group in chosen:
            mesh = mesh[..., None] + (torch.tensor(group.ranks) - self.rank)
        handles = [group.process_group or self._single() for group in chosen]
        if len(names) == 1:
            return DeviceMesh.from_group(handles[0], self.device.type, mesh_dim_names=tuple(names))
        return DeviceMesh.from_group(handles, self.device.type, mesh.contiguous(), mesh_dim_names=tuple(names))

    def _axes_in_order(self) -> list[str]:
        listed = self.config.order.lower().split("-")
        return listed + [axis for axis in ("tp", "cp", "dp", "pp") if axis not in listed]

    def _check_mesh_names(self, names: tuple[str, ...]) -> None:
        if not dist.is_initialized():
            raise ValueError("a DeviceMesh needs torch.distributed; call this inside labkit.launch.run or torchrun")
        for name in names:
            if name not in GROUP_TOKENS:
                raise ValueError(f"{name!r} is no dim of a mesh; choose among {', '.join(GROUP_TOKENS)}")
        axes = [axis for name in names for axis in GROUP_TOKENS[name][1].split("-")]
        if len(set(axes)) < len(axes):
            raise ValueError(f"the mesh dims {', '.join(names)} share an axis; each axis may appear once")
        if len({GROUP_TOKENS[name][0] for name in names if name != "pp"}) > 1:
            raise ValueError(
                f"the mesh dims {', '.join(names)} mix groups of the dense layers with groups of the experts"
            )

    def _single(self) -> Any:
        """A process group of this rank alone (meshes need one for dims of size 1), made once."""
        if not self._singles:
            self._singles.append(_new_group([self.rank], "alone", _timeout(self.config)))
        return self._singles[0]


def initialize_model_parallel(
    config: ParallelConfig,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    device: torch.device | str | None = None,
    ends: tuple[int, int] | None = None,
) -> ParallelGroups:
    """Create this rank's groups; every rank of the layout calls it, with the same arguments and in the same order.

    `rank` and `world_size` (the ranks of the layout, default: all from `config.rank_offset` on) come from
    torch.distributed. In a process without it the groups hold their ranks and no process group: of one rank by default,
    of any rank of any world where both are given.
    `device` is where models and batches made from these groups go. The default is the device that the launcher gave
    this rank; in a process without torch.distributed it is the CPU, whether or not there is a GPU.
    `ends` are the pipeline ranks of the first and the last stage, which `embd` joins: ranks 0 and pp - 1, unless the
    schedule puts these stages elsewhere (a V has both on rank 0).
    A layout on part of the ranks (`rank_offset`) is called by its ranks alone; because of the count above, later
    groups may not mix its ranks with others. Raises ValueError as `rank_generators` does, where this rank is not in
    the layout, and where `config.distributed_backend` names another backend than the running one.
    """
    live = dist.is_initialized() and rank in (None, dist.get_rank())
    rank = rank if rank is not None else (dist.get_rank() if live else config.rank_offset)
    if world_size is None:
        world_size = dist.get_world_size() - config.rank_offset if live else 1
        if world_size < 1:
            raise ValueError(
                f"rank_offset is {config.rank_offset} and there are {dist.get_world_size()} ranks; no rank is left"
            )
    check_listable(as_size("world_size", world_size), "the group of all ranks")
    if config.distributed_timeout_minutes <= 0:
        raise ValueError(f"distributed_timeout_minutes is {config.distributed_timeout_minutes}; it must be above 0")
    plan = groups_of_rank(rank, config, world_size, ends)
    backend = _check_backend(config) if live else "none"
    members = {"world": tuple(range(config.rank_offset, config.rank_offset + world_size))}
    members |= {kind: tuple(plan[kind].tolist()) for kind in GROUP_KINDS}
    joined = {
        kind
        for kind, columns in zip(("embd", "pos_embd"), embedding_columns(config.pp, config.split_rank, ends))
        if len(columns) > 1
    }
    create = _creator(config, rank, joined) if live else (lambda *_: None)
    groups: dict[str, Any] = {}
    for name, ranks in members.items():
        groups[name] = Group(name, ranks, ranks.index(rank) if ranks else -1, create(name, ranks))
    where = torch.device(device) if device is not None else rank_info().device if live else torch.device("cpu")
    return ParallelGroups(rank, world_size, config, **groups, device=where, backend=backend)


def single_process_groups(
    config: ParallelConfig | None = None, *, device: torch.device | str = "cpu"
) -> ParallelGroups:
    """Groups of size 1 for one process on its own; of `config` only what is not a size of the layout is kept.

    They stand for the CPU unless a device is asked for (`device="cuda"`), inside a rank as well.
    """
    sizes = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": None, "rank_offset": 0, "split_rank": None}
    alone = replace(config or ParallelConfig(), **sizes, distributed_backend="auto")  # pyright: ignore[reportArgumentType]
    return replace(initialize_model_parallel(alone, rank=0, world_size=1, device=device), backend="none")


def further_communicator(groups: ParallelGroups, group: Group, name: str) -> Group:
    """The same ranks over one more process group, with the layout's timeout; every member of `group` calls this."""
    if group.size < 2 or not dist.is_initialized():
        return group
    return replace(group, process_group=_new_group(list(group.ranks), name, _timeout(groups.config)))


def cut_group(groups: ParallelGroups, group: Group, parts: int) -> tuple[Group, Group]:
    """(within, across): `group` cut into `parts` runs of neighbours, and the ranks at this rank's place in each run.

    Every rank of the layout calls this for its own group of that name; they are made once. One part is the group itself
    and a group of this rank alone. Raises ValueError where the parts would not be equal.
    """
    if parts < 1 or group.size % parts:
        raise ValueError(f"{group.name} has {group.size} ranks, which cannot be cut into {parts} equal parts")
    width, key = group.size // parts, (group.name, parts)
    if key not in groups._cut:
        part, place = divmod(group.rank, width)
        cuts = (("within", group.ranks[part * width :][:width], place), ("across", group.ranks[place::width], part))
        within, across = (Group(f"{group.name}_{which}", ranks, position) for which, ranks, position in cuts)
        if parts == 1:
            groups._cut[key] = group, across
        else:
            groups._cut[key] = (
                further_communicator(groups, within, within.name),
                further_communicator(groups, across, across.name),
            )
    return groups._cut[key]


def _timeout(config: ParallelConfig) -> timedelta:
    return torch_timeout(60.0 * config.distributed_timeout_minutes, dist.get_backend())


def _creator(config: ParallelConfig, rank: int, joined: set[str]) -> Callable[[str, tuple[int, ...]], Any]:
    """A function (kind, ranks) -> ProcessGroup or None that shares communicators by the rule of this module.

    joined: kinds that not every rank is a member of and whose groups are larger than one rank.
    """
    timeout = _timeout(config)
    made: dict[tuple[str, tuple[int, ...]], Any] = {("in line", tuple(range(dist.get_world_size()))): dist.group.WORLD}

    def create(name: str, ranks: tuple[int, ...]) -> Any:
        if not ranks and name in joined:
            _new_group([rank], "alone", timeout)  # members made one: keep the count in step
        if len(ranks) < 2:
            return None
        key = (_OWN_COMMUNICATOR.get(name, "in line"), ranks)
        if key not in made:
            made[key] = _new_group(list(ranks), name, timeout)
        return made[key]

    return create


def _new_group(ranks: list[int], name: str, timeout: timedelta) -> Any:
    """A process group that only its members create.

    Where the default group is bound to a GPU, torch would split its NCCL communicator, for which every rank of the
    world must call; unbound, members connect on first use and nobody else takes part.
    """
    with _unbound(dist.group.WORLD):
        return dist.new_group(ranks, timeout=timeout, use_local_synchronization=True, group_desc=name)


@contextmanager
def _unbound(world: Any) -> Iterator[None]:
    bound = world.bound_device_id
    if bound is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


def _check_backend(config: ParallelConfig) -> str:
    running = dist.get_backend()
    wanted = config.distributed_backend
    if running in ("gloo", "nccl") and wanted not in ("auto", running):
        raise ValueError(
            f"distributed_backend is {wanted!r}, but torch.distributed runs {running!r}; "
            "start the ranks with the backend of the config, or set it to 'auto'"
        )
    return running
