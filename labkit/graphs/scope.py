"""The captured parts of one transformer layer: `graph.cuda_graph_modules`, read for a layer with experts or without.

| scope            | dense layer      | layer with experts                                              |
|------------------|------------------|-----------------------------------------------------------------|
| (empty)          | all              | all (drop-and-pad only)                                         |
| `attn`           | attention        | attention                                                       |
| `mlp`            | norm and MLP     | -                                                               |
| `moe`            | -                | the second half, residual included (drop-and-pad only)          |
| `moe_router`     | -                | norm, shared experts unless overlapped, router                  |
| `moe_preprocess` | -                | the above, counts, and rows sorted by expert                    |

With the all-gather dispatcher `moe_preprocess` neither counts nor sorts: it only flattens the tokens.

A layer has one graph, which begins with attention where that is captured. A layer of a Mamba model has one part, for
which the scope has one word: `mamba`, `attn` or `mlp`. Such a layer is captured whole or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.config import GraphConfig


def captures_layers(graph: GraphConfig) -> bool:
    """True where layers have graphs of their own; else there is no graph, or one of the whole iteration."""
    return graph.cuda_graph_impl != "none" and not graph.is_full_iteration


@dataclass(frozen=True, slots=True)
class LayerScope:
    """The captured parts of one layer; false as a condition where there is none."""

    attention: bool
    """The graph holds norm, attention and residual."""
    mlp: bool
    """The graph holds norm, the whole MLP, with or without experts, and residual."""
    router: bool
    """The graph holds norm, router, and shared experts unless they are overlapped."""
    preprocess: bool
    """The graph holds the counts of rows and the first permutation."""

    def __bool__(self) -> bool:
        return self.attention or self.mlp or self.router

    @property
    def is_partial(self) -> bool:
        """True where the graph ends inside the layer of experts."""
        return self.router and not self.mlp

    @property
    def ends_at(self) -> str | None:
        """The last captured step of a graph that ends inside the layer of experts: `route` or `preprocess`."""
        return ("preprocess" if self.preprocess else "route") if self.is_partial else None


NOTHING = LayerScope(False, False, False, False)


def layer_scope(graph: GraphConfig, *, has_experts: bool, only_part: str | None = None) -> LayerScope:
    """The captured parts of a layer (the table above); none without graphs, and none under a graph of the iteration.

    only_part: the word of the scope for a layer of a single part; None for a layer of two.
    """
    scope = graph.cuda_graph_modules
    if not captures_layers(graph):
        return NOTHING
    if not scope:
        return LayerScope(True, True, has_experts, has_experts)
    if only_part is not None:
        return LayerScope(True, True, False, False) if only_part in scope else NOTHING
    whole = ("moe" if has_experts else "mlp") in scope
    router = has_experts and (whole or "moe_router" in scope)
    return LayerScope("attn" in scope, whole, router, router and (whole or "moe_preprocess" in scope))
