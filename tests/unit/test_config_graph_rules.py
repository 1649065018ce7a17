"""What `graph.cuda_graph_scope` may name, and what excludes what."""

from __future__ import annotations

from typing import Any

import pytest

from labkit.config import ConfigError, GraphConfig, presets
from labkit.graphs.scope import NOTHING, LayerScope, layer_scope

GRAPH = {"cuda_graph_impl": "emulated"}
MOE = {**GRAPH, "num_experts": 8}
PADDED = {**MOE, "capacity_factor": 1.0, "pad_to_capacity": True}
ROUTER, PREPROCESS = ["attn", "moe_router"], ["attn", "moe_router", "moe_preprocess"]
SELECTIVE = {"recompute_granularity": "selective"}

# (changes to presets.tiny(), scope, part of the rule; "" where it is allowed)
CASES: list[tuple[dict[str, Any], list[str], str]] = [
    (GRAPH, [], ""),
    (GRAPH, ["attn", "mlp"], ""),
    (GRAPH, ["full_iteration"], ""),
    ({**GRAPH, "pp": 4}, ["attn"], ""),
    ({**GRAPH, "pp": 4}, ["full_iteration"], "hold messages between parallel.pp = 4 stages"),
    ({"cuda_graph_impl": "transformer_engine"}, ["full_iteration"], "which captures layer by layer; set graph.cuda_"),
    (GRAPH, ["mamba"], "layers that these models do not have"),
    (GRAPH, ["attn", "moe"], "moe is a part of layers with experts, but moe.num_experts = 0"),
    (GRAPH, ["moe_router"], "moe_router is a part of layers with experts, but moe.num_experts = 0"),
    (MOE, ROUTER, ""),
    (MOE, PREPROCESS, ""),
    (MOE, ["attn", "mlp"], "mlp is that of a dense layer, and moe.layer_freq has none; name moe_router"),
    ({**MOE, "layer_freq": [1, 0]}, ["attn", "mlp"], ""),
    (MOE, [], "the whole layer (an empty scope) holds the experts, and how many rows each of them gets is known only"),
    (MOE, ["moe"], "moe holds the experts"),
    (MOE, ["full_iteration"], "full_iteration holds the experts"),
    ({**MOE, "capacity_factor": 1.0}, ["moe"], "set moe.capacity_factor and moe.pad_to_capacity, or capture attn"),
    (PADDED, ["moe"], ""),
    (PADDED, [], ""),
    (PADDED, PREPROCESS, ""),
    ({**MOE, "capacity_factor": 1.0}, ROUTER, ""),
    ({**MOE, "capacity_factor": 1.0}, PREPROCESS, "would count on the host what moe.capacity_factor leaves"),
    ({**MOE, "load_balancing": "sinkhorn"}, ROUTER, "sinkhorn looks at its factors on the host"),
    ({**MOE, "load_balancing": "sinkhorn"}, ["attn"], ""),
    ({**GRAPH, "recompute_granularity": "full"}, ["attn"], "recomputes across layers, each of which would be a graph"),
    ({**GRAPH, "recompute_granularity": "full"}, ["full_iteration"], ""),
    ({**MOE, **SELECTIVE, "recompute_modules": ["moe"]}, ROUTER, "would begin in the graph, with the router, and end"),
    ({**MOE, **SELECTIVE, "recompute_modules": ["moe"]}, ["attn"], ""),
    ({**GRAPH, **SELECTIVE, "attention_dropout": 0.1}, ["attn"], "model.attention_dropout = 0.1): a graph cannot"),
    ({**GRAPH, **SELECTIVE, "attention_dropout": 0.1}, [], "cannot draw the same masks again"),
    ({**GRAPH, **SELECTIVE, "attention_dropout": 0.1}, ["mlp"], ""),
    ({**GRAPH, **SELECTIVE}, ["attn"], ""),
    ({**GRAPH, **SELECTIVE, "recompute_modules": ["layernorm"]}, ["mlp"], "but a graph has fixed its address"),
    ({**PADDED, **SELECTIVE, "recompute_modules": ["moe"], "input_jitter": 0.1}, ["moe"], "moe.input_jitter = 0.1)"),
    ({**PADDED, **SELECTIVE, "recompute_modules": ["moe"]}, ["moe"], ""),
]


@pytest.mark.parametrize(("changes", "scope", "rule"), CASES)
def test_scope(changes: dict[str, Any], scope: list[str], rule: str) -> None:
    config = presets.tiny().override({**changes, "graph.cuda_graph_scope": scope})
    if not rule:
        config.validate()
        return
    with pytest.raises(ConfigError) as caught:
        config.validate()
    (problem,) = caught.value.problems
    assert problem.startswith("graph.cuda_graph_scope = ") and rule in problem, problem


def test_newer_name_of_the_scope() -> None:
    config = presets.tiny().override({**GRAPH, "cuda_graph_modules": ["attn"]})
    assert config.graph.cuda_graph_scope == ("attn",)


@pytest.mark.parametrize(
    ("scope", "dense", "experts"),
    [
        ((), LayerScope(True, True, False, False), LayerScope(True, True, True, True)),
        (("full_iteration",), NOTHING, NOTHING),
        (("attn",), LayerScope(True, False, False, False), LayerScope(True, False, False, False)),
        (("mlp",), LayerScope(False, True, False, False), NOTHING),
        (("moe",), NOTHING, LayerScope(False, True, True, True)),
        (("moe_router",), NOTHING, LayerScope(False, False, True, False)),
        (("attn", "moe_router", "moe_preprocess"), LayerScope(True, False, False, False),
         LayerScope(True, False, True, True)),
    ],
)  # fmt: skip
def test_scope_of_a_layer(scope: tuple[str, ...], dense: LayerScope, experts: LayerScope) -> None:
    for impl in ("local", "emulated", "transformer_engine"):
        graph = GraphConfig(cuda_graph_impl=impl, cuda_graph_scope=scope)
        assert layer_scope(graph, has_experts=False) == dense
        assert layer_scope(graph, has_experts=True) == experts
    assert not layer_scope(GraphConfig(cuda_graph_scope=scope), has_experts=True)


def test_where_a_graph_ends() -> None:
    ends = {
        scope: layer_scope(GraphConfig(cuda_graph_impl="local", cuda_graph_scope=scope), has_experts=True).ends_at
        for scope in ((), ("attn",), ("moe",), ("moe_router",), ("moe_router", "moe_preprocess"))
    }
    assert list(ends.values()) == [None, None, None, "route", "preprocess"]
