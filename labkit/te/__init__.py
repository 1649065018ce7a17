"""Transformer Engine's modules in the place of ours, given to a model from outside.

Names are loaded on first use (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "engine": ("EngineFloat8",),
    "spec": ("EngineSpec",),
}
"""Module -> the names that this package offers from it."""
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from labkit.te.engine import EngineFloat8 as EngineFloat8
    from labkit.te.spec import EngineSpec as EngineSpec


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
