"""Memory of graphs: its parts, measured on captured graphs (`memory_prediction.py` predicts them).

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

A rank with L layers and M microbatches has 2 L M graphs in a pipeline, as Transformer Engine and Megatron capture them.
Without a pipeline each backward follows its forward at once, so 2 L graphs serve all microbatches.

The microbatches in flight are those of the warm-up and one more: p - r on rank r of p under 1F1B. An eager run has none
of the first four parts, and may free break points earlier. The rest of the pool is activations, which an eager run
keeps too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.graphs.order_table import layers_of_chunks, order_sizes, read_order, sample_index

if TYPE_CHECKING:
    import torch


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
    """The measured memory next to the predicted one; `str` gives a table."""

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
        return "\n".join([*lines, "(bytes, except graphs and operations)"])


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
        break_points=held_at_most(order, layers, stores),
        pool_peak=sum(pool.peak_bytes for pool in pools),
        pool_reserved=sum(pool.reserved_bytes for pool in pools),
        workspaces=max(workspaces, default=None),
    )


def held_at_most(order: Sequence[float], layers: Sequence[int], of_sample: Sequence[int]) -> int:
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
