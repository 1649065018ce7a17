"""Blocks of attention on a GPU: the kernels that hand out log-sum-exps, and the ring of many ranks on one GPU."""

import pytest
import torch

from labkit.config import ParallelConfig
from labkit.launch import run
from labkit.parallel import initialize_model_parallel, zigzag_split
from labkit.parallel.context.attention_block import attend, attend_backward, merge_
from labkit.parallel.context.ring_attention import all_gather_attention, ring_attention
from labkit.parallel.context.zigzag import join_sequence

pytestmark = pytest.mark.gpu


def tensors(dtype: torch.dtype, length: int = 256, dim: int = 64) -> list[torch.Tensor]:
    """q, k, v and a gradient, alike everywhere: drawn on the host."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, length, dim) for heads in (8, 2, 2, 8)]
    return [torch.randn(shape, generator=generator).to("cuda", dtype) for shape in shapes]


def at_once(q, k, v, grad) -> list[torch.Tensor]:
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.double())]


def distance(found, expected) -> float:
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2**-6), (torch.float16, 2**-9), (torch.float32, 1e-4)])
def test_two_blocks_are_attention(dtype, bound):
    """Causal over the second half's keys, and all of the first half's: joined, and each with its share of gradients."""
    q, k, v, grad = tensors(dtype)
    expected = at_once(q, k, v, grad)
    half = q.shape[2] // 2
    blocks = [(slice(0, half), slice(0, half), True), (slice(half, None), slice(0, half), False)]
    blocks.append((slice(half, None), slice(half, None), True))
    out = torch.zeros(q.shape, device="cuda")
    lse = torch.full(q.shape[:-1], -torch.inf, device="cuda")
    for rows, columns, causal in blocks:
        part = attend(q[:, :, rows], k[:, :, columns], v[:, :, columns], causal=causal)
        merge_(out[:, :, rows], lse[:, :, rows], *part)
    final = out.to(dtype)
    sums = [torch.zeros(x.shape, device="cuda") for x in (q, k, v)]
    for rows, columns, causal in blocks:
        own = (grad[:, :, rows], q[:, :, rows], k[:, :, columns], v[:, :, columns])
        shares = attend_backward(*own, final[:, :, rows], lse[:, :, rows], causal=causal)
        for total, share, where in zip(sums, shares, (rows, columns, columns), strict=True):
            total[:, :, where] += share
    assert distance([final, *sums], expected) < bound


def in_pieces(form, cp: int) -> list[torch.Tensor]:
    group = initialize_model_parallel(ParallelConfig(cp=cp)).cp
    mine = [zigzag_split(x, cp, group.rank, 2).clone() for x in tensors(torch.bfloat16)]
    inputs = [x.requires_grad_() for x in mine[:3]]
    out = form(*inputs, group)
    return [x.detach().cpu() for x in (out, *torch.autograd.grad(out, inputs, mine[3]))]


@pytest.mark.parametrize("form", [ring_attention, all_gather_attention])
def test_four_ranks_on_one_gpu(form):
    found = run(in_pieces, 4, form, 4, device="cuda", timeout=120)
    joined = [join_sequence(parts, 2, "zigzag") for parts in zip(*found, strict=True)]
    assert distance(joined, [x.cpu() for x in at_once(*tensors(torch.bfloat16))]) < 2**-6
