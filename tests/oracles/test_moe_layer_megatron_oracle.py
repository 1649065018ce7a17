"""Our MoE layer beside megatron-core's, with the same weights in the same ranks: output and every gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from labkit.config import ModelConfig, MoEConfig, ParallelConfig
from labkit.launch import run

pytestmark = pytest.mark.oracle

GATED = ModelConfig(hidden=32, heads=4, activation="swiglu", init_std=0.3)
GELU = replace(GATED, activation="gelu")
PLAIN = MoEConfig(num_experts=8, ffn_hidden=24, top_k=2, dispatcher="alltoall")
SHARED = replace(PLAIN, shared_expert_ffn_hidden=40)
CASES: dict[str, tuple[ModelConfig, MoEConfig]] = {
    "gated": (GATED, PLAIN),
    "gelu": (GELU, PLAIN),
    "one expert after the other": (GATED, replace(PLAIN, grouped_gemm=False)),
    "softmax first": (GATED, replace(PLAIN, pre_softmax=True, top_k=3)),
    "all experts": (GATED, replace(PLAIN, top_k=8)),
    "shared": (GATED, SHARED),
    "shared and gated": (GATED, replace(SHARED, shared_expert_gate=True)),
    "shared, overlapped": (GELU, replace(SHARED, shared_expert_overlap=True)),
}


def both(cases: dict[str, tuple[ModelConfig, MoEConfig]], layout: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By case: largest differences of output, its input's gradient and the weights' gradients on this rank, relative
    to the largest value of each."""
    import megatron_moe

    from labkit.moe import MoELayer
    from labkit.parallel import initialize_model_parallel

    groups = initialize_model_parallel(ParallelConfig(**layout))
    found = {}
    for number, (name, (model, moe)) in enumerate(cases.items()):
        sequence_parallel = groups.config.sequence_parallel
        ours = MoELayer("layers.0.mlp", model, moe, groups, sequence_parallel=sequence_parallel, seed=number)
        theirs = megatron_moe.layer(model, moe, groups)
        megatron_moe.copy_weights(ours, theirs)
        torch.manual_seed(100 * number + groups.rank)
        x = torch.randn(12, 2, model.hidden)
        grad = torch.randn_like(x)
        outputs, inputs = [], []
        for layer in (ours, theirs):
            inputs.append(x.clone().requires_grad_())
            made = layer(inputs[-1])
            outputs.append(made[0] if isinstance(made, tuple) else made)
            outputs[-1].backward(grad)
        found[name] = {
            "output": relative(outputs[0], outputs[1]),
            "input": relative(inputs[0].grad, inputs[1].grad),
            "weights": megatron_moe.largest_gradient_difference(ours, theirs),
        }
    return found


def relative(ours: Any, theirs: Any) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"ep": 2},
        {"tp": 2, "etp": 2, "sequence_parallel": True},
        {"tp": 2, "etp": 1, "ep": 2, "sequence_parallel": True},
    ],
    ids=["one rank", "ep2", "tp2 etp2", "tp2 etp1 ep2"],
)
def test_output_and_gradients_equal_megatron_core(layout: dict[str, Any]) -> None:
    parallel = ParallelConfig(**layout)
    for on_rank in run(both, parallel.smallest_world_size, CASES, layout, timeout=120):
        assert on_rank.keys() == CASES.keys()
        for case, differences in on_rank.items():
            assert max(differences.values()) < 1e-5, (case, differences)
