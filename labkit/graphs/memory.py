"""Memory of graphs: their number and their bytes, measured and predicted.

| part                | what it is                                               | grows with                       |
|---------------------|----------------------------------------------------------|----------------------------------|
| graphs              | one forward, one backward per layer and microbatch       | layers x microbatches            |
| graph objects       | memory of a GPU's driver for their operations            | operations; small                |
| static inputs       | a call copies its input into them (`plan_buffers`)       | layers x in flight               |
| static gradients    | a backward reads the gradients of its outputs from them  | kinds of outputs                 |
| pool                | tensors of captured operations, held until a backward    | layers x in flight               |
| of it, break points | outputs of graphs that end inside a layer of experts     | such layers x in flight          |
| fragmentation       | the pool's memory beyond its peak                        |                                  |
| cuBLAS workspaces   | scratch memory of matrix products, outside the pool      | threads that run products        |

The microbatches in flight are those of the warm-up and one more: p - r on rank r of p under 1F1B. An eager run has none
of the first four parts, and may free break points earlier. The rest of the pool is activations, which an eager run
keeps too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.graphs.buffers import plan_buffers
from labkit.graphs.order_table import layers_of_chunks, order_sizes, read_order, sample_index, sample_places
from labkit.graphs.pool import LayerMemory, predict_pool

if TYPE_CHECKING:
    import torch


class GraphCounts(NamedTuple):
    """Forward and backward graphs of a rank's layers."""

    one_microbatch: int
    """2 L: without a pipeline each backward follows its forward, so all microbatches replay the same graphs."""
    bound: int
    """2 L PP: under 1F1B a rank has at most PP microbatches in flight."""
    captured: int
    """2 L M: graphs for each microbatch, as Transformer Engine and Megatron capture them in a pipeline."""


def graph_counts(layers: int, pp: int, microbatches: int) -> GraphCounts:
    """Number of graphs that a rank with `layers` layers needs and has.

    Raises:
        ValueError: sizes below 1.
    """
    if min(layers, pp, microbatches) < 1:
        raise ValueError(f"layers={layers}, pp={pp}, microbatches={microbatches}: all must be at least 1")
    return GraphCounts(2 * layers, 2 * layers * pp, 2 * layers * microbatches)


@dataclass(frozen=True)
class GraphMemory:
    """The parts of the table above, in bytes; None where unknown."""

    graphs: int
    """Number of graphs."""
    operations: int | None
    """Operations launched when each graph is replayed once. Graph objects grow with them."""
    graph_objects: int | None
    """Bytes that a GPU's driver keeps for the graphs themselves (`graph_objects_made`). None on the host, where a graph
    is a Python list."""
    static_inputs: int
    static_gradients: int
    break_points: int
    """Part of the pool."""
    pool_peak: int
    """Most bytes that were held at once."""
    pool_reserved: int | None
    """Bytes of the machine that the pool holds, used or not."""
    workspaces: int | None = None
    """Bytes that cuBLAS keeps for the stream of the captures, in no pool (`predict_workspaces`). None on the host."""

    @property
    def fragmentation(self) -> int | None:
        """Bytes that the pool holds beyond its peak."""
        return None if self.pool_reserved is None else self.pool_reserved - self.pool_peak


@dataclass(frozen=True)
class GraphMemoryReport:
    """Measured beside predicted; `str` gives a table."""

    measured: GraphMemory
    predicted: GraphMemory | None = None

    def rows(self) -> list[tuple[str, int | None, int | None]]:
        """(part, predicted, measured) in bytes; graphs and operations as counts. A part that is unknown is left out."""
        names = (
            ("graphs", "graphs"),
            ("operations", "operations"),
            ("graph objects", "graph_objects"),
            ("static inputs", "static_inputs"),
            ("static gradients", "static_gradients"),
            ("pool, peak", "pool_peak"),
            ("of it break points", "break_points"),
            ("pool, reserved", "pool_reserved"),
            ("fragmentation", "fragmentation"),
            ("cuBLAS workspaces", "workspaces"),
        )
        found = [
            (label, None if self.predicted is None else getattr(self.predicted, name), getattr(self.measured, name))
            for label, name in names
        ]
        return [row for row in found if row[1:] != (None, None)]

    def __str__(self) -> str:
        lines = [f"{'':18}  {'predicted':>12}  {'measured':>12}"]
        for label, *values in self.rows():
            shown = ["unknown" if value is None else f"{value:,}" for value in values]
            lines.append(f"{label:18}  {shown[0]:>12}  {shown[1]:>12}")
        return "\n".join([*lines, "(bytes, but for graphs and operations)"])


@contextmanager
def graph_objects_made(device: torch.device | str) -> Iterator[list[int]]:
    """Measure the graph objects captured inside the block: bytes that the driver took, less those of torch's allocator.

    At the end of the block the list gets the number; on the host it stays empty. The driver counts memory of all
    processes on the GPU, so the number includes what other processes take meanwhile. It leaves out what the first
    replay takes.
    """
    found: list[int] = []
    if not str(device).startswith("cuda"):
        yield found
        return
    before = _beside_the_allocator(device)
    yield found
    found.append(max(0, _beside_the_allocator(device) - before))


def _beside_the_allocator(device: torch.device | str) -> int:
    import torch

    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def measure_graphs(
    callables: Sequence[Any],
    order: Sequence[float],
    layers_per_chunk: int | Sequence[int],
    *,
    graph_objects: int | None = None,
) -> GraphMemory:
    """The parts of the table, measured on graphed callables of one pool.

    callables: the results of `make_graphed_callables(order=...)`, one per layer and microbatch.
    graph_objects: the result of `graph_objects_made` around their capture.

    Raises:
        ValueError: the number of callables is not layers x microbatches.
    """
    chunks, microbatches = order_sizes(read_order(order))
    layers = layers_of_chunks(layers_per_chunk, chunks)
    if len(callables) != sum(layers) * microbatches:
        raise ValueError(
            f"{len(callables)} callables for {sum(layers)} layers and {microbatches} microbatches: give all of a rank"
        )
    stores = [_bytes(one.static_outputs) if _ends_inside_a_layer(one) else 0 for one in callables]
    graphs = [graph for one in callables for graph in one.graphs if graph is not None]
    operations = [graph.num_operations for graph in graphs]
    pools = {id(one.pool): one.pool for one in callables if one.pool is not None}.values()
    workspaces = [pool.workspace_bytes for pool in pools if pool.workspace_bytes is not None]
    return GraphMemory(
        graphs=len(graphs),
        operations=None if None in operations else sum(operations),
        graph_objects=graph_objects,
        static_inputs=_bytes(tensor for one in callables for tensor in one.static_inputs),
        static_gradients=_bytes(tensor for one in callables for tensor in one.captured.grad_outputs),
        break_points=_held_at_most(order, layers, stores),
        pool_peak=sum(pool.peak_bytes for pool in pools),
        pool_reserved=sum(pool.reserved_bytes for pool in pools),
        workspaces=max(workspaces, default=None),
    )


def predict_graph_memory(
    order: Sequence[float],
    layers_per_chunk: int | Sequence[int],
    memory: LayerMemory | Sequence[LayerMemory],
    *,
    input_bytes: int | Sequence[int],
    gradient_bytes: int | Sequence[int] | None = None,
    store_bytes: int | Sequence[int] = 0,
    operations: int | Sequence[int] | None = None,
    workspaces: int | None = None,
) -> GraphMemory:
    """Predict the parts of the table, for `plan_buffers` and one shared pool.

    Args:
        order: Signed chunk numbers of the rank.
        layers_per_chunk: Layers of each chunk, or one number for all.
        memory: Memory of each layer's graphs in the pool (`layer_memory`), or one for all.
        input_bytes: Bytes of each layer's static inputs; layers with the same number share buffers.
        gradient_bytes: Bytes of the gradients of each layer's outputs; None: as many as its inputs.
        store_bytes: Bytes of the outputs of graphs that end inside a layer, 0 for other layers.
        operations: Operations of each layer's forward and backward graph together, where known.
        workspaces: Bytes of cuBLAS's workspaces (`predict_workspaces`); None on the host.

    Raises:
        ValueError: an order that `predict_pool` refuses, or numbers for another number of layers.
    """
    passes = read_order(order)
    chunks, microbatches = order_sizes(passes)
    layers = layers_of_chunks(layers_per_chunk, chunks)
    inputs = _of_each_layer("input_bytes", input_bytes, layers)
    gradients = inputs if gradient_bytes is None else _of_each_layer("gradient_bytes", gradient_bytes, layers)
    stores = _of_each_layer("store_bytes", store_bytes, layers)
    buffers = plan_buffers(order, layers, inputs).buffers_by_signature
    return GraphMemory(
        graphs=sum(layers[one.chunk] for one in passes),
        operations=None if operations is None else microbatches * sum(_of_each_layer("operations", operations, layers)),
        graph_objects=None,
        static_inputs=sum(int(nbytes) * count for nbytes, count in buffers.items()),  # type: ignore[call-overload]
        static_gradients=sum(set(gradients)),
        break_points=_held_at_most(order, layers, _of_each_sample(stores, layers, microbatches)),
        pool_peak=predict_pool(order, layers, memory).peak_bytes,
        pool_reserved=None,
        workspaces=workspaces,
    )


def _of_each_layer(name: str, given: int | Sequence[int], layers: Sequence[int]) -> list[int]:
    each = [given] * sum(layers) if isinstance(given, int) else list(given)
    if len(each) != sum(layers):
        raise ValueError(f"{name} has {len(each)} numbers for {sum(layers)} layers: give one for each, or one for all")
    return each


def _of_each_sample(of_layer: Sequence[int], layers: Sequence[int], microbatches: int) -> list[int]:
    """Repeat numbers of layers in the layout of `sample_index`."""
    return [of_layer[sum(layers[:chunk]) + layer] for chunk, layer, _ in sample_places(layers, microbatches)]


def _held_at_most(order: Sequence[float], layers: Sequence[int], of_sample: Sequence[int]) -> int:
    """Most bytes held at once, where each layer and microbatch holds `of_sample` from its forward to its backward."""
    passes = read_order(order)
    microbatches = order_sizes(passes)[1]
    held = most = 0
    for one in passes:
        sign = {"F": 1, "B": -1, "W": 0}[one.kind]
        places = [sample_index(layers, microbatches, one.chunk, i, one.microbatch) for i in range(layers[one.chunk])]
        held += sign * sum(of_sample[place] for place in places)
        most = max(most, held)
    return most


def _ends_inside_a_layer(graphed: Any) -> bool:
    """True where a graph has several outputs; the graph of a whole layer has only hidden states."""
    return sum(tensor is not None for tensor in graphed.static_outputs) > 1


def _bytes(tensors: Iterable[Any]) -> int:
    """Bytes of all tensors, each address counted once."""
    found = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor is not None}
    return sum(found.values())


# ---- workspaces of cuBLAS ----

MIB = 1 << 20
LARGE = 32 * MIB
"""Workspace from compute capability 9.0 (Hopper) on."""
SMALL = 2 * 4 * MIB + 8 * 16 * 1024
"""Workspace of older GPUs: cuBLAS's own default, `:4096:2:16:8`."""


def predict_workspaces(capability: tuple[int, int], *, config: str | None = None, threads: int = 2) -> int:
    """Bytes of all workspaces that cuBLAS keeps for one stream on which graphs are captured.

    Workspaces lie in no graph pool (`cuda/capture_streams.py`) and do not grow with layers or microbatches. Each thread
    that runs matrix products on the stream gets one from torch, until the process ends. A
    training step has two such threads: the main thread, and autograd's thread for backwards.

    Sources: `parseChosenWorkspaceSize` in PyTorch's CublasHandlePool.cpp; NVIDIA's cuBLAS documentation,
    `cublasSetWorkspace`, for what Hopper needs; pytorch#168175 for cuBLASLt, which shares the workspace from 2.11 on.

    Args:
        capability: Compute capability of the GPU, (9, 0) on Hopper.
        config: `:SIZE:COUNT` pairs in KiB; None reads the environment variable CUBLAS_WORKSPACE_CONFIG. A text without
            such a pair means the default, as in torch.
        threads: Threads that run matrix products in captures; 1 without backwards.

    Raises:
        ValueError: fewer than one thread.
    """
    if threads < 1:
        raise ValueError(f"threads={threads}: at least one thread runs the products")
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "") if config is None else config
    pairs = re.findall(r":([0-9]+):([0-9]+)", config)
    default = LARGE if capability[0] >= 9 else SMALL
    return threads * (sum(int(size) * 1024 * int(count) for size, count in pairs) if pairs else default)
