"""`model.compile: layers`: torch.compile makes one function for all transformer layers of a kind.

A compiled region is a whole layer, or the half of it that computes on its own: attention between ranks of `cp`, and the
routing of tokens to experts, stay outside. Linear layers are nodes of the region's graph that the compiler does not
look into (`labkit/parallel/opaque_linear.py`), so collectives, weight gradients, ledger and Events are as without it.
What it fuses lies between them: norms, biases, the activation, residual additions. In a layer with experts it also
compiles the activation between the two products of the experts, for any number of rows.

The functions below are module-level, and parameters are inputs of what is compiled from them. So layers of one shape
share one compilation, on every chunk of the rank. Forward without gradients is another.

A forward hook on a module inside a region would not see what the region fuses away. A layer with such a hook computes
as without compilation until the hook is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from labkit.models.blocks import TransformerLayer
from labkit.models.gpt import GPTModel
from labkit.moe.experts import Experts, GroupedExperts
from labkit.moe.layer import MoELayer
from labkit.moe.weighted_activation import weighted
from labkit.parallel.layers import ColumnParallelLinear, RowParallelLinear

MOST_SHAPES = 64
"""Shapes and modes in which one region may be compiled in a process; torch gives up after 8."""


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `function` as one compiled graph, with the random numbers that it draws uncompiled."""
    import torch._dynamo.config as tracing  # a second to import, for runs that compile
    import torch._inductor.config as compiler

    # Ranks share the cores and are forked: a rank compiles by itself, and starts no processes that could outlive it.
    compiler.compile_threads = 1
    if not hasattr(tqdm, "_lock"):  # torch makes a progress bar, whose lock between processes nobody would free
        tqdm.set_lock(RLock())
    tracing.recompile_limit = MOST_SHAPES
    return torch.compile(function, fullgraph=True, options={"fallback_random": True})


class _Region:
    """A method of a layer, compiled."""

    def __init__(self, layer: TransformerLayer, name: str) -> None:
        self._plain = partial(getattr(TransformerLayer, name), layer)
        self._layer, self._function = layer, _compiled(getattr(TransformerLayer, name))
        inside = [module for module in layer.modules() if module is not layer]
        self._hooks = [hooks for module in inside for hooks in (module._forward_hooks, module._forward_pre_hooks)]

    def __call__(self, *args: Any) -> Tensor:
        return self._plain(*args) if any(self._hooks) else self._function(self._layer, *args)


def compile_layers(chunks: Iterable[nn.Module]) -> None:
    """Compile the layers of these chunks, each region in its first forward. Call this before the chunks are wrapped.

    Raises:
        ValueError: layers that are not those of `labkit.models.GPTModel`.
    """
    for chunk in chunks:
        layers = list(chunk.layers.values()) if isinstance(chunk, GPTModel) else [chunk]
        for layer in layers:
            if type(layer) is not TransformerLayer:
                raise ValueError(
                    f"model.compile = layers compiles the layers of labkit's GPT, and {type(layer).__name__} is none; "
                    "set it to none"
                )
            _compile_layer(layer)


def _compile_layer(layer: TransformerLayer) -> None:
    for inner in layer.modules():
        if isinstance(inner, ColumnParallelLinear | RowParallelLinear):
            inner.be_opaque()
    # The gather of parameters waits before the layer, since nothing can wait inside a region.
    layer.reads_children = True  # pyright: ignore[reportArgumentType]
    for name in regions(layer):
        setattr(layer, name, _Region(layer, name))
    if isinstance(layer.mlp, MoELayer):
        compile_experts(layer.mlp.experts)


def compile_experts(experts: Experts) -> None:
    """Compile the activation between the products of experts; experts that compute one after the other stay as they
    are."""
    if isinstance(experts, GroupedExperts):
        experts.weighted_activation = partial(_of_any_rows, experts.activation)


def regions(layer: TransformerLayer) -> list[str]:
    """Return the methods of a layer that are compiled: all of it, one half, or nothing."""
    halves = {"forward_attention": layer.attention.core.cp is None, "forward_mlp": layer.part == "mlp"}
    return ["forward"] if all(halves.values()) else [name for name, alone in halves.items() if alone]


def _weighted_activation(activation: Callable[[Tensor], Tensor], x: Tensor, probs_N: Tensor) -> Tensor:
    return weighted(activation(x), probs_N)


def _of_any_rows(activation: Callable[[Tensor], Tensor], x: Tensor, probs_N: Tensor) -> Tensor:
    """Return activation(x) * p, compiled for any number of rows except 0 and 1, which torch would compile anew."""
    if len(x) < 2:
        return _weighted_activation(activation, x, probs_N)
    for rows in (x, probs_N):
        torch._dynamo.maybe_mark_dynamic(rows, 0)
    return _compiled(_weighted_activation)(activation, x, probs_N)
