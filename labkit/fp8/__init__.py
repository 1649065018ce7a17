"""Linear layers in fp8: a precision strategy that a model is given from outside.

Names are loaded on first use (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "recipe": ("Float8Recipe", "float8_recipe"),
    "scaling": ("Float8Scaling", "Float8Spec"),
}
"""Module -> the names that this package offers from it."""
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from labkit.fp8.recipe import Float8Recipe as Float8Recipe
    from labkit.fp8.recipe import float8_recipe as float8_recipe
    from labkit.fp8.scaling import Float8Scaling as Float8Scaling
    from labkit.fp8.scaling import Float8Spec as Float8Spec


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
