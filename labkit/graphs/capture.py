"""`make_graphed_callables`: capture callables in the order in which they will run; return callables that replay.

These rules hold for every implementation.

One pool: all graphs share it. Memory is free again as soon as its last tensor is gone, and the next capture takes it.
So replays must come in the order of the captures, and the captures follow `order`.

Fixed addresses: a graph reads its static inputs and writes its static outputs. A call copies its tensors into the
inputs and returns aliases of the outputs.

Shared static inputs (`reuse_buffers`): one buffer serves all microbatches whose spans, from forward to backward, do not
overlap (`plan_buffers`).

Weak references (`reuse_buffers`): the capture drops a tensor as soon as no later graph reads it, so that the pool can
use the memory again. Static outputs go once the callable's backward is captured. So do gradients of parameters, which
replays hand out as copies. Gradients of inputs stay until the backward of the layer below is captured. Those of a
chunk's first layer travel to another rank, so they stay until the next chunk's backward is captured.

A backward reads the tensors that its forward left. If another replay has overwritten them, the backward is rejected
(`checks/in_flight_forwards.py`).

Python runs at capture and not at replay: side effects happen once, and branches are frozen.

Sources: Transformer Engine 2.20, `make_graphed_callables`, for arguments and layouts; PyTorch's function of the same
name.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from labkit.comm.capturing import GraphCaptureError, call_site, graph_warmup, is_graph_capturing, require_whole_process
from labkit.graphs.backend import GraphBackend, Pool, choose_impl, get_backend, make_weak_ref
from labkit.graphs.buffers import BufferPlan
from labkit.graphs.capture_isolation import (
    Arrivals,
    grads_emptied,
    parameters_put_aside,
    random_states_kept,
    rng_trackers_of,
)
from labkit.graphs.capture_request import CaptureRequest, checked_request, parameters_of
from labkit.graphs.capture_result import CallableGraphs, CaptureResult, CaptureTimes
from labkit.graphs.checks.during_capture import called, check_differentiated, outputs_read
from labkit.graphs.checks.in_flight_forwards import in_flight_of
from labkit.graphs.checks.replay_guards import ReplayGuards
from labkit.graphs.graphed_callable import GraphedCallable
from labkit.graphs.planned_captures import PlannedCapture
from labkit.graphs.static_inputs import static_inputs
from labkit.parallel.random import RngTracker
from labkit.parallel.weight_grad_store import WeightGradStore


def make_graphed_callables(
    callables: Any,
    sample_args: Any,
    *,
    sample_kwargs: Any = None,
    order: Sequence[float] | None = None,
    num_layers_per_chunk: int | Sequence[int] | None = None,
    num_warmup: int = 3,
    pool: Any = None,
    reuse_buffers: bool = False,
    impl: str = "auto",
    allow_unused_input: bool = False,
    clone_param_grads: bool = True,
    plan: BufferPlan | None = None,
    watch_replays: bool = True,
    rng_trackers: Sequence[RngTracker] | None = None,
    engine_options: Mapping[str, Any] | None = None,
    backend: GraphBackend | None = None,
) -> Any:
    """Capture callables; return callables that replay the graphs and work under autograd.

    Args:
        callables: a module or function, or a tuple of them. Under `order` the layers of all chunks, chunk by chunk.
        sample_args: a tuple of tensors, or a tuple of such tuples. The samples become the static inputs, so they live
            as long as the graphs. Later calls have the same shapes, types, devices and `requires_grad`. Under `order`
            there is one for every layer and microbatch, at prefix_layers[chunk] M + microbatch L_chunk + layer.
        sample_kwargs: keyword arguments in the same layout: a dict, or a tuple of dicts.
        order: signed chunk numbers, 1 first, as `Schedule.order` gives them; -c - 0.5 is a separate graph of the weight
            gradients. None: each callable has one graph, all forwards run before all backwards.
        num_layers_per_chunk: layers of each chunk; None gives each chunk the same number.
        num_warmup: runs of each callable before its capture, so that lazy initialisation is not captured.
        pool: `.pool` of earlier graphed callables, to share their memory; None starts a new pool.
        reuse_buffers: share static inputs between microbatches and give static outputs back to the pool.
        impl: `transformer_engine`, `local` (CUDA), `emulated` (host), or `auto` by the device of the samples.
        allow_unused_input: allow an input that requires grad and gets none.
        clone_param_grads: return gradients of parameters as copies. False returns aliases of the graph's memory, which
            its next replay overwrites.
        plan: the static input of each layer and microbatch, in place of `plan_buffers`. It is not checked here;
            `check_plan` does that.
        watch_replays: reject a backward whose forward's activations another replay has overwritten. With False the
            gradients are silently wrong, as on a bare CUDA graph.
        rng_trackers: the trackers whose states the callables draw from; None takes those that modules hold.
        engine_options: for Transformer Engine alone: `enabled`, `recipe`, `amax_reduction_group` and
            `cache_quantized_params` of its quantisation.
        backend: a backend in place of that of `impl`.

    Returns:
        One `GraphedCallable` for a single callable, else a tuple in the layout of `sample_args`.

    Raises:
        ValueError: numbers of arguments that do not fit, an order that cannot run, an implementation for another
            device.
        TypeError: arguments that are not tensors.
        GraphCaptureError: hooks, buffers that require grad, mixed modes, or an operation that no graph can hold.
        BrokenProcessError: a failed capture on a GPU, this one or an earlier one, could not be repaired.
    """
    require_whole_process()
    if is_graph_capturing():
        raise GraphCaptureError(f"{call_site()}: graphs cannot be captured while another graph is being captured")
    if impl == "transformer_engine" and plan is not None:
        raise ValueError("a plan is given, but Transformer Engine makes its own: use impl local or emulated")
    request = checked_request(
        callables, sample_args, sample_kwargs,
        order=order, num_layers_per_chunk=num_layers_per_chunk, num_warmup=num_warmup, pool=pool,
        reuse_buffers=reuse_buffers, impl=impl, allow_unused_input=allow_unused_input,
        clone_param_grads=clone_param_grads, plan=plan,
    )  # fmt: skip
    if backend is None:
        impl = choose_impl(impl, request.device())
    if backend is None and impl == "transformer_engine":
        from labkit.graphs.cuda.te_adaptor import make_with_transformer_engine

        made = make_with_transformer_engine(request, engine_options)
    else:
        trackers = rng_trackers_of(request.functions) if rng_trackers is None else list(rng_trackers)
        made = _made_on(backend or get_backend(impl, trackers), request, trackers, watch=watch_replays)
    single = order is None and not isinstance(callables, tuple | list)
    return made[0] if single else made


def _made_on(
    backend: GraphBackend, request: CaptureRequest, trackers: list[RngTracker], *, watch: bool
) -> tuple[GraphedCallable, ...]:
    """Warm up, capture, and put random states back; then let go of the samples that no call is copied into."""
    capture = _Capture(backend, request, watch=watch)
    with random_states_kept(backend.device_type, trackers):
        capture.run(request.num_warmup)
    made = capture.graphed()
    for one in request.arguments:
        one.forget_samples()
    return made


class _Capture:
    """Warm-up and captures of one `CaptureRequest` on one backend."""

    def __init__(self, backend: GraphBackend, request: CaptureRequest, *, watch: bool) -> None:
        """watch: note the times of captures, so that a replay can be rejected (`checks/in_flight_forwards.py`)."""
        self.backend = backend
        self.pool: Pool = backend.new_pool() if request.pool is None else request.pool
        self.places, self.captures, self.reuse = request.places, request.captures, request.reuse_buffers
        self.allow_unused_input, self.clone_param_grads = request.allow_unused_input, request.clone_param_grads
        self.parameters = list(parameters_of(request.functions))
        self.arrivals = Arrivals()
        self.store = WeightGradStore()
        self.put_off = {one.place for one in self.captures if one.kind == "W"}
        self.watch, self.in_flight = watch, in_flight_of(self.pool)
        inputs = static_inputs(request.arguments, request.owner)
        self.captured = [CaptureResult(*of_place) for of_place in zip(request.arguments, inputs, strict=True)]
        for place, captured in zip(self.places, self.captured, strict=True):
            captured.place, captured.in_grad_mode = place, torch.is_grad_enabled()
            captured.in_inference_mode = torch.is_inference_mode_enabled()
        self._seen: set[Hashable] = set()
        self._outputs_read: dict[Hashable, tuple[int, ...]] = {}
        self._forward_time: dict[int, int] = {}
        self._grad_outputs: dict[Hashable, Tensor] = {}
        self._below: int | None = None
        """The place in this chunk whose input gradients were captured last."""
        self._sent: int | None = None
        """First layer of the chunk whose backward was captured last: its input gradient may be on its way to a rank."""

    def run(self, num_warmup: int) -> None:
        """Warm up, then capture everything. A failure resets all graphs."""
        with parameters_put_aside(self.parameters, self.arrivals):
            try:
                with self.backend.warming_up(self.pool), graph_warmup():
                    self._warm_up(num_warmup)
                self.backend.before_captures(self.pool)
                for one in self.captures:
                    {"F": self._forward, "B": self._backward, "W": self._weights}[one.kind](one)
            except BaseException:
                for captured in self.captured:
                    for graph in captured.graphs or ():
                        if graph is not None:
                            graph.reset()
                self.captured, self.store, self._grad_outputs = [], WeightGradStore(), {}
                raise

    # ---- warm-up ----

    def _warm_up(self, runs: int) -> None:
        """Run each callable for every signature of its inputs, each backward right after its forward."""
        done: set[Hashable] = set()
        for index, place in enumerate(self.places):
            kind = (id(place.function), self.captured[index].arguments.signature)
            if kind in done:
                continue
            done.add(kind)
            for _ in range(runs):
                outputs = [y for y in self._called(index) if y is not None and y.requires_grad]
                if not outputs:
                    continue
                with grads_emptied([*self.captured[index].inputs, *self.parameters]):
                    with self.store.collecting(index) if index in self.put_off else nullcontext():
                        # Zeros: a layer that adds to main_grad itself does not change it.
                        torch.autograd.backward(outputs, [torch.zeros_like(y) for y in outputs])
                    if index in self.put_off:
                        self.store.run(index)
            self.arrivals.taken()

    def _called(self, index: int) -> list[Tensor | None]:
        """Run the callable on its static inputs; return its outputs as a flat list."""
        captured, place = self.captured[index], self.places[index]
        outputs, captured.output_spec, captured.changed = called(place, captured.arguments, captured.inputs)
        kind = (id(place.function), captured.arguments.signature)
        if kind not in self._seen:
            self._seen.add(kind)
            check_differentiated(place, outputs, [*captured.inputs, *self.parameters])
        return outputs

    # ---- capture ----

    def _forward(self, one: PlannedCapture) -> None:
        captured, place = self.captured[one.place], self.places[one.place]
        before = ReplayGuards(place.function)
        with self.backend.capturing(self.pool, f"{place.name} forward") as graph:
            outputs = self._called(one.place)
        before.require_members(place.name, "while it was captured")
        kind = (id(place.function), captured.arguments.signature)
        if kind not in self._outputs_read:
            self._outputs_read[kind] = outputs_read(outputs)
        captured.outputs_read = self._outputs_read[kind]
        captured.graphs, self._forward_time[one.place] = CallableGraphs(graph), self.in_flight.captured()
        captured.outputs = tuple(outputs)
        captured.differentiable = tuple(y is not None and y.requires_grad for y in outputs)

    def _backward(self, one: PlannedCapture) -> None:
        captured = self.captured[one.place]
        if not any(captured.differentiable):
            return
        pairs = list(zip(captured.outputs, captured.differentiable, strict=True))
        captured.grad_outputs = tuple(
            self._grad_output(one.place, y, i) if y is not None and wants else None
            for i, (y, wants) in enumerate(pairs)
        )
        wanting = [x for x in captured.inputs if x.requires_grad]
        put_off = one.place in self.put_off
        with grads_emptied([*wanting, *self.parameters]), ExitStack() as stack:
            if put_off:
                stack.enter_context(self.store.collecting(one.place))
            graph = stack.enter_context(self.backend.capturing(self.pool, f"{self.places[one.place].name} backward"))
            torch.autograd.backward(
                [y for y, wants in pairs if wants and y is not None],
                [dy for dy in captured.grad_outputs if dy is not None],
            )
            captured.grad_inputs = tuple(x.grad for x in captured.inputs)
            captured.parameters = tuple(self.arrivals.taken())
            captured.grad_parameters = tuple(p.grad for p in captured.parameters)
        del pairs
        assert captured.graphs is not None
        captured.graphs = captured.graphs._replace(backward=graph)
        if self.watch:
            captured.times = CaptureTimes(self._forward_time[one.place], self.in_flight.captured())
            captured.in_flight = self.in_flight
        self._check_used(one.place)
        if self.reuse:
            self._give_back(one)

    def _grad_output(self, index: int, output: Tensor, number: int) -> Tensor:
        """The tensor that the gradient of output `number` is copied into. It lies outside the pool.

        Under reuse outputs of one number and shape share a tensor, since only the backward reads it. The exception is a
        place whose weight gradients read it later.
        """
        key = (tuple(output.shape), output.dtype, output.layout, number)
        if not self.reuse or index in self.put_off or key not in self._grad_outputs:
            self._grad_outputs[key] = torch.zeros_like(output.detach())
        return self._grad_outputs[key]

    def _weights(self, one: PlannedCapture) -> None:
        captured, name = self.captured[one.place], self.places[one.place].name
        if captured.graphs is None or captured.graphs.backward is None:
            return
        with grads_emptied(self.parameters), self.backend.capturing(self.pool, f"{name} weight gradients") as graph:
            self.store.run(one.place)
            captured.late = tuple((p, p.grad) for p in self.arrivals.taken())
        if not captured.late:
            raise GraphCaptureError(
                f"{name}: the order has separate weight gradients, and this callable computes all of them in its "
                "backward: leave the entries c - 0.5 out of the order"
            )
        captured.graphs = captured.graphs._replace(weight=graph)
        if captured.times is not None:
            captured.times = captured.times._replace(weight=self.in_flight.captured())
        if self.reuse and self.clone_param_grads:
            captured.late = tuple((p, make_weak_ref(dp, self.backend)) for p, dp in captured.late)

    def _check_used(self, index: int) -> None:
        captured = self.captured[index]
        for name, x, dx in zip(captured.arguments.names, captured.inputs, captured.grad_inputs, strict=True):
            if x.requires_grad and dx is None and not self.allow_unused_input:
                raise GraphCaptureError(
                    f"{self.places[index].name}: {name} requires grad and its backward gives it none; pass it without "
                    "requires_grad, or set allow_unused_input=True"
                )

    def _give_back(self, one: PlannedCapture) -> None:
        """Drop the tensors that captures after this backward may overwrite (the rules at the top of this file)."""
        captured, backend = self.captured[one.place], self.backend
        captured.outputs = make_weak_ref(captured.outputs, backend)
        if self.clone_param_grads:
            captured.grad_parameters = make_weak_ref(captured.grad_parameters, backend)
        if self._below is not None:
            self._forget_grad_inputs(self._below)
        self._below = None if one.ends_chunk else one.place
        if one.ends_chunk:
            if self._sent is not None:
                self._forget_grad_inputs(self._sent)
            self._sent = one.place

    def _forget_grad_inputs(self, index: int) -> None:
        self.captured[index].grad_inputs = make_weak_ref(self.captured[index].grad_inputs, self.backend)

    def graphed(self) -> tuple[GraphedCallable, ...]:
        """The results: one for each place."""
        options = {"impl": self.backend.name, "pool": self.pool, "clone_param_grads": self.clone_param_grads}
        pairs = zip(self.places, self.captured, strict=True)
        return tuple(GraphedCallable(place.function, captured, **options) for place, captured in pairs)
