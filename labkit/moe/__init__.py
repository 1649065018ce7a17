"""Mixture of experts: routers, dispatchers, experts, and the layer made of them. Names are loaded on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS: dict[str, tuple[str, ...]] = {
    "experts": ("Experts", "GroupedExperts", "SequentialExperts"),
    "shared_experts": ("SharedExpertMLP",),
}
"""Module -> public names in it."""
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
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
