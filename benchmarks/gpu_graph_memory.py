"""Part of the GPU benchmark: the memory of graphs, foreseen and measured, along the order of a pipeline (row G7).

What a rank's graphs will take follows from what one layer does to a pool (`LayerMemory`). One layer is captured on the
host by the emulated graphs, before there is a GPU, and on the device itself; from each the rank is predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from gpu_peers import DEVICE, Row, held, open_workspaces, reason
from gpu_plain import our_layers
from gpu_steps import PLAIN
from torch import Tensor

from labkit.config import ModelConfig
from labkit.graphs import (
    LAYER_ORDER,
    GraphMemoryReport,
    LayerMemory,
    graph_objects_made,
    layer_memory,
    make_graphed_callables,
    measure_graphs,
    predict_graph_memory,
)
from labkit.graphs.backend import get_backend
from labkit.schedules import one_f_one_b

HOST = torch.device("cpu")


class Span(NamedTuple):
    """A capture, in bytes of its pool."""

    before: int
    """Alive when it began."""
    peak: int
    """Most that was alive during it."""


class Watched:
    """A backend of a GPU whose captures are measured: torch keeps no history of a pool."""

    def __init__(self, inner: Any, device: torch.device) -> None:
        self.inner, self.device, self.spans = inner, device, list[Span]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @contextmanager
    def capturing(self, pool: Any, *given: Any, **options: Any) -> Iterator[Any]:
        """The inner backend's, between two looks at the allocator."""
        before, allocated = pool.live_bytes, torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        with self.inner.capturing(pool, *given, **options) as graph:
            yield graph
        peak = torch.cuda.max_memory_allocated(self.device) - allocated
        self.spans.append(Span(before, before + peak))


def from_spans(spans: Sequence[Span]) -> LayerMemory:
    """What `layer_memory` reads off a history, from the captures of one layer along LAYER_ORDER.

    Raises:
        ValueError: other captures than those six.
    """
    if len(spans) != len(LAYER_ORDER):
        raise ValueError(f"{len(spans)} captures: capture one layer along {list(LAYER_ORDER)}")
    start, kept = spans[0].before, spans[1].before - spans[0].before
    return LayerMemory(
        forward_peak=spans[0].peak - start,
        kept=kept,
        backward_peak=spans[2].peak - start - 2 * kept,
        grad_inputs=spans[3].before - start - kept,
    )


def captured(
    config: ModelConfig, layers: int, order: Sequence[float], device: torch.device, dtype: torch.dtype, **made: Any
) -> Sequence[Any]:
    """Graphs of `layers` layers of one chunk along an order, buffers reused."""
    stack = tuple(our_layers(replace(config, layers=layers), device, dtype))

    def sample() -> tuple[Tensor]:
        shape = (config.seq_length, 1, config.hidden)
        return (torch.randn(shape, device=device).to(dtype).requires_grad_(),)

    samples = [sample() for _ in range(layers * len(order) // 2)]
    return make_graphed_callables(
        stack, samples, order=order, num_layers_per_chunk=[layers], reuse_buffers=True, num_warmup=1, **made
    )


def of_one_layer(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> LayerMemory:
    """Measured on `device`."""
    if device.type == "cpu":
        return layer_memory(captured(config, 1, LAYER_ORDER, device, dtype, impl="emulated")[0].pool.history)
    backend = Watched(get_backend("local", []), device)
    captured(config, 1, LAYER_ORDER, device, dtype, backend=backend)
    return from_spans(backend.spans)


def report_row(case: str, report: GraphMemoryReport) -> Row:
    """Parts as [predicted, measured], bytes in MiB; None is nobody's guess. `over_predicted` is of the pool."""
    counts = ("graphs", "operations")
    row: Row = {"case": case}
    for label, *values in report.rows():
        key = label if label in counts else f"{label} mib"
        row[key] = [value if value is None or label in counts else round(value / 2**20, 2) for value in values]
    assert report.predicted is not None
    return row | {"over_predicted": round(report.measured.pool_peak / report.predicted.pool_peak, 3)}


def graph_memory(
    pp: int = 4,
    microbatches: int = 8,
    layers: int = 2,
    config: ModelConfig = ModelConfig(layers=1, hidden=1024, heads=16, seq_length=1024, **PLAIN),  # noqa: B008
    *,
    device: torch.device = DEVICE,
    dtype: torch.dtype = torch.bfloat16,
    impl: str = "local",
) -> Iterator[Row]:
    """G7 foreseen: the graphs of stage 0 of 1F1B, predicted from one layer on the host and on the device."""
    order = one_f_one_b(pp, microbatches).order(0)
    open_workspaces(device, dtype)
    known: dict[str, LayerMemory] = {}
    case = f"G7: graphs of stage 0, 1F1B pp{pp} M{microbatches}, {layers} layers h{config.hidden} s{config.seq_length}"
    for where, place in {"host": HOST, "device": device}.items():
        try:
            known[where] = of_one_layer(config, place, dtype)
        except Exception as error:
            yield {"case": f"{case}: predicted from one layer on the {where}", "could_not_run": reason(error)}
    held(device)
    with graph_objects_made(device) as objects:
        graphed = captured(config, layers, order, device, dtype, impl=impl)
    measured = measure_graphs(graphed, order, layers, graph_objects=objects[0] if objects else None)
    nbytes = config.seq_length * config.hidden * dtype.itemsize
    for where, memory in known.items():
        predicted = predict_graph_memory(order, layers, memory, input_bytes=nbytes)
        words = f"{case}: predicted from one layer on the {where}, measured"
        yield report_row(words, GraphMemoryReport(measured, predicted))
