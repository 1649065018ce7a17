"""The callables of a capture, the arguments of their calls, and checks of both; the same for every `impl`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path

from labkit.comm.capturing import GraphCaptureError
from labkit.graphs.checks.replay_guards import HOOKS, global_hooks
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


class Work(NamedTuple):
    """One graph to capture, or one run of a warm-up."""

    kind: str
    """F forward, B backward, W weight gradients that the backward left out."""
    place: int
    """Index of the `Place`."""
    ends_chunk: bool
    """True for the last graph of an entry in the order."""


def places_and_work(
    callables: Sequence[Callable[..., Any]],
    samples: int,
    order: Sequence[float] | None,
    num_layers_per_chunk: int | Sequence[int] | None,
) -> tuple[list[Place], list[Work], tuple[int, ...]]:
    """(places in the layout of the sample arguments, graphs in the order of capture, layers of each chunk).

    Raises:
        ValueError: an order that `read_order` refuses, or numbers of callables and sample arguments that do not fit.
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
    work: list[Work] = []
    for one in passes:
        through = range(layers[one.chunk])
        for layer in through if one.kind == "F" else reversed(through):
            ends = layer == (through[-1] if one.kind == "F" else 0)
            work.append(Work(one.kind, sample_index(layers, microbatches, one.chunk, layer, one.microbatch), ends))
    return places, work, layers


def _forwards_then_backwards(
    callables: Sequence[Callable[..., Any]], samples: int
) -> tuple[list[Place], list[Work], tuple[int, ...]]:
    """Without an order: each callable once, all forwards and then all backwards in reverse."""
    if samples != len(callables):
        raise ValueError(f"{samples} sample_args for {len(callables)} callables: give one tuple of tensors for each")
    places = [Place(f, f"callable {i}", 0, i, 0) for i, f in enumerate(callables)]
    forwards = [Work("F", i, True) for i in range(samples)]
    return places, forwards + [Work("B", i, True) for i in reversed(range(samples))], (samples,)


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


def check_callables(callables: Sequence[Callable[..., Any]]) -> None:
    """Refuse callables that a replay could not follow.

    Raises:
        TypeError: an object that cannot be called.
        GraphCaptureError: modules in training beside modules in evaluation, hooks, buffers that require grad,
            autocast's cache.
    """
    for function in callables:
        if not callable(function):
            raise TypeError(f"a callable is expected, got a {type(function).__name__}")
    modules = [function for function in callables if isinstance(function, nn.Module)]
    if len({module.training for module in modules}) > 1:
        raise GraphCaptureError(
            "some modules are in training and some in evaluation mode: graphs that share a pool are captured in one "
            "mode. Call .train() or .eval() on all of them"
        )
    casts = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
    if casts and torch.is_autocast_cache_enabled():
        raise GraphCaptureError(
            "autocast keeps cast weights from one forward to the next, and a replay would read the old weights: "
            "capture inside torch.autocast(.., cache_enabled=False)"
        )
    if modules and any(global_hooks()):
        raise GraphCaptureError(
            "a hook is registered for all modules (register_module_forward_hook and the like); it would run at "
            "capture and at no replay: remove it before the capture"
        )
    for module in modules:
        for name, inner in module.named_modules():
            _check_module(f"{type(module).__name__}{'.' if name else ''}{name}", inner)


def _check_module(name: str, module: nn.Module) -> None:
    for attribute, what in HOOKS.items():
        if getattr(module, attribute):
            raise GraphCaptureError(
                f"{name} has {what}, which would run at capture and at no replay: remove it before the capture. To "
                "keep its effect, call it ahead of each replay (cuda_graph_manual_hooks)"
            )
    for buffer, tensor in module.named_buffers(recurse=False):
        if tensor.requires_grad:
            raise GraphCaptureError(
                f"buffer {name}.{buffer} requires grad, and only parameters and inputs of a graph get gradients: "
                "make it a parameter, or requires_grad_(False)"
            )


class Arguments:
    """The tensors of a call, in a fixed order, with fixed shapes and types: positional ones, then keywords by name."""

    def __init__(self, place: str, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Learn order, shapes and types from a sample call.

        Raises:
            TypeError: an argument is no tensor, or `args` is no tuple.
        """
        if not isinstance(args, tuple | list):
            raise TypeError(
                f"{place}: sample_args must be a tuple of tensors, got a {type(args).__name__}; "
                "write (x,) for one argument"
            )
        self.place = place
        self.keywords = tuple(kwargs)
        self._positional = len(args)
        self.tensors, self.spec = self._flatten(tuple(args), kwargs)
        paths, _ = tree_flatten_with_path(self._tree(tuple(args), kwargs))
        self.names = tuple(self._name(path) for path, _ in paths)
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if tensor is None:
                raise TypeError(f"{place}: {name} is None; a graph takes only tensors: leave it out of the sample")
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{place}: {name} is a {type(tensor).__name__}; a graph takes only tensors. Put a constant into "
                    "the callable (functools.partial), and a value that changes into a tensor"
                )
        self._known = [(x.shape, x.dtype, x.device) for x in self.tensors]
        self._flat = all(isinstance(x, Tensor) for x in (*args, *kwargs.values()))
        shapes = tuple((tuple(x.shape), x.dtype, x.layout, x.requires_grad) for x in self.tensors)
        self.signature: Hashable = (shapes, self.keywords)
        """Two calls can share static inputs only if their signatures are equal."""

    def forget_samples(self) -> None:
        """Keep only shapes and structure: where calls share static inputs, most samples are not needed any more."""
        self.tensors = []

    def _name(self, path: Any) -> str:
        which, index = path[0].idx, path[1].idx
        return (f"keyword argument {self.keywords[index]}" if which else f"argument {index}") + keystr(path[2:])

    def _tree(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        return list(args), [kwargs[key] for key in self.keywords]

    def _flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], TreeSpec]:
        return tree_flatten(self._tree(args, kwargs))

    def of_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Tensor]:
        """The tensors of a later call, checked against the sample.

        Raises:
            TypeError: the sample had other arguments.
            GraphCaptureError: a shape, type or device differs from the sample's.
        """
        if len(args) != self._positional or kwargs.keys() != set(self.keywords):
            raise TypeError(
                f"{self.place} was captured with {self._positional} positional argument(s) and the keywords "
                f"{list(self.keywords)}, and is called with {len(args)} and {list(kwargs)}: pass all of the sample call"
            )
        if self._flat:
            tensors: Sequence[Tensor] = [*args, *(kwargs[key] for key in self.keywords)] if kwargs else args
        else:
            tensors, spec = self._flatten(args, kwargs)
            if spec != self.spec:
                raise TypeError(f"{self.place} is called with arguments nested in another way than at capture")
        for i, (tensor, (shape, dtype, device)) in enumerate(zip(tensors, self._known, strict=True)):
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{self.place}: {self.names[i]} is a {type(tensor).__name__}, at capture it was a tensor"
                )
            if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
                raise GraphCaptureError(
                    f"{self.place}: {self.names[i]} is {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}, and "
                    f"the graph was captured with {tuple(shape)} of {dtype} on {device}: shapes of a graph are fixed; "
                    "pad to that shape, or capture again"
                )
        return tensors

    def rebuilt(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of the sample call with `tensors` in the place of its own."""
        args, values = self.spec.unflatten(tensors)
        return tuple(args), dict(zip(self.keywords, values, strict=True))


def parameters_of(functions: Sequence[Callable[..., Any]]) -> Iterator[nn.Parameter]:
    """The parameters of these modules that require grad, each once."""
    seen: set[int] = set()
    for function in functions:
        for parameter in function.parameters() if isinstance(function, nn.Module) else ():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


class CaptureRequest(NamedTuple):
    """The checked arguments of `make_graphed_callables`: our backends and Transformer Engine take the same."""

    functions: Sequence[Callable[..., Any]]
    """The callables; under an order the layers of all chunks, chunk by chunk."""
    places: Sequence[Place]
    """One for each pair of arguments, in the layout of the sample arguments."""
    work: Sequence[Work]
    """All graphs, in the order of their captures."""
    arguments: Sequence[Arguments]
    """The sample of each place."""
    owner: Sequence[int]
    """For each place, the index of the place into whose sample its calls are copied."""
    order: Sequence[float] | None
    """Signed chunk numbers; None where each callable has one graph."""
    layers: Sequence[int]
    """Layers of each chunk."""
    num_warmup: int
    pool: Any
    reuse_buffers: bool
    allow_unused_input: bool
    clone_param_grads: bool
