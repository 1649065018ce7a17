"""Which order a rank captures, and what a layer says of itself as a graph."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from labkit.config import GraphConfig, presets
from labkit.graphs import CudaGraphHelper, capture_order, graphable_modules, wrap_layers
from labkit.graphs.graphable_module import wrapper_of
from labkit.models import GPTModel
from labkit.parallel import single_process_groups
from labkit.schedules import gpipe, interleaved, one_f_one_b, zero_bubble_h1

EMULATED = GraphConfig(cuda_graph_impl="emulated")


def test_one_microbatch_is_captured_where_each_is_through_before_the_next():
    assert capture_order(one_f_one_b(1, 8), 0) == [1, -1]
    assert capture_order(zero_bubble_h1(1, 8), 0) == [1, -1, -1.5]
    assert capture_order(gpipe(1, 3), 0) == [1, 1, 1, -1, -1, -1]


def test_a_rank_of_a_pipeline_captures_its_row():
    """Golden order of PP2 V2 N3 M5: 5 forwards of warm-up."""
    text = "1 1 1 2 2 2 -2 1 -2 1 -2 2 -1 2 -1 -1 -2 -2 -1 -1"
    assert capture_order(interleaved(2, 2, 5, group_size=3), 0) == [int(word) for word in text.split()]
    assert capture_order(one_f_one_b(2, 3), 1) == [1, -1] and capture_order(one_f_one_b(2, 3), 0)[:2] == [1, 1]


def chunk(**changes) -> GPTModel:
    config = replace(presets.tiny().model, layers=2, **changes)
    return GPTModel(config, single_process_groups(), layers=range(2), seed=1)


@pytest.mark.parametrize(("scope", "covered"), [((), "attention mlp"), (("attn",), "attention"), (("mlp",), "mlp")])
def test_the_scope_says_which_half_is_under_a_graph(scope, covered):
    layer, _ = wrap_layers(chunk(), replace(EMULATED, cuda_graph_modules=scope))
    assert layer.is_graphable() and layer.is_wholly_captured() == (not scope)
    assert layer.get_submodules_under_cudagraphs() == [getattr(layer.layer, half) for half in covered.split()]
    called = []
    layer.setup_manual_hooks(lambda: called.append)
    assert [module for _, (module,) in layer.cuda_graph_manual_hooks] == [
        module
        for half in layer.get_submodules_under_cudagraphs()
        for module in half.modules()
        if list(module.parameters(recurse=False))
    ]


def test_static_inputs_have_the_shapes_of_the_layers_inputs():
    model = chunk(position="rope")
    seen = []
    layer, _ = wrap_layers(model, EMULATED)
    layer.layer.register_forward_pre_hook(lambda module, args: seen.append(layer.cuda_graph_inputs(*args)))
    model(torch.zeros(3, 64, dtype=torch.long))
    (x,) = layer.get_layer_static_inputs(64, 3).values()
    assert [t.shape for t in (x, *model.layer_context(64))] == [t.shape for t in seen[0]]
    assert x.requires_grad and x.dtype == seen[0][0].dtype


@pytest.mark.parametrize(
    "graph", [GraphConfig(), replace(EMULATED, cuda_graph_impl="full_iteration")], ids=["none", "iteration"]
)
def test_a_layer_of_which_nothing_is_captured_is_left_as_it_is(graph):
    model = chunk()
    before = sorted(vars(model.layers["0"]))
    assert not any(layer.is_graphable() for layer in wrap_layers(model, graph))
    assert sorted(vars(model.layers["0"])) == before and graphable_modules(model) == []


def test_wrapping_changes_no_name_and_no_number_and_can_be_undone():
    model, tokens = chunk(), torch.arange(64)[None]
    names, before, expected = list(model.state_dict()), sorted(vars(model.layers["0"])), model(tokens)
    wrappers = wrap_layers(model, EMULATED)
    assert graphable_modules(model) == wrappers == wrap_layers(model, EMULATED), "a second wrapping finds the first"
    assert list(model.state_dict()) == names and torch.equal(model(tokens), expected)
    for wrapper in wrappers:
        wrapper.unwrap()
    assert sorted(vars(model.layers["0"])) == before and wrapper_of(model.layers["0"]) is None


def test_another_configuration_wraps_anew_where_there_are_no_graphs_left():
    model, attention = chunk(), replace(EMULATED, cuda_graph_modules=("attn",))
    helper = CudaGraphHelper([model], EMULATED, 64, 1, schedule=one_f_one_b(1, 2))
    helper.create_cudagraphs()
    with pytest.raises(ValueError, match="the graphs of another CudaGraphHelper: call its reset"):
        wrap_layers(model, attention)
    helper.reset()
    assert [layer.scope.mlp for layer in wrap_layers(model, attention)] == [False, False]


def wrapped():
    """A wrapper of a layer, and an input."""
    layer, _ = wrap_layers(chunk(), EMULATED)
    return layer, torch.ones(4, 1, 64)


def test_arguments_that_are_no_tensors_are_refused():
    layer, x = wrapped()
    plain = layer.layer(x)
    layer.cuda_graphs = [lambda x: x * 3]
    assert torch.equal(layer.layer(x), x * 3)
    with pytest.raises(TypeError, match="given a float, and a graph takes only tensors"):
        layer.layer(x, 4.0)
    with torch.no_grad():
        assert torch.equal(layer.layer(x), plain)
    assert torch.equal(layer.layer.eval()(x), plain)


def test_each_microbatch_replays_its_own_graph_after_the_hooks():
    (layer, x), calls = wrapped(), []
    layer.cuda_graphs = [lambda x, i=i: calls.append(i) or x for i in range(3)]
    layer.cuda_graph_manual_hooks.append((lambda m: calls.append(type(m).__name__), (nn.Identity(),)))
    for layer.layer.current_microbatch in (0, 2, 4):
        layer.layer(x)
    assert calls == ["Identity", 0, "Identity", 2, "Identity", 1]
