"""`labkit groups`: every group of a layout, or those of one rank. It needs numpy but no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from labkit.cli.arguments import Arguments, Command, Option
from labkit.cli.output import folded, room, show
from labkit.config import ParallelConfig
from labkit.config.axis_sizes import axis_sizes, sizes_in_words
from labkit.config.errors import counted
from labkit.config.fields import SPECS
from labkit.config.rules import layout_problems

MOST_LISTED_RANKS = 2**20
"""Larger worlds are printed for one rank at a time (--rank), and larger groups as first, last, size and runs."""
SHOWN_MEMBERS = 16
"""The text lists all ranks of a group of up to this many; of a larger one it lists the first few and the last."""
FULLY_SHOWN_RANKS = 64
"""In a world of up to this many ranks the text lists every group; in a larger one, the first few of each kind. JSON
lists all."""


def execute(arguments: Arguments) -> int:
    """Print the groups as text or JSON."""
    options = dict(arguments.options)
    as_json, rank, world_size = options.pop("json"), options.pop("rank"), options.pop("world_size")
    given = {name: value for name, value in options.items() if value is not None}
    parallel = ParallelConfig(**given)
    problems = layout_problems(parallel, world_size)
    if world_size is None and not any("world" in problem for problem in arguments.problems):
        problems.append("--world-size: is missing; give the number of ranks")
    elif world_size is not None and not problems and rank is None and world_size > MOST_LISTED_RANKS:
        listed = f"more than the {MOST_LISTED_RANKS:,} ranks that are listed at once"
        problems.append(f"world_size = {world_size}: {listed}; add --rank r for the groups of one rank")
    first, last = parallel.rank_offset, parallel.rank_offset + (world_size or 1) - 1
    if rank is not None and not problems and not first <= rank <= last:
        problems.append(f"--rank {rank}: this layout's ranks are {first} to {last}")
    arguments.refuse(problems)
    assert world_size is not None
    from labkit.comm.group_plan import all_groups, members_of_rank

    plan: dict[str, Any] = (
        all_groups(parallel, world_size) if rank is None else members_of_rank(rank, parallel, world_size)
    )
    if as_json:
        groups = {kind: _as_json(group) for kind, group in plan.items()}
        dense, experts = axis_sizes(parallel, world_size)
        layout = {"world_size": world_size, "dense": dense, "experts": experts, "order": parallel.order}
        print(json.dumps({**layout, "rank": rank, "groups": groups}))
    else:
        lines = _world_lines(plan, parallel, world_size) if rank is None else _rank_lines(plan, rank)
        show("\n".join([*_head(parallel, world_size), "", *lines]))
    return 0


def _head(parallel: ParallelConfig, world_size: int) -> list[str]:
    dense, experts = map(sizes_in_words, axis_sizes(parallel, world_size))
    return [
        f"{counted(world_size, 'rank')}, order {parallel.order} (fastest first)",
        f"  dense    {dense}",
        f"  experts  {experts}",
        "  kinds    explained in docs/glossary.md",
    ]


def _rank_lines(plan: dict[str, Sequence[int]], rank: int) -> list[str]:
    """Return the groups of one rank; a shortened list is followed by its size and strides, which give the rest."""
    width = max(map(len, plan))
    lines = [f"groups of rank {rank}", ""]
    for kind, members in plan.items():
        words = [f"{_group(members)}{_runs_words(members)}" if members else "none"]
        lines += _listed(f"  {kind:<{width}}  ", words)
    return lines


def _runs_words(members: Sequence[int]) -> str:
    """Return `; 2,048 ranks, stride 16`, or `; 32 ranks: 8 at stride 1, 4 times at stride 32`; "" for a short group."""
    from labkit.comm.mixed_radix import Members

    if len(members) <= SHOWN_MEMBERS or not isinstance(members, Members):
        return ""
    size, *times = members.sizes
    stride, *jumps = members.strides
    if not times:
        return f"; {size:,} ranks, stride {stride:,}"
    more = "".join(f", {count:,} times at stride {jump:,}" for count, jump in zip(times, jumps))
    return f"; {len(members):,} ranks: {size:,} at stride {stride:,}{more}"


def _as_json(groups: np.ndarray | Sequence[int]) -> list[Any] | dict[str, Any]:
    """Return all groups of a kind, or one group, as a list; a group that is too long as its formula."""
    from labkit.comm.mixed_radix import Members

    if isinstance(groups, np.ndarray):
        return groups.tolist()
    if not isinstance(groups, Members):
        return list(groups)
    if len(groups) <= MOST_LISTED_RANKS:
        return groups.array().tolist()
    ends = {"first": groups[0], "last": groups[-1], "size": len(groups)}
    return {**ends, "runs": [list(run) for run in zip(groups.sizes, groups.strides)]}


def _world_lines(plan: dict[str, np.ndarray], parallel: ParallelConfig, world_size: int) -> list[str]:
    """Return the groups of all ranks by kind, in a large world the first few of each. All of a kind have the same
    strides, so these are printed once."""
    from labkit.comm.group_plan import members_of_rank

    width, first = max(map(len, plan)), members_of_rank(parallel.rank_offset, parallel, world_size)
    lines = [f"  {'kind':<{width}}  groups x size   ranks", ""]
    for kind, groups in plan.items():
        shown = groups if world_size <= FULLY_SHOWN_RANKS else groups[:4]
        left = len(groups) - len(shown)
        words = [*map(_group, shown), *([f"... {left:,} more"] if left else [])]
        words[-1] += _runs_words(first[kind])
        lines += _listed(f"  {kind:<{width}}  {len(groups):>6} x {len(groups[0]):<5}  ", words)
    return lines


def _listed(head: str, words: Sequence[str]) -> list[str]:
    """Return `head` and `words` in lines. On a terminal a line ends between two words; if one of them does not fit into
    a line, each begins a line of its own."""
    wide = room()
    if wide and any(len(head + word) > wide for word in words):
        return [
            line for i, word in enumerate(words) for line in folded(word, head if i == 0 else " " * len(head), wide)
        ]
    held = " ".join(word.replace(" ", "\u00a0") for word in words)
    return [line.replace("\u00a0", " ") for line in folded(held, head, wide)]


def _group(ranks: Sequence[int] | np.ndarray) -> str:
    if len(ranks) <= SHOWN_MEMBERS:
        return f"[{', '.join(map(str, ranks))}]"
    return f"[{', '.join(map(str, ranks[:6]))}, ..., {ranks[-1]}]"


_HELP = {
    "tp": ("tensor parallel size", "tensor_model_parallel_size"),
    "pp": ("pipeline parallel size", "pipeline_model_parallel_size"),
    "cp": ("context parallel size", "context_parallel_size"),
    "ep": ("expert parallel size", "expert_model_parallel_size"),
    "etp": ("tensor parallel size inside experts", "expert_tensor_parallel_size"),
    "order": ("axes from fastest to slowest varying, such as tp-cp-ep-dp-pp", "rank_order"),
    "split_rank": ("first pipeline rank of the decoder", "pipeline_model_parallel_split_rank"),
    "rank_offset": ("number of the first rank", "first_rank"),
}
_KINDS = {f.name: str(f.type).removesuffix(" | None") for f in fields(ParallelConfig)}

COMMAND = Command(
    name="groups",
    summary="Rank groups of a layout: which ranks talk to each other, for every kind of group.",
    options=(
        Option("world-size", "int", "number of ranks", aliases=("nproc",), unset="required"),
        *(
            Option(
                name.replace("_", "-"),
                _KINDS[name],
                text,
                aliases=(alias, f"parallel.{name}"),
                unset=f"default: {'tp' if name == 'etp' else SPECS[f'parallel.{name}'].default_words}",
            )
            for name, (text, alias) in _HELP.items()
        ),
        Option(
            "rank",
            "int",
            "show only the groups of this rank, which takes the same time in a world of any size",
            unset="default: all ranks",
        ),
        Option("json", "bool", "print JSON", False),
    ),
    execute=execute,
    example="labkit groups --world-size 16 --tp 4 --pp 2 --etp 1 --ep 4",
)
