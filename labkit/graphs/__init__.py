"""CUDA graphs: capture and replay on CUDA and, with the same semantics, on CPU; plans of their buffers as data."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.graphs.buffers import BufferPlan, PlanError, check_plan, plan_buffers
    from labkit.graphs.graphable import GraphableMegatronModule
    from labkit.graphs.memory import (
        GraphCounts,
        GraphMemory,
        GraphMemoryReport,
        graph_counts,
        measure_graphs,
        predict_graph_memory,
    )
    from labkit.graphs.passes import read_order, sample_index
    from labkit.graphs.pool import LayerMemory, Playback, layer_memory, play_back, predict_pool

_WHERE = {
    "BufferPlan": "buffers",
    "GraphCounts": "memory",
    "GraphMemory": "memory",
    "GraphMemoryReport": "memory",
    "GraphableMegatronModule": "graphable",
    "LayerMemory": "pool",
    "PlanError": "buffers",
    "Playback": "pool",
    "check_plan": "buffers",
    "graph_counts": "memory",
    "layer_memory": "pool",
    "measure_graphs": "memory",
    "plan_buffers": "buffers",
    "play_back": "pool",
    "predict_graph_memory": "memory",
    "predict_pool": "pool",
    "read_order": "passes",
    "sample_index": "passes",
}
__all__ = [
    "BufferPlan",
    "GraphCounts",
    "GraphMemory",
    "GraphMemoryReport",
    "GraphableMegatronModule",
    "LayerMemory",
    "PlanError",
    "Playback",
    "check_plan",
    "graph_counts",
    "layer_memory",
    "measure_graphs",
    "plan_buffers",
    "play_back",
    "predict_graph_memory",
    "predict_pool",
    "read_order",
    "sample_index",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
