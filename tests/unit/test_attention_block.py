"""Attention block by block against attention at once: outputs, log-sum-exps, gradients, types."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from labkit.parallel.context.attention_block import attend, attend_backward, merge_


def tensors(heads=(4, 2), queries=6, keys=6, dim=8, dtype=torch.float64, seed=0):
    """q, k, v and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (1, heads[0], queries, dim),
        (1, heads[1], keys, dim),
        (1, heads[1], keys, dim),
        (1, heads[0], queries, dim),
    ]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def at_once(q, k, v, grad, causal):
    """Output, log-sum-exp of the scores and gradients, by autograd."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    out.backward(grad.double())
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return out.detach(), scores.logsumexp(-1).detach(), q.grad, k.grad, v.grad


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
def test_one_block_is_attention(fused, causal, heads):
    q, k, v, grad = tensors(heads)
    expected = at_once(q, k, v, grad, causal)
    out, lse = attend(q, k, v, causal=causal, fused=fused)
    found = out, lse, *attend_backward(grad, q, k, v, out, lse, causal=causal, fused=fused)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans(), st.integers(0, 100))
def test_keys_may_come_in_any_pieces(pieces, fused, seed):
    """Blocks merged by their log-sum-exps are attention over all of the keys; backward needs no merging."""
    q, k, v, grad = tensors(keys=sum(pieces), seed=seed)
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -math.inf, dtype=q.dtype)
    parts = list(zip(k.split(pieces, 2), v.split(pieces, 2), strict=True))
    for k_part, v_part in parts:
        merge_(out, lse, *attend(q, k_part, v_part, causal=False, fused=fused))
    shares = [attend_backward(grad, q, *part, out, lse, causal=False, fused=fused) for part in parts]
    dq, dk, dv = zip(*shares, strict=True)
    found = out, lse, sum(dq), torch.cat(dk, 2), torch.cat(dv, 2)
    for mine, theirs in zip(found, at_once(q, k, v, grad, False), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def test_large_scores_overflow_nothing():
    q, k, v, grad = tensors()
    expected = at_once(100 * q, 100 * k, v, grad, True)[0]
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -math.inf, dtype=q.dtype)
    merge_(out, lse, *attend(100 * q, 100 * k, v, causal=True))
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_the_type(dtype, fused):
    q, k, v, grad = tensors(keys=16, queries=16, dtype=dtype)
    expected = at_once(q, k, v, grad, True)
    out, lse = attend(q, k, v, causal=True, fused=fused)
    found = out, lse, *attend_backward(grad, q, k, v, out, lse, causal=True, fused=fused)
    assert lse.dtype == torch.float32
    for mine, theirs in zip(found, expected, strict=True):
        assert ((mine.double() - theirs).norm() / theirs.norm()).item() < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
def test_the_call_of_the_gpu_kernels_fits_their_signatures(heads):
    """Without a GPU: torch's own shape functions of the kernels take the calls and give the shapes."""
    with FakeTensorMode():
        q = torch.empty(1, heads[0], 256, 64, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.empty(1, heads[1], 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out, lse = attend(q, k, v, causal=False)
        grads = attend_backward(torch.empty_like(out), q, k, v, out, lse, causal=False)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:-1], torch.float32)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
