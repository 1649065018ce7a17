"""A module that captures itself: as many graphs as are in flight, other shapes by graphs of their own."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from labkit.config import GraphConfig
from labkit.graphs import CudaGraphManager

EMULATED = GraphConfig(cuda_graph_impl="emulated", cuda_graph_warmup_steps=1)


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 6))
    return module, copy.deepcopy(module)


def steps(call, module: nn.Module, moves: str) -> list[Tensor]:
    """F is a forward of the next microbatch, B the backward of the oldest; outputs and gradients, in order."""
    torch.manual_seed(1)
    waiting, found = [], []
    for number, move in enumerate(moves):
        if move == "F":
            x = torch.full((3, 6), number / 7, requires_grad=True)
            y = call(module, x)
            waiting.append((x, y))
            found.append(y.detach().clone())
        else:
            x, y = waiting.pop(0)
            y.square().sum().backward()
            found.append(x.grad.clone())
    return [*found, *(p.grad.clone() for p in module.parameters())]


def in_flight(moves: str) -> int:
    depth = [moves[: i + 1].count("F") - moves[: i + 1].count("B") for i in range(len(moves))]
    return max(depth)


def rows(draws: list[bool]) -> str:
    """A sequence of forwards and backwards, every backward after its forward."""
    moves = ""
    for forward in draws:
        moves += "F" if forward or moves.count("F") == moves.count("B") else "B"
    return moves + "B" * (moves.count("F") - moves.count("B"))


@settings(max_examples=15)
@given(st.lists(st.booleans(), min_size=1, max_size=8).map(rows))
def test_any_order_gives_the_bits_of_eager_calls_with_as_many_graphs_as_are_in_flight(moves):
    graphed, eager = pair()
    manager = CudaGraphManager(EMULATED)
    moves = "FB" + moves  # the first call is the warm-up
    found = steps(lambda module, x: manager(module, (x,)), graphed, moves)
    for a, b in zip(found, steps(lambda module, x: module(x), eager, moves), strict=True):
        assert torch.equal(a, b)
    assert manager.num_graphs == in_flight(moves[2:])


def test_other_shapes_get_graphs_of_their_own_and_evaluation_is_eager():
    module, _ = pair()
    manager = CudaGraphManager(EMULATED)
    for rows_of_x in (3, 5):
        for _ in range(3):
            manager(module, (torch.ones(rows_of_x, 6, requires_grad=True),)).sum().backward()
    assert manager.num_graphs == 2
    module.eval()
    x = torch.ones(4, 6)
    assert torch.equal(manager(module, (x,)), module(x)) and manager.num_graphs == 2
    manager.reset()
    assert manager.num_graphs == 0


def test_it_needs_an_implementation():
    with pytest.raises(ValueError, match="captures nothing"):
        CudaGraphManager(GraphConfig())
