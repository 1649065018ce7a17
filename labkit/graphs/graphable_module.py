"""The wrapper of a layer, which takes the place of the layer's `forward` and replays graphs where it has them.

A layer knows nothing of graphs. It declares its halves (`parts()`, a `LayerParts`); the wrapper decides at each call:

| call                                   | goes to              | does                                                |
|----------------------------------------|----------------------|-----------------------------------------------------|
| during warm-up and capture             | `cuda_graph_capture` | the parts that `graph.cuda_graph_modules` names     |
| training, with graphs                  | `cuda_graph_replay`  | hooks, graph [microbatch mod count], then the rest  |
| otherwise (no graphs, evaluation, ..)  | the layer's forward  | the whole layer                                     |

Merged pairs call `until_dispatch` in place of `forward`. It ends before the experts' all-to-all and replays where there
are graphs; captures go through `forward`.

A layer has a graph for each microbatch, because a pipeline runs several forwards before the first backward. A graph
takes and returns only tensors, at fixed addresses, and rejects inputs of other shapes. With `cuda_graph_misfit` the
wrapper runs the layer eagerly on such inputs. A replay calls no hooks of the modules inside; the wrapper calls
`cuda_graph_manual_hooks` for those that must run.

A wrapped layer has four attributes of the wrapper: `forward`, `until_dispatch`, `current_microbatch` (set by the
pipeline runtime) and `cuda_graph_manual_hooks`. Parameters, their names and the module tree do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.capturing import is_graph_capturing, is_graph_warmup
from labkit.comm.groups import Group
from labkit.config import GraphConfig
from labkit.graphs.checks.before_capture import refuse_records
from labkit.graphs.graphed_callable import GraphedCallable
from labkit.graphs.partial_moe import CutMoELayer, MoECudaGraphPartialCaptureSignal
from labkit.graphs.scope import LayerScope, layer_scope
from labkit.models.blocks import LayerParts
from labkit.moe.layer import MoELayer

Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Sizes and types of a layer's arguments, in order."""
Hook = Callable[[nn.Module], object]
"""A function to call with a module before its forward, such as the wait for gathered parameters."""


class GraphableMegatronModule:
    """Owns the graphs of one layer (in Megatron a base class of this name). A plain object, outside the module tree.

    Attributes:
        layer, parts: the layer, and the halves that it declares.
        graph, scope: the configuration, and the parts of this layer that it captures.
        cut: the cut layer of experts, where the graph ends inside it; else None.
        cuda_graphs: the graphs by microbatch, in the order of their forwards; empty where there are none.
        cuda_graph_manual_hooks: pairs of a hook to call before a replay and its arguments.
        cuda_graph_owner: the `CudaGraphHelper` that made the graphs; only the owner may drop them.
        cuda_graph_shapes: the shapes that all graphs of the layer take.
        cuda_graph_misfit: called with the shapes of a training call that the graphs do not take; the call then runs
            eagerly. With None the graph rejects such a call.
    """

    def __init__(self, layer: Any, graph: GraphConfig) -> None:
        """Wrap `layer`, a module with `parts()`. A layer of which `graph` captures nothing does not change."""
        self.layer: Any = layer
        self.parts: LayerParts = layer.parts()
        self.graph = graph
        has_experts, only_part = isinstance(self.parts.mlp, MoELayer), getattr(layer, "graph_scope", None)
        self.scope: LayerScope = layer_scope(graph, has_experts=has_experts, only_part=only_part)
        self.cut: CutMoELayer | None = None
        self.cuda_graphs: list[GraphedCallable] = []
        self.cuda_graph_manual_hooks: list[tuple[Hook, tuple[nn.Module]]] = []
        self.cuda_graph_owner: Any = None
        self.cuda_graph_shapes: Shapes = ()
        self.cuda_graph_misfit: Callable[[Shapes], object] | None = None
        self._eager: Callable[..., Any] = layer.forward
        if self.scope:
            if self.scope.is_partial:
                assert isinstance(self.parts.mlp, MoELayer)
                self.cut = CutMoELayer(self.parts.mlp, self.scope)
            layer.forward, layer.current_microbatch = self.forward, 0
            if self.parts.until_dispatch is not None:
                layer.until_dispatch = self.until_dispatch
            layer.cuda_graph_manual_hooks = self.cuda_graph_manual_hooks

    def unwrap(self) -> None:
        """Restore the layer's own methods."""
        if self.scope:
            del self.layer.forward, self.layer.current_microbatch, self.layer.cuda_graph_manual_hooks
            if self.parts.until_dispatch is not None:
                del self.layer.until_dispatch
            if self.cut is not None:
                self.cut.undo()

    # ---- calls ----

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run as the layer's `forward` while it is wrapped, and choose by the table of this file."""
        if self.layer.training and torch.is_grad_enabled():
            if is_graph_capturing() or is_graph_warmup():
                return self.cuda_graph_capture(*args, **kwargs)
            if self.cuda_graphs and self._fits(args, kwargs):
                return self.cuda_graph_replay(*args, **kwargs)
        return self._eager(*args, **kwargs)

    def cuda_graph_capture(self, *tensors: Tensor) -> Any:
        """Run the captured part: x_SBH and, with attention, the rotary tables -> x_SBH.

        A graph that ends inside the layer of experts returns its own outputs, the residual last
        (`labkit.graphs.partial_moe`).

        Raises:
            GraphCaptureError: a captured router records or repeats choices.
        """
        x_SBH, *rotary = tensors
        if self.scope.attention:
            x_SBH = self.parts.run_attention(x_SBH, (rotary[0], rotary[1]) if rotary else None)
        if not (self.scope.mlp or self.scope.router):
            return x_SBH
        if self.scope.router:
            refuse_records(self.parts.mlp)
        try:
            return self.parts.run_mlp(x_SBH)
        except MoECudaGraphPartialCaptureSignal as signal:
            return (*signal.get_early_return_outputs(), x_SBH)

    def cuda_graph_replay(self, x_SBH: Tensor, rotary: Any = None) -> Tensor:
        """Run the part before the graph, the graph, and the part after it; [S, B, H] -> [S, B, H]."""
        if not self.scope.attention:
            x_SBH = self.parts.run_attention(x_SBH, rotary)
        made = self.run_cuda_graph(x_SBH, rotary)
        if self.cut is not None:
            return self.parts.add_mlp(*self.cut.resume(made))
        return made if self.scope.mlp else self.parts.run_mlp(made)

    def until_dispatch(self, x_SBH: Tensor, rotary: Any = None) -> tuple[Any, ...]:
        """Run as the layer's `until_dispatch`, the first part in a merged pair, and replay what a graph holds of it."""
        assert self.parts.until_dispatch is not None
        in_training = self.layer.training and torch.is_grad_enabled()
        if not (in_training and self.cuda_graphs and self._fits((x_SBH, rotary), {})):
            return self.parts.until_dispatch(x_SBH, rotary)
        if not self.scope.attention:
            x_SBH = self.parts.run_attention(x_SBH, rotary)
        made = self.run_cuda_graph(x_SBH, rotary)
        if self.cut is None:
            return self.layer.before_dispatch(made)
        before, residual = self.cut.resume(made, self.cut.moe_layer.before_dispatch)
        return residual, *before

    def run_cuda_graph(self, *args: Any, **kwargs: Any) -> Any:
        """Call the manual hooks, then the graph of the current microbatch."""
        tensors = self.cuda_graph_inputs(*args, **kwargs)
        for hook, arguments in self.cuda_graph_manual_hooks:
            hook(*arguments)
        return self.cuda_graphs[self.layer.current_microbatch % len(self.cuda_graphs)](*tensors)

    def cuda_graph_inputs(self, x_SBH: Tensor, rotary: Any = None) -> tuple[Tensor, ...]:
        """The graph's inputs: x_SBH and, with attention, the rotary tables, if there are any."""
        tensors = tuple(_opened([x_SBH, rotary if self.scope.attention else None]))
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{type(self.layer).__name__} was given a {type(tensor).__name__}, and a graph takes only "
                    "tensors: another value would stay as it was at capture. Pass a tensor, or None"
                )
        return tensors

    def _fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.cuda_graph_misfit is None:
            return True
        given = shapes_of(self.cuda_graph_inputs(*args, **kwargs))
        if given != self.cuda_graph_shapes:
            self.cuda_graph_misfit(given)
        return given == self.cuda_graph_shapes

    # ---- what is captured ----

    def is_graphable(self) -> bool:
        """True where the configured scope covers a part of this layer."""
        return bool(self.scope)

    def is_wholly_captured(self) -> bool:
        """True where no part of the layer stays eager."""
        return self.scope.attention and self.scope.mlp

    def defers_weight_gradients(self) -> bool:
        """True where the graph holds linear layers, whose weight gradients a backward can leave out."""
        shares = self.cut is not None and self.cut.moe_layer.has_shared_output
        return self.scope.attention or self.scope.mlp or shares

    def get_layer_static_inputs(self, seq_length: int, micro_batch_size: int) -> dict[str, Tensor]:
        """`x_SBH`, this rank's part of `micro_batch_size` sequences. The model adds the inputs that its layers share.

        seq_length: length of whole sequences, before they are cut over ranks.
        """
        return {"x_SBH": self.parts.new_input(seq_length, micro_batch_size)}

    def get_submodules_under_cudagraphs(self) -> list[nn.Module]:
        """The modules whose forward a replay leaves out: the captured halves, or the captured part of the second."""
        found = [self.parts.attention] if self.scope.attention else []
        if self.scope.mlp:
            found.append(self.parts.mlp)
        elif self.cut is not None:
            found += [self.parts.norm, *self.cut.captured_modules()]
        return found

    def get_groups_under_cudagraphs(self) -> list[Group]:
        """The groups over which the captured part communicates."""
        found = list(self.parts.groups_of_attention) if self.scope.attention else []
        if isinstance(self.parts.mlp, MoELayer):
            return found + groups_of_experts(self.parts.mlp, self.scope)
        return found + list(self.parts.groups_of_mlp) if self.scope.mlp else found

    def setup_manual_hooks(self, make_hook: Callable[[], Hook]) -> None:
        """Have each replay call a hook first, for every captured module that has parameters of its own."""
        covered = {id(m): m for part in self.get_submodules_under_cudagraphs() for m in part.modules()}
        own = [m for m in covered.values() if next(m.parameters(recurse=False), None) is not None]
        self.cuda_graph_manual_hooks[:] = [(make_hook(), (module,)) for module in own]


def groups_of_experts(layer: MoELayer, scope: LayerScope) -> list[Group]:
    """The groups over which the captured part of a layer of experts communicates."""
    groups, moe, found = layer.groups, layer.moe, []
    if layer.shared_experts is not None and (scope.preprocess or (scope.router and layer.has_shared_output)):
        found.append(groups.tp)
    if scope.router and moe.load_balancing in ("aux_loss", "seq_aux_loss"):
        found += [groups.tp, groups.cp]
    elif scope.router and moe.load_balancing == "global_aux_loss":
        found += [groups.tp, groups.cp, groups.dp]
    counts = scope.preprocess and moe.dispatcher != "allgather" and not moe.pad_to_capacity
    return [*found, groups.ep, groups.etp] if scope.mlp or counts else found


def shapes_of(tensors: Sequence[Tensor]) -> Shapes:
    """Shapes and types of tensors; a graph takes only tensors with its own."""
    return tuple((tuple(x.shape), x.dtype) for x in tensors)


def _opened(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _opened(value)
        elif value is not None:
            yield value


# ---- the layers of a chunk ----


def wrap_layers(chunk: nn.Module, graph: GraphConfig) -> list[GraphableMegatronModule]:
    """Wrap all layers of a model chunk; return the wrappers in the order of the layers.

    A layer that `graph` does not capture gets a wrapper that does nothing. A layer that is wrapped for the same
    configuration keeps its wrapper.

    Raises:
        ValueError: a layer has graphs of another configuration.
    """
    return [_wrapped(module, graph) for module in chunk.modules() if hasattr(type(module), "parts")]


def _wrapped(layer: nn.Module, graph: GraphConfig) -> GraphableMegatronModule:
    old = wrapper_of(layer)
    if old is not None and old.graph == graph:
        return old
    if old is not None:
        if old.cuda_graphs:
            raise ValueError("these layers have the graphs of another CudaGraphHelper: call its reset() first")
        old.unwrap()
    return GraphableMegatronModule(layer, graph)


def unwrap_layers(chunks: Iterable[nn.Module]) -> None:
    """Restore the methods of all layers of these chunks.

    Raises:
        ValueError: a layer has graphs.
    """
    for wrapper in [found for chunk in chunks for found in graphable_modules(chunk)]:
        if wrapper.cuda_graphs:
            raise ValueError("these layers have the graphs of a CudaGraphHelper: call its reset() first")
        wrapper.unwrap()


def wrapper_of(layer: Any) -> GraphableMegatronModule | None:
    """The wrapper of a layer; None where the layer has its own `forward`."""
    owner = getattr(layer.forward, "__self__", None)
    return owner if isinstance(owner, GraphableMegatronModule) else None


def graphable_modules(chunk: nn.Module) -> list[GraphableMegatronModule]:
    """The wrappers of the wrapped layers of a chunk, in the order of the layers."""
    return [found for module in chunk.modules() if (found := wrapper_of(module)) is not None]


def release_cudagraphs(chunks: Sequence[nn.Module]) -> None:
    """Drop all graphs of these chunks' layers. The layers run eagerly until the next capture."""
    for chunk in chunks:
        for layer in graphable_modules(chunk):
            if layer.cuda_graph_owner is not None:
                layer.cuda_graph_owner.reset()
