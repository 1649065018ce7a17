"""The memory of graphs, predicted from the order of their captures and from the captures of one layer.

Capture one layer along `LAYER_ORDER` and read its `LayerMemory` off the pool's history. `predict_graph_memory` then
tells the parts of `GraphMemory` for any order and any number of such layers. This module imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.graphs.buffers import plan_buffers
from labkit.graphs.memory import GraphMemory, held_at_most
from labkit.graphs.order_table import layers_of_chunks, order_sizes, read_order, sample_places
from labkit.graphs.pool import PoolHistory, play_back


@dataclass(frozen=True)
class LayerMemory:
    """Bytes that one layer's graphs take from a pool."""

    forward_peak: int
    """Most bytes that the forward's capture adds for a moment."""
    kept: int
    """Bytes that stay until the backward: output and saved activations."""
    backward_peak: int
    """Most bytes that the backward's capture adds for a moment, besides `kept`."""
    grad_inputs: int
    """Bytes that stay until the layer before has read them: gradients of the layer's inputs."""


LAYER_ORDER = (1, 1, -1, 1, -1, -1)
"""An order that shows a layer's memory. A forward gives nothing back, and one follows the first forward and the first
backward. So the history separates bytes that stay from bytes that the next capture drops."""


def layer_memory(history: PoolHistory) -> LayerMemory:
    """The memory of a layer, from a pool that holds its captures along LAYER_ORDER with buffers reused, and no others.

    Raises:
        ValueError: the pool has seen other captures than these six.
    """
    playback = play_back(history)
    if len(playback.captures) != len(LAYER_ORDER):
        raise ValueError(
            f"the pool has seen {len(playback.captures)} captures that take memory: capture one layer along "
            f"{list(LAYER_ORDER)}, in a pool of its own"
        )
    forward, _, backward, *_ = [playback.live_bytes[first : last + 1] for _, first, last in playback.captures]
    kept = forward[-1]
    return LayerMemory(
        forward_peak=max(forward), kept=kept, backward_peak=max(backward) - 2 * kept, grad_inputs=backward[-1] - kept
    )


@dataclass(frozen=True)
class PoolPrediction:
    """Bytes that a pool holds while an order's graphs are captured."""

    peak_bytes: int
    """Most bytes at once."""
    live_bytes: tuple[int, ...]
    """Bytes held after each step of the order."""


def predict_pool(
    order: Sequence[float], layers_per_chunk: int | Sequence[int], memory: LayerMemory | Sequence[LayerMemory]
) -> PoolPrediction:
    """Predict the bytes held in the shared pool along an order.

    A forward leaves `kept` until its backward has been captured. The layer before reads the gradient of a layer's
    input, which is free after the backward of that layer. The gradient of a chunk's input travels to another rank, so
    it stays until the next backward has been captured.

    memory: memory of every layer, chunk by chunk, or one for all.

    Raises:
        ValueError: an order that `read_order` rejects, one with separate weight gradients (c - 0.5), which keep more
            memory than `LayerMemory` tells, or numbers for another number of layers.
    """
    passes = read_order(order)
    if any(one.kind == "W" for one in passes):
        raise ValueError(
            "the order has separate weight gradients (c - 0.5), and the memory that stays alive until they have run is "
            "not predicted: measure the pool instead"
        )
    layers = layers_of_chunks(layers_per_chunk, order_sizes(passes)[0])
    of_layer = [memory] * sum(layers) if isinstance(memory, LayerMemory) else list(memory)
    if len(of_layer) != sum(layers):
        raise ValueError(f"memory of {len(of_layer)} layers for {sum(layers)}: give one for each, or one for all")
    live, peak, sent, after = 0, 0, 0, []
    for one in passes:
        first = sum(layers[: one.chunk])
        of_chunk = of_layer[first : first + layers[one.chunk]]
        if one.kind == "F":
            for layer in of_chunk:
                peak = max(peak, live + layer.forward_peak)
                live += layer.kept
        elif one.kind == "B":
            above = 0  # gradient of the input of the layer above
            for layer in reversed(of_chunk):
                peak = max(peak, live + layer.backward_peak)
                live += layer.grad_inputs - layer.kept - above
                above = layer.grad_inputs
            live, sent = live - sent, above
        after.append(live)
    return PoolPrediction(peak, tuple(after))


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
        ValueError: an order that `predict_pool` rejects, or numbers for another number of layers.
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
        break_points=held_at_most(order, layers, _of_each_sample(stores, layers, microbatches)),
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
