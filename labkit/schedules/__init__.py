"""Pipeline schedules as data: built, printed, simulated; only `runtime` touches torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.schedules.builders import build_schedule, gpipe, one_f_one_b, without_backward
    from labkit.schedules.entry_points import (
        forward_backward_no_pipelining,
        forward_backward_pipelining_without_interleaving,
        get_forward_backward_func,
    )
    from labkit.schedules.ir import Action, Schedule, ScheduleError
    from labkit.schedules.lowering import Message, Program, Step, Transfer, Transport, lower
    from labkit.schedules.rendezvous import Op, communication, interpret
    from labkit.schedules.runtime import PipelineRuntime
    from labkit.schedules.simulator import Costs, Timeline, simulate
    from labkit.schedules.verifier import verify

_WHERE = {
    "build_schedule": "builders",
    "gpipe": "builders",
    "one_f_one_b": "builders",
    "without_backward": "builders",
    "forward_backward_no_pipelining": "entry_points",
    "forward_backward_pipelining_without_interleaving": "entry_points",
    "get_forward_backward_func": "entry_points",
    "Action": "ir",
    "Schedule": "ir",
    "ScheduleError": "ir",
    "Message": "lowering",
    "Program": "lowering",
    "Step": "lowering",
    "Transfer": "lowering",
    "Transport": "lowering",
    "lower": "lowering",
    "Op": "rendezvous",
    "communication": "rendezvous",
    "interpret": "rendezvous",
    "PipelineRuntime": "runtime",
    "Costs": "simulator",
    "Timeline": "simulator",
    "simulate": "simulator",
    "verify": "verifier",
}
__all__ = [
    "Action",
    "Costs",
    "Message",
    "Op",
    "PipelineRuntime",
    "Program",
    "Schedule",
    "ScheduleError",
    "Step",
    "Timeline",
    "Transfer",
    "Transport",
    "build_schedule",
    "communication",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "get_forward_backward_func",
    "gpipe",
    "interpret",
    "lower",
    "one_f_one_b",
    "simulate",
    "verify",
    "without_backward",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
