"""Mixture of experts: routers, dispatchers, experts, and the layer made of them. Names are loaded on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS: dict[str, tuple[str, ...]] = {
    "allgather": ("MoEAllGatherTokenDispatcher",),
    "alltoall": ("MoEAlltoAllTokenDispatcher",),
    "dispatcher": ("build_dispatcher", "MoETokenDispatcher"),
    "local": ("MoELocalTokenDispatcher",),
    "permutation": ("permute", "sort_chunks_by_idxs", "unpermute"),
    "experts": ("Experts", "GroupedExperts", "SequentialExperts"),
    "shared_experts": ("SharedExpertMLP",),
}
"""Module -> public names in it."""
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from labkit.moe.allgather import MoEAllGatherTokenDispatcher as MoEAllGatherTokenDispatcher
    from labkit.moe.alltoall import MoEAlltoAllTokenDispatcher as MoEAlltoAllTokenDispatcher
    from labkit.moe.dispatcher import MoETokenDispatcher as MoETokenDispatcher
    from labkit.moe.dispatcher import build_dispatcher as build_dispatcher
    from labkit.moe.local import MoELocalTokenDispatcher as MoELocalTokenDispatcher
    from labkit.moe.permutation import permute as permute
    from labkit.moe.permutation import sort_chunks_by_idxs as sort_chunks_by_idxs
    from labkit.moe.permutation import unpermute as unpermute
    from labkit.moe.experts import Experts as Experts
    from labkit.moe.experts import GroupedExperts as GroupedExperts
    from labkit.moe.experts import SequentialExperts as SequentialExperts
    from labkit.moe.shared_experts import SharedExpertMLP as SharedExpertMLP


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
