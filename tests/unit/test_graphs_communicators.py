"""No CUDA graph holds gloo's messages: refused before the first step. GPUs and groups are stand-ins here."""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from labkit.cli.train_command import Trained, final_lines
from labkit.comm.groups import Group, initialize_model_parallel
from labkit.config import ConfigError, GraphConfig, ParallelConfig, presets
from labkit.graphs import CudaGraphHelper, wrap_layers
from labkit.graphs.checks import before_capture
from labkit.graphs.checks.before_capture import refuse_gloo
from labkit.models.blocks import LayerParts
from labkit.models.chunks import build_model_chunks
from labkit.schedules import build_schedule
from labkit.train.cuda_graphs import build_graphs
from labkit.train.pretraining import layer_spec

GPU = torch.device("cuda")
PAIR = Group("tp", (0, 1), 0, object())
ALONE = Group("cp", (0,), 0)


@pytest.fixture
def backend(monkeypatch):
    """Every group talks through `backend.name`."""
    chosen = SimpleNamespace(name="gloo")
    monkeypatch.setattr(before_capture.dist, "get_backend", lambda _: chosen.name)
    return chosen


def test_the_command_line_says_what_they_hold():
    held = {"graphs": (4, 8), "static_input_bytes": (16384, 16384), "pool_peak_bytes": (65536, 65536)}
    lines = [{"step": 3, "graphs": held}, {"step": 3, "loss": 1.0}]
    said = final_lines(Trained([1.0], lines), presets.tiny())
    assert said[1:] == [
        "CUDA graphs per rank: 4 to 8; static inputs 16,384 bytes; pool peak 65,536 bytes",
    ]


@pytest.mark.parametrize(
    ("steps", "words"), [(1, ["the only step was"]), (3, ["all 3 steps were"]), (4, [])], ids=["one", "three", "four"]
)
def test_the_command_line_says_when_none_was_captured(steps, words):
    graph = {"graph.cuda_graph_impl": "emulated", "graph.cuda_graph_warmup_steps": 3, "train.steps": steps}
    said = final_lines(Trained([1.0] * steps, []), presets.tiny().override(graph))
    assert said[1:] == [
        f"no training step ran in a CUDA graph: {word} warm-up (graph.cuda_graph_warmup_steps = 3)" for word in words
    ]
    assert len(final_lines(Trained([1.0], []), presets.tiny().override({"train.steps": 1}))) == 1


def test_groups_of_several_ranks_on_gloo_are_named(backend):
    with pytest.raises(ConfigError, match=r"local would capture messages over tp \(2 ranks\), which go through gloo"):
        refuse_gloo([ALONE, PAIR, PAIR], GPU, "local")


def test_nccl_single_ranks_and_the_host_are_fine(backend):
    refuse_gloo([ALONE], GPU, "local")
    refuse_gloo([PAIR], torch.device("cpu"), "emulated")
    backend.name = "nccl"
    refuse_gloo([PAIR], GPU, "local")


class OnGpu(nn.Module):
    """A layer that would be on a GPU and communicate over two ranks."""

    def parameters(self, recurse=True):
        return iter([SimpleNamespace(device=GPU)])

    def parts(self):
        nothing = dict.fromkeys(field.name for field in fields(LayerParts))
        return LayerParts(**nothing | {"groups_of_attention": (PAIR,), "groups_of_mlp": ()})

    def forward(self, x):
        return x


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_the_helper_refuses_such_layers(backend, impl):
    graph = GraphConfig(cuda_graph_impl=impl)
    schedule = build_schedule(presets.tiny().schedule, pp=1, microbatches=2)
    with pytest.raises(ConfigError, match="gloo"):
        CudaGraphHelper([nn.Sequential(OnGpu())], graph, 8, 1, schedule=schedule)
    backend.name = "nccl"
    CudaGraphHelper([nn.Sequential(OnGpu())], graph, 8, 1, schedule=schedule)


@pytest.mark.parametrize("axis", ["tp", "cp", "dp"])
def test_an_iteration_holds_messages_of_all_groups(backend, axis):
    config = presets.tiny().override({"graph.cuda_graph_impl": "full_iteration"})
    groups = replace(initialize_model_parallel(ParallelConfig()), device=GPU, **{axis: replace(PAIR, name=axis)})
    schedule = build_schedule(config.schedule, pp=1, microbatches=2)
    with pytest.raises(ConfigError, match=rf"over {axis} \(2 ranks\)"):
        build_graphs(config, groups, [], schedule, list, list)


@pytest.mark.parametrize("scope", ["mlp", "attn,mlp"])
def test_linears_in_fp8_agree_on_scales_over_cp(scope):
    """All ranks that hold parts of a sample do, so cp's messages are in the graph of an MLP too."""
    fp8 = {"model.layers": 1, "optim.fp8": "hybrid", "graph.cuda_graph_impl": "emulated"}
    config = presets.tiny().override({**fp8, "graph.cuda_graph_modules": tuple(scope.split(","))})
    spec = layer_spec(config.model, config.optim)
    (chunk,) = build_model_chunks(config, initialize_model_parallel(ParallelConfig()), spec=spec)
    (layer,) = wrap_layers(chunk, config.graph)
    assert [group.name for group in layer.get_groups_under_cudagraphs()][-2:] == ["tp", "cp"]


LAYERS = {
    "attn": ({}, ["tp", "cp"]),
    "mlp": ({}, ["tp"]),
    "attn,mlp": ({}, ["tp", "cp", "tp"]),
    "": ({}, ["tp", "cp", "tp"]),
    "moe_router": ({"moe.num_experts": 4, "moe.load_balancing": "none"}, []),
    "moe_router balanced": (
        {"moe.num_experts": 4, "moe.load_balancing": "global_aux_loss", "moe.aux_loss_coeff": 0.01}, ["tp", "cp", "dp"],
    ),
    "moe_router shared": (
        {"moe.num_experts": 4, "moe.load_balancing": "none", "moe.shared_expert_ffn_hidden": 16}, ["tp"],
    ),
    "moe_router,moe_preprocess": ({"moe.num_experts": 4, "moe.load_balancing": "none"}, ["ep", "etp"]),
    "moe": (
        {"moe.num_experts": 4, "moe.load_balancing": "none", "moe.capacity_factor": 1.0, "moe.pad_to_capacity": True},
        ["ep", "etp"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("scope", LAYERS)
def test_a_layer_names_the_groups_of_its_captured_part(scope):
    changes, expected = LAYERS[scope]
    words = scope.split(" ", maxsplit=1)[0]
    captured = {
        "graph.cuda_graph_impl": "emulated",
        "graph.cuda_graph_modules": tuple(words.split(",")) if words else (),
    }
    config = presets.tiny().override({"model.layers": 1, **changes, **captured})
    config.validate()
    spec = layer_spec(config.model, config.optim)
    (chunk,) = build_model_chunks(config, initialize_model_parallel(ParallelConfig()), spec=spec)
    (layer,) = wrap_layers(chunk, config.graph)
    assert [group.name for group in layer.get_groups_under_cudagraphs()] == expected
