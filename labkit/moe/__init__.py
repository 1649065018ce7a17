"""Mixture of experts: routers, dispatchers, experts, and the layer made of them."""

from __future__ import annotations

import importlib
from typing import Any

_WHERE: dict[str, str] = {}
"""Public name -> module that defines it; loaded on first use."""

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_WHERE)
