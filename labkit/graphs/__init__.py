"""CUDA graphs: capture and replay on CUDA and, with the same semantics, on CPU; plans of their buffers as data."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.graphs.backend import Graph, GraphBackend, Pool, PoolStep, make_weak_ref
    from labkit.graphs.buffers import BufferPlan, PlanError, check_plan, plan_buffers
    from labkit.graphs.call_trace import calls_between
    from labkit.graphs.capture import make_graphed_callables
    from labkit.graphs.full_iteration import FullIterationGraph
    from labkit.graphs.graphable import GraphableMegatronModule, graphable_modules, wrap_layers
    from labkit.graphs.graphed import GraphedCallable
    from labkit.graphs.helper import CudaGraphHelper, TECudaGraphHelper
    from labkit.graphs.memory import (
        GraphCounts,
        GraphMemory,
        GraphMemoryReport,
        graph_counts,
        graph_objects_made,
        measure_graphs,
        predict_graph_memory,
    )
    from labkit.graphs.orders import capture_order
    from labkit.graphs.partial import (
        MoECudaGraphPartialCaptureSignal,
        MoECudaGraphTensorStore,
        fill_store,
        maybe_skip_or_early_return_by_cudagraph,
        names_of_outputs,
    )
    from labkit.graphs.passes import read_order, sample_index
    from labkit.graphs.pool import LAYER_ORDER, LayerMemory, Playback, layer_memory, play_back, predict_pool
    from labkit.graphs.scope import LayerScope, layer_scope
    from labkit.graphs.workspaces import predict_workspaces
    from labkit.parallel.capturing import BrokenProcessError, GraphCaptureError, is_graph_capturing

_WHERE = {
    "BrokenProcessError": "labkit.parallel.capturing",
    "BufferPlan": "buffers",
    "CudaGraphHelper": "helper",
    "FullIterationGraph": "full_iteration",
    "Graph": "backend",
    "GraphBackend": "backend",
    "GraphCaptureError": "labkit.parallel.capturing",
    "GraphCounts": "memory",
    "GraphMemory": "memory",
    "GraphMemoryReport": "memory",
    "GraphableMegatronModule": "graphable",
    "GraphedCallable": "graphed",
    "LAYER_ORDER": "pool",
    "LayerMemory": "pool",
    "LayerScope": "scope",
    "MoECudaGraphPartialCaptureSignal": "partial",
    "MoECudaGraphTensorStore": "partial",
    "PlanError": "buffers",
    "Playback": "pool",
    "Pool": "backend",
    "PoolStep": "backend",
    "TECudaGraphHelper": "helper",
    "calls_between": "call_trace",
    "capture_order": "orders",
    "check_plan": "buffers",
    "fill_store": "partial",
    "graph_counts": "memory",
    "graph_objects_made": "memory",
    "graphable_modules": "graphable",
    "is_graph_capturing": "labkit.parallel.capturing",
    "layer_memory": "pool",
    "layer_scope": "scope",
    "make_graphed_callables": "capture",
    "make_weak_ref": "backend",
    "maybe_skip_or_early_return_by_cudagraph": "partial",
    "measure_graphs": "memory",
    "names_of_outputs": "partial",
    "plan_buffers": "buffers",
    "play_back": "pool",
    "predict_graph_memory": "memory",
    "predict_pool": "pool",
    "predict_workspaces": "workspaces",
    "read_order": "passes",
    "sample_index": "passes",
    "wrap_layers": "graphable",
}
__all__ = [
    "LAYER_ORDER",
    "BrokenProcessError",
    "BufferPlan",
    "CudaGraphHelper",
    "FullIterationGraph",
    "Graph",
    "GraphBackend",
    "GraphCaptureError",
    "GraphCounts",
    "GraphMemory",
    "GraphMemoryReport",
    "GraphableMegatronModule",
    "GraphedCallable",
    "LayerMemory",
    "LayerScope",
    "MoECudaGraphPartialCaptureSignal",
    "MoECudaGraphTensorStore",
    "PlanError",
    "Playback",
    "Pool",
    "PoolStep",
    "TECudaGraphHelper",
    "calls_between",
    "capture_order",
    "check_plan",
    "fill_store",
    "graph_counts",
    "graph_objects_made",
    "graphable_modules",
    "is_graph_capturing",
    "layer_memory",
    "layer_scope",
    "make_graphed_callables",
    "make_weak_ref",
    "maybe_skip_or_early_return_by_cudagraph",
    "measure_graphs",
    "names_of_outputs",
    "plan_buffers",
    "play_back",
    "predict_graph_memory",
    "predict_pool",
    "predict_workspaces",
    "read_order",
    "sample_index",
    "wrap_layers",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    where = _WHERE[name]
    return getattr(importlib.import_module(where if "." in where else f"{__name__}.{where}"), name)
