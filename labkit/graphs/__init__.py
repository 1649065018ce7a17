"""CUDA graphs of callables, of layers and of whole steps, on a GPU and, with the same rules, on a CPU.

Names are those of Megatron-LM and Transformer Engine (TE). A training run owns its graphs in `train/cuda_graphs.py`.

| name                                          | file                    | what it does                               |
|-----------------------------------------------|-------------------------|--------------------------------------------|
| `CudaGraphHelper` (Megatron)                  | `cuda_graph_helper.py`  | captures a rank's layers by its schedule   |
| `GraphableMegatronModule` (Megatron)          | `graphable_module.py`   | wraps a layer, and replays its graphs      |
| `MoECudaGraphPartialCaptureSignal` (Megatron) | `partial_moe.py`        | ends a graph inside a layer of experts     |
| `FullIterationGraph`                          | `full_iteration.py`     | captures a whole step as one graph         |
| `make_graphed_callables` (TE)                 | `capture.py`            | captures callables in the order of runs    |
| `GraphedCallable`                             | `graphed_callable.py`   | replays the graphs of one callable         |
| `plan_buffers`, `play_back`                   | `buffers.py`, `pool.py` | memory that graphs share; needs no torch   |

`make_graphed_callables` takes its arguments as a `CaptureRequest` (`capture_request.py`), which lists the graphs in the
order of their captures (`planned_captures.py`) and the fixed addresses that calls are copied to (`static_inputs.py`).
A `GraphBackend` (`backend.py`) captures each graph: `emulated/` on a CPU, `cuda/` on a GPU. Gradients, hooks, random
states and counters of the run are put aside meanwhile (`capture_isolation.py`). Each callable and microbatch ends up as
a `CaptureResult` (`capture_result.py`). `checks/` rejects what a replay would silently compute wrongly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.lazy import public_names

if TYPE_CHECKING:
    from labkit.comm.capturing import BrokenProcessError as BrokenProcessError
    from labkit.comm.capturing import GraphCaptureError as GraphCaptureError
    from labkit.comm.capturing import is_graph_capturing as is_graph_capturing
    from labkit.graphs.backend import make_weak_ref as make_weak_ref
    from labkit.graphs.buffers import BufferPlan as BufferPlan
    from labkit.graphs.buffers import PlanError as PlanError
    from labkit.graphs.buffers import check_plan as check_plan
    from labkit.graphs.buffers import plan_buffers as plan_buffers
    from labkit.graphs.buffers import plan_from as plan_from
    from labkit.graphs.capture import make_graphed_callables as make_graphed_callables
    from labkit.graphs.cuda_graph_helper import CudaGraphHelper as CudaGraphHelper
    from labkit.graphs.cuda_graph_helper import TECudaGraphHelper as TECudaGraphHelper
    from labkit.graphs.full_iteration import FullIterationGraph as FullIterationGraph
    from labkit.graphs.graphable_module import GraphableMegatronModule as GraphableMegatronModule
    from labkit.graphs.graphable_module import graphable_modules as graphable_modules
    from labkit.graphs.graphable_module import unwrap_layers as unwrap_layers
    from labkit.graphs.graphable_module import wrap_layers as wrap_layers
    from labkit.graphs.memory import GraphMemoryReport as GraphMemoryReport
    from labkit.graphs.memory import graph_objects_made as graph_objects_made
    from labkit.graphs.memory import measure_graphs as measure_graphs
    from labkit.graphs.memory_prediction import LAYER_ORDER as LAYER_ORDER
    from labkit.graphs.memory_prediction import LayerMemory as LayerMemory
    from labkit.graphs.memory_prediction import layer_memory as layer_memory
    from labkit.graphs.memory_prediction import predict_graph_memory as predict_graph_memory
    from labkit.graphs.memory_prediction import predict_pool as predict_pool
    from labkit.graphs.memory_prediction import predict_workspaces as predict_workspaces
    from labkit.graphs.order_table import capture_order as capture_order
    from labkit.graphs.order_table import read_order as read_order
    from labkit.graphs.order_table import sample_index as sample_index
    from labkit.graphs.partial_moe import MoECudaGraphPartialCaptureSignal as MoECudaGraphPartialCaptureSignal
    from labkit.graphs.partial_moe import MoECudaGraphTensorStore as MoECudaGraphTensorStore
    from labkit.graphs.partial_moe import fill_store as fill_store
    from labkit.graphs.partial_moe import (
        maybe_skip_or_early_return_by_cudagraph as maybe_skip_or_early_return_by_cudagraph,
    )
    from labkit.graphs.pool import overwritten as overwritten
    from labkit.graphs.pool import play_back as play_back
    from labkit.graphs.study.call_trace import calls_between as calls_between

__all__, __getattr__, __dir__ = public_names(__name__)
