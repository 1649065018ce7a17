"""Score a learner's function, layout or schedule: `check("02.groups", my_function)`; check a chapter's parameters."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "parameters": ("check_parameters",),
    "scoring": ("Exercise", "Outcome", "Score", "check", "compare", "exercise", "exercises", "holds"),
}
"""Module -> the names that this package offers from it."""
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from labkit.check.parameters import check_parameters as check_parameters
    from labkit.check.scoring import Exercise as Exercise
    from labkit.check.scoring import Outcome as Outcome
    from labkit.check.scoring import Score as Score
    from labkit.check.scoring import check as check
    from labkit.check.scoring import compare as compare
    from labkit.check.scoring import exercise as exercise
    from labkit.check.scoring import exercises as exercises
    from labkit.check.scoring import holds as holds


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
