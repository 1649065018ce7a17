"""`CudaGraphHelper`: capture the layers of a rank's model chunks, and give them their graphs.

    helper = CudaGraphHelper(chunks, config.graph, seq_length, micro_batch_size, schedule=schedule, pp_rank=rank)
    .. eager warm-up steps ..
    helper.create_cudagraphs()             between two steps: it empties the gradient buffers
    helper.cuda_graph_set_manual_hooks()
    .. steps that replay ..

The captures follow the rank's row of the schedule. Each of L layers and M microbatches has a forward and a backward:
2 L M graphs. Inputs and activations share memory wherever the order allows (`plan_buffers`, one pool). Without
pipelining every backward follows its forward at once. Then the helper captures one microbatch, and all replay it. In a
row with merged pairs the layers of two chunks take turns, so every layer is captured as a chunk of its own.

A captured backward always adds to `main_grad`. Python cannot decide at a replay that a gradient is the first of its
step. So the capture marks parameters (`ParameterRecord.added_elsewhere`). At the start of a step gradient buffers
set the gradients of marked parameters to zero; 0 + g equals g to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from labkit.config import GraphConfig
from labkit.events import not_recording, span
from labkit.fp8.gemms import CastOperands
from labkit.fp8.scaling import Float8Scaling
from labkit.graphs.backend import choose_impl
from labkit.graphs.buffers import BufferPlan, plan_buffers
from labkit.graphs.capture import make_graphed_callables
from labkit.graphs.capture_isolation import counters_kept
from labkit.graphs.checks.before_capture import refuse_gloo
from labkit.graphs.graphable_module import GraphableMegatronModule, Shapes, shapes_of, wrap_layers
from labkit.graphs.memory import GraphMemory, graph_objects_made, measure_graphs
from labkit.graphs.order_table import capture_order, merged_capture_order, sample_index
from labkit.graphs.scope import captures_layers
from labkit.parallel.parameters.parameter_record import record_of
from labkit.schedules.ir import Schedule

EAGER_RUNS = 10
"""Number of runs of a layer before its capture, warm-up steps included (Megatron's number)."""


class CudaGraphHelper:
    """Captures the layers of one rank and gives them their graphs (Megatron's `TECudaGraphHelper`)."""

    def __init__(
        self,
        model: Sequence[nn.Module],
        config: GraphConfig,
        seq_length: int,
        micro_batch_size: int,
        *,
        schedule: Schedule,
        pp_rank: int = 0,
        optimizers: Sequence[Any] = (),
        delay_wgrad_compute: bool = False,
    ) -> None:
        """Collect the layers; nothing is captured yet.

        Args:
            model: the rank's chunks in the order of its schedule, wrapped for data parallelism or bare.
            config: the implementation, and the parts of layers to capture.
            seq_length: length of whole sequences.
            micro_batch_size: sequences of a microbatch.
            schedule, pp_rank: the schedule, and the pipeline rank whose row runs here.
            optimizers: a capture calls their `zero_grad`, if they have one.
            delay_wgrad_compute: merged pairs compute weight gradients apart, so these get graphs of their own.

        Raises:
            ValueError: graphs that are not of layers, layers that have graphs, an implementation for another device or
                unable to hold the layers' messages, or a row that cannot be captured.
        """
        if not captures_layers(config):
            raise ValueError(
                f"graph.cuda_graph_impl = {config.cuda_graph_impl} with modules {list(config.cuda_graph_modules)} "
                "captures no layers: CudaGraphHelper is for emulated, local and transformer_engine, FullIterationGraph "
                "for full_iteration"
            )
        self.chunks, self.config, self.optimizers = list(model), config, list(optimizers)
        self.seq_length, self.micro_batch_size = seq_length, micro_batch_size
        wrapped = [wrap_layers(chunk, config) for chunk in model]
        self.callables_per_chunk: list[list[GraphableMegatronModule]] = [
            [layer for layer in layers if layer.is_graphable()] for layers in wrapped
        ]
        """By chunk, the wrappers of the captured layers, in their order."""
        self._is_captured = [[layer.is_graphable() for layer in layers] for layers in wrapped]
        self._delay_wgrad = delay_wgrad_compute
        self._whole = all(layer.is_wholly_captured() for layers in wrapped for layer in layers)
        if any(layer.cuda_graphs for layer in self.layers):
            raise ValueError("these layers have the graphs of another CudaGraphHelper: call its reset() first")
        self._engine_options = _engine_options(self.chunks, config.cuda_graph_impl)
        for layer in self.layers:
            device = next(layer.layer.parameters()).device
            choose_impl(config.cuda_graph_impl, device)
            refuse_gloo(layer.get_groups_under_cudagraphs(), device, config.cuda_graph_impl)
        self.pp_rank = pp_rank
        """The pipeline rank whose row of the schedule is captured."""
        self.order = self._order(schedule, pp_rank)
        """The captures in order: c + 1 is a forward of chunk c, -(c + 1) its backward. If the backward leaves out
        weight gradients, -(c + 1.5) is their capture. Under merged pairs every captured layer is a chunk of its own."""
        self.captured_chunks = self._chunks_of_order(schedule)
        """The captured layers by chunk of `order`."""
        self.schedule_microbatches = schedule.num_microbatches
        self._marked: list[nn.Parameter] = []
        self._graph_objects: int | None = None
        self.plan: BufferPlan | None = None
        """The static input buffer of each captured forward; None before `create_cudagraphs`."""

    def _order(self, schedule: Schedule, pp_rank: int) -> list[int | float]:
        """The order of the captures.

        Eager layers between graphs put their weight gradients off to W and keep their inputs, which are outputs of
        graphs. The pool may use that memory again after the graph's backward, so such a row is rejected.

        Raises:
            ValueError: a row that cannot be captured.
        """
        engine = self.config.cuda_graph_impl == "transformer_engine"
        if schedule.has_pairs:
            return self._order_of_pairs(schedule, pp_rank)
        order = capture_order(schedule, pp_rank, weight_gradients=not engine)
        if any(step != int(step) for step in order) and not self._whole:
            raise ValueError(
                f"{schedule.name} splits backwards, and with graph.cuda_graph_modules = "
                f"{list(self.config.cuda_graph_modules)} a part of the layers stays eager. Its weight gradients would "
                "read outputs of graphs that later replays have overwritten. Capture whole layers (no module named, or "
                "attn and mlp without experts), or choose a schedule with whole backwards (1f1b, interleaved, gpipe)"
            )
        return order

    def _order_of_pairs(self, schedule: Schedule, pp_rank: int) -> list[int | float]:
        """The order where pairs merge. Parts that stay eager keep no output of a graph for their weight gradients: in
        between lie norms, whose gradients are never put off, and all-to-alls, which bring rows of their own."""
        defers = any(layer.defers_weight_gradients() for layer in self.layers)
        order = merged_capture_order(
            schedule, pp_rank, self._is_captured, weight_gradients=defers, delay_wgrad=self._delay_wgrad
        )
        if any(step != int(step) for step in order) and self.config.cuda_graph_impl == "transformer_engine":
            raise ValueError(
                "Transformer Engine's captures have no weight gradients apart: leave schedule.delay_wgrad_compute out, "
                "choose schedule.name 1f1b or interleaved, or set graph.cuda_graph_impl to local"
            )
        return order or [*range(1, len(self.chunks) + 1), *range(-len(self.chunks), 0)]  # of no layers

    def _chunks_of_order(self, schedule: Schedule) -> list[list[GraphableMegatronModule]]:
        return [[layer] for layer in self.layers] if schedule.has_pairs and self.layers else self.callables_per_chunk

    @property
    def layers(self) -> list[GraphableMegatronModule]:
        """The wrappers of every captured layer of the rank, chunk by chunk."""
        return [layer for layers in self.callables_per_chunk for layer in layers]

    @property
    def num_microbatches(self) -> int:
        """Number of captured microbatches."""
        return self.order.count(1)

    @property
    def pool(self) -> Any:
        """The memory that all graphs share; None without graphs, or where Transformer Engine made them."""
        graphs = [graph for layer in self.layers for graph in layer.cuda_graphs]
        return getattr(graphs[0], "pool", None) if graphs else None

    def graphs_created(self) -> bool:
        """True while the layers have their graphs."""
        return self.plan is not None

    def memory(self) -> GraphMemory | None:
        """Memory of this rank's graphs; None without graphs, and for Transformer Engine, which does not say."""
        if not self.graphs_created() or self.config.cuda_graph_impl == "transformer_engine":
            return None
        rounds = range(self.num_microbatches)
        graphs = [layer.cuda_graphs[m] for layers in self.captured_chunks for m in rounds for layer in layers]
        counts = [len(layers) for layers in self.captured_chunks]
        return measure_graphs(graphs, self.order, counts, graph_objects=self._graph_objects)

    # ---- capture ----

    def create_cudagraphs(self, *, early_release: int = 0) -> None:
        """Capture every layer once for each microbatch, and give it the graphs. Call this between two steps.

        early_release: the number of steps before its backward at which a static input is given back. Above 0 gradients
            can be wrong, as a chapter shows.

        Raises:
            RuntimeError: there are graphs already (`reset` drops them).
            GraphCaptureError: an operation that a graph cannot hold.
        """
        if self.graphs_created():
            raise RuntimeError("there are graphs already: call reset() before they are captured again")
        if not self.layers:
            self.plan = plan_buffers(self.order, [0] * len(self.chunks))
            return
        counts = [len(layers) for layers in self.captured_chunks]
        made = [_context(chunk, self.seq_length) for chunk in self.chunks]
        contexts = {layer: made[c] for c, layer in self._with_chunk()}
        signatures = [_signature(self._inputs(layer, contexts[layer])) for layer in self.layers]
        keep = self.config.cuda_graph_impl != "transformer_engine"  # the engine gives inputs back with the backward
        plan = plan_buffers(self.order, counts, signatures, early_release=early_release, keep_for_weight_gradients=keep)
        for layer in self.layers:
            if layer.cut is not None:
                layer.cut.metadata_form = None  # it holds shapes, and these captures may have others
            for linear in _float8_linears(layer):
                linear.plan.gemms.keep_weight(linear.weight)
        parameters = [p for layer in self.layers for p in layer.layer.parameters()]
        self._marked = [p for p in parameters if not record_of(p).added_elsewhere]
        device = next(self.layers[0].layer.parameters()).device
        with (
            span("capture of layers", "timer"),
            not_recording(),
            _around_capture(self.chunks, self.layers),
            graph_objects_made(device) as objects,
        ):
            graphs = self._capture(plan, counts, contexts)
        self._graph_objects = objects[0] if objects else None
        for chunk, layers in enumerate(self.captured_chunks):
            for position, layer in enumerate(layers):
                places = (
                    sample_index(counts, self.num_microbatches, chunk, position, microbatch)
                    for microbatch in range(self.num_microbatches)
                )
                layer.cuda_graphs, layer.cuda_graph_owner = [graphs[place] for place in places], self
                layer.cuda_graph_shapes = shapes_of(self._inputs(layer, contexts[layer]))
        self._finish()
        self.plan = plan

    def _capture(
        self, plan: BufferPlan, counts: list[int], contexts: Mapping[GraphableMegatronModule, tuple[Tensor, ...]]
    ) -> Sequence[Any]:
        buffers: dict[int, tuple[Tensor, ...]] = {}
        samples: dict[int, tuple[Tensor, ...]] = {}
        for (chunk, position, microbatch), buffer in plan.assignment.items():
            if buffer not in buffers:
                layer = self.captured_chunks[chunk][position]
                buffers[buffer] = self._inputs(layer, contexts[layer])
            samples[sample_index(counts, self.num_microbatches, chunk, position, microbatch)] = buffers[buffer]
        eager = self.config.cuda_graph_warmup_steps * self.schedule_microbatches
        return make_graphed_callables(
            tuple(layer.layer for layer in self.layers),
            [samples[place] for place in sorted(samples)],
            order=self.order,
            num_layers_per_chunk=counts,
            num_warmup=max(1, math.ceil((EAGER_RUNS - eager) / self.num_microbatches)),
            reuse_buffers=True,
            impl=self.config.cuda_graph_impl,
            allow_unused_input=True,
            plan=None if self.config.cuda_graph_impl == "transformer_engine" else plan,
            engine_options=self._engine_options,
        )

    def _with_chunk(self) -> Iterator[tuple[int, GraphableMegatronModule]]:
        for chunk, layers in enumerate(self.callables_per_chunk):
            for layer in layers:
                yield chunk, layer

    def _inputs(
        self, layer: GraphableMegatronModule, context: tuple[Tensor, ...], sizes: tuple[int, int] | None = None
    ) -> tuple[Tensor, ...]:
        """New tensors for the inputs of one layer. sizes: (seq_length, micro_batch_size), if not the helper's."""
        inputs = layer.get_layer_static_inputs(*(sizes or (self.seq_length, self.micro_batch_size)))
        own = tuple(tensor.clone() for tensor in context)
        return layer.cuda_graph_inputs(inputs["x_SBH"], own or None)

    def _finish(self) -> None:
        """Drop the gradients and fp8 weights that warm-up and capture made."""
        for chunk in self.chunks:
            if hasattr(chunk, "zero_grad_buffer"):
                chunk.zero_grad_buffer()  # pyright: ignore[reportCallIssue]
            scaling = getattr(chunk, "precision", None)
            if isinstance(scaling, Float8Scaling):
                scaling.forget_weights()
        for optimizer in self.optimizers:
            if hasattr(optimizer, "zero_grad"):
                optimizer.zero_grad()

    def cuda_graph_set_manual_hooks(self) -> None:
        """Have every replay first wait for parameters that the distributed optimizer is still gathering.

        The first replay of a step also casts weights to fp8.
        """
        for chunk, layers in zip(self.chunks, self.callables_per_chunk, strict=True):
            gather = getattr(chunk, "param_gather", None)
            if gather is not None and gather.overlap:
                for layer in layers:
                    layer.setup_manual_hooks(gather.make_hook)
        for layer in self.layers:
            layer.cuda_graph_manual_hooks += [(_refresh_float8, (linear,)) for linear in _float8_linears(layer)]

    # ---- again ----

    def reset(self) -> None:
        """Drop all graphs and their memory. The layers run eagerly until the next `create_cudagraphs`."""
        for layer in self.layers:
            for graph in layer.cuda_graphs:
                if hasattr(graph, "reset"):
                    graph.reset()  # pyright: ignore[reportFunctionMemberAccess]
            layer.cuda_graphs, layer.cuda_graph_owner = [], None
            layer.cuda_graph_manual_hooks.clear()
        while self._marked:
            record_of(self._marked.pop()).added_elsewhere = False
        self.plan = None

    def recapture(
        self, *, schedule: Schedule | None = None, pp_rank: int | None = None, seq_length: int | None = None,
        micro_batch_size: int | None = None,
    ) -> None:  # fmt: skip
        """Capture new graphs for another number of microbatches or other shapes. Call this between two steps.

        None keeps a value as it is.

        Raises:
            ValueError: a row that cannot be captured; the old graphs then stay.
        """
        if pp_rank is not None and schedule is None:
            raise ValueError(f"pp_rank = {pp_rank} names a row of a schedule: give that schedule as well")
        if schedule is not None:
            pp_rank = self.pp_rank if pp_rank is None else pp_rank
            self.order, self.pp_rank = self._order(schedule, pp_rank), pp_rank
            self.captured_chunks = self._chunks_of_order(schedule)
            self.schedule_microbatches = schedule.num_microbatches
        self.reset()
        self.seq_length = self.seq_length if seq_length is None else seq_length
        self.micro_batch_size = self.micro_batch_size if micro_batch_size is None else micro_batch_size
        self.create_cudagraphs()
        self.cuda_graph_set_manual_hooks()

    def sizes_of(self, shapes: Shapes) -> tuple[int, int] | None:
        """(seq_length, micro_batch_size) of microbatches that give a layer inputs of these shapes.

        None where no such pair exists, as where each sequence has positions of its own.
        """
        chunk, layer = next(self._with_chunk())
        own, given = layer.cuda_graph_shapes[0][0], shapes[0][0]
        sizes = given[0] * self.seq_length // own[0], given[1]
        fitting = self._inputs(layer, _context(self.chunks[chunk], sizes[0]), sizes)
        return sizes if shapes_of(fitting) == shapes else None


TECudaGraphHelper = CudaGraphHelper
"""Megatron's name for this class."""


def _engine_options(chunks: Sequence[Any], impl: str) -> dict[str, Any] | None:
    """The fp8 options of Transformer Engine's layers; None where they do not compute in fp8."""
    scalings: list[Any] = [getattr(chunk, "precision", None) for chunk in chunks]
    engines = [scaling for scaling in scalings if hasattr(scaling, "graph_options")]
    if engines and impl != "transformer_engine":
        raise ValueError(
            f"graph.cuda_graph_impl = {impl} does not know the fp8 scales of Transformer Engine's layers: set it to "
            "transformer_engine, or optim.fp8 to none"
        )
    return engines[0].graph_options() if engines else None


def _context(chunk: nn.Module, seq_length: int) -> tuple[Tensor, ...]:
    """The tensors that the chunk gives each of its layers in addition to the layer's input."""
    make = getattr(chunk, "layer_context", None)
    return () if make is None else tuple(make(seq_length))  # pyright: ignore[reportCallIssue]


def _signature(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple((tuple(t.shape), t.dtype, t.layout, t.requires_grad) for t in tensors)


@contextmanager
def _around_capture(chunks: Sequence[Any], layers: Sequence[GraphableMegatronModule]) -> Iterator[None]:
    """Inside the block: training mode and no pre-hooks of wrappers. Afterwards modes and counters are as before."""
    modes = [wrapper.layer.training for wrapper in layers]
    with ExitStack() as stack, counters_kept(chunks):
        for chunk in chunks:
            if hasattr(chunk, "disable_forward_pre_hook"):
                chunk.disable_forward_pre_hook()
                stack.callback(chunk.enable_forward_pre_hook)
        for wrapper in layers:
            wrapper.layer.train()
        yield
    for wrapper, mode in zip(layers, modes, strict=True):
        wrapper.layer.train(mode)


def _float8_linears(layer: GraphableMegatronModule) -> Iterator[Any]:
    """The captured linear layers of a layer that compute in fp8."""
    for part in layer.get_submodules_under_cudagraphs():
        for module in part.modules():
            if isinstance(getattr(getattr(module, "plan", None), "gemms", None), CastOperands):
                yield module


def _refresh_float8(linear: Any) -> None:
    linear.plan.gemms.refresh_weight(linear.weight)
