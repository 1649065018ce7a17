"""Graphs of a module that nobody captures ahead: it captures itself, and again where it is called before it is free.

`CudaGraphHelper` knows the schedule, so the graphs of all layers and microbatches share one pool. A module that is used
alone has no schedule. Its manager runs it eagerly a few times, captures it, and replays. Between a forward and its
backward the activations of a graph must stay; a call that comes in between gets a graph of its own, so there are as
many as were ever in flight at once, for each shape of the inputs:

    calls       F0  F1  B0  F2  B1  B2
    graph        0   1       0              two, where one for each microbatch would be three

With PP microbatches in flight, as under 1F1B, that is the bound of 2 L PP forward and backward graphs; each has its own
pool, since nobody knows who comes when. A forward is in flight until its backward begins, or until nobody holds what
the backward would start from:

    >>> import torch
    >>> from labkit.config import GraphConfig
    >>> from labkit.graphs import CudaGraphManager
    >>> layer = torch.nn.Linear(4, 4)
    >>> manager = CudaGraphManager(GraphConfig(cuda_graph_impl="emulated", cuda_graph_warmup_steps=1))
    >>> x = torch.ones(2, 4, requires_grad=True)
    >>> manager(layer, (x,)).sum().backward()  # the warm-up, eager
    >>> a, b = manager(layer, (x,)), manager(layer, (x,))  # two in flight
    >>> manager.num_graphs
    2
    >>> a.sum().backward()  # the first graph is free again
    >>> c = manager(layer, (x,))
    >>> manager.num_graphs
    2
    >>> torch.equal(c, layer(x))
    True
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from labkit.config import GraphConfig
from labkit.graphs.capture import make_graphed_callables
from labkit.graphs.graphed import GraphedCallable
from labkit.parallel.weights import takes_first_gradient


@dataclass
class _Runner:
    """One graph of the module, and whether the backward of its last forward is still to come."""

    graphed: GraphedCallable
    in_flight: int | None = None
    """Number of the forward whose backward may still come; None if the graph is free."""
    forwards: int = 0

    def watch(self, outputs: Any) -> None:
        """Busy from now on, until the backward of `outputs` begins or can no longer come."""
        wanting = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.grad_fn is not None]
        if not wanting:
            return
        self.forwards += 1
        self.in_flight = number = self.forwards
        # A backward ends before anybody can call the module again. One whose node is gone was dropped with its outputs.
        release = partial(_release, weakref.ref(self), number)
        for output in wanting:
            output.register_hook(release)
        weakref.finalize(wanting[0].grad_fn, release).atexit = False


def _release(runner: weakref.ref[_Runner], number: int, _: Tensor | None = None) -> None:
    """The runner is free, unless it is in flight again by now."""
    found = runner()
    if found is not None and found.in_flight == number:
        found.in_flight = None


class CudaGraphManager:
    """Calls a module eagerly at first and by graphs from then on (Megatron's class of this name)."""

    def __init__(self, config: GraphConfig) -> None:
        """config: implementation and warm-up calls. Raises ValueError where it captures nothing."""
        if config.cuda_graph_impl == "none":
            raise ValueError(
                "graph.cuda_graph_impl = none captures nothing: set it to emulated, local or transformer_engine"
            )
        self.config = config
        self._calls: Counter[Hashable] = Counter()
        self._runners: dict[Hashable, list[_Runner]] = {}

    @property
    def num_graphs(self) -> int:
        """How often the module was captured."""
        return sum(map(len, self._runners.values()))

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """`module(*args, **kwargs)`; eager in evaluation, without gradients, and in the first calls of a shape."""
        kwargs = kwargs or {}
        key = tuple(_signature(x) for x in tree_leaves((args, kwargs)))
        if not (module.training and torch.is_grad_enabled()):
            return module(*args, **kwargs)
        self._calls[key] += 1
        if self._calls[key] <= self.config.cuda_graph_warmup_steps:
            return module(*args, **kwargs)
        runners = self._runners.setdefault(key, [])
        runner = next((runner for runner in runners if runner.in_flight is None), None)
        if runner is None:
            runner = _Runner(self._captured(module, args, kwargs))
            runners.append(runner)
        outputs = runner.graphed(*args, **kwargs)
        runner.watch(outputs)
        return outputs

    def reset(self) -> None:
        """Drop all graphs; warm-up begins anew."""
        for runners in self._runners.values():
            for runner in runners:
                runner.graphed.reset()
        self._runners.clear()
        self._calls.clear()

    def _captured(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GraphedCallable:
        for parameter in module.parameters():
            if takes_first_gradient(parameter):  # from now on it is added to, by the graph
                parameter.main_grad.zero_()  # type: ignore[operator]
        own = lambda x: x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x  # noqa: E731
        sample, named = tuple(map(own, args)), {name: own(value) for name, value in kwargs.items()}
        return make_graphed_callables(
            module, sample, sample_kwargs=named, impl=self.config.cuda_graph_impl, allow_unused_input=True
        )


def _signature(x: Any) -> Hashable:
    return (tuple(x.shape), x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor) else x
