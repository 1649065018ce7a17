"""Transformer Engine's `make_graphed_callables` under our signature.

| ours                   | the engine's                        | since                                               |
|------------------------|-------------------------------------|-----------------------------------------------------|
| `order`                | `_order`                            | always given: without one, n callables are n chunks |
| `num_layers_per_chunk` | `_num_layers_per_chunk`             | left out where unknown and all chunks are alike     |
| `reuse_buffers`        | `_reuse_graph_input_output_buffers` | 2.7                                                 |
| `clone_param_grads`    | `clone_param_grads_on_return`       | before, gradients are copied here                   |
| `engine_options`       | `enabled`, `recipe`, `amax_reduction_group`, `cache_quantized_params` (or `OLDER_NAMES`)  ||
| at each call           | `is_first_microbatch`               | where quantised weights are kept: microbatch 0 only |

The signature of the engine's function tells the arguments that it knows. The adaptor adds work that our own captures do
and the engine leaves out. It checks callables and each call, and restores random states and flags after a failure. It
copies gradients of inputs that would outlive the next replay, and calls the hooks of parameters whose gradients the
graph adds to `main_grad`.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._pytree import tree_leaves

from labkit.comm.capturing import GraphCaptureError, graph_warmup
from labkit.graphs.capture_isolation import Arrivals, parameters_put_aside, random_states_kept, rng_trackers_of
from labkit.graphs.capture_request import CaptureRequest, parameters_of
from labkit.graphs.capture_result import CallableGraphs, CaptureResult
from labkit.graphs.cuda.local_backend import explained, reset_before_leaving, stale_streams_followed
from labkit.graphs.graphed_callable import GraphedCallable
from labkit.graphs.planned_captures import Place
from labkit.graphs.static_inputs import Arguments
from labkit.launch.transformer_engine import why_no_transformer_engine
from labkit.parallel.random import RngTracker

OLDER_NAMES = {
    "enabled": "fp8_enabled",
    "recipe": "fp8_recipe",
    "amax_reduction_group": "fp8_group",
    "cache_quantized_params": "fp8_weight_caching",
}
"""Option of quantisation -> its name in older engines."""
_REPLAYED = "labkit replayed"
"""Key under which the node of a replay in autograd's graph holds its `Place`."""
NEEDED_VERSION = {"_order": "1.5", "sample_kwargs": "1.10", "_reuse_graph_input_output_buffers": "2.7"}


def engine_function() -> Callable[..., Any]:
    """The engine's `make_graphed_callables`.

    Raises:
        ValueError: the engine cannot be used here; one sentence says what is missing.
    """
    if (missing := why_no_transformer_engine()) is not None:
        raise ValueError(f"impl='transformer_engine': {missing}; or use impl='local'")
    return importlib.import_module("transformer_engine.pytorch").make_graphed_callables


def engine_arguments(function: Callable[..., Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for the installed engine. wanted: arguments by the newest engine's names; None is left out.

    Raises:
        ValueError: the engine does not know an argument that matters.
    """
    known = inspect.signature(function).parameters
    given: dict[str, Any] = {}
    for name, value in wanted.items():
        own = name if name in known else OLDER_NAMES.get(name, name)
        dispensable = name in ("_num_layers_per_chunk", "clone_param_grads_on_return")
        if value is None or (own not in known and dispensable):
            continue
        if own in known:
            given[own] = value
        elif value is not False:
            since = f" (it came with {NEEDED_VERSION[name]})" if name in NEEDED_VERSION else ""
            raise ValueError(
                f"this Transformer Engine's make_graphed_callables has no {name}{since}: update the engine, or leave "
                "that argument out"
            )
    layers = wanted.get("_num_layers_per_chunk") or [1]
    if "_num_layers_per_chunk" not in known and len(set(layers)) > 1:
        raise ValueError(f"this Transformer Engine takes only chunks of equal length, and these have {layers} layers")
    return given


def make_with_transformer_engine(
    request: CaptureRequest, engine_options: Mapping[str, Any] | None = None
) -> tuple[GraphedCallable, ...]:
    """Have the engine capture. `make_graphed_callables` calls this after its own checks.

    Raises:
        ValueError: there is no engine here, or it is too old for what is asked.
        GraphCaptureError: the engine captures neither functions that are not modules nor training without gradients.
    """
    modules = _modules(request.functions)
    training = _is_training(modules, request.order)
    make, options = engine_function(), dict(engine_options or {})
    given = engine_arguments(make, _wanted(request, training=training) | options)
    arrivals = Arrivals()
    made = _made_by(make, modules, request.arguments, given, arrivals)
    if not training:
        made = [_taken_off(module) for module in modules]
    if request.clone_param_grads and "clone_param_grads_on_return" not in given:
        for parameter in parameters_of(modules):
            parameter.register_post_accumulate_grad_hook(_own_gradient)
    caches = bool(options.get("cache_quantized_params"))
    inputs = [request.arguments[index].tensors for index in request.owner]
    found = []
    for place, arguments, static, one in zip(request.places, request.arguments, inputs, made, strict=True):
        captured = _captured(place, arguments, static, arrivals)
        arguments.forget_samples()
        found.append(EngineCallable(place, captured, one, pool=request.pool, has_backward=training, caches=caches))
    return tuple(found)


def _is_training(modules: Sequence[nn.Module], order: Sequence[float] | None) -> bool:
    """True in training, with captures of backwards.

    Raises:
        GraphCaptureError: training without gradients, or an order without training.
    """
    training = all(module.training for module in modules)
    if training and not torch.is_grad_enabled():
        raise GraphCaptureError(
            "the engine captures modules in training with their backward: enable gradients, or .eval()"
        )
    if not training and order is not None:
        raise GraphCaptureError("the engine captures an order only in training: leave it out, or call .train()")
    return training


def _wanted(request: CaptureRequest, *, training: bool) -> dict[str, Any]:
    """The arguments of the call, by the names of the newest engine."""
    order, layers = _order_of(request) if training else (None, None)
    return {
        "num_warmup_iters": request.num_warmup,
        "allow_unused_input": request.allow_unused_input,
        "sample_kwargs": _sample_kwargs(request.arguments),
        "_order": order,
        "_num_layers_per_chunk": layers,
        "pool": getattr(request.pool, "handle", request.pool),
        "_reuse_graph_input_output_buffers": request.reuse_buffers,
        "clone_param_grads_on_return": request.clone_param_grads,
    }


def _made_by(
    make: Callable[..., Any],
    modules: Sequence[nn.Module],
    arguments: Sequence[Arguments],
    given: Mapping[str, Any],
    arrivals: Arrivals,
) -> Sequence[Any]:
    """Call the engine's function; gradients, hooks and random states are afterwards as they were before."""
    trackers = rng_trackers_of(modules)
    device = arguments[0].tensors[0].device.type if arguments[0].tensors else "cuda"
    samples = tuple(one.rebuilt(one.tensors)[0] for one in arguments)
    with (
        random_states_kept(device, trackers),
        parameters_put_aside(list(parameters_of(modules)), arrivals),
        _generators_known(make, trackers),
        _set_back(make, modules),
        stale_streams_followed(),
        graph_warmup(),  # for the whole call: only the engine knows whether it warms up or captures
    ):
        return make(tuple(modules), samples, **given)


def _order_of(request: CaptureRequest) -> tuple[list[float], list[int]]:
    """The order and the layers of its chunks; without an order each callable is a chunk with one microbatch."""
    if request.order is not None:
        return list(request.order), list(request.layers)
    count = len(request.functions)
    return [*range(1, count + 1), *range(-count, 0)], [1] * count


class _TakenOff:
    """A graphed forward that the engine has put into a module, and the adaptor has taken out again."""

    def __init__(self, forward: Callable[..., Any], reset: Callable[[], None] | None) -> None:
        self.forward, self.reset = forward, reset or (lambda: None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


def _taken_off(module: nn.Module) -> _TakenOff:
    """Take the graphed forward out of a module: without an order the engine replaces the module's own `forward`."""
    own = vars(module)
    own.pop("backward_dw", None)
    return _TakenOff(own.pop("forward"), own.pop("reset", None))


def _modules(functions: Sequence[Callable[..., Any]]) -> list[nn.Module]:
    modules = [function for function in functions if isinstance(function, nn.Module)]
    if len(modules) != len(functions):
        raise GraphCaptureError("the engine captures only modules: make a module of the function, or use impl='local'")
    return modules


def _sample_kwargs(arguments: Sequence[Arguments]) -> tuple[dict[str, Tensor], ...] | None:
    """Keyword arguments of the samples; None where there are none, since older engines take none."""
    return tuple(one.rebuilt(one.tensors)[1] for one in arguments) if any(one.keywords for one in arguments) else None


def _captured(place: Place, arguments: Arguments, inputs: Sequence[Tensor], arrivals: Arrivals) -> CaptureResult:
    captured = CaptureResult(arguments, inputs)
    own = list(place.function.parameters())  # pyright: ignore[reportFunctionMemberAccess]
    captured.place, captured.in_grad_mode = place, torch.is_grad_enabled()
    captured.parameters = tuple(
        p for p in own if id(p) in arrivals.without_gradient and getattr(p, "main_grad", None) is not None
    )
    return captured


@contextmanager
def _set_back(make: Callable[..., Any], modules: Sequence[nn.Module]) -> Iterator[None]:
    """After a failure, restore the state that the engine changes at the start of a capture and restores at its end."""
    kinds = {type(module): type(module).__dict__.get("__call__") for module in modules}
    collected, stream = gc.isenabled(), torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    try:
        yield
    except BaseException as error:
        for kind, call in kinds.items():
            if call is not None:
                kind.__call__ = call
            elif "__call__" in kind.__dict__:
                del kind.__call__
        for module in modules:
            for inner in module.modules():
                inner._forward_hooks.clear()  # the engine's own: callables with hooks were refused
        if (end := getattr(sys.modules.get(make.__module__), "set_capture_end", None)) is not None:
            end()
        if stream is not None:
            torch.cuda.set_stream(stream)
        if collected:
            gc.enable()
        if isinstance(error, RuntimeError):
            told = explained(error, "a callable of Transformer Engine")
            if told is not error:
                raise told from error
        raise


@contextmanager
def _generators_known(make: Callable[..., Any], trackers: Sequence[RngTracker]) -> Iterator[None]:
    """Inside the block the engine registers labkit's named random states with every graph, in addition to its own."""
    generators = [generator for tracker in trackers for generator in tracker.generators]
    distributed = sys.modules.get(f"{make.__module__.rpartition('.')[0]}.distributed")
    if not generators or distributed is None:
        yield
        return
    before = dict(distributed.get_all_rng_states())
    distributed.set_all_rng_states(before | {f"labkit {i}": generator for i, generator in enumerate(generators)})
    try:
        yield
    finally:
        distributed.set_all_rng_states(before)


def _own_gradient(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad = parameter.grad.clone()


def _notes(node: Any) -> dict[str, Any]:
    """The notes that code outside autograd keeps on a node of autograd's graph."""
    return node.metadata


class _Leaving(Function):
    """Inputs on their way into an engine's graph: y = x, without a copy.

        forward    y = x                                                                  [..] -> [..], same memory
        backward   dx = dy, copied where the next replay would overwrite a kept gradient  [..] -> [..]

    This backward runs after the graph's backward. So it calls the hooks of the parameters whose gradients the graph
    adds itself.
    """

    @staticmethod
    def forward(ctx: Any, graphed: EngineCallable, *tensors: Tensor) -> Any:
        ctx.graphed = graphed
        ctx.set_materialize_grads(False)
        ctx.owned = tuple(graphed.owns_gradient_of(x) for x in tensors)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = [None if dy is None else dy.clone() if copy else dy for dy, copy in zip(grads, ctx.owned, strict=True)]
        for parameter in ctx.graphed.captured.parameters:
            for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                hook(parameter)
        return None, *found


class EngineCallable(GraphedCallable):
    """A callable graphed by the engine, with labkit's checks. The engine keeps graphs and static outputs."""

    def __init__(
        self,
        place: Place,
        captured: CaptureResult,
        engine_callable: Callable[..., Any],
        *,
        pool: Any,
        has_backward: bool,
        caches: bool,
    ) -> None:
        """has_backward: captured in training.
        caches: the engine keeps quantised weights between microbatches, so each call marks the first microbatch."""
        super().__init__(place.function, captured, impl="transformer_engine", pool=pool)
        self.has_backward = has_backward
        self._place, self._caches = place, caches
        self._engine_callable: Callable[..., Any] | None = engine_callable
        reset_before_leaving(self)

    @property
    def graphs(self) -> CallableGraphs:
        """Raise GraphCaptureError, since the engine does not hand out its graphs."""
        raise GraphCaptureError(f"{self.name}: Transformer Engine does not hand out its graphs")

    def _replayed(self, tensors: Sequence[Tensor]) -> Any:
        assert self._engine_callable is not None
        given = list(self.apart(tensors))
        if self.has_backward:
            wanting = [i for i, x in enumerate(given) if x.requires_grad]
            leaving: Any = _Leaving.apply(self, *(given[i] for i in wanting)) if wanting else ()
            for i, x in zip(wanting, leaving, strict=True):
                given[i] = x
        args, kwargs = self.captured.arguments.rebuilt(given)
        if self._caches:
            kwargs["is_first_microbatch"] = getattr(self.function, "current_microbatch", self._place.microbatch) == 0  # type: ignore[assignment]
        outputs = self._engine_callable(*args, **kwargs)
        for y in tree_leaves(outputs):
            if isinstance(y, Tensor) and y.grad_fn is not None:
                _notes(y.grad_fn)[_REPLAYED] = self._place
        return outputs

    def _place_below(self, x: Tensor) -> Place | None:
        return None if x.grad_fn is None else _notes(x.grad_fn).get(_REPLAYED)

    def backward_dw(self) -> None:
        """Replay the engine's graph of the weight gradients that its modules put off."""
        self.require_alive()
        if (run := getattr(self._engine_callable, "backward_dw", None)) is not None:
            run()

    def reset(self) -> None:
        """Drop the engine's graphs; an engine without `reset` frees them with the last reference."""
        if not self._is_reset and (run := getattr(self._engine_callable, "reset", None)) is not None:
            run()
        self._engine_callable = None
        super().reset()
