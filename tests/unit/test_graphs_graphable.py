"""Which order a rank captures, and what a layer says of itself as a graph."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from labkit.config import GraphConfig, presets
from labkit.graphs import GraphableMegatronModule, capture_order
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


def chunk(graph: GraphConfig, **changes) -> GPTModel:
    config = replace(presets.tiny().model, layers=2, **changes)
    return GPTModel(config, single_process_groups(), layers=range(2), seed=1, graph=graph)


@pytest.mark.parametrize(("scope", "covered"), [((), "attention mlp"), (("attn",), "attention"), (("mlp",), "mlp")])
def test_the_scope_says_which_half_is_under_a_graph(scope, covered):
    layer = chunk(replace(EMULATED, cuda_graph_scope=scope)).layers["0"]
    assert layer.is_graphable()
    assert layer.get_submodules_under_cudagraphs() == [getattr(layer, half) for half in covered.split()]
    called = []
    layer.setup_manual_hooks(lambda: called.append)
    assert [module for _, (module,) in layer.cuda_graph_manual_hooks] == [
        module
        for half in layer.get_submodules_under_cudagraphs()
        for module in half.modules()
        if list(module.parameters(recurse=False))
    ]


def test_static_inputs_have_the_shapes_of_the_layers_inputs():
    model = chunk(EMULATED, position="rope")
    seen = []
    layer = model.layers["0"]
    layer.register_forward_pre_hook(lambda module, args: seen.append(module.cuda_graph_inputs(*args)))
    model(torch.zeros(3, 64, dtype=torch.long))
    (x,) = layer.get_layer_static_inputs(64, 3).values()
    assert [t.shape for t in (x, *model.layer_context(64))] == [t.shape for t in seen[0]]
    assert x.requires_grad and x.dtype == seen[0][0].dtype


def test_a_module_without_graphs_and_one_that_none_covers_run_as_they_are():
    plain = chunk(GraphConfig()).layers["0"]
    whole = chunk(GraphConfig(cuda_graph_impl="emulated", cuda_graph_scope=("full_iteration",))).layers["0"]
    assert not plain.is_graphable() and not whole.is_graphable()


class Scaled(GraphableMegatronModule):
    """x times a number."""

    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor


def test_arguments_that_are_no_tensors_are_refused():
    module = Scaled(EMULATED)
    module.cuda_graphs = [lambda x: x * 3]
    x = torch.ones(2)
    assert torch.equal(module(x), x * 3)
    with pytest.raises(TypeError, match="given a float, and a graph takes tensors alone"):
        module(x, 4.0)
    with torch.no_grad():
        assert torch.equal(module(x, 4.0), x * 4)
    assert torch.equal(module.eval()(x), x * 2)
    with pytest.raises(NotImplementedError, match="Scaled does not say"):
        module.get_layer_static_inputs(4, 1)


def test_each_microbatch_replays_its_own_graph_after_the_hooks():
    module, calls = Scaled(EMULATED), []
    module.cuda_graphs = [lambda x, i=i: calls.append(i) or x for i in range(3)]
    module.cuda_graph_manual_hooks = [(lambda m: calls.append(type(m).__name__), (nn.Identity(),))]
    for module.current_microbatch in (0, 2, 4):
        module(torch.ones(1))
    assert calls == ["Identity", 0, "Identity", 2, "Identity", 1]
