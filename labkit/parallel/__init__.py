"""Rank groups, collectives and the layers that are split over them. Names are loaded on first use (PEP 562)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "rank_generator": (
        "decompose",
        "DEFAULT_ORDER",
        "generate_masked_orthogonal_groups",
        "generate_masked_orthogonal_rank_groups",
        "MAX_LISTED_RANKS",
        "prefix_product",
        "rank_generators",
        "RankGenerator",
    ),
    "group_plan": ("all_groups", "embedding_columns", "GROUP_KINDS", "GROUP_TOKENS", "groups_of_rank"),
    "groups": ("Group", "initialize_model_parallel", "ParallelGroups", "single_process_groups"),
    "ledger": ("comm_scope", "CommLedger", "CommRecord", "delayed", "dropped"),
    "collectives": (
        "all_gather",
        "all_gather_async",
        "all_reduce",
        "all_reduce_async",
        "all_to_all",
        "all_to_all_async",
        "barrier",
        "batch",
        "broadcast",
        "broadcast_async",
        "gather_objects",
        "irecv",
        "isend",
        "Message",
        "Pending",
        "reduce_scatter",
        "reduce_scatter_async",
    ),
    "data_parallel": ("NaiveDataParallel",),
}
"""Module -> the names that this package offers from it."""
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from labkit.parallel.collectives import Message as Message
    from labkit.parallel.collectives import Pending as Pending
    from labkit.parallel.collectives import all_gather as all_gather
    from labkit.parallel.collectives import all_gather_async as all_gather_async
    from labkit.parallel.collectives import all_reduce as all_reduce
    from labkit.parallel.collectives import all_reduce_async as all_reduce_async
    from labkit.parallel.collectives import all_to_all as all_to_all
    from labkit.parallel.collectives import all_to_all_async as all_to_all_async
    from labkit.parallel.collectives import barrier as barrier
    from labkit.parallel.collectives import batch as batch
    from labkit.parallel.collectives import broadcast as broadcast
    from labkit.parallel.collectives import broadcast_async as broadcast_async
    from labkit.parallel.collectives import gather_objects as gather_objects
    from labkit.parallel.collectives import irecv as irecv
    from labkit.parallel.collectives import isend as isend
    from labkit.parallel.collectives import reduce_scatter as reduce_scatter
    from labkit.parallel.collectives import reduce_scatter_async as reduce_scatter_async
    from labkit.parallel.data_parallel import NaiveDataParallel as NaiveDataParallel
    from labkit.parallel.group_plan import GROUP_KINDS as GROUP_KINDS
    from labkit.parallel.group_plan import GROUP_TOKENS as GROUP_TOKENS
    from labkit.parallel.group_plan import all_groups as all_groups
    from labkit.parallel.group_plan import embedding_columns as embedding_columns
    from labkit.parallel.group_plan import groups_of_rank as groups_of_rank
    from labkit.parallel.groups import Group as Group
    from labkit.parallel.groups import ParallelGroups as ParallelGroups
    from labkit.parallel.groups import initialize_model_parallel as initialize_model_parallel
    from labkit.parallel.groups import single_process_groups as single_process_groups
    from labkit.parallel.ledger import CommLedger as CommLedger
    from labkit.parallel.ledger import CommRecord as CommRecord
    from labkit.parallel.ledger import comm_scope as comm_scope
    from labkit.parallel.ledger import delayed as delayed
    from labkit.parallel.ledger import dropped as dropped
    from labkit.parallel.rank_generator import DEFAULT_ORDER as DEFAULT_ORDER
    from labkit.parallel.rank_generator import MAX_LISTED_RANKS as MAX_LISTED_RANKS
    from labkit.parallel.rank_generator import RankGenerator as RankGenerator
    from labkit.parallel.rank_generator import decompose as decompose
    from labkit.parallel.rank_generator import generate_masked_orthogonal_groups as generate_masked_orthogonal_groups
    from labkit.parallel.rank_generator import (
        generate_masked_orthogonal_rank_groups as generate_masked_orthogonal_rank_groups,
    )
    from labkit.parallel.rank_generator import prefix_product as prefix_product
    from labkit.parallel.rank_generator import rank_generators as rank_generators


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
