"""Our permutations beside megatron-core's own, on the same routings: rows, weights, order and gradients."""

from __future__ import annotations

import pytest
import torch

from labkit.moe import permute, sort_chunks_by_idxs, unpermute
from labkit.moe.dispatch.alltoall import Splits
from labkit.moe.routing import apply_capacity

pytestmark = pytest.mark.oracle
pytest.importorskip("megatron.core", reason="needs megatron-core")

TOKENS, EXPERTS, TOP_K, HIDDEN = 24, 6, 3, 5


@pytest.mark.parametrize(("capacity", "pad"), [(None, False), (0.7, False), (1.2, True)])
def test_permute_and_unpermute(capacity: float | None, pad: bool) -> None:
    from megatron.core.transformer.moe import moe_utils

    torch.manual_seed(0)
    scores = torch.randn(TOKENS, EXPERTS, dtype=torch.float64)
    map_TE = torch.zeros(scores.shape, dtype=torch.bool).scatter_(1, scores.topk(TOP_K).indices, True)
    probs = scores.masked_fill(~map_TE, -torch.inf).softmax(1)
    if capacity is not None:
        probs, map_TE = apply_capacity(probs, map_TE, top_k=TOP_K, capacity_factor=capacity, pad_to_capacity=pad)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    number = int(map_TE.sum())
    found = []
    for ours in (True, False):
        x, p = hidden.clone().requires_grad_(), probs.detach().clone().requires_grad_()
        if ours:
            rows, weights, index = permute(x, map_TE, probs_TE=p, num_out_tokens=number)
            assert weights is not None
            back = unpermute(rows * weights[:, None], index, TOKENS)
        else:
            rows, weights, index = moe_utils.permute(x, map_TE, probs=p, num_out_tokens=number, drop_and_pad=pad)
            assert weights is not None
            back = moe_utils.unpermute(
                rows * weights[:, None], index, torch.Size((TOKENS, HIDDEN)), routing_map=map_TE, drop_and_pad=pad
            )
        back.cos().sum().backward()
        assert x.grad is not None
        assert p.grad is not None
        found.append((index, rows.detach(), weights.detach(), back.detach(), x.grad, p.grad))
    for mine, theirs in zip(*found):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-14)


def test_chunks_and_the_sizes_that_the_dispatcher_cuts() -> None:
    """The order from sources to local experts and back, as megatron-core's dispatcher sets it up."""
    from megatron.core.transformer.moe import moe_utils

    etp, ep, local = 2, 2, EXPERTS // 2
    torch.manual_seed(1)
    splits = Splits.of(torch.randint(0, 4, (etp, ep, EXPERTS)), ep_rank=1, etp_rank=0)
    chunks = torch.tensor(splits.chunks)
    places = torch.arange(etp * ep * local)
    x = torch.randn(sum(splits.chunks), HIDDEN)
    to_experts = places.reshape(-1, local).T.ravel()
    theirs, _ = moe_utils.sort_chunks_by_idxs(x, chunks, to_experts)
    assert torch.equal(sort_chunks_by_idxs(x, splits.chunks, to_experts.tolist()), theirs)
    assert splits.tokens_per_expert.tolist() == chunks[to_experts].view(local, -1).sum(1).tolist()
