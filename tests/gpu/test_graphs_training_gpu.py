"""Training by CUDA graphs on a GPU: the same losses as without, layer by layer and by the whole iteration."""

from __future__ import annotations

import pytest

from labkit.config import presets
from labkit.launch import run
from labkit.train import TrainResult, pretrain

pytestmark = pytest.mark.gpu

DROPOUT = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
ATTENTION = {"graph.cuda_graph_modules": ("attn",)}
FULL = {"graph.cuda_graph_impl": "full_iteration"}


def trained(impl: str, changes: dict) -> TrainResult:
    config = presets.tiny().override(
        {
            "model.layers": 2,
            "train.steps": 6,
            "train.global_batch_size": 4,
            "train.eval_steps": 1,
            "train.eval_interval": 2,
            "graph.cuda_graph_impl": impl,
            "graph.cuda_graph_warmup_steps": 2 if impl != "none" else 3,
            **{key: value for key, value in changes.items() if impl != "none" or not key.startswith("graph.")},
        }
    )
    return pretrain(config)


@pytest.mark.parametrize(
    "scope", [{}, {"graph.cuda_graph_modules": ("attn",)}, FULL], ids=["layers", "attn", "iteration"]
)
@pytest.mark.parametrize("changes", [{}, DROPOUT, {"optim.precision": "bf16"}], ids=["fp32", "dropout", "bf16"])
def test_losses_are_bit_equal_to_those_without_graphs(changes: dict, scope: dict) -> None:
    graphed, eager = trained("local", changes | scope), trained("none", changes)
    assert graphed.losses == eager.losses
    assert graphed.series("validation_loss") == eager.series("validation_loss")
    assert any(event.kind == "graph_replay" for event in graphed.events)


def both(changes: dict) -> tuple[list[float], list[float]]:
    return trained("local", changes).losses, trained("none", changes).losses


@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 2, "vpp": 2, "layers": 4}], ids=["pp2", "pp2 vpp2"])
def test_a_pipeline_of_graphs_gives_the_losses_of_one_without(layout: dict) -> None:
    """Two ranks, on one GPU if there is no other: messages travel between replays."""
    for graphed, eager in run(both, 2, layout, backend="gloo"):
        assert graphed == eager
