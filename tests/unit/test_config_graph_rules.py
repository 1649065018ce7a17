"""What `graph.cuda_graph_impl` and `cuda_graph_modules` may name, and what excludes what."""

from __future__ import annotations

from typing import Any

import pytest

from labkit.config import ConfigError, GraphConfig, presets
from labkit.graphs.scope import NOTHING, LayerScope, captures_layers, layer_scope

GRAPH = {"cuda_graph_impl": "emulated"}
MOE = {**GRAPH, "num_experts": 8}
MAMBA = {**GRAPH, "family": "mamba", "mamba_head_dim": 16}
PAIRS = {**MOE, "overlap_moe_expert_parallel_comm": True, "ep": 2}
SPLIT = {"pp": 2, "schedule.name": "zero_bubble_h1"}
PADDED = {**MOE, "capacity_factor": 1.0, "pad_to_capacity": True}
ROUTER, PREPROCESS = ["attn", "moe_router"], ["attn", "moe_router", "moe_preprocess"]
SELECTIVE, FULL = {"recompute_granularity": "selective"}, {**GRAPH, "recompute_granularity": "full"}
KEPT = {"num_microbatches_with_partial_activation_checkpoints": 1}

# (changes to presets.tiny(), scope, part of the rule; "" where it is allowed)
CASES: list[tuple[dict[str, Any], list[str], str]] = [
    (GRAPH, [], ""),
    (GRAPH, ["attn", "mlp"], ""),
    (GRAPH, ["full_iteration"], ""),
    ({**GRAPH, "pp": 4}, ["attn"], ""),
    ({**GRAPH, "pp": 4}, ["full_iteration"], "contain messages between parallel.pp = 4 stages"),
    (
        {"cuda_graph_impl": "transformer_engine"},
        ["full_iteration"],
        "because it captures layer by layer; set graph.cuda_",
    ),
    (
        GRAPH,
        ["experts"],
        "'experts' is not a part of a layer; choose from attn, mlp, moe, moe_router, moe_preprocess, mamba",
    ),
    (GRAPH, ["mamba"], "mamba is not a part of any layer of this model; choose from attn, mlp"),
    (MAMBA, ["mamba"], ""),
    (MAMBA, ["attn", "mamba"], "attn is not a part of any layer of this model; choose from mamba"),
    ({**MAMBA, "hybrid_override_pattern": "M*-M*-M-"}, ["attn", "mamba"], ""),
    (
        {**MAMBA, "hybrid_override_pattern": "M*-M*-M-", **SPLIT},
        ["mamba"],
        "splits backwards, and a part of these layers",
    ),
    ({**MAMBA, **SPLIT}, ["mamba"], ""),
    (GRAPH, ["attn", "moe"], "moe is a part of layers with experts, but moe.num_experts = 0"),
    (GRAPH, ["moe_router"], "moe_router is a part of layers with experts, but moe.num_experts = 0"),
    (MOE, ROUTER, ""),
    (MOE, PREPROCESS, ""),
    (MOE, ["attn", "mlp"], "mlp is the MLP of a dense layer, and moe.layer_freq has no dense layer; name moe_router"),
    ({**MOE, "layer_freq": [1, 0]}, ["attn", "mlp"], ""),
    (
        MOE,
        [],
        "the whole layer (no module named) contains the experts, and how many rows each of them gets is known only",
    ),
    (MOE, ["moe"], "moe contains the experts"),
    (MOE, ["full_iteration"], "full_iteration contains the experts"),
    ({**MOE, "capacity_factor": 1.0}, ["moe"], "set moe.capacity_factor and moe.pad_to_capacity, or capture attn"),
    (PADDED, ["moe"], ""),
    (PADDED, [], ""),
    (PADDED, PREPROCESS, ""),
    ({**MOE, "capacity_factor": 1.0}, ROUTER, ""),
    ({**MOE, "capacity_factor": 1.0}, PREPROCESS, "would count on the host how many rows moe.capacity_factor"),
    ({**MOE, "load_balancing": "sinkhorn"}, ROUTER, "sinkhorn checks on the host"),
    ({**MOE, "load_balancing": "sinkhorn"}, ["attn"], ""),
    ({**GRAPH, "recompute_granularity": "full"}, ["attn"], "recomputes across layers, each of which would be a graph"),
    ({**GRAPH, "recompute_granularity": "full"}, ["full_iteration"], ""),
    ({**FULL, "hidden_dropout": 0.1}, ["full_iteration"], "the layers are recomputed in a graph and would draw"),
    ({**FULL, "attention_dropout": 0.1}, ["full_iteration"], "(model.attention_dropout = 0.1): a graph cannot draw"),
    (
        {**FULL, "cuda_graph_impl": "local", "hidden_dropout": 0.1, "attention_dropout": 0.2},
        ["full_iteration"],
        "(model.hidden_dropout = 0.1 and model.attention_dropout = 0.2)",
    ),
    ({**FULL, **PADDED, "input_jitter": 0.1}, ["full_iteration"], "(moe.input_jitter = 0.1)"),
    ({**FULL, **PADDED}, ["full_iteration"], ""),
    ({**FULL, "embedding_dropout": 0.1}, ["full_iteration"], ""),
    ({**GRAPH, **SELECTIVE, "hidden_dropout": 0.1}, ["full_iteration"], ""),
    ({**GRAPH, **SELECTIVE, **KEPT}, [], "core_attn is recomputed inside graphs of layers, in every microbatch"),
    ({**GRAPH, **SELECTIVE, **KEPT, "recompute_modules": ["mlp"]}, ["attn"], ""),
    ({**GRAPH, **SELECTIVE, **KEPT}, ["full_iteration"], ""),
    ({**FULL, **KEPT}, ["full_iteration"], ""),
    (
        {**MOE, **SELECTIVE, **KEPT, "recompute_modules": ["shared_experts"], "shared_expert_ffn_hidden": 16},
        ROUTER,
        "shared_experts is recomputed inside graphs",
    ),
    (
        {**GRAPH, "schedule.name": "zero_bubble_h1"},
        ["attn"],
        "a part of these layers stays eager: by then",
    ),
    ({**GRAPH, "schedule.name": "zero_bubble_h1"}, ["attn", "mlp"], ""),
    ({**GRAPH, "schedule.name": "zero_bubble_h1"}, ["full_iteration"], ""),
    ({**GRAPH, "schedule.name": "gpipe"}, ["attn"], ""),
    ({**MOE, "pp": 2, "schedule.name": "zbv"}, PREPROCESS, "or choose a schedule with whole backwards"),
    ({**PADDED, "schedule.name": "zero_bubble_h1"}, ["attn", "moe"], ""),
    (
        {**PADDED, "schedule.name": "zero_bubble_h1", "layer_freq": [1, 0]},
        ["attn", "moe"],
        "a part of these layers stays eager",
    ),
    ({**MOE, **SELECTIVE, "recompute_modules": ["moe"]}, ROUTER, "would begin in the graph, with the router, and end"),
    ({**MOE, **SELECTIVE, "recompute_modules": ["moe"]}, ["attn"], ""),
    ({**GRAPH, **SELECTIVE, "attention_dropout": 0.1}, ["attn"], "model.attention_dropout = 0.1): a graph cannot draw"),
    ({**GRAPH, **SELECTIVE, "attention_dropout": 0.1}, [], "core_attn is recomputed in a graph and would draw"),
    ({**GRAPH, **SELECTIVE, "attention_dropout": 0.1}, ["mlp"], ""),
    ({**GRAPH, **SELECTIVE}, ["attn"], ""),
    ({**GRAPH, **SELECTIVE, "recompute_modules": ["layernorm"]}, ["mlp"], "but a graph has fixed its address"),
    ({**PADDED, **SELECTIVE, "recompute_modules": ["moe"], "input_jitter": 0.1}, ["moe"], "moe.input_jitter = 0.1)"),
    ({**PADDED, **SELECTIVE, "recompute_modules": ["moe"]}, ["moe"], ""),
    (PAIRS, PREPROCESS, ""),
    ({**PAIRS, "delay_wgrad_compute": True}, ["attn"], ""),
    (
        {**PAIRS, **PADDED},
        ["attn", "moe"],
        "runs after the first part of a layer, and moe reaches beyond it; name attn",
    ),
    ({**PAIRS, **PADDED}, [], "and the whole layer (no module named) reaches beyond it"),
    ({**PAIRS, "layer_freq": [1, 0]}, ["mlp"], "and mlp reaches beyond it"),
    ({**PAIRS, **PADDED}, ["full_iteration"], "and full_iteration reaches beyond it"),
    (
        {**PAIRS, "pp": 2, "schedule.name": "dualpipe_v"},
        ["attn"],
        "splits some backwards and merges others whole, and graphs need all alike; set schedule.delay_wgrad_compute",
    ),
    ({**PAIRS, "pp": 2, "schedule.name": "dualpipe_v", "delay_wgrad_compute": True}, ["attn"], ""),
    ({**PAIRS, "pp": 2, "schedule.name": "dualpipe_v"}, ["moe_router"], ""),
    ({**PAIRS, "pp": 2, "schedule.name": "dualpipe_v", "shared_expert_ffn_hidden": 16}, ["moe_router"], "graphs need"),
    ({**PAIRS, "cuda_graph_impl": "transformer_engine"}, PREPROCESS, ""),
]


@pytest.mark.parametrize(("changes", "scope", "rule"), CASES)
def test_scope(changes: dict[str, Any], scope: list[str], rule: str) -> None:
    config = presets.tiny().override({**changes, "graph.cuda_graph_modules": scope})
    if not rule:
        config.validate()
        return
    with pytest.raises(ConfigError) as caught:
        config.validate()
    (problem,) = caught.value.problems
    assert problem.startswith("graph.cuda_graph_modules = ") and rule in problem, problem


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"delay_wgrad_compute": True}, "but schedule.delay_wgrad_compute splits them; leave that out, or set this to"),
        ({"pp": 2, "schedule.name": "dualpipe_v"}, "but schedule.name = dualpipe_v splits backwards; choose"),
    ],
)
def test_the_engine_captures_merged_pairs_with_whole_backwards(changes: dict[str, Any], rule: str) -> None:
    engine = {**PAIRS, **changes, "cuda_graph_impl": "transformer_engine", "graph.cuda_graph_modules": ["attn"]}
    with pytest.raises(ConfigError, match=rule) as caught:
        presets.tiny().override(engine).validate()
    assert caught.value.problems[0].startswith("graph.cuda_graph_impl = ")


def test_the_engine_computes_both_gradients_of_a_linear_layer_together() -> None:
    engine = {"cuda_graph_impl": "transformer_engine", "schedule.name": "zero_bubble_h1"}
    with pytest.raises(ConfigError, match="zero_bubble_h1 splits backwards into input and weight gradients") as caught:
        presets.tiny().override(engine).validate()
    assert caught.value.problems[0].startswith("graph.cuda_graph_impl = ")


@pytest.mark.parametrize("scope", [[], ["full_iteration"]])
def test_delayed_scales_need_a_step_of_history(scope: list[str]) -> None:
    changes = {**GRAPH, "fp8": "hybrid", "cuda_graph_warmup_steps": 0, "graph.cuda_graph_modules": scope}
    with pytest.raises(ConfigError, match=r"must be at least 1 with optim\.fp8_recipe = delayed") as caught:
        presets.tiny().override(changes).validate()
    (problem,) = caught.value.problems
    assert problem.startswith("graph.cuda_graph_warmup_steps = 0: ")
    for allowed in ({"fp8_recipe": "current"}, {"cuda_graph_warmup_steps": 1}, {"fp8": "none"}):
        presets.tiny().override({**changes, **allowed}).validate()


ITERATION = [
    (changes, rule) for changes, scope, rule in CASES if scope == ["full_iteration"] and "captures layer" not in rule
]


@pytest.mark.parametrize(("changes", "rule"), ITERATION)
def test_a_whole_iteration_is_an_implementation(changes: dict[str, Any], rule: str) -> None:
    """As the old module of that name it is refused for the same reasons, and captures as much."""
    config = presets.tiny().override({**changes, "cuda_graph_impl": "full_iteration"})
    assert [problem.partition(": ")[0] for problem in config.problems()] == (
        ["graph.cuda_graph_impl = 'full_iteration'"] if rule else []
    )
    assert all(rule in problem for problem in config.problems())
    assert config.graph.is_full_iteration and not captures_layers(config.graph)


def test_no_module_stands_beside_a_whole_iteration() -> None:
    (problem,) = (
        presets.tiny().override({"cuda_graph_impl": "full_iteration", "cuda_graph_modules": ["mlp"]}).problems()
    )
    assert problem.startswith("graph.cuda_graph_modules = ") and "all parts of all layers; leave this out" in problem


@pytest.mark.parametrize("word", ["cuda_graph_scope", "graph.cuda_graph_scope", "cuda-graph-scope"])
def test_older_name_of_the_modules(word: str) -> None:
    for modules in (("attn",), ("full_iteration",)):
        config = presets.tiny().override({**GRAPH, word: modules}).validate()
        assert config.graph.cuda_graph_modules == modules
        assert config.graph.is_full_iteration == (modules == ("full_iteration",))


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
        graph = GraphConfig(cuda_graph_impl=impl, cuda_graph_modules=scope)
        assert layer_scope(graph, has_experts=False) == dense
        assert layer_scope(graph, has_experts=True) == experts
    assert not layer_scope(GraphConfig(cuda_graph_modules=scope), has_experts=True)


def test_where_a_graph_ends() -> None:
    ends = {
        scope: layer_scope(GraphConfig(cuda_graph_impl="local", cuda_graph_modules=scope), has_experts=True).ends_at
        for scope in ((), ("attn",), ("moe",), ("moe_router",), ("moe_router", "moe_preprocess"))
    }
    assert list(ends.values()) == [None, None, None, "route", "preprocess"]
