"""Every graph of one call of `make_graphed_callables`, in the order of their captures.

A callable gets graphs of its own for each microbatch: a `Place`. A place has a forward, a backward and, where the order
separates them, weight gradients: each is a `PlannedCapture`. Places lie in the layout of the sample arguments
(`sample_index`), captures in the order in which they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from labkit.graphs.order_table import layers_of_chunks, order_sizes, read_order, sample_index, sample_places


class Place(NamedTuple):
    """A callable at one microbatch, which gets graphs of its own."""

    function: Callable[..., Any]
    """The callable to capture."""
    name: str
    """Name in messages and of the graphs: `chunk 0 layer 1 microbatch 2`, or `callable 3`."""
    chunk: int
    """Model chunk of the rank, 0 first; 0 without an order."""
    layer: int
    """Layer in the chunk, 0 first; without an order the number of the callable."""
    microbatch: int
    """Microbatch, 0 first."""


class PlannedCapture(NamedTuple):
    """One graph to capture."""

    kind: str
    """F forward, B backward, W weight gradients that the backward left out."""
    place: int
    """Index of the `Place`."""
    ends_chunk: bool
    """True for the last graph of an entry in the order."""


def planned_captures(
    callables: Sequence[Callable[..., Any]],
    samples: int,
    order: Sequence[float] | None,
    num_layers_per_chunk: int | Sequence[int] | None,
) -> tuple[list[Place], list[PlannedCapture], tuple[int, ...]]:
    """(places in the layout of the sample arguments, graphs in the order of capture, layers of each chunk).

    Raises:
        ValueError: an order that `read_order` rejects, or numbers of callables and sample arguments that do not fit.
    """
    if order is None:
        return _forwards_then_backwards(callables, samples)
    passes = read_order(order)
    chunks, microbatches = order_sizes(passes)
    layers = _layers_of_callables(callables, chunks, num_layers_per_chunk)
    if samples != len(callables) * microbatches:
        raise ValueError(
            f"{samples} sample_args for {len(callables)} callables and {microbatches} microbatches of the order: "
            f"give {len(callables) * microbatches}, each at index prefix_layers[chunk] * {microbatches} + "
            "microbatch * layers[chunk] + layer"
        )
    places = [
        Place(callables[sum(layers[:c]) + layer], f"chunk {c} layer {layer} microbatch {m}", c, layer, m)
        for c, layer, m in sample_places(layers, microbatches)
    ]
    captures: list[PlannedCapture] = []
    for one in passes:
        through = range(layers[one.chunk])
        for layer in through if one.kind == "F" else reversed(through):
            ends = layer == (through[-1] if one.kind == "F" else 0)
            place = sample_index(layers, microbatches, one.chunk, layer, one.microbatch)
            captures.append(PlannedCapture(one.kind, place, ends))
    return places, captures, layers


def _forwards_then_backwards(
    callables: Sequence[Callable[..., Any]], samples: int
) -> tuple[list[Place], list[PlannedCapture], tuple[int, ...]]:
    """Without an order: each callable once, all forwards and then all backwards in reverse."""
    if samples != len(callables):
        raise ValueError(f"{samples} sample_args for {len(callables)} callables: give one tuple of tensors for each")
    places = [Place(f, f"callable {i}", 0, i, 0) for i, f in enumerate(callables)]
    forwards = [PlannedCapture("F", i, True) for i in range(samples)]
    return places, forwards + [PlannedCapture("B", i, True) for i in reversed(range(samples))], (samples,)


def _layers_of_callables(
    callables: Sequence[Callable[..., Any]], chunks: int, num_layers_per_chunk: int | Sequence[int] | None
) -> tuple[int, ...]:
    """Layers of each chunk, which add up to the callables; None gives each chunk the same number."""
    if num_layers_per_chunk is None:
        if len(callables) % chunks:
            raise ValueError(
                f"{len(callables)} callables cannot be shared out equally over the {chunks} chunks of the order: "
                "say how many each has in num_layers_per_chunk"
            )
        num_layers_per_chunk = len(callables) // chunks
    layers = layers_of_chunks(num_layers_per_chunk, chunks)
    if sum(layers) != len(callables):
        raise ValueError(
            f"num_layers_per_chunk {layers} add up to {sum(layers)}, and there are {len(callables)} callables"
        )
    return layers
