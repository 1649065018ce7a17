"""The parity microscope looks at runs with CUDA graphs: the first step eagerly, the last by replays."""

import pytest

from labkit.config import ConfigError, presets
from labkit.train import compare

SMALL = {"model.layers": 2, "model.hidden": 32, "model.heads": 4, "model.seq_length": 16, "train.global_batch_size": 4}
GRAPHS = {"graph.cuda_graph_impl": "emulated"}
ATTENTION = {**GRAPHS, "graph.cuda_graph_modules": ("attn",)}
ITERATION = {"graph.cuda_graph_impl": "full_iteration"}


def test_layouts_with_graphs_agree_with_one_eager_process():
    layouts = [{"tp": 2, **GRAPHS}, {"pp": 2, **ATTENTION}, {"world_size": 2, **ITERATION}]
    report = compare(presets.tiny().override(SMALL), layouts)
    assert report.ok, f"\n{report}"
    for row, words in zip(
        report.rows, ("emulated graphs of layers", "emulated graphs attn", "graphs full_iteration"), strict=True
    ):
        assert row.name.endswith(words)


def test_a_communication_that_a_graph_leaves_out_is_found():
    fault = {"operation": "all_reduce", "group": "tp"}
    report = compare(presets.tiny().override(SMALL), [{"tp": 2, **GRAPHS}], steps=2, fault=fault)
    assert not report.ok and not report.fault_missed


REFUSED = {
    "one step": ({}, {"steps": 1}, "the first step, which runs eagerly"),
    "router": (
        {"moe.num_experts": 4, "graph.cuda_graph_modules": ("moe_router",)},
        {"dtype": "float32"},
        "the choice of",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_graphs_hide_is_refused_before_anything_is_launched(name, monkeypatch):
    changes, arguments, message = REFUSED[name]
    monkeypatch.delattr("labkit.launch.run")
    with pytest.raises(ConfigError, match=message):
        compare(presets.tiny().override(SMALL | changes | GRAPHS), [{"pp": 2}], **arguments)
