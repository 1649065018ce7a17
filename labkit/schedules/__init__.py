"""Pipeline schedules as data: built, printed, simulated; only `runtime` touches torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.schedules.builders import gpipe, one_f_one_b, without_backward
    from labkit.schedules.ir import Action, Schedule, ScheduleError
    from labkit.schedules.simulator import Costs, Timeline, simulate

_WHERE = {
    "Action": "ir",
    "Schedule": "ir",
    "ScheduleError": "ir",
    "gpipe": "builders",
    "one_f_one_b": "builders",
    "without_backward": "builders",
    "Costs": "simulator",
    "Timeline": "simulator",
    "simulate": "simulator",
}
__all__ = [
    "Action",
    "Costs",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "gpipe",
    "one_f_one_b",
    "simulate",
    "without_backward",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
