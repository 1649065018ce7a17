"""`CudaGraphHelper` by hand: what a recapture checks and keeps, and what captures and resets leave behind."""

import copy

import pytest
import torch
from graph_training import GRAPHS, Training, small

from labkit.config import GraphConfig, presets
from labkit.graphs import CudaGraphHelper, FullIterationGraph, unwrap_layers, wrap_layers
from labkit.graphs.order_table import capture_order
from labkit.models import build_model_chunks
from labkit.parallel import single_process_groups
from labkit.parallel.parameters.parameter_record import record_of
from labkit.schedules import PipelineRuntime, Schedule, build_schedule, one_f_one_b

EMULATED = GRAPHS | {"schedule.name": "gpipe"}


def pp2(name: str, microbatches: int = 4) -> Schedule:
    config = small(**{"schedule.name": name})
    return build_schedule(config.schedule, pp=2, vpp=1, microbatches=microbatches)


def helper_of(training: Training, schedule: Schedule, pp_rank: int = 0, **options) -> CudaGraphHelper:
    graph, chunks = training.pipeline.config.graph, training.pipeline.chunks
    return CudaGraphHelper(chunks, graph, 16, 1, schedule=schedule, pp_rank=pp_rank, **options)


def test_a_recapture_stays_on_its_row_of_the_schedule():
    helper = helper_of(Training(small(**GRAPHS)), pp2("1f1b"), pp_rank=1)
    assert helper.order == [1, -1] * (len(helper.order) // 2), "the last rank goes backward at once"
    helper.recapture(schedule=pp2("1f1b", 6))
    assert helper.pp_rank == 1 and helper.order == capture_order(pp2("1f1b", 6), 1)
    helper.recapture(schedule=pp2("1f1b"), pp_rank=0)
    assert helper.pp_rank == 0 and helper.order == capture_order(pp2("1f1b"), 0)
    helper.recapture(seq_length=8)
    assert helper.order == capture_order(pp2("1f1b"), 0) and helper.layers[0].cuda_graph_shapes[0][0] == (8, 1, 32)
    with pytest.raises(ValueError, match="pp_rank = 1 names a row of a schedule"):
        helper.recapture(pp_rank=1)


def test_a_recapture_refuses_what_the_constructor_refuses_and_leaves_the_graphs():
    """Weight gradients that eager code puts off would read what graphs have written over by then."""
    training = Training(small(**GRAPHS, **{"graph.cuda_graph_modules": ("attn",)}))
    split = pp2("zero_bubble_h1")
    with pytest.raises(ValueError, match=r"splits backwards, and with graph\.cuda_graph_modules"):
        helper_of(training, split, pp_rank=1)
    helper = helper_of(training, pp2("1f1b"), pp_rank=1)
    helper.create_cudagraphs()
    before = helper.order, [layer.cuda_graphs for layer in helper.layers]
    with pytest.raises(ValueError, match=r"splits backwards, and with graph\.cuda_graph_modules"):
        helper.recapture(schedule=split)
    assert (helper.order, [layer.cuda_graphs for layer in helper.layers]) == before and helper.graphs_created()


class Cleared:
    """An optimizer that counts."""

    def __init__(self) -> None:
        self.calls = 0

    def zero_grad(self) -> None:
        self.calls += 1


def test_optimizers_forget_what_ran_for_the_sake_of_the_capture():
    training = Training(small(**EMULATED))
    counting, without = Cleared(), object()
    helper = helper_of(training, training.pipeline.schedule, optimizers=[counting, without])
    assert counting.calls == 0
    helper.create_cudagraphs()
    assert counting.calls == 1
    helper.recapture(seq_length=8)
    assert counting.calls == 2
    for chunk in training.pipeline.chunks:
        assert all(p.grad is None and not p.main_grad.any() for p in chunk.parameters())


@pytest.mark.parametrize("training_mode", [True, False])
def test_layers_are_captured_in_training_and_left_in_their_mode(training_mode):
    training = Training(small(**EMULATED))
    helper = training.helper
    for layer in helper.layers:
        layer.layer.train(training_mode)
    helper.create_cudagraphs()
    for layer in helper.layers:
        assert {module.training for module in layer.layer.modules()} == {training_mode}
        layer.layer.train()
        x = torch.zeros(16, 1, 32, requires_grad=True)
        assert layer.layer(x).data_ptr() == layer.cuda_graphs[0].static_outputs[0].data_ptr(), "its graph ran"


def test_after_a_reset_gradients_are_written_as_without_graphs():
    """Captured backwards always add to `main_grad`; eager ones replace the first of a step."""
    training = Training(small(**EMULATED))
    helper = training.helper
    parameters = [p for layer in helper.layers for p in layer.layer.parameters()]
    marks = [record_of(p).added_elsewhere for p in parameters]
    helper.create_cudagraphs()
    assert all(record_of(p).added_elsewhere for p in parameters)
    helper.reset()
    assert [record_of(p).added_elsewhere for p in parameters] == marks
    assert not any(marks) and not helper.graphs_created()
    assert all(layer.cuda_graph_owner is None and not layer.cuda_graphs for layer in helper.layers)


def test_two_helpers_do_not_have_graphs_of_one_layer():
    training = Training(small(**EMULATED))
    training.helper.create_cudagraphs()
    with pytest.raises(ValueError, match="the graphs of another CudaGraphHelper: call its reset"):
        helper_of(training, training.pipeline.schedule)


def test_a_full_iteration_holds_whole_layers_whatever_wrapped_them_before():
    config = small(**EMULATED | {"graph.cuda_graph_modules": ("mlp",)})
    (chunk,) = build_model_chunks(config, single_process_groups())
    layer = next(iter(chunk.layers.values()))
    x = torch.randn(4, 1, config.model.hidden)
    eager = layer(x)
    wrap_layers(chunk, config.graph)
    made = []
    step = FullIterationGraph(
        lambda _: made.append(layer(x)), num_microbatches=1, impl="emulated", warmup_steps=0, chunks=[chunk]
    )
    step(iter([{"a": torch.zeros(1)}]))
    assert torch.equal(made[0], eager), "attention is in the graph, too"


def test_a_runtime_tells_layers_that_were_wrapped_later_whose_forward_is_next():
    config = small(**EMULATED)
    (chunk,) = build_model_chunks(config, single_process_groups())
    seen = []

    def forward(batches, model):
        seen.append([getattr(layer, "current_microbatch", None) for layer in model.layers.values()])
        return torch.zeros((), requires_grad=True) * next(batches), None

    runtime = PipelineRuntime(one_f_one_b(1, 3), chunk, single_process_groups(), forward_step_func=forward)
    runtime.run(iter([0.0] * 3))
    wrap_layers(chunk, config.graph)
    runtime.run(iter([0.0] * 3))
    layers = len(chunk.layers)
    assert seen == [[None] * layers] * 3 + [[0] * layers, [1] * layers, [2] * layers]


def test_a_model_with_a_cut_layer_of_experts_is_not_copied():
    config = presets.tiny_moe().override({"model.layers": 1})
    (chunk,) = build_model_chunks(config, single_process_groups())
    graph = GraphConfig(cuda_graph_impl="emulated", cuda_graph_modules=("attn", "moe_router"))
    wrap_layers(chunk, graph)
    with pytest.raises(TypeError, match=r"layers\.0\.mlp .* Copy the model before"):
        copy.deepcopy(chunk)
    unwrap_layers([chunk])
    assert copy.deepcopy(chunk).layers["0"].mlp.route.__self__ is not chunk.layers["0"].mlp
