"""A module that captures itself: as many graphs as are in flight, other shapes by graphs of their own."""

import copy
import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import labkit.graphs.manager
from labkit.config import GraphConfig
from labkit.graphs import CudaGraphManager

EMULATED = GraphConfig(cuda_graph_impl="emulated", cuda_graph_warmup_steps=1)


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 6))
    return module, copy.deepcopy(module)


def steps(call, module: nn.Module, moves: str) -> list[Tensor]:
    """F is a forward of the next microbatch, B the backward of the oldest, D drops that; outputs and gradients."""
    torch.manual_seed(1)
    waiting, found = [], []
    for number, move in enumerate(moves):
        if move == "F":
            x = torch.full((3, 6), number / 7, requires_grad=True)
            y = call(module, x)
            waiting.append((x, y))
            found.append(y.detach().clone())
        elif move == "D":
            del waiting[0]
        else:
            x, y = waiting.pop(0)
            y.square().sum().backward()
            found.append(x.grad.clone())
        x = y = None  # `waiting` alone holds them
    return [*found, *(p.grad.clone() for p in module.parameters())]


def in_flight(moves: str) -> int:
    depth = [2 * moves[:end].count("F") - end for end in range(len(moves) + 1)]
    return max(depth)


def rows(draws: list[str]) -> str:
    """A sequence of forwards, backwards and drops, each of the last two after its forward."""
    moves = ""
    for draw in draws:
        waiting = 2 * moves.count("F") - len(moves)
        moves += draw if waiting else "F"
    return moves + "B" * (2 * moves.count("F") - len(moves))


@settings(max_examples=25)
@given(st.lists(st.sampled_from("FFBD"), min_size=1, max_size=10).map(rows))
def test_any_order_gives_the_bits_of_eager_calls_with_as_many_graphs_as_are_in_flight(moves):
    graphed, eager = pair()
    manager = CudaGraphManager(EMULATED)
    moves = "FB" + moves  # the first call is the warm-up
    found = steps(lambda module, x: manager(module, (x,)), graphed, moves)
    for a, b in zip(found, steps(lambda module, x: module(x), eager, moves), strict=True):
        assert torch.equal(a, b)
    assert manager.num_graphs == in_flight(moves[2:])


def test_forwards_whose_outputs_are_dropped_share_one_graph():
    module, _ = pair()
    manager = CudaGraphManager(EMULATED)
    for _ in range(20):
        manager(module, (torch.ones(3, 6, requires_grad=True),))
    assert manager.num_graphs == 1


def test_a_forward_is_in_flight_for_as_long_as_something_made_of_it_can_go_backward():
    module, _ = pair()
    manager = CudaGraphManager(EMULATED)
    x = torch.ones(3, 6, requires_grad=True)
    manager(module, (x,))
    loss = manager(module, (x,)).square().sum()  # the output itself is gone
    manager(module, (x,))
    assert manager.num_graphs == 2
    loss.backward()
    second = manager(module, (x,))  # by the first graph, whose old node is only dropped now
    del loss
    third = manager(module, (x,))
    assert manager.num_graphs == 2
    fourth = manager(module, (x,))
    assert manager.num_graphs == 3, "two are in flight still"
    del second, third, fourth


def test_the_example_of_its_module_is_right():
    found = doctest.testmod(labkit.graphs.manager)
    assert found.attempted > 10 and found.failed == 0


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
