"""The ranks of every group of a layout, as plain arrays: for the whole world, or for one rank alone.

Nothing here communicates. `groups.py` creates process groups from one rank's part of this plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np

from labkit.comm.mixed_radix import Members, as_size
from labkit.comm.rank_generator import RankGenerator, rank_generators
from labkit.config import ParallelConfig

GROUP_TOKENS: dict[str, tuple[str, str]] = {
    "tp": ("dense", "tp"),
    "cp": ("dense", "cp"),
    "dp": ("dense", "dp"),
    "dp_cp": ("dense", "dp-cp"),
    "pp": ("dense", "pp"),
    "ep": ("expert", "ep"),
    "etp": ("expert", "tp"),
    "edp": ("expert", "dp"),
    "tp_ep": ("expert", "tp-ep"),
    "tp_ep_pp": ("expert", "tp-ep-pp"),
    "tp_cp": ("dense", "tp-cp"),
    "tp_dp_cp": ("dense", "tp-dp-cp"),
    "mp": ("dense", "tp-pp"),
}
"""Kind of group -> (generator, token). `embedding_columns` picks `embd` and `pos_embd` from `pp`."""
GROUP_KINDS = (*GROUP_TOKENS, "embd", "pos_embd")
"""All kinds, in the order in which they are created."""
IN_LINE = "in line"
_OWN_PURPOSE = {
    "pp": "pipeline",
    "cp": "context",
    "ep": "expert",
    "dp": "gradients",
    "dp_cp": "gradients",
    "edp": "expert gradients",
    "embd": "word embedding",
    "pos_embd": "position embedding",
}
_SIZES = ("tp", "pp", "cp", "ep", "etp", "order", "rank_offset", "split_rank")


def purpose(kind: str) -> str:
    """Return the use of a group of `kind`. Groups over the same ranks share a communicator if they have the same use.

    All members of a communicator must issue its operations in one order: NCCL runs them in order of issue and would
    deadlock otherwise. A layer or the end of a step calls `tp`, `etp`, `tp_cp`, `tp_ep`, `tp_dp_cp`, `mp` and others in
    program order, so these kinds share. The other kinds run concurrently with the layers, so each use has its own
    communicator. They are pipeline send/receive, the ring of `cp`, the all-to-all of `ep`, and the buckets of
    gradients, whose order follows the backward pass. With two stages `embd` has the ranks of `pp` but another use.
    """
    return _OWN_PURPOSE.get(kind, IN_LINE)


def embedding_columns(
    pp: int, split_rank: int | None = None, ends: tuple[int, int] | None = None
) -> tuple[list[int], list[int]]:
    """Return the pipeline positions with the word embedding, and those with the position embedding.

    The first stage has both embeddings. The last stage has the word embedding, which it uses as output layer. `ends`
    are the positions of these two stages, by default 0 and pp - 1; a V schedule has both on 0. `split_rank` is the
    first decoder stage of an encoder-decoder model and has both embeddings too. Raises ValueError for positions that do
    not exist.
    """
    first, last = ends or (0, pp - 1)
    for end in (first, last):
        if not 0 <= end < pp:
            raise ValueError(f"ends (pipeline ranks of first and last stage) are {ends} and pp is {pp}")
    word, position = [first, last], [first]
    if split_rank is not None:
        if not 1 <= as_size("split_rank", split_rank, least=0) < pp:
            allowed = f"it must be one of 1 to {pp - 1}" if pp > 1 else "a split needs pp >= 2"
            raise ValueError(f"split_rank (the decoder's first stage) is {split_rank} and pp is {pp}; {allowed}")
        word, position = [first, split_rank, last], [first, split_rank]
    return sorted(set(word)), sorted(set(position))


def _generators(
    sizes: ParallelConfig | Mapping[str, object], world_size: int
) -> tuple[dict[str, RankGenerator], int | None]:
    if isinstance(sizes, ParallelConfig):
        given: dict[str, object] = {field.name: getattr(sizes, field.name) for field in fields(sizes)}
    else:
        given = dict(sizes)
        unknown = sorted(set(given) - set(_SIZES))
        if unknown:
            raise ValueError(f"unknown sizes {', '.join(unknown)}; a layout has {', '.join(_SIZES)}")
    split_rank = given.pop("split_rank", None)
    wanted = {name: given[name] for name in _SIZES if name in given}
    dense, expert = rank_generators(world_size=world_size, **wanted)  # pyright: ignore[reportArgumentType]
    return {"dense": dense, "expert": expert}, split_rank  # pyright: ignore[reportReturnType]


def all_groups(sizes: ParallelConfig | Mapping[str, object], world_size: int) -> dict[str, np.ndarray]:
    """Return kind -> int64 array (num_groups, group_size) for all GROUP_KINDS.

    `sizes` is a ParallelConfig or a mapping with any of tp, pp, cp, ep, etp, order, rank_offset, split_rank.
    `world_size` counts the ranks of the layout. Ranks of middle stages are in no group of `embd` or `pos_embd`. Raises
    ValueError as `rank_generators` and `embedding_columns` do.
    """
    generators, split_rank = _generators(sizes, world_size)
    word, position = embedding_columns(generators["dense"].sizes["pp"], split_rank)
    plan = {kind: generators[which].rank_array(token) for kind, (which, token) in GROUP_TOKENS.items()}
    return {**plan, "embd": plan["pp"][:, word], "pos_embd": plan["pp"][:, position]}


def members_of_rank(
    rank: int,
    sizes: ParallelConfig | Mapping[str, object],
    world_size: int,
    ends: tuple[int, int] | None = None,
) -> dict[str, Sequence[int]]:
    """Return kind -> the ranks of the group of `rank`, in group order and by formula; empty if it has no such group.

    The cost is the same in a world of any size. Arguments and errors are as in `all_groups` and `embedding_columns`.
    """
    generators, split_rank = _generators(sizes, world_size)
    word, position = embedding_columns(generators["dense"].sizes["pp"], split_rank, ends)
    plan: dict[str, Sequence[int]] = {
        kind: generators[which].members_of(token, rank) for kind, (which, token) in GROUP_TOKENS.items()
    }
    for kind, columns in (("embd", word), ("pos_embd", position)):
        members = tuple(plan["pp"][column] for column in columns)
        plan[kind] = members if rank in members else ()
    return plan


def groups_of_rank(
    rank: int,
    sizes: ParallelConfig | Mapping[str, object],
    world_size: int,
    ends: tuple[int, int] | None = None,
) -> dict[str, np.ndarray]:
    """Return `members_of_rank` as int64 arrays. The cost is the sum of the groups' sizes, not the size of the world.

    Raises ValueError also for a group of more than MAX_LISTED_RANKS ranks.
    """
    plan = members_of_rank(rank, sizes, world_size, ends)
    return {
        kind: members.array() if isinstance(members, Members) else np.array(members, dtype=np.int64)
        for kind, members in plan.items()
    }
