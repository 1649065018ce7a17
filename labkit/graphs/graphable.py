"""A module that replays graphs where it has them: what `TransformerLayer` derives from.

A module is captured one microbatch after the other, because a pipeline runs forwards of several before the first
backward. A call is one of three, under Megatron's names:

| call                                   | goes to              | does                                                |
|----------------------------------------|----------------------|-----------------------------------------------------|
| while its graphs are being made        | `cuda_graph_capture` | the part that `graph.cuda_graph_scope` names        |
| training, with graphs                  | `cuda_graph_replay`  | hooks, graph [microbatch mod count], then the rest  |
| otherwise (no graphs, evaluation, ..)  | `forward`            | everything                                          |

Inputs of other shapes than the graphs' are refused, or, where somebody listens (`cuda_graph_misfit`), go to `forward`.
Graphs take and give tensors alone, at fixed addresses. Nothing that hangs on the modules inside runs at a replay;
`cuda_graph_manual_hooks` are called in the place of those that must (`setup_manual_hooks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.config import GraphConfig
from labkit.graphs.scope import captures_layers
from labkit.parallel.capturing import is_graph_capturing, is_graph_warmup
from labkit.parallel.groups import Group

Graphed = Callable[..., Any]
"""What `make_graphed_callables` makes of a module: called like it, with tensors."""
Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Sizes and types of the tensors that a module is called with, in order."""
Hook = Callable[[nn.Module], object]
"""Called with a module ahead of what was its forward, such as the one that waits for gathered parameters."""


class GraphableMegatronModule(nn.Module):
    """Base of modules that can be captured, in whole or in part (Megatron's class of this name)."""

    def __init__(self, graph: GraphConfig | None = None) -> None:
        """graph: which parts are captured; None captures nothing."""
        super().__init__()
        self.graph = graph or GraphConfig()
        self.cuda_graphs: list[Graphed] = []
        """By microbatch, in the order of their forwards; empty until they are made, and after they were dropped."""
        self.current_microbatch = 0
        """Whose forward is next; the pipeline runtime sets it."""
        self.cuda_graph_manual_hooks: list[tuple[Hook, tuple[nn.Module]]] = []
        """What is called ahead of a replay, and with which module."""
        self.cuda_graph_owner: Any = None
        """The `CudaGraphHelper` that made the graphs, and that alone may drop them."""
        self.cuda_graph_shapes: Shapes = ()
        """What the graphs take; all of them take the same."""
        self.cuda_graph_misfit: Callable[[Shapes], object] | None = None
        """Told of a call in training with other shapes, which then runs eagerly; None leaves it to the graph, which
        refuses it."""

    # ---- what a subclass says about itself ----

    def is_graphable(self) -> bool:
        """Whether `graph` captures this module, or a part of it, by itself."""
        return captures_layers(self.graph)

    def is_wholly_captured(self) -> bool:
        """Whether nothing of it stays eager."""
        return self.is_graphable()

    def get_layer_static_inputs(self, seq_length: int, micro_batch_size: int) -> dict[str, Tensor]:
        """New tensors of the shapes, types and devices of the inputs, by name, in the order of `forward`'s arguments.

        seq_length: of whole sequences, before they are cut over ranks.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what its inputs look like")

    def get_submodules_under_cudagraphs(self) -> list[nn.Module]:
        """The modules whose forward a replay leaves out, with all inside them."""
        return [self]

    def get_groups_under_cudagraphs(self) -> list[Group]:
        """Over which groups the captured part communicates."""
        return []

    def cuda_graph_capture(self, *tensors: Tensor) -> Any:
        """What is captured; it takes what `cuda_graph_inputs` gives."""
        return self.forward(*tensors)

    def cuda_graph_replay(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of `forward`: the graph of the current microbatch. A subclass adds what was not captured."""
        return self.run_cuda_graph(*args, **kwargs)

    # ---- what is the same for all ----

    def cuda_graph_inputs(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """The tensors among the arguments of `forward`, in order; None is left out, tuples are opened."""
        tensors = tuple(_opened([*args, *kwargs.values()]))
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{type(self).__name__} was given a {type(tensor).__name__}, and a graph takes tensors alone: what "
                    "is no tensor would stay what it was at capture"
                )
        return tensors

    def run_cuda_graph(self, *args: Any, **kwargs: Any) -> Any:
        """Call the manual hooks, then the graph of the current microbatch."""
        tensors = self.cuda_graph_inputs(*args, **kwargs)
        for hook, arguments in self.cuda_graph_manual_hooks:
            hook(*arguments)
        return self.cuda_graphs[self.current_microbatch % len(self.cuda_graphs)](*tensors)

    def setup_manual_hooks(self, make_hook: Callable[[], Hook]) -> None:
        """Call a hook ahead of each replay for every captured module that has parameters of its own."""
        covered = {id(m): m for part in self.get_submodules_under_cudagraphs() for m in part.modules()}
        own = [m for m in covered.values() if next(m.parameters(recurse=False), None) is not None]
        self.cuda_graph_manual_hooks = [(make_hook(), (module,)) for module in own]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`forward`, or what stands in its place (the table of this file)."""
        if self.training and captures_layers(self.graph) and torch.is_grad_enabled():
            if is_graph_capturing() or is_graph_warmup():
                return self.cuda_graph_capture(*args, **kwargs)
            if self.cuda_graphs and self._fits(args, kwargs):
                return self.cuda_graph_replay(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def _fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.cuda_graph_misfit is None:
            return True
        given = shapes_of(self.cuda_graph_inputs(*args, **kwargs))
        if given != self.cuda_graph_shapes:
            self.cuda_graph_misfit(given)
        return given == self.cuda_graph_shapes


def shapes_of(tensors: Sequence[Tensor]) -> Shapes:
    """What must agree for a graph to take them."""
    return tuple((tuple(x.shape), x.dtype) for x in tensors)


def _opened(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _opened(value)
        elif value is not None:
            yield value


def graphable_modules(chunk: nn.Module) -> list[GraphableMegatronModule]:
    """Those of a model chunk that are captured by themselves, in the order of its layers."""
    return [m for m in chunk.modules() if isinstance(m, GraphableMegatronModule) and m.is_graphable()]


def release_cudagraphs(chunks: Sequence[nn.Module]) -> None:
    """Drop all graphs of these chunks' layers, whoever made them; the layers run eagerly until the next capture."""
    for chunk in chunks:
        for layer in graphable_modules(chunk):
            if layer.cuda_graph_owner is not None:
                layer.cuda_graph_owner.reset()
