"""Dispatchers on CUDA tensors: nothing but the copy of the counts is waited for, and preprocessing can be captured."""

from __future__ import annotations

import pytest
import torch
from host_waits import no_waiting
from torch import Tensor

from labkit.config import MoEConfig, ParallelConfig
from labkit.launch import run
from labkit.moe import MoETokenDispatcher, build_dispatcher, unpermute
from labkit.moe.dispatch.dispatcher import Metadata
from labkit.moe.routing import apply_capacity
from labkit.parallel import initialize_model_parallel, single_process_groups

pytestmark = pytest.mark.gpu

EXPERTS, TOP_K = 8, 3


def routed(seed: int, *, padded: bool = False, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [16, 2, 32], weights and map, on the GPU"""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(32, EXPERTS, generator=generator)
    map_TE = torch.zeros(scores.shape, dtype=torch.bool).scatter_(1, scores.topk(TOP_K).indices, True)
    probs = scores.masked_fill(~map_TE, -torch.inf).softmax(1)
    if padded:
        probs, map_TE = apply_capacity(probs, map_TE, top_k=TOP_K, capacity_factor=1.0, pad_to_capacity=True)
    hidden = torch.randn(16, 2, 32, generator=generator, dtype=torch.float64).to(dtype)
    return hidden.cuda(), probs.to(dtype).cuda(), map_TE.cuda()


def through(dispatcher: MoETokenDispatcher, hidden: Tensor, probs: Tensor, map_TE: Tensor) -> Tensor:
    """The layer with experts that only apply the weights."""
    return after(dispatcher, *dispatcher.dispatch_preprocess(hidden, probs, map_TE))


def after(dispatcher: MoETokenDispatcher, rows: Tensor, weights: Tensor, metadata: Metadata) -> Tensor:
    sent = dispatcher.token_dispatch(rows, weights, metadata)
    rows, counts, weights, metadata = dispatcher.dispatch_postprocess(*sent)
    assert counts.device.type == "cpu"
    combined = dispatcher.token_combine(*dispatcher.combine_preprocess(rows * weights[:, None], metadata))
    return dispatcher.combine_postprocess(*combined)


def config_of(kind: str, padded: bool) -> MoEConfig:
    capacity = 1.0 if padded else None
    return MoEConfig(
        num_experts=EXPERTS, top_k=TOP_K, dispatcher=kind, capacity_factor=capacity, pad_to_capacity=padded
    )


@pytest.mark.parametrize("kind", ["local", "alltoall"])
@pytest.mark.parametrize("point", ["before_permutation_1", "before_ep_alltoall"])
@pytest.mark.parametrize("padded", [False, True])
def test_no_step_waits_forward_or_backward(kind: str, point: str, padded: bool) -> None:
    dispatcher = build_dispatcher(config_of(kind, padded), single_process_groups(device="cuda"), cuda_dtoh_point=point)
    hidden, probs, map_TE = routed(0, padded=padded)
    hidden.requires_grad_()
    probs.requires_grad_()
    through(dispatcher, hidden, probs, map_TE).sum().backward()  # allocates
    hidden.grad = probs.grad = None
    with no_waiting():
        output = through(dispatcher, hidden, probs, map_TE)
        output.backward(torch.ones_like(output))
    weights = (probs.detach() * map_TE).sum(1).view(16, 2, 1)
    torch.testing.assert_close(output, hidden * weights)
    torch.testing.assert_close(hidden.grad, weights.expand_as(hidden))
    assert probs.grad is not None
    torch.testing.assert_close(probs.grad, map_TE * hidden.detach().sum(2).view(32, 1))


def test_the_same_bits_twice_and_sums_rounded_once() -> None:
    dispatcher = build_dispatcher(config_of("alltoall", False), single_process_groups(device="cuda"))
    hidden, probs, map_TE = routed(1, dtype=torch.bfloat16)
    first = through(dispatcher, hidden, probs, map_TE)
    assert all(torch.equal(first, through(dispatcher, hidden, probs, map_TE)) for _ in range(5))
    rows = torch.tensor([[256.0], *[[1.0]] * 4], device="cuda").bfloat16()
    assert unpermute(rows, torch.zeros(5, dtype=torch.int64, device="cuda"), 1).item() == 260


@pytest.mark.parametrize("kind", ["local", "alltoall"])
def test_preprocessing_is_captured_and_follows_new_routings(kind: str) -> None:
    groups = single_process_groups(device="cuda")
    dispatcher = build_dispatcher(config_of(kind, False), groups, cuda_dtoh_point="before_ep_alltoall")
    static = [x.clone() for x in routed(2)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dispatcher.dispatch_preprocess(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = dispatcher.dispatch_preprocess(*static)
    for seed in (3, 4):
        new = routed(seed)
        for into, x in zip(static, new):
            into.copy_(x)
        graph.replay()
        eager = build_dispatcher(config_of(kind, False), groups)
        torch.testing.assert_close(after(dispatcher, *captured), through(eager, *new), rtol=0, atol=0)


def across_ranks() -> None:
    groups = initialize_model_parallel(ParallelConfig(ep=2))
    hidden, probs, map_TE = routed(groups.rank)
    gathered, exchanged = (
        through(build_dispatcher(config_of(kind, False), groups), hidden, probs, map_TE)
        for kind in ("allgather", "alltoall")
    )
    assert exchanged.is_cuda
    torch.testing.assert_close(exchanged, gathered, rtol=0, atol=1e-14)


def test_two_ranks_that_share_a_gpu_agree_with_the_all_gather() -> None:
    run(across_ranks, 2, backend="gloo", device="cuda", timeout=120.0)
