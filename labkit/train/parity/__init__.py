"""The parity microscope: any layout against one process. Names are loaded on first use (PEP 562)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.train.parity.comparison import ParityReport, ParityRow, compare, differences, tensor_difference

__all__ = ["ParityReport", "ParityRow", "compare", "differences", "tensor_difference"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.comparison"), name)


def __dir__() -> list[str]:
    return __all__
