"""The router on a GPU: the same numbers as on the host, no wait for the device, and all of it in a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from labkit.config import ModelConfig, MoEConfig
from labkit.moe.balance import AuxLossScale
from labkit.moe.router import TopKRouter, finish_router_step
from labkit.moe.statistics import summarize
from labkit.parallel import single_process_groups

pytestmark = pytest.mark.gpu

S, B, H, E = 16, 2, 32, 8
LOSSES = {"aux_loss_coeff": 0.1, "z_loss_coeff": 0.1}
POLICIES: dict[str, dict[str, Any]] = {
    "softmax": LOSSES,
    "sequence": {**LOSSES, "load_balancing": "seq_aux_loss", "pre_softmax": True},
    "global": {**LOSSES, "load_balancing": "global_aux_loss"},
    "deepseek": {
        **LOSSES,
        "score_function": "sigmoid",
        "expert_bias": True,
        "num_groups": 4,
        "group_topk": 1,
        "topk_scaling_factor": 2.5,
    },
    "drops": {**LOSSES, "capacity_factor": 0.75},
    "padded": {**LOSSES, "capacity_factor": 0.75, "drop_policy": "position", "pad_to_capacity": True},
}


def router_of(device: str, moe: dict[str, Any]) -> TopKRouter:
    model, config = ModelConfig(hidden=H, init_std=0.3), MoEConfig(num_experts=E, **moe)
    scale = AuxLossScale(2.0, device=device)
    groups = single_process_groups(device=device)
    return TopKRouter("router", model, config, groups, dtype=torch.float64, device=device, aux_scale=scale)


def one_step(router: TopKRouter, x_SBH: Tensor, target_TE: Tensor) -> Tensor:
    """Gradient of the input; the weight's is left in the weight."""
    x_SBH = x_SBH.detach().requires_grad_()
    probs_TE, _ = router(x_SBH)
    (probs_TE * target_TE).sum().backward()
    assert x_SBH.grad is not None
    return x_SBH.grad


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_to_the_host_without_waiting_for_the_device(policy: str) -> None:
    random = torch.Generator().manual_seed(1)
    x_SBH, target_TE = (torch.randn(*shape, generator=random).double() for shape in ((S, B, H), (S * B, E)))
    host, device = router_of("cpu", POLICIES[policy]), router_of("cuda", POLICIES[policy])
    on_device = [x.cuda() for x in (x_SBH, target_TE)]
    one_step(device, *on_device)  # libraries are loaded on first use, which may wait
    device.zero_grad(set_to_none=True)
    device.statistics.reset()
    if device.local_tokens_per_expert is not None:
        device.local_tokens_per_expert.zero_()
    device.reset_global_aux_loss_tracker()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = one_step(device, *on_device)
        finish_router_step([device], device.groups)
        device.aux_scale.set(1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(found.cpu(), one_step(host, x_SBH, target_TE))
    finish_router_step([host], host.groups)
    assert host.weight.grad is not None and device.weight.grad is not None
    torch.testing.assert_close(device.weight.grad.cpu(), host.weight.grad)
    assert host.expert_bias is None or torch.equal(device.expert_bias.cpu(), host.expert_bias)  # type: ignore[union-attr]
    ours, theirs = (summarize([router.statistics], router.groups)[0] for router in (device, host))
    assert ours.tokens_per_expert == theirs.tokens_per_expert and ours.dropped == theirs.dropped


@pytest.mark.parametrize("policy", POLICIES)
def test_a_captured_router_counts_at_every_replay_and_reads_the_scale_of_the_day(policy: str) -> None:
    router = router_of("cuda", POLICIES[policy])
    x_SBH, target_TE = torch.randn(S, B, H, device="cuda").double(), torch.randn(S * B, E, device="cuda").double()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            one_step(router, x_SBH, target_TE)
    torch.cuda.current_stream().wait_stream(side)
    router.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradient = one_step(router, x_SBH, target_TE)
    finish_router_step([router], router.groups, move_biases=False)
    router.statistics.reset()
    for scale in (2.0, 5.0):
        router.aux_scale.set(scale)
        graph.replay()
        eager = router_of("cuda", POLICIES[policy])
        eager.aux_scale.set(scale)
        torch.testing.assert_close(gradient, one_step(eager, x_SBH, target_TE))
    assert summarize([router.statistics], router.groups)[0].tokens_per_expert == tuple(
        2 * load for load in summarize([eager.statistics], eager.groups)[0].tokens_per_expert
    )
