"""CUDA graphs: capture and replay on CUDA and, with the same semantics, on CPU; plans of their buffers as data."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.graphs.buffers import BufferPlan, PlanError, check_plan, plan_buffers
    from labkit.graphs.graphable import GraphableMegatronModule
    from labkit.graphs.passes import read_order, sample_index
    from labkit.graphs.pool import LayerMemory, Playback, layer_memory, play_back, predict_pool

_WHERE = {
    "BufferPlan": "buffers",
    "GraphableMegatronModule": "graphable",
    "LayerMemory": "pool",
    "PlanError": "buffers",
    "Playback": "pool",
    "check_plan": "buffers",
    "layer_memory": "pool",
    "plan_buffers": "buffers",
    "play_back": "pool",
    "predict_pool": "pool",
    "read_order": "passes",
    "sample_index": "passes",
}
__all__ = [
    "BufferPlan",
    "GraphableMegatronModule",
    "LayerMemory",
    "PlanError",
    "Playback",
    "check_plan",
    "layer_memory",
    "plan_buffers",
    "play_back",
    "predict_pool",
    "read_order",
    "sample_index",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
