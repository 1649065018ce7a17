"""Rows into the order of experts and back: values, transposes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from labkit.moe import permute, sort_chunks_by_idxs, unpermute


@st.composite
def routings(draw: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, a map with up to k experts a token (also none: dropped), and weights that add up to 1 over them."""
    tokens, experts = draw(st.integers(0, 12)), draw(st.integers(1, 9))
    k, seed, dropped = draw(st.integers(1, experts)), draw(st.integers(0, 2**31)), draw(st.sampled_from([0.0, 0.4]))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator, dtype=torch.float64)
    map_TE = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, scores.topk(k).indices, True)
    map_TE &= torch.rand(tokens, experts, generator=generator) >= dropped
    weights = scores * map_TE
    weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-300)
    return torch.randn(tokens, 3, generator=generator, dtype=torch.float64), map_TE, weights


def test_rows_of_an_expert_lie_together_and_in_the_order_of_tokens() -> None:
    map_TE = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 1]], dtype=torch.bool)
    tokens = torch.tensor([[10.0], [20.0], [30.0]])
    probs = torch.tensor([[0.1, 9, 0.2], [0.3, 0.4, 9], [9, 9, 0.5]])
    rows, weights, index = permute(tokens, map_TE, probs_TE=probs, num_out_tokens=5)
    assert rows.flatten().tolist() == [10, 20, 20, 10, 30]  # expert 0: tokens 0, 1; expert 1: 1; expert 2: 0, 2
    assert weights is not None
    assert weights.tolist() == pytest.approx([0.1, 0.3, 0.4, 0.2, 0.5])
    assert index.tolist() == [0, 1, 1, 0, 2]
    assert unpermute(rows, index, 3).flatten().tolist() == [20, 40, 30]


@given(routings())
def test_weights_that_add_up_to_1_give_every_token_back(routing: tuple[Tensor, Tensor, Tensor]) -> None:
    tokens, map_TE, probs = routing
    rows, weights, index = permute(tokens, map_TE, probs_TE=probs)
    assert weights is not None
    assert len(rows) == int(map_TE.sum())
    back = unpermute(rows * weights[:, None], index, len(tokens))
    kept = map_TE.any(dim=1)[:, None]
    torch.testing.assert_close(back, tokens * kept, rtol=0, atol=1e-14)


@given(routings())
def test_permute_and_unpermute_are_transposes_of_each_other(routing: tuple[Tensor, Tensor, Tensor]) -> None:
    tokens, map_TE, probs = routing
    x = tokens.clone().requires_grad_()
    rows, _, index = permute(x, map_TE, probs_TE=probs)
    y = torch.randn_like(rows, requires_grad=True)
    summed = unpermute(y, index, len(tokens))
    # <P x, y> = <x, P' y>, and the gradient of each is the value of the other
    assert float((rows * y).detach().sum()) == pytest.approx(float((x * summed).detach().sum()), abs=1e-11)
    (into_x,) = torch.autograd.grad((rows * y.detach()).sum(), x)
    (into_y,) = torch.autograd.grad((summed * x.detach()).sum(), y)
    assert torch.equal(into_x, summed.detach())
    assert torch.equal(into_y, rows.detach())


def test_weights_get_the_gradient_of_their_row_and_the_others_none() -> None:
    map_TE = torch.tensor([[1, 0], [1, 1]], dtype=torch.bool)
    probs = torch.ones(2, 2, requires_grad=True)
    _, weights, _ = permute(torch.ones(2, 1), map_TE, probs_TE=probs)
    assert weights is not None
    (weights * torch.tensor([1.0, 2.0, 4.0])).sum().backward()
    assert probs.grad is not None
    assert probs.grad.tolist() == [[1, 0], [2, 4]]


def test_half_precision_is_summed_in_float32_and_rounded_once() -> None:
    # 256 + 1 is 256 in bfloat16: sums rounded after every row would lose all of the ones
    rows = torch.tensor([[256.0], *[[1.0]] * 4]).bfloat16()
    assert unpermute(rows, torch.zeros(5, dtype=torch.int64), 1).item() == 260
    generator = torch.Generator().manual_seed(0)
    many = torch.randn(3000, 64, generator=generator).bfloat16()
    index = torch.randint(0, 500, (3000,), generator=generator)
    exact = torch.zeros(500, 64).index_add_(0, index, many.float())
    assert torch.equal(unpermute(many, index, 500), exact.bfloat16())


def test_no_tokens_stay_connected_to_the_graph() -> None:
    tokens = torch.empty(0, 4, requires_grad=True)
    rows, _, index = permute(tokens, torch.zeros(0, 2, dtype=torch.bool), num_out_tokens=0)
    unpermute(rows, index, 0).sum().backward()
    assert tokens.grad is not None
    assert tokens.grad.shape == (0, 4)


def test_a_wrong_number_of_rows_is_found_on_the_host() -> None:
    with pytest.raises(AssertionError, match="the map has 2 entries, 3 were announced"):
        permute(torch.ones(2, 1), torch.eye(2, dtype=torch.bool), num_out_tokens=3)


# ---- chunks ----


@given(st.lists(st.integers(0, 4), max_size=8), st.randoms(use_true_random=False))
def test_chunks_come_in_the_order_asked_for_and_gradients_go_back(sizes: list[int], random: Any) -> None:
    order = list(range(len(sizes)))
    random.shuffle(order)
    x = torch.arange(sum(sizes), dtype=torch.float64).requires_grad_()
    y = sort_chunks_by_idxs(x, sizes, order)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    wanted = [float(row) for i in order for row in range(starts[i], starts[i] + sizes[i])]
    assert y.tolist() == wanted
    if wanted:
        (y * y.detach()).sum().backward()  # row n's gradient is its own value
        assert x.grad is not None
        assert torch.equal(x.grad, x.detach())


def test_chunks_in_order_are_left_alone() -> None:
    x = torch.ones(5, 2)
    assert sort_chunks_by_idxs(x, [2, 3], [0, 1]) is x
