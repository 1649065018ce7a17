"""Partial graphs of layers with experts on a GPU: the same bits as without, on one rank and on two."""

from __future__ import annotations

from typing import Any

import pytest

from labkit.config import presets
from labkit.launch import run
from labkit.train import TrainResult, pretrain

pytestmark = pytest.mark.gpu

ROUTER, PREPROCESS = ("attn", "moe_router"), ("attn", "moe_router", "moe_preprocess")
SHARED = {"moe.shared_expert_ffn_hidden": 64, "moe.shared_expert_gate": True}
OVERLAPPED = {**SHARED, "moe.shared_expert_overlap": True}
PADDED = {"moe.capacity_factor": 1.0, "moe.pad_to_capacity": True}


def trained(impl: str, scope: tuple[str, ...], changes: dict[str, Any]) -> TrainResult:
    config = presets.tiny_moe().override({"model.layers": 2, "train.steps": 6, "train.global_batch_size": 4, **changes})
    graph = {"graph.cuda_graph_impl": impl, "graph.cuda_graph_modules": scope, "graph.cuda_graph_warmup_steps": 2}
    return pretrain(config if impl == "none" else config.override(graph))


def both(scope: tuple[str, ...], changes: dict[str, Any]) -> tuple[list[float], list[float], bool, bool]:
    graphed, eager = trained("local", scope, changes), trained("none", scope, changes)
    load = "moe/layers.0/tokens_per_expert"
    replayed = any(event.kind == "graph_replay" for event in graphed.events)
    return graphed.losses, eager.losses, graphed.series(load) == eager.series(load), replayed


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("scope", "changes"),
    [
        (ROUTER, {}),
        (PREPROCESS, {}),
        (PREPROCESS, SHARED),
        (ROUTER, OVERLAPPED),  # the first stage runs beside the graph, on a stream of its own
        (PREPROCESS, OVERLAPPED),  # and here inside, so that its stream is forked and joined in the graph
        (PREPROCESS, PADDED),
        (("attn", "moe"), PADDED),
        (PREPROCESS, {"moe.dispatcher": "local"}),
        (PREPROCESS, {"model.hidden_dropout": 0.1, "moe.input_jitter": 0.1}),
    ],
    ids=[
        "router",
        "preprocess",
        "shared",
        "overlapped outside",
        "overlapped inside",
        "padded",
        "whole",
        "local",
        "drawn",
    ],
)
def test_losses_and_loads_are_those_without_graphs(scope: tuple[str, ...], changes: dict, precision: str) -> None:
    graphed, eager, same_load, replayed = both(scope, {**changes, "optim.precision": precision})
    assert graphed == eager and same_load and replayed


@pytest.mark.parametrize("layout", [{"parallel.ep": 2}, {"parallel.pp": 2}], ids=["ep2", "pp2"])
def test_two_ranks(layout: dict[str, Any]) -> None:
    """On one GPU if there is no other. The counts of ep's ranks are gathered eagerly with gloo, so NCCL is needed for a
    graph that holds `preprocess`; the router's graph holds no collective."""
    for graphed, eager, same_load, _ in run(both, 2, ROUTER, layout, backend="gloo"):
        assert graphed == eager and same_load
