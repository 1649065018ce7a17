"""CUDA graphs: capture and replay on CUDA and, with the same semantics, on CPU; plans of their buffers as data."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.graphs.buffers import BufferPlan, PlanError, check_plan, plan_buffers
    from labkit.graphs.graphable import GraphableMegatronModule
    from labkit.graphs.passes import read_order, sample_index

_WHERE = {
    "BufferPlan": "buffers",
    "GraphableMegatronModule": "graphable",
    "PlanError": "buffers",
    "check_plan": "buffers",
    "plan_buffers": "buffers",
    "read_order": "passes",
    "sample_index": "passes",
}
__all__ = [
    "BufferPlan",
    "GraphableMegatronModule",
    "PlanError",
    "check_plan",
    "plan_buffers",
    "read_order",
    "sample_index",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
